"""The definitions once more, with Python floats and loops. Imports nothing from dash_trl."""

from __future__ import annotations

import math

EPSILON = 1e-4  # TRL's


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def group_advantages(
    rewards: list[list[float | None]],
    weights: list[float],
    group_size: int,
    scale_rewards: str,
    aggregation: str,
) -> list[float]:
    """GRPO's outcome advantages; `None` = not applicable; a row of `None` only has advantage 0."""
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    if aggregation == "normalize_then_sum":
        totals: list[float | None] = []
        for group in groups:
            normalised: list[list[float | None]] = [[None] * len(weights) for _ in group]
            for k in range(len(weights)):
                column = [row[k] for row in group if row[k] is not None]
                for i, row in enumerate(group):
                    if row[k] is not None and len(column) > 1:
                        spread = max(column) - min(column)
                        normalised[i][k] = (row[k] - mean(column)) / (std(column) + EPSILON) if spread else 0.0
            for row, norm in zip(group, normalised, strict=True):
                scored = any(value is not None for value in row)
                totals.append(
                    sum(w * n for w, n in zip(weights, norm, strict=True) if n is not None) if scored else None
                )
        known = [total for total in totals if total is not None]
        if len(known) < 2:
            return [0.0] * len(totals)
        return [0.0 if total is None else total / (std(known) + EPSILON) for total in totals]

    totals = [
        None
        if all(value is None for value in row)
        else math.fsum(w * r for w, r in zip(weights, row, strict=True) if r is not None)
        for row in rewards
    ]
    known = [total for total in totals if total is not None]
    result = []
    for i, total in enumerate(totals):
        group = [t for t in totals[i - i % group_size : i - i % group_size + group_size] if t is not None]
        if total is None or len(group) < 2 and scale_rewards == "group" or max(group) - min(group) < 1e-9:
            result.append(0.0)
        elif scale_rewards == "group":
            result.append((total - mean(group)) / (std(group) + EPSILON))
        elif scale_rewards == "batch":
            result.append((total - mean(group)) / (std(known) + EPSILON))
        else:
            result.append(total - mean(group))
    return result


def rloo(groups, lengths):
    return each_row(groups, lambda group, i: group[i] - mean(others(group, i)) if others(group, i) else 0.0)


def opo(groups, lengths):
    def advantage(group, i, lengths):
        if not others(group, i):
            return 0.0
        tokens = math.fsum(length for r, length in zip(group, lengths, strict=True) if r is not None)
        weighted = math.fsum(length * r for r, length in zip(group, lengths, strict=True) if r is not None)
        return group[i] - weighted / tokens if tokens else 0.0  # no row has a token to teach

    return [
        [None if r is None else advantage(group, i, its) for i, r in enumerate(group)]
        for group, its in zip(groups, lengths, strict=True)
    ]


def grpo_passk(groups, lengths):
    def advantage(group, i):
        best, *rest = sorted((r for r in group if r is not None), reverse=True)
        if not rest or best == rest[0] or group[i] != best:
            return 0.0
        return (best - rest[0]) / (std([best, *rest]) + EPSILON)

    return each_row(groups, advantage)


def reinforce_plus_plus(groups, lengths):
    known = [r for group in groups for r in group if r is not None]
    scale = std(known) + EPSILON if len(known) > 1 else 1.0
    return each_row(groups, lambda group, i: (group[i] - mean(known)) / scale)


def reinforce_plus_plus_baseline(groups, lengths):
    centred = each_row(groups, lambda group, i: group[i] - mean([r for r in group if r is not None]))
    known = [c for group in centred for c in group if c is not None]
    scale = std(known) + EPSILON if len(known) > 1 else 1.0
    return each_row(centred, lambda group, i: group[i] / scale)


def others(group, i):
    return [r for j, r in enumerate(group) if j != i and r is not None]


def each_row(groups, advantage):
    return [[None if r is None else advantage(group, i) for i, r in enumerate(group)] for group in groups]


def importance_ratio(old, sampling, mask, mode, low, high):
    """Per row, per token (or one per row): exp(Σ or single (old − sampling)), truncated or masked."""
    result = []
    for old_row, sampling_row, mask_row in zip(old, sampling, mask, strict=True):
        differences = [
            0.0 if not m or math.isnan(s) else o - s for o, s, m in zip(old_row, sampling_row, mask_row, strict=True)
        ]
        if mode.startswith("sequence"):
            differences = [math.fsum(differences)]
        ratios = []
        for difference in differences:
            ratio = math.exp(difference)
            below, above = low is not None and ratio < low, high is not None and ratio > high
            if mode.endswith("truncate"):
                ratio = low if below else high if above else ratio
            elif below or above:
                ratio = 0.0
            ratios.append(ratio)
        result.append(ratios)
    return result


def off_policy_loss(loss, policy, proximal, sampler, advantages, tokens, *, bound, low=0.2, high=0.2):
    """−(1/N) Σ of a loss per token; rows of log-probs, advantages per token, `tokens` is N."""
    total = []
    for rows in zip(policy, proximal, sampler, advantages, strict=True):
        for pi, prox, mu, advantage in zip(*rows, strict=True):
            ratio = math.exp(pi - mu)
            if loss == "aipo":
                total.append(min(ratio, bound) * advantage)
            elif loss == "aipo, detached":
                total.append(min(ratio, bound) * advantage * pi)
            else:
                u = math.exp(pi - prox)
                clipped = min(max(u, 1 - low), 1 + high)
                total.append(min(math.exp(prox - mu), bound) * min(u * advantage, clipped * advantage))
    return -math.fsum(total) / tokens


def off_policy_figures(policy, sampler, bound):
    """(mean ratio, share above the bound, k3 of KL(sampler ‖ policy)); a NaN counts nowhere."""
    ratios = [
        math.exp(pi - mu)
        for pi_row, mu_row in zip(policy, sampler, strict=True)
        for pi, mu in zip(pi_row, mu_row, strict=True)
        if not math.isnan(mu)
    ]
    return mean(ratios), mean([ratio > bound for ratio in ratios]), mean([r - 1 - math.log(r) for r in ratios])
