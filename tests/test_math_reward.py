"""The accuracy reward: finding answers, comparing them, and what becomes of hanging and dying workers."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.math_reward import DATA, FILES, canonical, in_box, run
from dash_trl.rewards import math as math_reward
from dash_trl.rewards.math import MathAccuracyReward, UnreadableGold, score_answer
from dash_trl.workers.processes import OutOfWork, default_workers, run_within
from tests.math_cases import RIGHT, UNSCORED, WRONG

ROOT = Path(__file__).parents[1]
needs_data = pytest.mark.skipif(
    not all((DATA / file).exists() for file in FILES), reason=f"GSM8K and MATH-500 are not in {DATA}"
)


def misbehave(completion: str, gold: str) -> float:
    """Scores a row in a worker: does what the completion says, else compares text."""
    if completion.startswith("hang"):
        if ":" in completion:
            Path(completion.split(":", 1)[1]).write_text(str(os.getpid()))
        while True:
            pass
    if completion == "crash":
        os._exit(3)
    if completion == "raise":
        raise RuntimeError("as asked")
    if completion == "pid":
        return float(os.getpid())
    if completion == "imports":
        return float(bool({"torch", "trl", "transformers", "datasets"} & set(sys.modules)))
    return float(completion == gold)


def is_gone(pid: int) -> bool:
    """Whether no such process exists, not even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def impatient(completion: str, gold: str) -> float:
    """`score_answer` with less CPU time, for the workers."""
    math_reward.CPU_SECONDS = 2.0
    return score_answer(completion, gold)


class Scripted(MathAccuracyReward):
    score = staticmethod(misbehave)


class Impatient(MathAccuracyReward):
    score = staticmethod(impatient)


@pytest.fixture(scope="module")
def reward():
    with closing(MathAccuracyReward(workers=2, timeout=20)) as reward:
        yield reward


@pytest.fixture(scope="module")
def scripted():
    """One worker, so that whatever a bad row destroys is its neighbours'."""
    with closing(Scripted(workers=1, timeout=1)) as reward:
        yield reward


def rows(cases: dict) -> list:
    """The parameters of a table in `math_cases`, named after topic and completion."""
    return [
        pytest.param(*row, id=f"{topic}: {row[0][:40]} | {row[1][:20]}")
        for topic, group in cases.items()
        for row in group
    ]


# ------------------------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize(("completion", "gold"), rows(RIGHT))
def test_right_answers(completion, gold):
    assert score_answer(completion, gold) == 1.0


@pytest.mark.parametrize(("completion", "gold"), rows(WRONG))
def test_wrong_answers(completion, gold):
    assert score_answer(completion, gold) == 0.0


@pytest.mark.parametrize(("completion", "gold"), rows(UNSCORED))
def test_unscored_answers(completion, gold):
    with pytest.raises(UnreadableGold, match="gold answer"):
        score_answer(completion, gold)


@pytest.mark.parametrize(
    "answer",
    [r"9^{9^9}", r"(10^9)!", r"2^{2^{40}} = 5", r"\sum_{k=1}^{10^{9}} k^k", r"5 + 10^{10^{10}} - 10^{10^{10}}"],
)
def test_more_work_than_the_limit_is_wrong_in_the_answer_and_unscored_in_the_gold_answer(answer, monkeypatch):
    monkeypatch.setattr(math_reward, "CPU_SECONDS", 0.5)
    assert score_answer(in_box(answer), "5") == 0.0
    with pytest.raises(UnreadableGold, match="too much work"):
        score_answer(r"\boxed{5}", answer)


def test_too_deep_a_recursion_is_wrong():
    answer = in_box("-" * 900 + "5")
    assert score_answer(answer, "6") == 0.0


def test_a_limit_of_work_is_one_of_cpu_time():
    """What another process does, as on a busy machine, is no work; the limit holds against `except Exception`."""

    def stubborn() -> None:
        while True:
            try:
                sum(range(1_000))
            except Exception:
                pass

    work = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]
    assert run_within(0.2, subprocess.call, work) == 0
    with pytest.raises(OutOfWork, match=r"more than 0\.2 s of CPU time"):
        run_within(0.2, stubborn)
    assert run_within(10, sum, [1, 2]) == 3 and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_row_in_any_batch_has_the_score_that_it_has_alone():
    """Degenerate ones, too: work is limited row by row, and a gold answer that is too much work is unscored."""
    expected = ((RIGHT, 1.0), (WRONG, 0.0), (UNSCORED, math.nan))
    table = [(*row, score) for cases, score in expected for group in cases.values() for row in group]
    table = random.Random(0).sample(table, 60) + [(in_box("9^{9^9}"), "5x", 0.0)] * 3
    table += [(in_box("3"), "9^{9^9}", math.nan), *[row for row in table if math.isnan(row[2])]]
    random.Random(1).shuffle(table)
    completions, golds, scores = zip(*table, strict=True)
    with closing(Impatient(workers=2)) as reward:
        assert list(map(str, reward(completions, golds))) == list(map(str, scores))


@needs_data
@pytest.mark.slow
def test_all_golds(reward):
    report = run(reward)
    assert report["golds"] == 9_292
    assert report["failures"] == []


def test_the_criterion_for_different_golds_tells_values_apart():
    assert canonical(r"\dfrac{1}{4}") == canonical(r"\frac14") == canonical(".25")
    assert canonical("10,\\!080") == canonical("10080") == canonical(r"\$10{,}080".replace("{,}", ","))
    assert canonical("36^\\circ") == canonical("\\$36")
    assert len({canonical(g) for g in ("1", "-1", "1/2", "x", "(1,2)", "[1,2]", r"\frac{1}{3}")}) == 7


