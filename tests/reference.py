"""The definitions once more, with Python floats and loops, or a plain pass. Imports nothing from dash_trl."""

import math

import torch
from torch.distributions import Categorical

EPSILON = 1e-4  # TRL's


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def total(row: list[float | None], weights: list[float]) -> float | None:
    """Return the weighted sum of the rewards that apply; `None` if none applies."""
    known = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
    return math.fsum(known) if known else None


def normalised(column: list[float | None]) -> list[float | None]:
    """Normalises one function's rewards of a group; 0 if they do not differ."""
    known = [value for value in column if value is not None]
    if len(set(known)) < 2:
        return [None if value is None else 0.0 for value in column]
    return [None if value is None else (value - mean(known)) / (std(known) + EPSILON) for value in column]


def group_advantages(
    rewards: list[list[float | None]], weights: list[float], group_size: int, scale_rewards: str, aggregation: str
) -> list[float]:
    """GRPO's outcome advantages; `None` = not applicable; a row of `None` only has advantage 0."""
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    if aggregation == "normalize_then_sum":
        columns = [[normalised(list(column)) for column in zip(*group, strict=True)] for group in groups]
        groups = [list(zip(*group, strict=True)) for group in columns]
    totals = [[total(row, weights) for row in group] for group in groups]
    of_all = [value for group in totals for value in group if value is not None]

    def advantage(group, i):
        scored = [value for value in group if value is not None]
        if aggregation == "normalize_then_sum":
            return group[i] / (std(of_all) + EPSILON) if len(of_all) > 1 else 0.0
        if len(scored) < 2 or max(scored) - min(scored) < 1e-9:
            return 0.0
        scale = {"group": scored, "batch": of_all}.get(scale_rewards)
        return (group[i] - mean(scored)) / (std(scale) + EPSILON if scale else 1.0)

    return [value or 0.0 for group in each_row(totals, advantage) for value in group]


def rloo(groups):
    return each_row(groups, lambda group, i: group[i] - mean(others(group, i)) if others(group, i) else 0.0)


def grpo_passk(groups):
    def advantage(group, i):
        best, *rest = sorted((r for r in group if r is not None), reverse=True)
        if not rest or best == rest[0] or group[i] != best:
            return 0.0
        return (best - rest[0]) / (std([best, *rest]) + EPSILON)

    return each_row(groups, advantage)


def single_path(groups):
    known = [r for group in groups for r in group if r is not None]
    return each_row(groups, lambda group, i: group[i] - mean(known))


def others(group, i):
    return [r for j, r in enumerate(group) if j != i and r is not None]


def each_row(groups, advantage):
    return [[None if r is None else advantage(group, i) for i, r in enumerate(group)] for group in groups]


def distributions(model, rollouts) -> Categorical:
    """[B, T], of the completions' tokens, by one plain pass over padded rows."""
    ids, mask = (
        torch.cat([getattr(rollouts, part + name) for part in ("prompt_", "completion_")], dim=1)
        for name in ("ids", "mask")
    )
    return Categorical(
        logits=model(input_ids=ids, attention_mask=mask).logits[:, rollouts.prompt_ids.shape[1] - 1 : -1]
    )


def off_policy_figures(policy, sampler, bound):
    """(mean ratio, share above the bound, k3 of KL(sampler ‖ policy)); a NaN counts nowhere."""
    ratios = [math.exp(pi - mu) for pi, mu in zip(policy, sampler, strict=True) if not math.isnan(mu)]
    return mean(ratios), mean([ratio > bound for ratio in ratios]), mean([r - 1 - math.log(r) for r in ratios])
