"""From scored samples to figures: accuracy and pass@k with their intervals, lengths, truncated and failed shares.

A sample that its reward failed on counts neither way. Where that is more than one in a hundred, the figures are of
other samples than those asked for, and are marked.

Letters: P problems, n scored samples of a problem, c correct ones among them, k <= n.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CORRECT_ABOVE = 0.5  # a completion with a greater reward is correct: the middle of a 0/1 reward
LEVEL = 0.95  # of an interval
RESAMPLES = 10_000  # so many that the interval's ends are known to a hundredth of its width
CHUNK = 1 << 22  # indices drawn at a time: 32 MiB
MARKED_ABOVE = 0.01  # share of failed rewards
MARK = "*"


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is correct.

        pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, equation 1)

    Args:
        n: samples drawn. c: correct ones among them, 0 <= c <= n. k: 1 <= k <= n.
    """
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


def figures_of(rows: Sequence[Sequence[Mapping[str, Any]]], ks: Sequence[int], *, seed: int = 0) -> dict[str, Any]:
    """The figures, as JSON; None where nothing could be estimated.

    Args:
        rows: per problem its samples, each with `reward` (None: failed), `tokens` and `truncated`.
        ks, seed: see `figures_of_rewards`.
    Returns:
        What `figures_of_rewards` returns; truncated: a share of the samples; mean_length: tokens.
    """
    samples = [sample for row in rows for sample in row]
    return {
        **figures_of_rewards([[sample["reward"] for sample in row] for row in rows], ks, seed=seed),
        "truncated": sum(sample["truncated"] for sample in samples) / len(samples) if samples else 0.0,
        "mean_length": sum(sample["tokens"] for sample in samples) / len(samples) if samples else 0.0,
    }


def figures_of_rewards(
    rewards: Sequence[Sequence[float | None]], ks: Sequence[int], *, seed: int = 0
) -> dict[str, Any]:
    """The figures that rewards alone give.

    Args:
        rewards: per problem those of its samples; None: failed.
        ks: at most the samples of a problem.
        seed: of the intervals.
    Returns:
        accuracy: correct samples among the scored ones, with accuracy_interval.
        pass_at: k (a string) → [mean over problems, low, high]; of problems with k scored samples.
        left_out: k (a string) → problems that have fewer.
        problems, samples: their numbers. failed: share of the samples.
        marked: more than 1 % of the rewards failed.
    """
    counts = [_counts(row) for row in rewards]
    known = [(n, c) for n, c in counts if n > 0]
    samples, total = sum(map(len, rewards)), sum(n for n, _ in known)
    accuracy = interval = None
    if known:
        accuracy = sum(c for _, c in known) / total
        interval = list(bootstrap_interval([c for _, c in known], [n for n, _ in known], seed=seed))
    pass_at: dict[str, list[float | None]] = {}
    for k in ks:
        estimates = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        pass_at[str(k)] = [None] * 3
        if estimates:
            pass_at[str(k)] = [sum(estimates) / len(estimates), *bootstrap_interval(estimates, seed=seed)]
    failed = (samples - total) / samples if samples else 0.0
    return {
        "accuracy": accuracy,
        "accuracy_interval": interval,
        "pass_at": pass_at,
        "left_out": {str(k): sum(n < k for n, _ in counts) for k in ks},
        "problems": len(rewards),
        "samples": samples,
        "failed": failed,
        "marked": failed > MARKED_ABOVE,
    }


