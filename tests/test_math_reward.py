"""The accuracy reward: finding answers, comparing them, and what becomes of hanging and dying workers."""

import copy
import math
import os
import pickle
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import mock

import pytest

from benchmarks.math_reward import DATA, FILES, in_box, run
from dash_trl.rewards import MathAccuracyReward
from dash_trl.rewards import math as math_reward
from dash_trl.rewards.math import UnreadableGold, score_answer
from dash_trl.workers import OutOfWork, default_workers, run_within
from tests.math_cases import RIGHT, UNSCORED, WRONG

needs_data = pytest.mark.skipif(
    not all((DATA / file).exists() for file in FILES), reason=f"GSM8K and MATH-500 are not in {DATA}"
)


def misbehave(completion: str, gold: str) -> float:
    """Scores a row in a worker: misbehaves as the completion says, or compares texts."""
    while completion == "hang":
        pass
    if completion == "raise":
        raise RuntimeError("as asked")
    if completion == "pid":
        return float(os.getpid())
    if completion == "imports":
        return float(bool({"torch", "trl", "transformers", "datasets"} & set(sys.modules)))
    return float(completion == gold)


def impatient(completion: str, gold: str) -> float:
    """`score_answer` with less CPU time, for the workers."""
    with mock.patch.object(math_reward, "CPU_SECONDS", 1.5):
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
    """Returns a reward with one worker, so that a bad row can harm its neighbours."""
    with closing(Scripted(workers=1, timeout=1)) as reward:
        yield reward


TABLE = [
    pytest.param(*row, score, id=f"{topic}: {row[0][:40]} | {row[1][:20]}")
    for cases, score in ((RIGHT, 1.0), (WRONG, 0.0), (UNSCORED, math.nan))
    for topic, group in cases.items()
    for row in group
]


# ------------------------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize(("completion", "gold", "score"), TABLE)
def test_the_score_of_an_answer(completion, gold, score):
    if math.isnan(score):
        with pytest.raises(UnreadableGold, match="gold answer"):
            score_answer(completion, gold)
    else:
        assert score_answer(completion, gold) == score


@pytest.mark.parametrize(
    "answer",
    [r"9^{9^9}", r"(10^9)!", r"2^{2^{40}} = 5", r"\sum_{k=1}^{10^{9}} k^k", r"5 + 10^{10^{10}} - 10^{10^{10}}"],
)
def test_more_work_than_the_limit_is_wrong_in_the_answer_and_unscored_in_the_gold_answer(answer, monkeypatch):
    monkeypatch.setattr(math_reward, "CPU_SECONDS", 0.3)
    assert score_answer(in_box(answer), "5") == 0.0
    with pytest.raises(UnreadableGold, match="too much work"):
        score_answer(r"\boxed{5}", answer)


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
    table = [row.values for row in random.Random(0).sample(TABLE, 60)]
    table += [(in_box("9^{9^9}"), "5x", 0.0), (in_box("3"), "9^{9^9}", math.nan)]
    table += [row.values for row in TABLE if math.isnan(row.values[2])]
    random.Random(1).shuffle(table)
    completions, golds, scores = zip(*table, strict=True)
    with closing(Impatient(workers=2)) as reward:
        assert list(map(str, reward(completions, golds))) == list(map(str, scores))


@needs_data
@pytest.mark.parametrize(
    ("gsm8k", "math500", "golds"),
    [(40, 7, 187 + 33 + 72), pytest.param(1, 1, 9_292, marks=[pytest.mark.exhaustive, pytest.mark.slow])],
)
def test_golds(reward, tmp_path, gsm8k, math500, golds):
    """Every so many-th of GSM8K and of MATH-500."""
    for file in FILES:
        stride = gsm8k if file.startswith("gsm8k") else math500
        (tmp_path / file).parent.mkdir(exist_ok=True)
        lines = (DATA / file).read_text().splitlines()[::stride]
        (tmp_path / file).write_text("\n".join(lines))
    report = run(reward, tmp_path)
    assert report["golds"] == golds
    assert report["failures"] == []


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


def test_a_failed_row_is_nan_and_loses_no_neighbour(scripted):
    """Nor does a worker load what only the trainer needs."""
    completions = ["yes", "no", "hang", "yes", "no", "raise", "yes", "no", "imports"]
    scores = [1.0, 0.0, math.nan, 1.0, 0.0, math.nan, 1.0, 0.0, 0.0]
    assert list(map(str, scripted(completions, ["yes"] * 9))) == list(map(str, scores))


def test_it_works_in_threads_at_the_same_time(reward):
    with ThreadPoolExecutor(4) as pool:
        scores = pool.map(lambda i: reward([in_box(str(i)), in_box("7")] * 8, [str(i)] * 16), range(4))
        assert list(scores) == [[1.0, 0.0] * 8] * 4


def test_rewards_share_workers_until_the_last_one_closes():
    first = Scripted(workers=3)
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    pids = set()
    for one in (first, *copies):
        assert (one.timeout, one.workers) == (first.timeout, 3)
        pids |= set(one(["pid"] * 9, [""] * 9))
    assert len(pids) <= 3
    first.close()
    copies[0].close()
    assert set(copies[1](["pid"] * 9, [""] * 9)) <= pids
    copies[1].close()
    (again,) = first(["pid"], [""])  # a closed reward starts anew
    assert again not in pids
    first.close()
    for pid in (*pids, again):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
