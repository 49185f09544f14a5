"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

The estimators are pure functions of whole groups. A user chooses an estimator by its name in `ESTIMATORS`.

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i at the last token of episode i,
else 0). An advantage is the sum of an outcome part and a process part, which has the weight w_p. `deepseek_process`,
`prime_rloo` and `reinforce` weigh the rewards instead of such a part: there, w_p multiplies the process rewards, even
where a formula below leaves it out.

The docstring of an estimator names which of the following laws it breaks.

1. If an episode is split in two and the two U add up to the former U, the credit of the episode's first token does not
   change.
2. If a row is longer than all other rows of its group, and the additional tokens are an episode with U = 0, the process
   part of this episode is 0, whether the outcomes of the group are good or bad.
3. Adding a constant to all V of a group changes nothing.
4. Permuting the rows of a group permutes their credit.
5. Without process rewards, the credit is exactly the outcome advantage.
6. Multiplying all U by a constant changes nothing, if the spread of the U stays above the floor.
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
    """The input of a credit estimator: the process rewards and the outcomes of the rows of whole groups.

    The rows are those of this rank. The tokens of tools are removed from completions of several turns, so that the
    policy's turns follow each other directly.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True = the last token of an episode (also if its U is 0).
        values: [N, T], V at the last boundary at or before token t that has a known V; used by `gae` and `vineppo`.
        mask: [N, T] bool, True = a token of the completion; the padding is on the right.
        outcome: [N], the weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's advantages from the outcomes.
        valued: [N] bool, True = the row has process rewards. False = the row has none, because V_0 or V_n is missing,
            or because the row is unscored or has no token. A row that is not valued gets its outcome advantage, and is
            left out of baselines and scales.
        group_size: G, which divides N.
        sum_over_ranks: function that takes a float64 tensor of any shape and returns its sum over the ranks. Estimators
            use it for statistics of the whole batch. It is a collective: an estimator must call it the same number of
            times on every rank, also on a rank without valued rows.
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
    """Settings of the credit estimators. `Estimator.settings` lists which estimator uses which settings.

    Args:
        process_weight: w_p >= 0, the weight of the process part; the outcome part has the weight 1.
        scale_floor: number > 0, in the unit of V. Process rewards are divided by their spread, or by this number if it
            is larger than the spread. The default is larger than the rounding errors of V in float32 (1e-5), and much
            smaller than the post's U (0.03). With a larger number, a V that hardly changes has less effect.
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
    """Turns values at boundaries into process rewards: the last token of episode i gets U_i = V_i − V_{i−1}.

    So ΣU = V_n − V_0. If an inner value is missing, the episodes before and after its boundary become one episode. A
    row without V_0, without V_n or without a token (a masked completion) gets no process rewards: `valued` is False.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN or infinite = missing.
        lengths: [N] int, the number of completion tokens.
        width: T, the number of columns.
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
    """A_t = the outcome advantage, without process rewards. This is the baseline for comparing estimators."""
    return _or_outcome(rewards.outcome_advantages.unsqueeze(1), rewards)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ, where s are last tokens of episodes.

    This is the estimator of "Training-Free Process Rewards for LLM RL", and the default: outcome and process rewards
    are normalised separately, because their scales differ. μ and σ are the mean and the standard deviation of all U of
    the group. σ is at least the floor. Deviation: the post's code finds the process rewards as the numbers that are not
    0 before the last token; here, an episode counts also if its U is 0 or if it ends with the row. Breaks laws 1 and 2:
    in a row with n episodes, the sum at the first token contains −n·μ/σ, so the advantage depends on the number of
    episodes.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = ((rewards.process - mean) / std.clamp(min=settings.scale_floor)).masked_fill(~rewards.ends, 0)
    process = _returns_to_go(normalised).mul_(settings.process_weight)
    return _or_outcome(process.add_(rewards.outcome_advantages.unsqueeze(1)), rewards)


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ, with μ and σ over all tokens of the group.

    On the last token of a row, r_s also contains the outcome. This is DeepSeekMath's process supervision (arXiv
    2402.03300, 4.1.3) in the form of the post "Implementing Process Rewards in VeRL", where μ and σ are over all
    tokens. Breaks laws 1, 2, 5 and 6: a token without reward contributes −μ/σ, and these terms add up over the length.
    μ and σ also depend on the outcomes.
    """
    combined = _combined(rewards, settings)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = ((combined - mean) / (std + STD_EPSILON)).masked_fill(~rewards.mask, 0)
    return _or_outcome(_returns_to_go(normalised), rewards)


