"""The accuracy reward: finding answers, comparing them, and what becomes of hanging and dying workers."""

import copy
import json
import math
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.math_reward import FILES, in_box, run
from dash_trl.rewards import MathAccuracyReward
from tests.launching import SHARED, needs_data


def misbehave(completion: str, gold: str) -> float:
    """Scores a row in a worker: misbehaves as the completion says, or compares texts."""
    while completion == "hang":
        pass
    if completion == "die":
        os._exit(1)
    if completion == "pid":
        return float(os.getpid())
    return float(completion == gold)


class Scripted(MathAccuracyReward):
    score = staticmethod(misbehave)


@pytest.fixture(scope="module")
def reward():
    with closing(MathAccuracyReward(workers=2, timeout=600)) as reward:
        yield reward


CASES = [json.loads(line) for line in Path(__file__).with_name("math_cases.jsonl").read_text().splitlines()]
REPEATED = 20_000
HANGING = (
    "9^{9^{9^{9}}}",
    "1000000!",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n}",
    r"\int_0^1 \sin(x^{x^{x}}) dx",
    r"\lim_{x\to 0} \frac{\sin(\sin(\sin(x)))}{x^{9}}",
    r"\binom{10^7}{5\cdot 10^6}",
    r"\sqrt{" * 200 + "2" + "}" * 200,
    r"\frac{1}{" * 300 + "2" + "}" * 300,
    "(" * 5000 + "5" + ")" * 5000,
    r"\sin(" * 100 + "x" + ")" * 100,
    "(x+1)^{100000}",
    "(a+b+c+d+e+f+g)^{200}",
    r"\log_{2}(2^{10^{12}})",
    r"\cos(10^{10^{7}})",
    r"\sqrt[1000000]{2}",
    r"\gcd(10^{10^6}, 6^{10^6})",
)
# (completion, gold answer, score); None = unscored.
DEGENERATE = [
    (in_box("5" * 1000), "5" * 1000, 1),
    (in_box("5") * REPEATED, "5", 1),
    ("a" * 3_000 + " 7\nin all", "7", 0),  # half a line is read
    (r"\boxed{5 " * 300, "5", 0),
    (r"\boxed{" * REPEATED, "5", 0),
    ("\\" * REPEATED, "5", 0),
    ("\\[" * REPEATED, "5", 0),
    ("#### " * REPEATED, "5", 0),
    ("answer is " * REPEATED, "5", 0),
    ("".join(rf"\boxed{{{number}}}, " for number in range(REPEATED)), "1", 0),
    (in_box("5" + "+0" * REPEATED), "5", 0),
    (in_box("-" * 900 + "5"), "6", 0),
    (in_box("9^{9^9}"), "5x", 0),  # math-verify gives up after 5 s
    *((in_box(one), "5", 0) for one in HANGING),
    (in_box("5"), "1" + "+1" * 600, None),
    (in_box("5" * 1001), "5" * 1001, None),
]


# ------------------------------------------------------------------------------------------------------ comparison


def test_the_scores_of_answers(reward):
    """Also of degenerate ones: work is limited row by row, and too much work is a wrong answer."""
    table = [(case["completion"], case["gold"], case["score"]) for case in CASES] + DEGENERATE
    random.Random(0).shuffle(table)
    completions, golds, scores = zip(*table, strict=True)
    found = list(map(str, reward(completions, golds)))
    due = ("nan" if score is None else str(float(score)) for score in scores)
    rows = zip(completions, golds, found, due, strict=True)
    assert [(one[:80], gold[:80], score) for one, gold, score, wanted in rows if score != wanted] == []


@needs_data
@pytest.mark.parametrize(
    ("gsm8k", "math500", "golds"), [(400, 10, 19 + 4 + 50), pytest.param(1, 1, 9_292, marks=pytest.mark.exhaustive)]
)
def test_golds(reward, tmp_path, gsm8k, math500, golds):
    """Every so many-th of GSM8K and of MATH-500."""
    for file in FILES:
        stride = gsm8k if file.startswith("gsm8k") else math500
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("\n".join((SHARED / file).read_text().splitlines()[::stride]))
    report = run(reward, tmp_path)
    assert report["golds"] == golds
    assert report["failures"] == []


# ------------------------------------------------------------------------------------------------ the reward function


def test_none_empty_and_conversational_completions_and_no_rows(reward):
    from tests.tiny import assistant  # here: worker processes import this file, but not torch

    completions = [
        assistant(r"\boxed{5}"),
        assistant(r"\boxed{6}"),
        assistant(r"\boxed{6}") + assistant([{"text": r"\boxed{5}"}]),
        assistant(None),
        [],
        None,
    ]
    assert reward(completions=completions, answer=[5] * 6, prompts=["?"] * 6) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert reward([], []) == []
    assert reward.__name__ == "math_accuracy"  # for TRL
    with pytest.raises(ValueError, match="shorter"):
        reward(["5", "6"], ["5"])


def test_an_unreadable_gold_is_nan_and_said_once(reward, caplog):
    other = MathAccuracyReward(workers=2, timeout=600)  # which shares the workers
    for _ in range(2):
        scores = other(["5", "5", r"\boxed{5}"], [None, "5", "???"])
        assert math.isnan(scores[0]) and scores[1] == 1.0 and math.isnan(scores[2])
    assert [r.message.count("UnreadableGold") for r in caplog.records] == [1]


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_row_is_nan_and_loses_no_neighbour():
    """In one worker, so that a bad row could harm its neighbours."""
    with closing(Scripted(workers=1, timeout=600)) as patient, closing(Scripted(workers=1, timeout=1)) as hasty:
        assert str(patient(["yes", "die", "no"], ["yes"] * 3)) == "[1.0, nan, 0.0]"
        assert math.isnan(hasty.math_accuracy("hang", "yes"))
        assert patient(["yes", "no"], ["yes"] * 2) == [1.0, 0.0]


def test_it_works_in_threads_at_the_same_time(reward):
    with ThreadPoolExecutor(4) as pool:
        scores = pool.map(lambda i: reward([in_box(str(i)), in_box("7")] * 8, [str(i)] * 16), range(4))
        assert list(scores) == [[1.0, 0.0] * 8] * 4


def test_rewards_share_workers_until_one_closes():
    first = Scripted(workers=1, timeout=600)
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    pids = set()
    for one in (first, *copies):
        assert (one.timeout, one.workers) == (600, 1)
        pids |= set(one(["pid"] * 9, [""] * 9))
    assert len(pids) == 1
    copies[0].close()
    (again,) = first(["pid"], [""])  # a closed reward starts anew
    assert again not in pids
    first.close()
    for pid in (*pids, again):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
