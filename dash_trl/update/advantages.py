"""Advantage estimators: pure functions that compute advantages from the rewards of whole groups.

`group_advantages` implements TRL's options (GRPO, Dr. GRPO, GDPO). `ESTIMATORS` adds estimators that TRL's GRPOTrainer
does not offer, under verl's names. Each takes rewards [M, G] (NaN = unscored), and returns advantages [M, G], 0 for
unscored rows. If the baseline is the group's, the only scored row of a group gets 0, too.

Letters: N rows (the G rows of a group are adjacent), F reward functions, G group size, M = N / G groups.
"""

import torch
from torch import Tensor

from dash_trl.update.arguments import check_tensor
from dash_trl.update.estimators import ESTIMATORS, Estimator, registered

# TRL adds this number to a standard deviation before dividing by it (grpo_trainer.py). With another number, our
# advantages would differ from TRL's.
STD_FLOOR = 1e-4

# Rewards are float32, so a weighted sum of rewards has rounding errors of a few units in the last place. If the rewards
# of a group differ by no more than these errors, they count as equal. TRL divides the errors by 1e-4, so in TRL equal
# rewards can get advantages up to 3.6e-3.
ROUNDING = 4 * torch.finfo(torch.float32).eps


def group_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    *,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:
    """Compute GRPO's advantages (DeepSeekMath, arXiv 2402.03300, 4.1.2; DASH, eq. 4), as TRL 1.16 defines them.

    `sum_then_normalize`: r_i = Σ_k w_k r_ik and A_i = (r_i − mean_group r) / (σ + 1e-4). σ is the unbiased standard
    deviation of the group ("group") or of all N rows ("batch"); with "none" (DASH's eq. 4, Dr. GRPO) there is no
    division. `normalize_then_sum` (GDPO, arXiv 2601.05242): each function's rewards are normalised in their group, then
    their weighted sum over all N rows.

    Deviation from TRL: a group of equal rewards gets exactly 0 instead of rounding errors divided by 1e-4.

    Args:
        rewards: [N, F]; NaN = the function does not apply to the row. A row whose rewards are all NaN is unscored: no
            mean or standard deviation includes it, and its advantage is 0.
        weights: [F], the weight of each reward function.
        group_size: G, which divides N.
        scale_rewards: "group", "batch" or "none"; ignored by `normalize_then_sum`.
        multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
    Returns:
        [N] float32 on the CPU, in the order of the rows.
    Raises:
        ValueError: if a tensor has a wrong shape, or if the rows do not split into whole groups.
    """
    rewards = rewards.cpu().double()  # MPS has no float64
    weights = weights.cpu().double()
    total, advantages = _in_groups(rewards, weights, group_size)
    if multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, group_size, rewards.shape[1])  # [M, G, F]
        normalised = _centred(grouped, scale=grouped.abs()) / _divisor(grouped)
        total = (normalised * weights).nansum(dim=2).masked_fill(total.squeeze(2).isnan(), torch.nan).view(1, -1)
        # TRL subtracts the mean over all rows here, which is 0 except for rounding errors. We do not subtract it,
        # because the rounding errors would give the rows of a constant group an advantage other than 0.
        advantages = total / _divisor(total)
    elif scale_rewards == "group":
        advantages = advantages / _divisor(total)
    elif scale_rewards == "batch":
        advantages = advantages / _divisor(total.view(1, -1, 1))
    return advantages.flatten().nan_to_num().float()


# --------------------------------------------------------------------------------------------- estimators by name
# Unscored rows are left out of every mean and standard deviation.


def rloo(rewards: Tensor) -> Tensor:
    """A_i = r_i − mean_{j≠i} r_j (RLOO: Ahmadian et al. 2024, arXiv 2402.14740), as in TRL's RLOOTrainer.

    The baseline does not depend on row i, so the gradient is unbiased. Deviation from RLOOTrainer: the reward has no KL
    term.
    """
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (_from_mean(rewards) * count / (count - 1)).nan_to_num()


def grpo_passk(rewards: Tensor) -> Tensor:
    """A_best = (r_best − r_second) / (σ_group + 1e-4), 0 for all other rows (pass@k: arXiv 2503.19595, as in verl).

    Without the best row, the group's best reward would be r_second, so the row contributes r_best − r_second.
    """
    best = rewards.nan_to_num(nan=-torch.inf).topk(2, dim=1)
    gap = best.values[:, :1] - best.values[:, 1:]
    advantages = torch.zeros_like(rewards).scatter(1, best.indices[:, :1], gap)
    return (advantages / _divisor(rewards)).nan_to_num()


def single_path(rewards: Tensor) -> Tensor:
    """A_i = r_i − mean r over all N rows: the single-path method (DASH, eq. 3).

    The mean is not the group's, so a group of equal rewards can have advantages other than 0.
    """
    return _from_mean(rewards.view(1, -1)).nan_to_num().view_as(rewards)


