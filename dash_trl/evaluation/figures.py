"""Computes figures from scored samples: accuracy and pass@k with intervals, lengths, truncated and failed shares.

A sample is *scored* if its reward did not fail; an unscored sample counts neither as correct nor as wrong. If more than
1 % of the rewards failed, the figures are marked: the scored samples may not represent the others.

Letters: P problems, n scored samples of a problem, c correct samples among these, k <= n samples of pass@k.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CORRECT_ABOVE = 0.5  # a completion is correct if its reward is greater than this, the middle of a 0/1 reward
LEVEL = 0.95  # confidence level of an interval
RESAMPLES = 10_000  # with this number, the ends of an interval are exact to about a hundredth of its width
MARKED_ABOVE = 0.01  # figures are marked if more than this share of the rewards failed
Rows = Sequence[Sequence[Mapping[str, Any]]]  # for each problem a list of samples, see `figures_of`
MARK, EQUAL = "*", "[all equal]"  # if all problems are equal, an interval has no width, but the figure is not certain


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k samples of a problem is correct::

        pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, equation 1)

    Args:
        n: number of samples.
        c: number of correct samples, 0 <= c <= n.
        k: number of samples that are drawn, 1 <= k <= n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Return the 95 % percentile interval of Σ values / Σ weights by a bootstrap over the problems (Efron 1979).

    Problems are resampled, because another test set would have other problems. If all values are equal, the interval
    has no width, although the figure is not certain.

    Args:
        values: [P], at least one: for example pass@k of each problem.
        weights: [P], for example the number of scored samples of each problem. None = 1 for each problem.
    """
    value = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(value) if weights is None else np.asarray(weights, dtype=np.float64)
    generator = np.random.default_rng(0)
    draws = (generator.integers(len(value), size=len(value)) for _ in range(RESAMPLES))
    ratios = [value[drawn].sum() / weight[drawn].sum() for drawn in draws]
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def figures_of(rows: Rows, ks: Sequence[int]) -> dict[str, Any]:
    """Compute the figures of a model, in a form that can be written as JSON.

    Args:
        rows: for each problem a list of samples. A sample has `reward` (number; None = failed), `tokens` (number of
            tokens) and `truncated` (bool).
        ks: values of k for pass@k; at most the number of samples of a problem.
    Returns:
        A dictionary with these entries. A figure that cannot be estimated is None.

        - `accuracy`: share of correct samples among the scored samples.
        - `accuracy_interval`: its lower and upper end.
        - `pass_at`: k (as a string) → [mean, low, high] over the problems with at least k scored samples.
        - `left_out`: k (as a string) → number of the other problems.
        - `problems`, `samples`: numbers of problems and of samples.
        - `failed`, `truncated`: shares of samples whose reward failed, and of truncated samples.
        - `marked`: True = more than 1 % of the rewards failed.
        - `mean_length`: mean number of tokens of a sample.
    """
    samples = [sample for row in rows for sample in row]
    counts = [_counts(row) for row in rows]
    known = [(n, c) for n, c in counts if n > 0]
    accuracy, *interval = _estimate([c for _, c in known], [n for n, _ in known])
    total = max(len(samples), 1)
    failed = sum(sample["reward"] is None for sample in samples) / total
    return {
        "accuracy": accuracy,
        "accuracy_interval": interval if known else None,
        "pass_at": {str(k): _estimate([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in ks},
        "left_out": {str(k): sum(n < k for n, _ in counts) for k in ks},
        "problems": len(rows),
        "samples": len(samples),
        "failed": failed,
        "marked": failed > MARKED_ABOVE,
        "truncated": sum(sample["truncated"] for sample in samples) / total,
        "mean_length": sum(sample["tokens"] for sample in samples) / total,
    }


def _estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> list[Any]:
    """Return Σ values / Σ weights and the ends of its interval; three None if empty."""
    if not values:
        return [None] * 3
    return [sum(values) / sum(weights or [1] * len(values)), *bootstrap_interval(values, weights)]


def _counts(samples: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the numbers of scored and of correct samples of a problem."""
    scored = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return len(scored), sum(reward > CORRECT_ABOVE for reward in scored)


def metrics_of(
    rewards: Sequence[Sequence[float]], names: Sequence[str], ks: Sequence[int], *, group_size: int
) -> dict[str, float]:
    """Compute accuracy and pass@k of an evaluation during training, for the trainer's log.

    Args:
        rewards: [N, F] as nested lists; the samples of a problem are adjacent. NaN = the function does not apply, or
            a function failed on the sample.
        names: names of the F reward functions.
        ks: values of k; at most `group_size`.
        group_size: number of samples of a problem.
    Returns:
        Name → number; NaN = it cannot be estimated. The names are `accuracy` and `pass_at_<k>`, also with `_low` and
        `_high` for the interval, and `failed`, the share of NaN. With several functions, they begin with
        `rewards/<name>/`.
    """
    found: dict[str, float] = {}
    for name, column in zip(names, zip(*rewards, strict=True), strict=False):  # without rows, `zip` makes no columns
        samples = [{"reward": None if math.isnan(one) else one, "tokens": 0, "truncated": False} for one in column]
        figures = figures_of([samples[at : at + group_size] for at in range(0, len(samples), group_size)], ks)
        place = f"rewards/{name}/" if len(names) > 1 else ""
        values = {
            "accuracy": [figures["accuracy"], *(figures["accuracy_interval"] or [None, None])],
            "failed": [figures["failed"]],
            **{f"pass_at_{k}": value for k, value in figures["pass_at"].items()},
        }
        for what, estimate in values.items():
            for end, value in zip(("", "_low", "_high"), estimate, strict=False):
                found[f"{place}{what}{end}"] = math.nan if value is None else value
    return found


def differences(
    rows: Rows,
    others: Rows,
    ks: Sequence[int],
) -> dict[str, list[Any]]:
    """Compute how much better a model (`rows`) is than another one (`others`) on the same problems in the same order.

    The models are compared problem by problem, so a problem's difficulty cancels and the interval is narrower than the
    two models'. Each problem counts 1, however many of its samples are scored. A problem is left out if one of the
    models has too few scored samples of it.

    Returns:
        "accuracy" and each "pass@k" → [mean, low, high] of the difference. Three None = no problem is left.
    """
    counts = [(_counts(row), _counts(other)) for row, other in zip(rows, others, strict=True)]
    gains = {
        name: [pass_at_k(*one, k) - pass_at_k(*other, k) for one, other in counts if min(one[0], other[0]) >= k]
        for name, k in (("accuracy", 1), *((f"pass@{k}", k) for k in ks))
    }
    return {name: _estimate(values) for name, values in gains.items()}


def comparison(name: str, found: Mapping[str, Any]) -> str:
    """Return the result of `differences`, and "from", the other model's name, as one line in percentage points."""
    estimates = [(what, *value) for what, value in found.items() if what != "from" and value[0] is not None]
    cells = [
        f"{what} {100 * mean:+.1f} " + (f"[{100 * low:+.1f}, {100 * high:+.1f}]" if low < high else EQUAL)
        for what, mean, low, high in estimates
    ]
    return f"{name} − {found['from']}, paired by problem: {'  '.join(cells)}"


def table(models: Mapping[str, Mapping[str, Any]], ks: Sequence[int]) -> str:
    """Return the results of `figures_of` for several models as a text table, in per cent with intervals in brackets."""
    rows = [["model", "accuracy", *(f"pass@{k}" for k in ks), "tokens", "truncated", "failed"]]
    for name, figures in models.items():
        mark = MARK if figures["marked"] else ""
        cells = [[figures["accuracy"], *(figures["accuracy_interval"] or [0, 0])], *figures["pass_at"].values()]
        shares = [
            "–"
            if share is None
            else f"{100 * share:.1f} " + (f"[{100 * low:.1f}, {100 * high:.1f}]" if low < high else EQUAL)
            for share, low, high in cells
        ]
        rows.append(
            [
                name,
                *(share + mark for share in shares),
                f"{figures['mean_length']:.0f}",
                f"{figures['truncated']:.1%}",
                f"{figures['failed']:.1%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if any(one["marked"] for one in models.values()):
        lines.append(f"{MARK} More than 1 % of the rewards failed, and count neither as right nor as wrong.")
    return "\n".join(lines)
