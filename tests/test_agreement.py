"""Statistics of values against what came of it, against their definitions by loops over pairs."""

import math
import random

import pytest

from dash_trl.process_rewards import auc, brier, calibration_error, reliability, spearman, within


def pairs(seed, size=40):
    generator = random.Random(seed)
    return [generator.randrange(8) / 8 for _ in range(size)], [generator.random() < 0.4 for _ in range(size)]


@pytest.mark.parametrize("seed", range(3))
def test_auc_is_the_share_of_pairs_in_the_right_order_ties_half(seed):
    values, labels = pairs(seed)
    won = [
        (a > b) + (a == b) / 2
        for a, yes in zip(values, labels, strict=True)
        for b, no in zip(values, labels, strict=True)
        if yes and not no
    ]
    assert auc(values, labels) == pytest.approx(sum(won) / len(won), abs=1e-12)
    assert auc(values, [True] * len(values)) is None


@pytest.mark.parametrize("seed", range(3))
def test_spearman_is_the_correlation_of_mid_ranks(seed):
    x, y = pairs(seed)[0], pairs(seed + 10)[0]
    rank = [[sum(b < a for b in of) + (sum(b == a for b in of) - 1) / 2 for a in of] for of in (x, y)]
    a, b = ([one - sum(side) / len(side) for one in side] for side in rank)
    expected = sum(p * q for p, q in zip(a, b, strict=True)) / math.sqrt(sum(p * p for p in a) * sum(q * q for q in b))
    assert spearman(x, y) == pytest.approx(expected, abs=1e-12)
    assert spearman([1.0] * 5, [1.0, 2, 3, 4, 5]) is None and spearman([1.0, 2], [1.0, 2]) is None


def test_within_is_the_mean_over_groups_in_which_it_is_defined():
    values, labels, groups = [0.1, 0.9, 0.5, 0.2, 0.7], [False, True, False, True, True], ["a", "a", "b", "b", "c"]
    assert within(auc, groups, values, labels) == (1.0 + 0.0) / 2  # the third has one member
    assert within(auc, groups, values, [True] * 5) is None


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_and_brier_score(seed):
    values, labels = pairs(seed)
    error = 0.0
    for low in range(10):
        inside = [i for i, value in enumerate(values) if low <= 10 * value < low + 1 or value == 1 and low == 9]
        error += abs(sum(values[i] - labels[i] for i in inside))
    assert calibration_error(values, labels) == pytest.approx(error / len(values), abs=1e-12)
    assert brier(values, labels) == pytest.approx(
        sum((v - y) ** 2 for v, y in zip(values, labels, strict=True)) / len(values), abs=1e-12
    )
    assert sum(count for _, _, count in reliability(values, labels)) == len(values)


def test_what_is_missing_has_no_rank():
    for measure, second in ((spearman, [1.0, 2, 3]), (auc, [True, False, True])):
        with pytest.raises(ValueError, match="has no rank"):
            measure([0.1, math.nan, 0.3], second)


def test_nothing_to_compare():
    assert calibration_error([], []) is None and brier([], []) is None and reliability([], []) == []
