"""Computes how well V(prefix) agrees with the truth, and shows the figures as a table and a plot::

    V_rk, truths y_rk of response r, boundary k ──► Spearman's ρ, AUC, Brier score, … over all and within problems

Only the inner boundaries b_1 … b_{n−1} count: before b_0 nothing is written, and after b_n nothing is left to decide.

Letters: R responses.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dash_trl.evaluation import CORRECT_ABOVE, bootstrap_interval

BINS = 10  # number of bins in a reliability diagram
RESPONSES_DRAWN = 4  # number of responses in the plot: those whose truth changes most, of different problems

# Title in the table → figure. "within" is the mean over the problems in which the figure is defined.
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


def ranks(values: Sequence[float]) -> list[float]:
    """Returns the ranks 0 … n − 1 by size; equal values get the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Returns Spearman's ρ, the correlation of the ranks; None for fewer than three pairs or constant values."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(ranks(x), ranks(y))


def auc(values: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Returns P(a positive has a higher value than a negative), ties count one half; None if a class is empty."""
    positives, negatives = sum(labels), len(labels) - sum(labels)
    if not positives or not negatives:
        return None
    total = sum(rank for rank, label in zip(ranks(values), labels, strict=True) if label)
    return (total - positives * (positives - 1) / 2) / (positives * negatives)


def by_group(
    measure: Callable[[list[Any], list[Any]], float | None], groups: Sequence[Hashable], x: Sequence, y: Sequence
) -> list[float]:
    """Computes a measure within each group; groups in which it is undefined are left out.

    Args:
        measure: takes the x and y of a group; returns None if it is undefined.
        groups: the group of each pair.
        x: values.
        y: truths.
    Returns:
        The measures, in the order of the groups' first members.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    found = [measure([x[i] for i in rows], [y[i] for i in rows]) for rows in members.values()]
    return [value for value in found if value is not None]


def calibration(values: Sequence[float], truth: Sequence[float]) -> dict[str, Any]:
    """Computes how far probabilities are from the truth.

    Args:
        values: probabilities.
        truth: the true probabilities.
    Returns:
        A dictionary with these entries:

        - `brier`: mean (v − y)² (Brier 1950); None if there is no pair.
        - `calibration_error`: Σ_bins n_b/n·abs(mean value − mean truth) (Guo et al. 2017, arXiv 1706.04599, eq. 3);
          None if there is no pair.
        - `reliability`: (mean value, mean truth, number of pairs) of each of the `BINS` equal bins of 0 … 1 that is not
          empty, in order.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for v, y in zip(values, truth, strict=True):
        bins.setdefault(min(BINS - 1, max(0, int(v * BINS))), []).append((v, y))
    filled = [(*map(statistics.fmean, zip(*bins[number], strict=True)), len(bins[number])) for number in sorted(bins)]
    errors = [count * abs(v - y) for v, y, count in filled]
    return {
        "brier": _mean([(v - y) ** 2 for v, y in zip(values, truth, strict=True)]),
        "calibration_error": sum(errors) / len(values) if errors else None,
        "reliability": filled,
    }


def figures_of(
    values: Sequence[Sequence[float]],
    truth: Sequence[Sequence[float]],
    problems: Sequence[int],
    *,
    probabilities: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Computes the figures of the inner boundaries, as JSON.

    Args:
        values: R lists with one number per boundary, including the first and the last; NaN = missing.
        truth: in the same form. A boundary without a truth is left out.
        problems: [R], the problem of each response.
        probabilities: True = values and truth are probabilities, so `calibration` can compare their numbers.
        seed: seed of the bootstrap interval.
    Returns:
        A dictionary with these entries, None where there is nothing to measure:

        - `spearman`, `auc`, `u_spearman`: over all problems. AUC is that of predicting a truth above ½. U are the
          differences from one inner boundary to the next.
        - `spearman_within`, `auc_within`, `u_spearman_within`: the mean over the problems in which it is defined.
        - `spearman_within_interval`: its 95 % bootstrap interval over these problems.
        - the entries of `calibration`, for probabilities.
        - `missing`: number of inner boundaries without a value.
        - `boundaries`: number of inner boundaries with a truth.
    """
    points, moves = [], []  # (problem, V, y) of each boundary; (problem, ΔV, Δy) from a boundary to the next
    for problem, row, true in zip(problems, values, truth, strict=True):
        inner = list(zip(row, true, strict=True))[1:-1]
        points += [(problem, v, y) for v, y in inner]
        for (v, y), (next_v, next_y) in pairwise(inner):
            moves.append((problem, next_v - v, next_y - y))
    group, v, y = _known(points)
    u_group, u, du = _known(moves)
    likely = [one > CORRECT_ABOVE for one in y]
    of_problems = by_group(spearman, group, v, y)
    boundaries = sum(not math.isnan(true) for _, _, true in points)
    return {
        "spearman": spearman(v, y),
        "spearman_within": _mean(of_problems),
        "spearman_within_interval": list(bootstrap_interval(of_problems, seed=seed)) if of_problems else None,
        "auc": auc(v, likely),
        "auc_within": _mean(by_group(auc, group, v, likely)),
        "u_spearman": spearman(u, du),
        "u_spearman_within": _mean(by_group(spearman, u_group, u, du)),
        **(calibration(v, y) if probabilities else dict.fromkeys(("brier", "calibration_error", "reliability"))),
        "missing": boundaries - len(v),
        "boundaries": boundaries,
    }


def ceiling(
    even: Sequence[Sequence[float]], odd: Sequence[Sequence[float]], problems: Sequence[int]
) -> dict[str, float | None]:
    """Estimates Spearman's ρ of a perfect V, which is less than 1, since the truth is a mean of K noisy rewards::

        r_K = 2ρ / (1 + ρ),  ceiling = √r_K        ρ: correlation between the means of the two halves of the rollouts

    r_K is the reliability of all K rollouts, twice as many as in a half (Spearman 1910, Brown 1910). Its root is the
    correlation of the truth with rewards without noise (attenuation: Spearman 1904). Both formulas are exact for
    Pearson's correlation and approximate for rank correlations and their mean over problems. In simulations with
    K = 32, the error of the ceiling is at most 0.03 in general. The ceiling is up to 0.05 too high if problems have few
    boundaries and many truths are near 0. Its error is up to 0.1 if the truths hardly differ.

    Args:
        even, odd: R lists each, as `truth` in `figures_of`: the mean reward of every second rollout, and of the others.
        problems: [R], of each response.
    Returns:
        The ceiling of each correlation in `figures_of`. None = ρ is undefined. 0 = ρ is not positive.
    """
    of_halves = figures_of(even, odd, problems, probabilities=False)
    found = {}
    for name in ("spearman", "spearman_within", "u_spearman", "u_spearman_within"):
        rho = of_halves[name]
        found[name] = None if rho is None else math.sqrt(2 * max(0.0, rho) / (1 + max(0.0, rho)))
    return found


def _known(rows: Iterable[tuple[int, float, float]]) -> list[list[Any]]:
    """Returns the three columns of the rows without NaN."""
    known = [row for row in rows if not math.isnan(row[1] + row[2])]
    return [[row[column] for row in known] for column in range(3)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def table(found: Mapping[str, Any]) -> str:
    """Returns the table as text: a line for each estimator, with 95 % intervals in brackets, and one for the ceiling.

    Args:
        found: what `measure` returns.
    """
    rows = [["V", *COLUMNS]]
    of_ceiling = {f"ceiling of K = {found['ceiling']['num_rollouts']}": found["ceiling"]}
    for name, figures in {**found["estimators"], **of_ceiling}.items():
        cells = [_cell(figures.get(key)) for key in COLUMNS.values()]
        if (interval := figures.get("spearman_within_interval")) is not None:
            cells[1] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def plot(found: Mapping[str, Any], picture: Path, *, title: str) -> None:
    """Plots the reliability of values that are probabilities, and the best of these values along a few responses.

    Args:
        found: what `measure` returns: `estimators` has the figures by name; `values` has for each response its
            boundaries, its truth, and its values by name.
        picture: the file to write.
        title: of the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    reliable, along = figure.subplots(1, 2)
    probabilities = {name: one for name, one in found["estimators"].items() if one["reliability"]}
    reliable.plot([0, 1], [0, 1], color="lightgray", lw=1)
    for name, figures in probabilities.items():
        value, truth, _ = zip(*figures["reliability"], strict=True)
        reliable.plot(value, truth, marker="o", markersize=3, label=name)
    reliable.set(title="reliability", xlabel="V", ylabel="truth", xlim=(0, 1), ylim=(0, 1))
    best = max(probabilities, key=lambda name: probabilities[name]["spearman_within"] or -1.0, default=None)
    moved: dict[int, Mapping[str, Any]] = {}
    for one in sorted(found["values"], key=_range_of_truth, reverse=True):
        moved.setdefault(one["problem"], one)
    for number, one in enumerate(list(moved.values())[:RESPONSES_DRAWN]):
        along.plot(one["boundaries"], one["truth"], color=f"C{number}", marker="o", markersize=3)
        if best is not None:
            along.plot(one["boundaries"], one[best], color=f"C{number}", ls="--")
    along.set(title="truth (line) and V (dashed)" if best else "truth", xlabel=f"token; V: {best}" if best else "token")
    if probabilities:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(picture, dpi=120)


def _range_of_truth(response: Mapping[str, Any]) -> float:
    known = [one for one in response["truth"] if one is not None]
    return max(known) - min(known) if known else 0.0
