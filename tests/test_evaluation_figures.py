"""Intervals and figures, against distributions that are enumerated."""

from __future__ import annotations

import itertools
import math

import pytest

from dash_trl.evaluation import bootstrap_interval
from dash_trl.evaluation.figures import figures_of, remarks, table

NAN = math.nan


def resampled(values, weights):
    """Every equally probable resample of the problems: [P^P] ratios, sorted."""
    drawn = itertools.product(range(len(values)), repeat=len(values))
    return sorted(sum(values[i] for i in one) / sum(weights[i] for i in one) for one in drawn)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ([0.0, 1.0, 0.25, 0.5, 0.0], None),
        ([1, 0, 3, 2], [4, 1, 3, 4]),
        ([0.0, 1.0], None),
        ([2.0, 2.0, 1.0], [4, 4, 4]),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_interval_is_the_middle_95_percent_of_all_resamples(values, weights, seed):
    ratios = resampled(values, weights or [1] * len(values))
    error = 4 * math.sqrt(0.025 * 0.975 / 10_000)  # of a share that is measured on 10,000 resamples
    for end, share in zip(bootstrap_interval(values, weights, seed=seed), (0.025, 0.975), strict=True):
        below = sum(ratio < end - 1e-12 for ratio in ratios) / len(ratios)
        up_to = sum(ratio <= end + 1e-12 for ratio in ratios) / len(ratios)
        assert below - error <= share <= up_to + error


def test_many_binary_problems_have_the_binomial_interval():
    """500 problems, 180 solved: the resampled mean is binomial, and nearly normal."""
    low, high = bootstrap_interval([1.0] * 180 + [0.0] * 320)
    half = 1.96 * math.sqrt(0.36 * 0.64 / 500)
    assert low == pytest.approx(0.36 - half, abs=3e-3) and high == pytest.approx(0.36 + half, abs=3e-3)


def test_an_interval_is_a_function_of_its_arguments():
    values = [0.1, 0.9, 0.4, 0.4]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval([0.3] * 7) == (pytest.approx(0.3), pytest.approx(0.3))
    assert all(map(math.isnan, bootstrap_interval([])))
    with pytest.raises(ValueError, match="one of each for every problem"):
        bootstrap_interval([1.0, 2.0], [1.0])


def samples(*rewards, tokens=10, truncated=False):
    return [{"reward": reward, "tokens": tokens, "truncated": truncated} for reward in rewards]


def test_figures():
    rows = [samples(1.0, 0.0, None, 0.6), samples(None, None, None, 1.0, tokens=30), samples(0.0, 0.0, 0.5, 0.0)]
    rows[2][0]["truncated"] = True
    figures = figures_of(rows, [1, 2, 4])
    assert figures["accuracy"] == pytest.approx(3 / 8)  # of the scored ones; 0.5 is not more than 0.5
    low, high = figures["accuracy_interval"]
    assert low <= 3 / 8 <= high
    pass_at = {k: value for k, (value, _, _) in figures["pass_at"].items()}
    lucky = sum(map(any, itertools.combinations([1, 0, 1], 2))) / 3
    assert pass_at == {"1": pytest.approx((2 / 3 + 1 + 0) / 3), "2": pytest.approx((lucky + 0) / 2), "4": 0.0}
    assert figures["left_out"] == {"1": 0, "2": 1, "4": 2}
    assert (figures["problems"], figures["samples"]) == (3, 12)
    assert figures["failed"] == pytest.approx(4 / 12) and figures["marked"]
    assert figures["truncated"] == pytest.approx(1 / 12)
    assert figures["mean_length"] == pytest.approx((4 * 10 + 4 * 30 + 4 * 10) / 12)


def test_pass_at_1_of_complete_problems_is_the_accuracy():
    figures = figures_of([samples(1.0, 0.0), samples(1.0, 1.0), samples(0.0, 0.0)], [1])
    assert figures["pass_at"]["1"] == [figures["accuracy"], *figures["accuracy_interval"]]


@pytest.mark.parametrize(("failed", "marked"), [(0, False), (1, False), (2, True)])
def test_more_than_one_failed_reward_in_a_hundred_marks_the_figures(failed, marked):
    figures = figures_of([samples(*[None] * failed, *[1.0] * (100 - failed))], [1, 100])
    assert figures["marked"] == marked
    line = table({"a model": figures}, [1]).splitlines()[1]
    assert ("100.0 [100.0, 100.0]*" in line) == marked
    said = remarks("a model", figures)
    assert any("the reward failed on 2.0% of 100 samples" in one for one in said) == marked
    assert any("pass@100 leaves out 1 of 1 problems" in one for one in said) == (failed > 0)


def test_where_nothing_was_scored_there_is_no_figure():
    figures = figures_of([samples(None, None)], [1])
    assert figures["accuracy"] is None and figures["pass_at"] == {"1": [None, None, None]} and figures["marked"]
    assert table({"a": figures}, [1]).splitlines()[1].split() == ["a", "–*", "–*", "10", "0.0%", "100.0%"]