def prime_rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = W(Σ_sources Σ_{s ≥ t} (r_s·n/(n−1) − b)), b = Σ_j mean_j / (n−1), with s over the tokens of each source.

    This is PRIME (arXiv 2502.01456, eq. 5): a leave-one-out baseline b is subtracted from each source of rewards, and
    the whitening W over the batch follows. There are two sources. The outcome has one token per row, the last token.
    The process rewards have one token per episode, the episode's last token. n is the number of rows of the group that
    have a token of the source, and mean_j is the mean of the rewards of row j over these tokens. Deviation: PRIME's
    reward model scores every token, so PRIME subtracts b at every token. Here b of the process rewards is subtracted
    only at the last token of each episode. Breaks laws 1 (b is subtracted once per episode), 2, 5 and 6 (the whitening
    mixes the sources).
    """
    last = torch.zeros_like(rewards.mask)
    last[_last_token(rewards)] = True
    process = _prime_source(rewards.process, rewards.ends, rewards)
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1) * last, last, rewards)
    return _or_outcome(_whitened(_returns_to_go(outcome + settings.process_weight * process), rewards), rewards)


def reinforce(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} r_s with the outcome on the last token.

    This is the REINFORCE++ of "Implementing Process Rewards in VeRL", without its discount (see `gae`) and, as there,
    without whitening. There is no baseline: if all rewards are above 0, all advantages are. Breaks laws 2, 5 and 6.
    """
    return _or_outcome(_returns_to_go(_combined(rewards, settings)), rewards)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = δ_t + λ·A_{t+1}, δ_t = r_t + V_{t+1} − V_t, with V(prefix) as the critic (GAE, arXiv 1506.02438, γ = 1).

    V_t is V at the last boundary at or before token t, and 0 after the last token. The reward r_t is the outcome on the
    last token, and 0 on the others. V must have the unit of the outcome. The result is not whitened, so that a row gets
    the advantage 0 if V is equal to its outcome at each boundary. So choose `gradient_filter_threshold` in the unit of
    the reward. `process_weight` is not used, because the advantage cannot be divided into an outcome part and a process
    part.

    Deviations from "Implementing Process Rewards in VeRL", which shows process rewards in r_t, and a discount γ: U_k is
    not added to r_t, where it would count twice, because δ at the last token of episode k is U_k already. γ is 1,
    because the outcome is paid at the last token only, so a smaller γ would pay a right answer less the longer it is.

    Breaks laws 1 (with λ < 1), 2 (the outcome is on the last token), 3 (V is compared with the outcome), 5 and 6.
    """
    return _or_outcome(_discounted(_td_errors(rewards), torch.full_like(rewards.process, settings.lam)), rewards)


def vineppo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = V_k − V_{k−1} for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    An episode is paid its own progress, without a division. The final answer is an episode, too: its tokens get
    outcome − V_n. V must have the unit of the outcome; see `gae`, whose δ this adds up within each episode. Breaks
    laws 1, 2, 3, 5 and 6.
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
    """Raises a `ValueError` if a setting that the estimator does not use differs from its default.

    Args:
        estimator: name of the credit estimator.
        settings: the settings for this estimator.
    """
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
    """Return [N, T]: δ_t = r_t + V_{t+1} − V_t, where r is the outcome on the last token; V is 0 after it."""
    values = rewards.values.masked_fill(~rewards.mask, 0)
    after = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    return _combined(rewards, CreditSettings(process_weight=0.0)) + after - values


def _last_token(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Return the indices of the rows that have tokens, and the position of the last token of each."""
    lengths = rewards.mask.sum(dim=1)
    row = lengths.nonzero().squeeze(1)
    return row, lengths[row] - 1


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """Return [N, T]: G_t = v_t + d_t·G_{t+1}, where v are the values and d are the discounts, [N, T] each."""
    sums, discounts = values.t().contiguous(), discounts.t().contiguous()  # [T, N]: contiguous at each t
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _returns_to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum_(dim=1).flip(1)


