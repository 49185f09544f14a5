"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i on the last token of episode i,
else 0). w_p weighs the process part of an advantage; in `deepseek_process` and `reinforce`, whose formulas leave it
out, the process rewards. docs/concepts/credit.md compares the estimators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dash_trl.update import ESTIMATORS, Estimator

STD_EPSILON = 1e-6  # added to a standard deviation, as in verl; the posts add nothing


@dataclass(frozen=True)
class Rewards:
    """The input of a credit estimator: this rank's rows, in whole groups.

    Tokens of tools are removed: the policy's turns are adjacent.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True = last token of an episode, also if U is 0.
        values: [N, T], the last known V at or before token t; 0 for padding.
        mask: [N, T] bool, True = a token of the completion; padding is on the right.
        outcome: [N], weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's advantages.
        valued: [N] bool, False = V_0 or V_n is missing, or the row is unscored or has no token. It gets its outcome
            advantage, and no part in baselines and scales.
        group_size: G, which divides N.
        sum_over_ranks: sums a float64 tensor over the ranks, a collective: call it on each, also without valued rows.
    """

    process: Tensor
    ends: Tensor
    values: Tensor
    mask: Tensor
    outcome: Tensor
    outcome_advantages: Tensor
    valued: Tensor
    group_size: int
    sum_over_ranks: Callable[[Tensor], Tensor] = torch.clone


@dataclass(frozen=True)
class CreditSettings:
    """Settings of the credit estimators. An estimator ignores the settings that are not its own.

    Args:
        process_weight: w_p >= 0, of `grpo_process`, `deepseek_process` and `reinforce`. The outcome has the weight 1.
        scale_floor: number > 0 in the unit of V, the smallest divisor of process rewards in `grpo_process`. The default
            is above the rounding errors of V in float32 (1e-5), and far below the post's U (0.03).
        lam: λ of `gae` in [0, 1], per token.
    Raises:
        ValueError: if a number is out of range.
    """

    process_weight: float = 1.0
    scale_floor: float = 1e-4
    lam: float = 0.95

    def __post_init__(self) -> None:
        if not (self.process_weight >= 0 and 0 <= self.lam <= 1 and self.scale_floor > 0):
            raise ValueError(
                f"{self} is out of range: process_weight is >= 0, scale_floor is > 0 in the unit of V, e.g. 0.1, and "
                "lam is from 0 to 1."
            )


