"""Estimates from counts of correct samples: pure functions of arrays and a seed.

Letters: P problems, n scored samples of a problem, c correct ones among them, k <= n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CORRECT_ABOVE = 0.5  # a completion with a greater reward is correct: the middle of a 0/1 reward
LEVEL = 0.95  # of an interval
RESAMPLES = 10_000  # so many that the interval's ends are known to a hundredth of its width
CHUNK = 1 << 22  # indices drawn at a time: 32 MiB


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is correct.

        pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, equation 1)

    Args:
        n: samples drawn. c: correct ones among them. k: 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}) is undefined: it needs 0 <= c <= n and 1 <= k <= n samples.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    values: Sequence[float], weights: Sequence[float] | None = None, *, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile interval of Σ values / Σ weights under resampling of the problems (Efron 1979).

    The problems are the sample, since another test set has other problems; the samples of one problem stay together.
    Where all values are equal, and so where there is one problem only, the interval has no width: it says nothing of
    what was never seen.

    Args:
        values: [P], e.g. pass@k of each problem, or its number of correct samples.
        weights: [P], of each problem; e.g. its number of scored samples. None: 1 each, the mean of the values.
        seed: of the resampling.
    Returns:
        (low, high), both NaN without a problem.
    """
    value = np.asarray(values, dtype=np.float64)
    weight = np.ones_like(value) if weights is None else np.asarray(weights, dtype=np.float64)
    if value.ndim != 1 or value.shape != weight.shape:
        raise ValueError(f"values {value.shape} and weights {weight.shape} must be one of each for every problem.")
    problems = len(value)
    if problems == 0:
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    rows = max(1, CHUNK // problems)
    ratios = []
    for start in range(0, RESAMPLES, rows):
        drawn = generator.integers(problems, size=(min(rows, RESAMPLES - start), problems))
        ratios.append(value[drawn].sum(axis=1) / weight[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
