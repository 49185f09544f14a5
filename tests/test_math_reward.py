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
from pathlib import Path

import pytest

from benchmarks.math_reward import DATA, FILES, FORMS, canonical, check, in_box, others, read_golds, run
from dash_trl.rewards import math as math_reward
from dash_trl.rewards.math import MathAccuracyReward, UnreadableGold, score_answer
from dash_trl.workers.processes import OutOfWork, default_workers, run_within
from tests.math_cases import RIGHT, UNSCORED, WRONG

ROOT = Path(__file__).parents[1]
needs_data = pytest.mark.skipif(
    not all((DATA / file).exists() for file in FILES), reason=f"GSM8K and MATH-500 are not in {DATA}"
)


def misbehave(completion: str, gold: str) -> float:
    """A verify function for the workers: does what the completion says, else compares text."""
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


@pytest.fixture(scope="module")
def reward():
    with MathAccuracyReward(workers=2, timeout=20) as reward:
        yield reward


@pytest.fixture(scope="module")
def scripted():
    """Scores with `misbehave`; one worker, so that whatever a bad row destroys is its neighbours'."""
    with MathAccuracyReward(workers=1, timeout=1, verify=misbehave) as reward:
        yield reward


def rows(cases: dict) -> list:
    """The parameters of a table in `math_cases`, named after topic and completion."""
    return [
        pytest.param(*row, id=f"{topic}: {row[0][:40]} | {row[1][:20]}")
        for topic, group in cases.items()
        for row in group
    ]


def impatient(completion: str, gold: str) -> float:
    """`score_answer` with less CPU time, for the workers."""
    math_reward.CPU_SECONDS = 0.5
    return score_answer(completion, gold)


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


def test_a_row_has_the_same_score_alone_and_in_any_batch():
    """Degenerate completions, too, whose work is limited row by row."""
    table = [row for cases in (RIGHT, WRONG, UNSCORED) for group in cases.values() for row in group]
    table = random.Random(0).sample(table, 60) + [(in_box("9^{9^9}"), "5")] * 3
    random.Random(1).shuffle(table)
    with MathAccuracyReward(workers=2, verify=impatient) as reward:
        together = reward(*zip(*table, strict=True))
        alone = [reward([completion], [gold])[0] for completion, gold in table]
    assert list(map(str, together)) == list(map(str, alone))


@needs_data
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_a_sample_of_golds_against_itself_and_others(reward, file, form):
    golds = random.Random(0).sample(read_golds(DATA / file), 60)
    assert check(reward, golds, golds, FORMS[form])[1] == []
    assert check(reward, golds, others(golds, 1), FORMS[form])[1] == []


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


def test_no_rows(reward):
    assert reward([], []) == []


def test_different_lengths(reward):
    with pytest.raises(ValueError, match="2 completions cannot be compared with 1 answers: pass one gold answer"):
        reward(["5", "6"], ["5"])


@pytest.mark.parametrize(("options", "message"), [({"timeout": 0}, "timeout = 0"), ({"workers": 0}, "workers = 0")])
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        MathAccuracyReward(**options)


def test_a_function_of_the_main_script_is_refused(monkeypatch):
    monkeypatch.setattr(misbehave, "__module__", "__main__")
    with pytest.raises(ValueError, match="verify = misbehave is defined in the main script"):
        MathAccuracyReward(verify=misbehave)


def test_trl_sees_a_name():
    assert MathAccuracyReward().__name__ == "math_accuracy"


def test_ranks_share_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert default_workers() == 1


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


def test_a_pathological_expression_is_wrong_and_harms_no_neighbour():
    with MathAccuracyReward(workers=1, verify=impatient) as reward:
        scores = reward([r"\boxed{9^{9^9}}", r"\boxed{3}", r"\boxed{3}"], ["5x", "3", "9^{9^9}"])
    assert scores[:2] == [0.0, 1.0] and math.isnan(scores[2])


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
    first = MathAccuracyReward(workers=3, verify=misbehave)
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    pids = set(first(["pid"] * 9, [""] * 9))
    for other in copies:
        assert (other.timeout, other.workers, other.verify) == (first.timeout, 3, misbehave)
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
    code = """
import sys
print("once")
from dash_trl.rewards.math import MathAccuracyReward
from tests.test_math_reward import misbehave
heavy = {"torch", "trl", "transformers", "datasets", "math_verify", "sympy"}
print(heavy & set(sys.modules))
print(int(MathAccuracyReward(workers=1, verify=misbehave)(["pid"], [""])[0]))
"""
    process = python(code, tmp_path)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    once, heavy, pid = out.splitlines()
    assert (process.returncode, once, heavy, err) == (0, "once", "set()", "")
    assert is_gone(int(pid))


def test_a_forked_child_starts_its_own_workers(tmp_path):
    code = """
import os
from dash_trl.rewards.math import MathAccuracyReward
from tests.test_math_reward import misbehave
reward = MathAccuracyReward(workers=1, verify=misbehave)
print(reward(["yes"], ["yes"]), flush=True)
child = os.fork()
if child == 0:
    with reward:
        print(reward(["yes", "no"], ["yes"] * 2), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(reward(["no"], ["yes"]))
"""
    process = python(code, tmp_path)
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out.splitlines() == ["[1.0]", "[1.0, 0.0]", "[0.0]"]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open to wait for another's child")
def test_workers_die_with_a_killed_parent(tmp_path):
    os.mkfifo(tmp_path / "pid")
    code = f"""
from dash_trl.rewards.math import MathAccuracyReward
from tests.test_math_reward import misbehave
MathAccuracyReward(workers=1, timeout=1000, verify=misbehave)(["hang:{tmp_path}/pid"], [""])
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
