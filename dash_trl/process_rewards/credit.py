"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i on the last token of episode i,
else 0). w_p weighs the process part of an advantage; in `deepseek_process`, `prime_rloo` and `reinforce`, whose
formulas leave it out, the process rewards.

An estimator's docstring names the laws that it breaks:

1. Splitting an episode, and its U, does not change the credit of its first token.
2. If the longest row of a group ends with one more episode with U = 0, the process part there is 0, whatever the
   outcomes.
3. Adding a constant to all V of a group changes nothing.
4. Permuting the rows of a group permutes their credit.
5. Without process rewards, the credit is exactly the outcome advantage.
6. Multiplying all U by a constant changes nothing, if their spread stays above the floor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dash_trl.update import ESTIMATORS, Estimator

STD_EPSILON = 1e-6  # added to a standard deviation, as in verl; the posts add nothing
VARIANCE_EPSILON = 1e-8  # added to a variance, as in verl's whitening


@dataclass(frozen=True)
class Rewards:
    """The input of a credit estimator: process rewards and outcomes of this rank's rows, which are whole groups.

    Tokens of tools are removed, so the policy's turns follow each other directly.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True = last token of an episode, also if U is 0.
        values: [N, T], the last known V at or before token t.
        mask: [N, T] bool, True = a token of the completion; padding is on the right.
        outcome: [N], weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's advantages.
        valued: [N] bool, False = V_0 or V_n is missing, or the row is unscored or has no token. It gets its outcome
            advantage, and no part in baselines and scales.
        group_size: G, which divides N.
        sum_over_ranks: sums a float64 tensor of any shape over the ranks. Call it equally often on all ranks, also on
            one without valued rows.
    """

    process: Tensor
    ends: Tensor
    values: Tensor
    mask: Tensor
    outcome: Tensor
    outcome_advantages: Tensor
    valued: Tensor
    group_size: int
    sum_over_ranks: Callable[[Tensor], Tensor] = field(default=torch.clone)


@dataclass(frozen=True)
class CreditSettings:
    """Settings of the credit estimators. `Estimator.settings` lists which estimator uses which.

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

    If an inner value is missing, the episodes at its boundary become one. A row without V_0, V_n or a token is not
    `valued`, and gets no process rewards.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN or infinite = missing.
        lengths: [N] int, numbers of completion tokens.
        width: T.
    Returns:
        `process`, `ends`, `values` and `valued` of `Rewards`.
    """
    rows, most = boundaries.shape
    values, lengths, number = values.double(), lengths.unsqueeze(1), torch.arange(most)
    present = boundaries >= 0
    known = present & values.isfinite()
    last = present.sum(dim=1, keepdim=True) - 1
    valued = known[:, :1].any(dim=1) & (known & (number == last)).any(dim=1) & (lengths > 0).any(dim=1)
    known &= valued.unsqueeze(1)

    # For each boundary from b_1 on, the index of the last boundary before it that has a known value.
    before = torch.where(known, number, 0).cummax(dim=1).values[:, :-1]
    utilities = values[:, 1:] - values.gather(1, before)
    row, k = known[:, 1:].nonzero(as_tuple=True)
    token = boundaries[row, k + 1] - 1
    process, ends = torch.zeros(rows, width, dtype=torch.double), torch.zeros(rows, width, dtype=torch.bool)
    process[row, token], ends[row, token] = utilities[row, k], True

    # Each value is repeated from its boundary to the next boundary with a known value, or to the end of the row. The
    # tokens before the first known value and the padding get 0.
    starts = torch.where(known, boundaries, lengths).flip(1).cummin(dim=1).values.flip(1)
    edges = torch.cat([torch.zeros_like(lengths), starts, lengths, torch.full_like(lengths, width)], dim=1)
    levels = torch.nn.functional.pad(torch.where(known, values, 0.0), (1, 1))
    per_token = levels.flatten().repeat_interleave(edges.diff(dim=1).flatten(), output_size=rows * width)
    return process, ends, per_token.view(rows, width), valued


# ------------------------------------------------------------------------------------------------------- estimators