def _counts(rewards: Sequence[float | None]) -> tuple[int, int]:
    """(n, c) of a problem."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored), sum(reward > CORRECT_ABOVE for reward in scored)


def metrics_of(
    rewards: Sequence[Sequence[float]], names: Sequence[str], ks: Sequence[int], *, group_size: int
) -> dict[str, float]:
    """The figures of a trainer's evaluation, one number each, as it logs them; NaN where nothing could be estimated.

    Args:
        rewards: [N, F]; the `group_size` samples of a problem are adjacent. NaN: failed, or does not apply.
        names: F, of the reward functions.
    Returns:
        accuracy, pass_at_<k>, each with the ends of its interval, _low and _high; failed. With several functions, each
        has its own under rewards/<name>/.
    """
    found: dict[str, float] = {}
    for name, column in zip(names, zip(*rewards, strict=True), strict=False):  # without a row there is no column
        scores = [None if math.isnan(one) else one for one in column]
        groups = [scores[start : start + group_size] for start in range(0, len(scores), group_size)]
        figures = figures_of_rewards(groups, ks)
        place = f"rewards/{name}/" if len(names) > 1 else ""
        values = {"accuracy": [figures["accuracy"], *(figures["accuracy_interval"] or [None, None])]}
        values |= {f"pass_at_{k}": value for k, value in figures["pass_at"].items()}
        for what, of_one in values.items():
            for end, value in zip(("", "_low", "_high"), of_one, strict=True):
                found[f"{place}{what}{end}"] = math.nan if value is None else value
        found[f"{place}failed"] = figures["failed"]
    return found


def differences(
    rows: Sequence[Sequence[Mapping[str, Any]]],
    others: Sequence[Sequence[Mapping[str, Any]]],
    ks: Sequence[int],
    *,
    seed: int = 0,
) -> dict[str, list[float] | None]:
    """By how much a model is better than another one on the same problems: "accuracy", "pass@k" → [mean, low, high].

    Paired by problem: what makes a problem hard is in both models' figures, and cancels. So these intervals are
    narrower than those of the two models suggest. Problems that lack scored samples of either are left out.

    Args:
        rows, others: of the model and of the other one, as for `figures_of`, the problems in the same order.
    Returns:
        The differences of the mean over problems; None where no problem is left.
    """

    def estimates(found: Sequence[Sequence[Mapping[str, Any]]], k: int) -> list[float | None]:
        counts = [_counts([sample["reward"] for sample in row]) for row in found]
        return [pass_at_k(n, c, k) if n >= k else None for n, c in counts]

    result: dict[str, list[float] | None] = {}
    for name, k in (("accuracy", 1), *((f"pass@{k}", k) for k in ks)):
        pairs = zip(estimates(rows, k), estimates(others, k), strict=True)
        of_problems = [one - other for one, other in pairs if one is not None and other is not None]
        result[name] = None
        if of_problems:
            result[name] = [sum(of_problems) / len(of_problems), *bootstrap_interval(of_problems, seed=seed)]
    return result


def comparison(name: str, other: str, found: Mapping[str, list[float] | None]) -> str:
    """A line: `differences` in percentage points."""
    cells = [
        f"{what} {100 * one[0]:+.1f} [{100 * one[1]:+.1f}, {100 * one[2]:+.1f}]" for what, one in found.items() if one
    ]
    return f"{name} − {other}, paired by problem: {'  '.join(cells)}"


def remarks(name: str, figures: Mapping[str, Any]) -> list[str]:
    """What has to be said beside the figures of a model."""
    said = []
    if figures["marked"]:
        said.append(
            f"{MARK} {name}: the reward failed on {figures['failed']:.1%} of {figures['samples']} samples, which count "
            "neither as right nor as wrong."
        )
    for k, problems in figures["left_out"].items():
        if problems:
            said.append(
                f"{name}: pass@{k} leaves out {problems} of {figures['problems']} problems, which have fewer than {k} "
                "scored samples."
            )
    return said


def table(models: Mapping[str, Mapping[str, Any]], ks: Sequence[int]) -> str:
    """A line per model; shares in per cent, the 95 % intervals in brackets."""
    rows = [["model", "accuracy", *(f"pass@{k}" for k in ks), "tokens", "truncated", "failed"]]
    for name, figures in models.items():
        mark = MARK if figures["marked"] else ""
        cells = [(figures["accuracy"], *(figures["accuracy_interval"] or (None, None)))]
        cells += [tuple(figures["pass_at"][str(k)]) for k in ks]
        rows.append(
            [
                name,
                *(_cell(*cell) + mark for cell in cells),
                f"{figures['mean_length']:.0f}",
                f"{figures['truncated']:.1%}",
                f"{figures['failed']:.1%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: float | None, low: float | None, high: float | None) -> str:
    if value is None or low is None or high is None:
        return "–"
    return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
