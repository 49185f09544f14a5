"""Computes figures from scored samples: accuracy and pass@k with intervals, lengths, truncated and failed shares.

A sample is *scored* if its reward did not fail; an unscored sample counts neither as correct nor as wrong.

Letters: P problems, n scored samples of a problem, c correct samples among these, k <= n samples of pass@k.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas

CORRECT_ABOVE = 0.5  # a completion is correct if its reward is greater than this, the middle of a 0/1 reward
LEVEL = 0.95  # confidence level of an interval
RESAMPLES = 10_000  # with this number, the ends of an interval are exact to about a hundredth of its width
Rows = Sequence[Sequence[Mapping[str, Any]]]  # for each problem a list of samples, see `figures_of`
Estimate = list[float | None]  # mean, low and high; None = it cannot be estimated


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k samples of a problem is correct::

        pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, equation 1)

    Args:
        n: number of samples.
        c: number of correct samples, 0 <= c <= n.
        k: number of samples that are drawn, 1 <= k <= n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of values by a bootstrap over the problems (Efron 1979).

    Problems are resampled, because another test set would have other problems.

    Args:
        values: [P], at least one: for example pass@k of each problem.
    """
    value = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    draws = (generator.integers(len(value), size=len(value)) for _ in range(RESAMPLES))
    low, high = np.quantile([value[drawn].mean() for drawn in draws], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def figures_of(rows: Rows, ks: Sequence[int]) -> dict[str, Any]:
    """Compute the figures of a model, in a form that can be written as JSON.

    Args:
        rows: for each problem a list of samples. A sample has `reward` (number; None = failed), `tokens` (number of
            tokens) and `truncated` (bool).
        ks: values of k for pass@k; at most the number of samples of a problem.
    Returns:
        A dictionary with these entries. A figure that cannot be estimated is None.

        - `accuracy`, `accuracy_interval`: pass@1, the share of correct samples among the scored ones of a problem.
        - `pass_at`: k (as a string) → [mean, low, high] over the problems with at least k scored samples.
        - `problems`, `samples`: numbers of problems and of samples.
        - `failed`, `truncated`: shares of samples whose reward failed, and of truncated samples.
        - `mean_length`: mean number of tokens of a sample.
    """
    samples = [sample for row in rows for sample in row]
    counts = [_counts(row) for row in rows]
    accuracy, *interval = _estimate([c / n for n, c in counts if n])
    total = max(len(samples), 1)
    return {
        "accuracy": accuracy,
        "accuracy_interval": None if accuracy is None else interval,
        "pass_at": {str(k): _estimate([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in ks},
        "problems": len(rows),
        "samples": len(samples),
        "failed": sum(sample["reward"] is None for sample in samples) / total,
        "truncated": sum(sample["truncated"] for sample in samples) / total,
        "mean_length": sum(sample["tokens"] for sample in samples) / total,
    }


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values and the ends of its interval; three None if empty."""
    if not values:
        return [None] * 3
    return [sum(values) / len(values), *bootstrap_interval(values)]


def _counts(samples: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the numbers of scored and of correct samples of a problem."""
    scored = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return len(scored), sum(reward > CORRECT_ABOVE for reward in scored)


def differences(rows: Rows, others: Rows, ks: Sequence[int]) -> dict[str, Estimate]:
    """Compute how much better a model (`rows`) is than another one (`others`) on the same problems in the same order.

    The models are compared problem by problem, so a problem's difficulty cancels. Each problem counts 1. It is left out
    if one of the models has too few scored samples of it.

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
    cells = [f"{what} {_in_percent(value, '+')}" for what, value in found.items() if what != "from"]
    return f"{name} − {found['from']}, paired by problem: {'  '.join(cells)}"


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results of `figures_of` for several models as a text table, in per cent with intervals in brackets."""
    rows = [
        {
            "model": name,
            "accuracy": _in_percent([figures["accuracy"], *(figures["accuracy_interval"] or [None, None])]),
            **{f"pass@{k}": _in_percent(estimate) for k, estimate in figures["pass_at"].items()},
            "tokens": f"{figures['mean_length']:.0f}",
            "truncated": f"{figures['truncated']:.1%}",
            "failed": f"{figures['failed']:.1%}",
        }
        for name, figures in models.items()
    ]
    return pandas.DataFrame(rows).to_string(index=False)


def _in_percent(estimate: Sequence[Any], sign: str = "") -> str:
    value, low, high = estimate
    if value is None:
        return "–"
    # If all problems are equal, the interval has no width, but the figure is not certain.
    interval = f"[{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]" if low < high else "[all equal]"
    return f"{100 * value:{sign}.1f} {interval}"