def place_rewards(
    boundaries: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    lengths: Tensor,
    outcome: Tensor,
    outcome_advantages: Tensor,
    *,
    group_size: int,
    sum_over_ranks: Callable[[Tensor], Tensor] = torch.clone,
) -> Rewards:
    """Turn values at boundaries into process rewards: the last token of episode i gets U_i = V_i − V_{i−1}.

    If an inner value is missing, its two episodes become one. A row without V_0, V_n, a token or an outcome is not
    `valued`. For the other arguments see `Rewards`.

    Args:
        boundaries: of N rows, ascending, the first is 0.
        values: V at each boundary; NaN or infinite = missing.
        lengths: [N] int, numbers of completion tokens.
    """
    mask = torch.arange(max(int(lengths.max()), 1)) < lengths.unsqueeze(1)
    process = torch.zeros(mask.shape, dtype=torch.double)
    levels = torch.zeros_like(process)
    ends = torch.zeros_like(mask)
    valued = torch.zeros_like(lengths, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        found = torch.tensor(values[row], dtype=torch.double)
        known = found.isfinite()
        if length > 0 and known[0] and known[-1]:
            valued[row] = True
            at = torch.tensor(boundaries[row])[known]
            found = found[known]
            process[row, at[1:] - 1] = found.diff()
            ends[row, at[1:] - 1] = True
            levels[row, at[0] : length] = found.repeat_interleave(at.diff(append=lengths[row : row + 1]))
    return Rewards(
        process=process,
        ends=ends,
        values=levels,
        mask=mask,
        outcome=outcome.double(),
        outcome_advantages=outcome_advantages.double(),
        valued=valued & ~outcome.isnan(),
        group_size=group_size,
        sum_over_ranks=sum_over_ranks,
    )


# ------------------------------------------------------------------------------------------------------- estimators


def grpo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = the outcome advantage, without process rewards: the baseline for comparing estimators."""
    return rewards.outcome_advantages.unsqueeze(1)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ, where s are last tokens of episodes.

    The estimator of "Training-Free Process Rewards for LLM RL": outcome and process rewards are normalised separately,
    because their scales differ. μ and σ are mean and standard deviation of the group's U, σ at least the floor.
    Deviation: the post's code leaves out episodes with U = 0 and those that end with the row. A row with n episodes
    gets −n·μ/σ at its first token.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = ((rewards.process - mean) / std.clamp(min=settings.scale_floor)).masked_fill(~rewards.ends, 0)
    process = _returns_to_go(normalised).mul_(settings.process_weight)
    return process.add_(rewards.outcome_advantages.unsqueeze(1))


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ, with μ and σ over all tokens of the group; a row's last r_s includes its outcome.

    DeepSeekMath's process supervision (arXiv 2402.03300, 4.1.3) as in the post "Implementing Process Rewards in VeRL",
    where μ and σ are over all tokens. A token without reward contributes −μ/σ.
    """
    combined = _combined(rewards, settings.process_weight)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = ((combined - mean) / (std + STD_EPSILON)).masked_fill(~rewards.mask, 0)
    return _returns_to_go(normalised)


def reinforce(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} r_s with the outcome on the last token.

    The REINFORCE++ of "Implementing Process Rewards in VeRL", without its discount (see `gae`). As there, without
    whitening or baseline: if all rewards are above 0, all advantages are.
    """
    return _returns_to_go(_combined(rewards, settings.process_weight))


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = δ_t + λ·A_{t+1}, δ_t = r_t + V_{t+1} − V_t, with V(prefix) as the critic (GAE, arXiv 1506.02438, γ = 1).

    V_t is V at the last boundary at or before token t, and 0 after the last token; r_t is the outcome on the last
    token, else 0. V and `gradient_filter_threshold` must have the unit of the outcome: there is no whitening, so a row
    whose V is its outcome gets 0.

    Deviations from "Implementing Process Rewards in VeRL": r_t has no U_k, which δ at the last token of episode k is
    already. γ is 1: a smaller γ would pay a right answer less the longer it is.
    """
    return _discounted(_td_errors(rewards), torch.full_like(rewards.process, settings.lam))


def vineppo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = V_k − V_{k−1} for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    This is the sum of `gae`'s δ over the episode. The final answer is one, too: it gets outcome − V_n. V must have the
    unit of the outcome.
    """
    return _discounted(_td_errors(rewards), (~rewards.ends).double())


def _of_valued_rows(
    estimator: Callable[[Rewards, CreditSettings], Tensor], rewards: Rewards, settings: CreditSettings
) -> Tensor:
    """Return an estimator's advantages for valued rows, A_outcome for others, and 0 for padding, [N, T]."""
    outcome = rewards.outcome_advantages.unsqueeze(1)
    credit = torch.where(rewards.valued.unsqueeze(1), estimator(rewards, settings), outcome)
    return credit.expand(rewards.mask.shape).masked_fill(~rewards.mask, 0)


for _credit in (grpo_process, deepseek_process, gae, vineppo, grpo, reinforce):
    _known = ESTIMATORS.get(_credit.__name__, Estimator(per_group=True))  # `dash_trl.update` may have it for outcomes
    ESTIMATORS[_credit.__name__] = replace(_known, credit=partial(_of_valued_rows, _credit))


# ---------------------------------------------------------------------------------------- helpers of the estimators


def _combined(rewards: Rewards, weight: float) -> Tensor:
    """Return [N, T]: weight·r_t, plus the outcome on the last token of each row."""
    is_last = rewards.mask & ~torch.nn.functional.pad(rewards.mask, (0, 1))[:, 1:]
    return weight * rewards.process + rewards.outcome.nan_to_num().unsqueeze(1) * is_last


def _td_errors(rewards: Rewards) -> Tensor:
    """Return δ_t = r_t + V_{t+1} − V_t, [N, T], where r is the outcome on the last token; V is 0 after it."""
    after = torch.nn.functional.pad(rewards.values, (0, 1))[:, 1:]
    return _combined(rewards, 0.0) + after - rewards.values


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """Return G_t = v_t + d_t·G_{t+1} for the values v and the discounts d, [N, T] each."""
    sums = values.t().contiguous()  # [T, N]: contiguous at each t
    discounts = discounts.t().contiguous()
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _returns_to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum_(dim=1).flip(1)


def _pooled(values: Tensor, places: Tensor, rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of `values` at the `places` of each group's valued rows, [N, 1] each.

    The mean of no number is NaN, the deviation of one infinity: what is divided by it becomes 0.
    """
    used = places & rewards.valued.unsqueeze(1)
    size = rewards.group_size
    pools = [group[chosen] for group, chosen in zip(values.split(size), used.split(size), strict=True)]
    mean = torch.stack([pool.mean() for pool in pools])
    std = torch.stack([pool.std() if len(pool) > 1 else mean.new_tensor(torch.inf) for pool in pools])
    return mean.repeat_interleave(size).unsqueeze(1), std.repeat_interleave(size).unsqueeze(1)
