"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i on the last token of episode i,
else 0). w_p weighs the process part of an advantage; in `deepseek_process`, `prime_rloo` and `reinforce`, whose
formulas leave it out, the process rewards.

An estimator's docstring names the laws that it breaks:

1. Splitting an episode, and its U, does not change the credit of its first token.
2. In a last episode with U = 0, longer than all other rows, the process part is 0, whatever the outcomes.
3. Adding a constant to all V of a group changes nothing.
4. Permuting the rows of a group permutes their credit.
5. Without process rewards, the credit is exactly the outcome advantage.
6. Multiplying all U by a constant changes nothing, if their spread stays above the floor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dash_trl.update import ESTIMATORS, Estimator

STD_EPSILON = 1e-6  # added to a standard deviation, as in verl; the posts add nothing
VARIANCE_EPSILON = 1e-8  # added to a variance, as in verl's whitening


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
    """Settings of the credit estimators; `Estimator.settings` lists those of each.

    Args:
        process_weight: w_p >= 0; the outcome part has the weight 1.
        scale_floor: number > 0 in the unit of V, the smallest divisor of process rewards. The default is above the
            rounding errors of V in float32 (1e-5), and far below the post's U (0.03).
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
    boundaries: Tensor, values: Tensor, lengths: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn values at boundaries into process rewards: the last token of episode i gets U_i = V_i − V_{i−1}.

    If an inner value is missing, its two episodes become one. A row without V_0, V_n or a token is not `valued`.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN or infinite = missing.
        lengths: [N] int, numbers of completion tokens.
        width: T.
    Returns:
        `process`, `ends`, `values` and `valued` of `Rewards`.
    """
    process = torch.zeros(len(boundaries), width, dtype=torch.double)
    levels = torch.zeros_like(process)
    ends = torch.zeros_like(process, dtype=torch.bool)
    valued = torch.zeros(len(boundaries), dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        at = boundaries[row][boundaries[row] >= 0]
        found = values[row, : len(at)].double()
        known = found.isfinite()
        if length > 0 and known[0] and known[-1]:
            valued[row] = True
            at = at[known]
            found = found[known]
            process[row, at[1:] - 1] = found.diff()
            ends[row, at[1:] - 1] = True
            tokens = torch.cat([at, lengths[row : row + 1]]).diff()
            levels[row, at[0] : length] = found.repeat_interleave(tokens)
    return process, ends, levels, valued


# ------------------------------------------------------------------------------------------------------- estimators


def grpo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = the outcome advantage, without process rewards: the baseline for comparing estimators."""
    return _or_outcome(rewards.outcome_advantages.unsqueeze(1), rewards)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ, where s are last tokens of episodes.

    The estimator of "Training-Free Process Rewards for LLM RL": outcome and process rewards are normalised separately,
    because their scales differ. μ and σ are mean and standard deviation of the group's U, σ at least the floor.
    Deviation: the post's code leaves out episodes with U = 0 and those that end with the row. Breaks laws 1 and 2: a
    row with n episodes gets −n·μ/σ at its first token.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = ((rewards.process - mean) / std.clamp(min=settings.scale_floor)).masked_fill(~rewards.ends, 0)
    process = _returns_to_go(normalised).mul_(settings.process_weight)
    return _or_outcome(process.add_(rewards.outcome_advantages.unsqueeze(1)), rewards)


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ, with μ and σ over all tokens of the group; a row's last r_s includes its outcome.

    DeepSeekMath's process supervision (arXiv 2402.03300, 4.1.3) as in the post "Implementing Process Rewards in VeRL",
    where μ and σ are over all tokens. Breaks laws 1, 2, 5 and 6: a token without reward contributes −μ/σ, and μ and σ
    depend on the outcomes.
    """
    combined = _combined(rewards, settings.process_weight)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = ((combined - mean) / (std + STD_EPSILON)).masked_fill(~rewards.mask, 0)
    return _or_outcome(_returns_to_go(normalised), rewards)


def prime_rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = W(Σ_sources Σ_{s ≥ t} (r_s·n/(n−1) − b)), b = Σ_j mean_j / (n−1), with s over the tokens of each source.

    PRIME (arXiv 2502.01456, eq. 5): a leave-one-out baseline b for each source of rewards, then the whitening W over
    the batch. The sources are the outcome, on each row's last token, and the process rewards, on each episode's. n is
    the number of the group's rows that have a token of the source, mean_j the mean reward of row j over these tokens.
    Deviation: PRIME scores every token, and subtracts b from each. Breaks laws 1 (b counts once per episode), 2, 5 and
    6 (the whitening mixes the sources).
    """
    process = _prime_source(rewards.process, rewards.ends, rewards)
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1), _last_token(rewards), rewards)
    return _or_outcome(_whitened(_returns_to_go(outcome + settings.process_weight * process), rewards), rewards)


def reinforce(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} r_s with the outcome on the last token.

    The REINFORCE++ of "Implementing Process Rewards in VeRL", without its discount (see `gae`). As there, without
    whitening or baseline: if all rewards are above 0, all advantages are. Breaks laws 2, 5 and 6.
    """
    return _or_outcome(_returns_to_go(_combined(rewards, settings.process_weight)), rewards)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = δ_t + λ·A_{t+1}, δ_t = r_t + V_{t+1} − V_t, with V(prefix) as the critic (GAE, arXiv 1506.02438, γ = 1).

    V_t is V at the last boundary at or before token t, and 0 after the last token; r_t is the outcome on the last
    token, else 0. V and `gradient_filter_threshold` must have the unit of the outcome: there is no whitening, so a row
    whose V is its outcome gets 0.

    Deviations from "Implementing Process Rewards in VeRL": r_t has no U_k, which δ at the last token of episode k is
    already. γ is 1: a smaller γ would pay a right answer less the longer it is.

    Breaks laws 1 (with λ < 1), 2 (the outcome is on the last token), 3 (V is compared with the outcome), 5 and 6.
    """
    return _or_outcome(_discounted(_td_errors(rewards), torch.full_like(rewards.process, settings.lam)), rewards)


def vineppo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = V_k − V_{k−1} for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    This is the sum of `gae`'s δ over the episode. The final answer is one, too: it gets outcome − V_n. V must have the
    unit of the outcome. Breaks laws 1, 2, 3, 5 and 6.
    """
    return _or_outcome(_discounted(_td_errors(rewards), (~rewards.ends).double()), rewards)


# Each credit estimator, and the settings that it uses.
for _credit, _settings in (
    (grpo_process, ("process_weight", "scale_floor")),
    (deepseek_process, ("process_weight",)),
    (prime_rloo, ("process_weight",)),
    (gae, ("lam",)),
    (vineppo, ()),
    (grpo, ()),
    (reinforce, ("process_weight",)),
):
    # `dash_trl.update` may have an estimator of this name. `prime_rloo` whitens over the batch.
    _known = ESTIMATORS.get(_credit.__name__, Estimator(per_group=_credit is not prime_rloo))
    ESTIMATORS[_credit.__name__] = replace(_known, credit=_credit, settings=frozenset(_settings))


def check_settings(estimator: str, settings: CreditSettings) -> None:
    """Raise a `ValueError` if a setting that the estimator does not use differs from its default."""
    used = ESTIMATORS[estimator].settings
    for name, value in vars(settings).items():
        if used is not None and name not in used and value != getattr(CreditSettings, name):
            raise ValueError(
                f"{name}={value!r} does nothing with estimator={estimator!r}, whose settings are "
                f"{', '.join(sorted(used)) or 'none'}. Leave it out, or choose an estimator that has it."
            )


# ---------------------------------------------------------------------------------------- helpers of the estimators


def _or_outcome(advantages: Tensor, rewards: Rewards) -> Tensor:
    """Return `advantages` [N, T] or [N, 1] for valued rows, A_outcome for the others, and 0 for padding."""
    outcome = rewards.outcome_advantages.unsqueeze(1)
    credit = torch.where(rewards.valued.unsqueeze(1), advantages, outcome).expand(rewards.mask.shape)
    return credit.masked_fill(~rewards.mask, 0)


def _combined(rewards: Rewards, weight: float) -> Tensor:
    """Return [N, T]: weight·r_t, plus the outcome on the last token of each row."""
    return weight * rewards.process + rewards.outcome.nan_to_num().unsqueeze(1) * _last_token(rewards)


def _td_errors(rewards: Rewards) -> Tensor:
    """Return δ_t = r_t + V_{t+1} − V_t, [N, T], where r is the outcome on the last token; V is 0 after it."""
    after = torch.nn.functional.pad(rewards.values, (0, 1))[:, 1:]
    return _combined(rewards, 0.0) + after - rewards.values


def _last_token(rewards: Rewards) -> Tensor:
    """Return [N, T] bool, True = the last token of a row."""
    return rewards.mask & ~torch.nn.functional.pad(rewards.mask, (0, 1))[:, 1:]


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """Return G_t = v_t + d_t·G_{t+1} for the values v and the discounts d, [N, T] each."""
    sums = values.t().contiguous()  # [T, N]: contiguous at each t
    discounts = discounts.t().contiguous()
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _returns_to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum_(dim=1).flip(1)


def _of_group(values: Tensor, rewards: Rewards) -> Tensor:
    """Return the sum of `values` [N] over each row's group, [N, 1]."""
    sums = values.view(-1, rewards.group_size).sum(dim=1)
    return sums.repeat_interleave(rewards.group_size).unsqueeze(1)


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


def _prime_source(values: Tensor, places: Tensor, rewards: Rewards) -> Tensor:
    """Return r·n/(n−1) − b for the rewards r at the `places` of a source, else 0, [N, T]; see `prime_rloo`."""
    places = places & rewards.valued.unsqueeze(1)
    means = (values * places).sum(dim=1) / places.sum(dim=1).clamp(min=1)
    total = _of_group(means, rewards)
    count = _of_group(places.any(dim=1), rewards)
    return torch.where(places, (count * values - total) / (count - 1).clamp(min=1), 0)


def _whitened(values: Tensor, rewards: Rewards) -> Tensor:
    """Return (x − mean) / √(σ² + 1e-8) over all ranks' tokens of valued rows; fewer than two stay as they are."""
    places = rewards.mask & rewards.valued.unsqueeze(1)
    count, mean, variance = moments([values[places]], rewards.sum_over_ranks)
    if count < 2:
        return values
    return (values - mean).div_((variance + VARIANCE_EPSILON).sqrt())


def moments(samples: Iterable[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and unbiased variance of S samples over all ranks, [S] float64 each; NaN = undefined.

    The variance has a sum of its own, because Σx² would lose digits.
    """
    parts = [values.double() for values in samples]
    sums = [[values.numel(), values.sum()] for values in parts]
    count, total = sum_over_ranks(torch.tensor(sums, dtype=torch.double)).unbind(1)
    mean = total / count
    squares = [(values - centre).square_().sum() for values, centre in zip(parts, mean, strict=True)]
    return count, mean, sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)