# ------------------------------------------------------------------------------------------------ the reward function


def test_none_empty_and_conversational_completions(reward):
    completions = [
        [{"role": "assistant", "content": r"\boxed{5}"}],
        [{"role": "assistant", "content": r"\boxed{6}"}],
        [{"role": "assistant", "content": r"\boxed{6}"}, {"role": "assistant", "content": [{"text": r"\boxed{5}"}]}],
        [{"role": "assistant", "content": None}],
        [],
        None,
    ]
    assert reward(completions=completions, answer=[5] * 6, prompts=["?"] * 6) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_an_unreadable_gold_is_nan_and_said_once(reward, caplog):
    reward = copy.copy(reward)
    reward._told = set()
    for _ in range(2):
        scores = reward(["5", "5", r"\boxed{5}"], [None, "5", "???"])
        assert math.isnan(scores[0]) and scores[1] == 1.0 and math.isnan(scores[2])
    assert [r.message.count("UnreadableGold") for r in caplog.records] == [1]


def test_no_rows_and_different_lengths(reward):
    assert reward([], []) == []
    assert reward.__name__ == "math_accuracy"  # for TRL
    with pytest.raises(ValueError, match="shorter"):
        reward(["5", "6"], ["5"])


def test_ranks_share_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    for ranks, workers in ((None, 8), ("4", 3), ("100", 1)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert default_workers() == workers


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("bad", ["hang", "crash", "raise"])
def test_a_failed_row_is_nan_and_loses_no_neighbour(scripted, bad):
    completions = ["yes", "no"] * 5 + [bad] + ["yes", "no"] * 5
    scores = scripted(completions, ["yes"] * 21)
    assert math.isnan(scores[10])
    assert scores[:10] + scores[11:] == [1.0, 0.0] * 10


def test_the_pool_survives_a_batch_of_crashes(scripted):
    assert all(map(math.isnan, scripted(["crash"] * 4, ["yes"] * 4)))
    assert scripted(["yes"], ["yes"]) == [1.0]


def test_a_timeout_kills_the_worker(scripted, tmp_path):
    assert math.isnan(scripted([f"hang:{tmp_path / 'pid'}"], ["yes"])[0])
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_it_works_in_threads_at_the_same_time(reward):
    scores = {}

    def score(i: int) -> None:
        scores[i] = reward([in_box(str(i)), in_box("7")] * 8, [str(i)] * 16)

    threads = [threading.Thread(target=score, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {i: [1.0, 0.0] * 8 for i in range(4)}


# --------------------------------------------------------------------------------------------------------- processes


def test_the_workers_import_neither_torch_nor_trl(scripted):
    assert scripted(["imports"], [""]) == [0.0]


def test_rewards_share_workers_until_the_last_one_closes():
    first = Scripted(workers=3)
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    pids = set(first(["pid"] * 9, [""] * 9))
    for other in copies:
        assert (other.timeout, other.workers) == (first.timeout, 3)
        pids |= set(other(["pid"] * 9, [""] * 9))
    assert len(pids) <= 3
    first.close()
    copies[0].close()
    assert set(copies[1](["pid"] * 9, [""] * 9)) <= pids
    copies[1].close()
    assert all(is_gone(int(pid)) for pid in pids)
    again = set(first(["pid"], [""]))  # a closed reward starts anew
    assert again.isdisjoint(pids)
    first.close()
    assert is_gone(int(again.pop()))


def python(code: str, path: Path) -> subprocess.Popen:
    script = path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(tmp_path):
    """A forked child of it starts its own workers."""
    code = """
import os
import sys
print("once")
from tests.test_math_reward import Scripted
heavy = {"torch", "trl", "transformers", "datasets", "math_verify", "sympy"}
print(heavy & set(sys.modules))
reward = Scripted(workers=1)
print(int(reward(["pid"], [""])[0]), flush=True)
child = os.fork()
if child == 0:
    print(reward(["yes", "no"], ["yes"] * 2), flush=True)
    reward.close()
    os._exit(0)
os.waitpid(child, 0)
print(reward(["no"], ["yes"]))
"""
    process = python(code, tmp_path)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    once, heavy, pid, *scores = out.splitlines()
    assert (process.returncode, once, heavy, scores, err) == (0, "once", "set()", ["[1.0, 0.0]", "[0.0]"], "")
    assert is_gone(int(pid))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open to wait for another's child")
def test_workers_die_with_a_killed_parent(tmp_path):
    os.mkfifo(tmp_path / "pid")
    code = f"""
from tests.test_math_reward import Scripted
Scripted(workers=1, timeout=1000)(["hang:{tmp_path}/pid"], [""])
"""
    process = python(code, tmp_path)
    pid = int((tmp_path / "pid").read_text())  # waits for the worker to write
    worker = os.pidfd_open(pid)
    try:
        process.kill()
        process.wait()  # not communicate: a worker that lives on keeps the pipes open
        ended, _, _ = select.select([worker], [], [], 30)
        assert ended, "the worker outlived its parent"
    finally:
        os.close(worker)
        process.stdout.close()
        process.stderr.close()
        if not is_gone(pid):  # on failure; a killed orphan's entry may also wait for init
            os.kill(pid, signal.SIGKILL)
