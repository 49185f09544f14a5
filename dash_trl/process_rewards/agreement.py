"""How well do values agree with what came of it? Plain statistics of two lists, for V(prefix) against outcomes.

values v_i, outcomes or truths y_i in the same order ──► Spearman's ρ, AUC, Brier score, calibration
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any

BINS = 10  # of a reliability diagram


def ranks(values: Sequence[float]) -> list[float]:
    """0 … n − 1 by size; equal values share the mean of their ranks.

    Raises:
        ValueError: for NaN, which equals nothing, not even itself.
    """
    if any(value != value for value in values):
        raise ValueError("A missing value (NaN) has no rank: leave its pair out.")
    order = sorted(range(len(values)), key=lambda i: values[i])
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for i in order[start:end]:
            result[i] = (start + end - 1) / 2
        start = end
    return result


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's ρ: the correlation of the ranks; None for fewer than three pairs, or where one side is constant."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(ranks(x), ranks(y))


def auc(values: Sequence[float], labels: Sequence[bool]) -> float | None:
    """P(a positive has a higher value than a negative), ties half; None without both."""
    positives, negatives = sum(labels), len(labels) - sum(labels)
    if not positives or not negatives:
        return None
    total = sum(rank for rank, label in zip(ranks(values), labels, strict=True) if label)
    return (total - positives * (positives - 1) / 2) / (positives * negatives)


def by_group(
    measure: Callable[[list[Any], list[Any]], float | None], groups: Sequence[Hashable], x: Sequence, y: Sequence
) -> list[float]:
    """A measure of each group in which it is defined, in the order of their first members."""
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    found = [measure([x[i] for i in rows], [y[i] for i in rows]) for rows in members.values()]
    return [value for value in found if value is not None]


def within(
    measure: Callable[[list[Any], list[Any]], float | None], groups: Sequence[Hashable], x: Sequence, y: Sequence
) -> float | None:
    """The mean of a measure over the groups in which it is defined; None where it is in none."""
    known = by_group(measure, groups, x, y)
    return statistics.mean(known) if known else None


def brier(values: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """mean (v − y)² (Brier 1950); None without a pair."""
    pairs = zip(values, outcomes, strict=True)
    return statistics.fmean((value - outcome) ** 2 for value, outcome in pairs) if len(values) else None


def reliability(values: Sequence[float], outcomes: Sequence[float]) -> list[tuple[float, float, int]]:
    """(mean value, mean outcome, pairs) of each of `BINS` equal bins of 0 … 1 that has any, in their order."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(BINS)]
    for value, outcome in zip(values, outcomes, strict=True):
        bins[min(BINS - 1, max(0, int(value * BINS)))].append((value, outcome))
    return [
        (statistics.fmean(value for value, _ in pairs), statistics.fmean(outcome for _, outcome in pairs), len(pairs))
        for pairs in bins
        if pairs
    ]


def calibration_error(values: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Σ_bins n_b/n·|mean value − mean outcome| (Guo et al. 2017, arXiv 1706.04599, eq. 3); None without a pair."""
    if not values:
        return None
    return sum(count * abs(v - y) for v, y, count in reliability(values, outcomes)) / len(values)