ESTIMATORS.update(
    # The outcome form of "grpo" is `group_advantages`, which also takes TRL's options.
    grpo=Estimator(per_group=True),
    rloo=Estimator(rloo, per_group=True),
    single_path=Estimator(single_path),
    grpo_passk=Estimator(grpo_passk, per_group=True),
)


def outcome_advantages(
    estimator: str,
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    *,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:
    """Compute advantages with the outcome form of an estimator.

    Rewards of a group that differ only by rounding errors count as equal.

    Args:
        estimator: a name in `ESTIMATORS`; "grpo" stands for `group_advantages`.
        rewards: [N, F], NaN as in `group_advantages`.
        weights: [F], the weight of each reward function.
        group_size: G >= 2, which divides N.
        scale_rewards: see `group_advantages`; used by "grpo" only.
        multi_objective_aggregation: see `group_advantages`; used by "grpo" only.
    Returns:
        [N] float32 on the CPU, in the order of the rows; 0 for unscored rows.
    Raises:
        ValueError: if the name is unknown, a tensor has a wrong shape, or the rows do not split into whole groups.
    """
    outcome = registered(estimator, "outcome", "estimator").outcome
    if outcome is None:
        return group_advantages(
            rewards,
            weights,
            group_size,
            scale_rewards=scale_rewards,
            multi_objective_aggregation=multi_objective_aggregation,
        )
    total, centred = _in_groups(rewards.cpu().double(), weights.cpu().double(), group_size)  # MPS has no float64
    return outcome((total.nanmean(dim=1, keepdim=True) + centred).squeeze(2)).flatten().float()


def weighted_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Compute each row's weighted sum of rewards, r_i = Σ_k w_k r_ik, for example in an estimator of your own.

    An unscored row must not count as 0, so its sum is NaN. Use `nansum` or `nanmean` over a group.

    Args:
        rewards: [N, F]; NaN = the function does not apply to the row. A row whose rewards are all NaN is unscored.
        weights: [F], the weight of each reward function, on any device.
    Returns:
        [N]; NaN for an unscored row.
    Raises:
        ValueError: if a tensor has a wrong shape.
    """
    check_tensor("rewards", rewards, N=None, F=None)
    check_tensor("weights", weights, F=rewards.shape[1])
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def checked_advantages(advantages: Tensor, rewards: Tensor, name: str) -> Tensor:
    """Check an estimator's advantages, and return them as float32 [N], with 0 for unscored rows.

    Args:
        advantages: the estimator's result.
        rewards: [N, F], the rewards that the estimator got; NaN as in `group_advantages`.
        name: the estimator's name, for the error.
    Raises:
        ValueError: if `advantages` is no float tensor [N], or if the advantage of a scored row is not finite, because
            it would turn every parameter into NaN.
    """
    check_tensor(f"What {name} returned", advantages, floats=True, N=len(rewards))
    unscored = rewards.isnan().all(dim=1).to(advantages.device)
    advantages = advantages.detach().float().masked_fill(unscored, 0.0)
    bad = (~advantages.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"{name} returned {advantages[bad[0]].item()} for row {bad[0]}, whose rewards are "
            f"{rewards[bad[0]].tolist()} ({len(bad)} such rows). Is the divisor the spread of a constant group, "
            "which is 0? Add a small number to it."
        )
    return advantages


def _in_groups(rewards: Tensor, weights: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return two tensors [M, G, 1]: each row's weighted sum of rewards, and this sum minus its group's mean."""
    total = weighted_rewards(rewards, weights)
    if group_size < 1 or len(total) % group_size:
        raise ValueError(
            f"{len(total)} rewards do not split into groups of {group_size}: was a completion dropped before its group "
            "was complete?"
        )
    total = total.view(-1, group_size, 1)
    return total, _centred(total, scale=(rewards * weights).abs().nansum(dim=1).view_as(total))


def _from_mean(rewards: Tensor) -> Tensor:
    """Subtract the group's mean from each value of [M, G], ignoring NaN. Equal values give exactly 0."""
    return _centred(rewards, scale=rewards.abs())


def _centred(values: Tensor, *, scale: Tensor) -> Tensor:
    """Subtract the group's mean from each value of [M, G, …], ignoring NaN. Values that differ only by rounding give 0.

    `scale` has the sum of the absolute terms of each value, because rounding errors are proportional to it.
    """
    high = values.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    low = values.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    constant = high - low <= ROUNDING * scale.nan_to_num().amax(dim=1, keepdim=True)
    return torch.where(constant & ~values.isnan(), 0.0, values - values.nanmean(dim=1, keepdim=True))


def _divisor(values: Tensor) -> Tensor:
    """Compute each group's unbiased σ + `STD_FLOOR`, ignoring NaN; fewer than two values give NaN."""
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    squares = (values - values.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return torch.where(count > 1, squares / (count - 1).clamp(min=1), torch.nan).sqrt() + STD_FLOOR