def grpo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = the outcome advantage, without process rewards: the baseline for comparing estimators."""
    return _or_outcome(rewards.outcome_advantages.unsqueeze(1), rewards)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ, where s are last tokens of episodes.

    The estimator of "Training-Free Process Rewards for LLM RL": outcome and process rewards are normalised separately,
    because their scales differ. μ and σ are mean and standard deviation of the group's U, σ at least the floor.
    Deviation: the post's code leaves out an episode if its U is 0 or if it ends with the row. Breaks laws 1 and 2: a
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
    combined = _combined(rewards, settings)
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
    last = torch.zeros_like(rewards.mask)
    last[_last_token(rewards)] = True
    process = _prime_source(rewards.process, rewards.ends, rewards)
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1) * last, last, rewards)
    return _or_outcome(_whitened(_returns_to_go(outcome + settings.process_weight * process), rewards), rewards)


def reinforce(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} r_s with the outcome on the last token.

    The REINFORCE++ of "Implementing Process Rewards in VeRL", without its discount (see `gae`) and, as there, without
    whitening or baseline: if all rewards are above 0, all advantages are. Breaks laws 2, 5 and 6.
    """
    return _or_outcome(_returns_to_go(_combined(rewards, settings)), rewards)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = δ_t + λ·A_{t+1}, δ_t = r_t + V_{t+1} − V_t, with V(prefix) as the critic (GAE, arXiv 1506.02438, γ = 1).

    V_t is V at the last boundary at or before token t, and 0 after the last token; r_t is the outcome on the last
    token, else 0. V must have the unit of the outcome, and `gradient_filter_threshold`, too: the result is not
    whitened, so a row gets 0 if V equals its outcome at each boundary.

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
    (grpo_process, {"process_weight", "scale_floor"}),
    (deepseek_process, {"process_weight"}),
    (prime_rloo, {"process_weight"}),
    (gae, {"lam"}),
    (vineppo, set[str]()),
    (grpo, set[str]()),
    (reinforce, {"process_weight"}),
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


def _combined(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Return [N, T]: w_p·r_t, plus the outcome on the last token of each row."""
    row, token = _last_token(rewards)
    combined = settings.process_weight * rewards.process
    combined[row, token] += rewards.outcome.nan_to_num()[row]
    return combined


def _td_errors(rewards: Rewards) -> Tensor:
    """Return δ_t = r_t + V_{t+1} − V_t, [N, T], where r is the outcome on the last token; V is 0 after it."""
    values = rewards.values.masked_fill(~rewards.mask, 0)
    after = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    return _combined(rewards, CreditSettings(process_weight=0.0)) + after - values


def _last_token(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Return the indices of the rows that have tokens, and the position of each one's last token."""
    lengths = rewards.mask.sum(dim=1)
    row = lengths.nonzero().squeeze(1)
    return row, lengths[row] - 1


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """Return G_t = v_t + d_t·G_{t+1} for the values v and the discounts d, [N, T] each."""
    sums, discounts = values.t().contiguous(), discounts.t().contiguous()  # [T, N]: contiguous at each t
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _returns_to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum_(dim=1).flip(1)


def _groups(values: Tensor, rewards: Rewards) -> Tensor:
    """Reshape [N, …] to [N / G, G, …]."""
    return values.reshape(-1, rewards.group_size, *values.shape[1:])


def _pooled(values: Tensor, places: Tensor, rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of `values` at the `places` of each group's valued rows, [N, 1] each.

    The deviation of fewer than two numbers is infinity: what is divided by it becomes 0.
    """
    used = _groups(places & rewards.valued.unsqueeze(1), rewards)
    grouped, count = _groups(values, rewards).masked_fill(~used, 0), used.sum(dim=(1, 2), keepdim=True)
    mean = grouped.sum(dim=(1, 2), keepdim=True) / count.clamp(min=1)
    squares = (grouped - mean).masked_fill(~used, 0).square().sum(dim=(1, 2), keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt().masked_fill(count < 2, torch.inf)
    mean, std = (one.repeat_interleave(rewards.group_size, dim=0).squeeze(2) for one in (mean, std))
    return mean, std


def _prime_source(values: Tensor, places: Tensor, rewards: Rewards) -> Tensor:
    """Return r·n/(n−1) − b for the rewards r at the `places` of a source, else 0, [N, T]; see `prime_rloo`."""
    places = places & rewards.valued.unsqueeze(1)
    means = (values * places).sum(dim=1) / places.sum(dim=1).clamp(min=1)
    counted = _groups(places.any(dim=1).to(values.dtype), rewards)
    others = (counted.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    baseline = _groups(means, rewards).sum(dim=1, keepdim=True) / others
    factor = counted.sum(dim=1, keepdim=True).clamp(min=1) / others
    source = (_groups(values, rewards) * factor.unsqueeze(2)).sub_(baseline.unsqueeze(2))
    return source.reshape(values.shape).masked_fill_(~places, 0)


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
