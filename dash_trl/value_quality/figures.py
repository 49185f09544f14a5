"""How well V(prefix) agrees with the truth: figures of an estimator, and their table. Pure.

values V_rk, truths y_rk of response r, boundary k ──► Spearman's ρ, AUC, Brier score, … over all and within problems

Letters: R responses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dash_trl.evaluation import CORRECT_ABOVE, bootstrap_interval
from dash_trl.process_rewards import auc, brier, by_group, calibration_error, reliability, spearman, within

# Title in the table → figure. "within": the mean over the problems in which it is defined.
COLUMNS = {
    "Spearman": "spearman",
    "within problems": "spearman_within",
    "AUC": "auc",
    "within": "auc_within",
    "Spearman of U": "u_spearman",
    "U within": "u_spearman_within",
    "Brier": "brier",
    "calibration error": "calibration_error",
    "missing": "missing",
}


def figures_of(
    values: Sequence[Sequence[float]],
    truth: Sequence[Sequence[float]],
    problems: Sequence[int],
    *,
    probabilities: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """The figures, as JSON; None where there is nothing to measure.

    Args:
        values, truth: R lists, one number per boundary; NaN is missing. A boundary without a truth is left out.
        problems: [R], of each response.
        probabilities: whether both are, so that they can be compared as numbers.
        seed: of the interval.
    Returns:
        spearman, auc, u_spearman: over all boundaries; …_within: the mean over the problems in which it is defined,
            spearman_within_interval: its 95 % bootstrap interval over them. AUC is of the truths above ½; U of the
            differences from one boundary to the next.
        brier, calibration_error, reliability (mean V, mean truth, number in each of ten bins): of probabilities.
        missing: boundaries without a value. boundaries: all with a truth.
    """
    v, y, group, missing = [], [], [], 0
    u, du, u_group = [], [], []
    for row, true, problem in zip(values, truth, problems, strict=True):
        for value, one in zip(row, true, strict=True):
            if math.isnan(one):
                continue
            missing += math.isnan(value)
            if not math.isnan(value):
                v.append(value)
                y.append(one)
                group.append(problem)
        for (before, true_before), (after, true_after) in pairwise(zip(row, true, strict=True)):
            utility, difference = after - before, true_after - true_before
            if not math.isnan(utility + difference):
                u.append(utility)
                du.append(difference)
                u_group.append(problem)
    likely = [one > CORRECT_ABOVE for one in y]
    of_problems = by_group(spearman, group, v, y)
    return {
        "spearman": spearman(v, y),
        "spearman_within": statistics.mean(of_problems) if of_problems else None,
        "spearman_within_interval": list(bootstrap_interval(of_problems, seed=seed)) if of_problems else None,
        "auc": auc(v, likely),
        "auc_within": within(auc, group, v, likely),
        "u_spearman": spearman(u, du),
        "u_spearman_within": within(spearman, u_group, u, du),
        "brier": brier(v, y) if probabilities else None,
        "calibration_error": calibration_error(v, y) if probabilities else None,
        "reliability": [list(one) for one in reliability(v, y)] if probabilities else None,
        "missing": missing,
        "boundaries": len(v) + missing,
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per estimator; the 95 % interval in brackets."""
    rows = [["V", *COLUMNS]]
    for name, figures in results.items():
        cells = [_cell(figures[key]) for key in COLUMNS.values()]
        if (interval := figures["spearman_within_interval"]) is not None:
            cells[1] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