def _groups(values: Tensor, rewards: Rewards) -> Tensor:
    """Reshapes [N, …] to [N / G, G, …]."""
    return values.reshape(-1, rewards.group_size, *values.shape[1:])


def _pooled(values: Tensor, places: Tensor, rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of `values` at the `places` of each group's valued rows, [N, 1] each.

    The standard deviation of fewer than two numbers is infinity, so what is divided by it becomes 0.
    """
    used = _groups(places & rewards.valued.unsqueeze(1), rewards)
    grouped, count = _groups(values, rewards).masked_fill(~used, 0), used.sum(dim=(1, 2), keepdim=True)
    mean = grouped.sum(dim=(1, 2), keepdim=True) / count.clamp(min=1)
    squares = (grouped - mean).masked_fill(~used, 0).square().sum(dim=(1, 2), keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt().masked_fill(count < 2, torch.inf)
    mean, std = (one.repeat_interleave(rewards.group_size, dim=0).squeeze(2) for one in (mean, std))
    return mean, std


def _prime_source(values: Tensor, places: Tensor, rewards: Rewards) -> Tensor:
    """Compute r·n/(n−1) − b for rewards r at the `places` of a source, else 0, [N, T]; see `prime_rloo`."""
    places = places & rewards.valued.unsqueeze(1)
    means = (values * places).sum(dim=1) / places.sum(dim=1).clamp(min=1)
    counted = _groups(places.any(dim=1).to(values.dtype), rewards)
    others = (counted.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    baseline = _groups(means, rewards).sum(dim=1, keepdim=True) / others
    factor = counted.sum(dim=1, keepdim=True).clamp(min=1) / others
    source = (_groups(values, rewards) * factor.unsqueeze(2)).sub_(baseline.unsqueeze(2))
    return source.reshape(values.shape).masked_fill_(~places, 0)


def _whitened(values: Tensor, rewards: Rewards) -> Tensor:
    """Compute (x − mean) / √(σ² + 1e-8) over all ranks' tokens of valued rows; fewer than two stay as they are."""
    places = rewards.mask & rewards.valued.unsqueeze(1)
    count, mean, variance = moments([values[places]], rewards.sum_over_ranks)
    if count < 2:
        return values
    return (values - mean).div_((variance + VARIANCE_EPSILON).sqrt())


def moments(samples: Iterable[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Computes count, mean and unbiased variance of S samples over all ranks.

    The variance needs a second sum over the ranks, because a computation from Σx² would lose digits.

    Args:
        samples: this rank's part of the S samples. Each is a tensor of values, which may be empty.
        sum_over_ranks: see `Rewards`.
    Returns:
        [S] float64 each: count, mean, variance. The mean of no values and the variance of one value are NaN.
    """
    parts = [values.double() for values in samples]
    sums = [[values.numel(), values.sum()] for values in parts]
    count, total = sum_over_ranks(torch.tensor(sums, dtype=torch.double)).unbind(1)
    mean = total / count
    squares = [(values - centre).square_().sum() for values, centre in zip(parts, mean, strict=True)]
    return count, mean, sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)
