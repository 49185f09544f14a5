"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

They are pure functions of whole groups and are chosen by name (`ESTIMATORS`). Values may be *anchored*: then the
outcome is the last value of a row (`anchor`).

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i at the last token of episode i,
else 0), R_t = Σ_{s ≥ t} r_s return-to-go, w_o and w_p weights of the outcome and the process part.

`centered_return` keeps the following laws. The docstring of each other estimator says which of them it breaks.

1. If an episode is split in two with the same total, the credit of its first token does not change.
2. If a row outlasts the rest of its group by an episode with U = 0, this episode earns nothing, whether the group fails
   or succeeds.
3. Adding a constant to all V of a group changes nothing.
4. Permuting the rows of a group permutes their credit.
5. Without process rewards, the credit is exactly the outcome advantage.
6. Multiplying all U by a constant changes nothing, as long as the scale stays above its floor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from dash_trl.update import check_tensor

# Default of `scale_floor` for each space of V: process rewards are divided by their spread, or by this if it is larger.
FLOORS = {"log": 0.1, "probability": 0.01, "reward": 0.01}
ALIKE = 1e-5  # smaller differences of outcomes count as rounding: sums of weighted rewards are float32
# The published formulas have these: the post adds one to the standard deviation, verl's whitening one to the variance.
STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class Rewards:
    """The input of a credit estimator: whole groups of this rank or, if groups are spread over several ranks, of all.

    Completions of several turns are given without the tokens of tools: the policy's turns follow each other directly.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True on those last tokens (a U may be 0).
        values: [N, T], V at the last boundary at or before token t; used by `gae`.
        mask: [N, T] bool, True = a token of the completion; the padding is on the right.
        outcome: [N], the weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's advantages from the outcomes.
        valued: [N] bool, False = no process reward, because V_0 or V_n is missing, or the row is unscored or has no
            token. Such a row gets its outcome advantage (`_outcome_part`) and is left out of baselines and scales.
        group_size: G, which divides N.
        unit: for anchored values, the advantage that a reward of 1 has in a group whose outcomes are all the same;
            None = the values are not anchored.
        sum_over_ranks: takes a float64 tensor of any shape and returns its sum over the ranks, for statistics of the
            whole batch; the identity if all rows are here. It is a collective: an estimator calls it equally often on
            every rank, even on a rank without a valued row.
    Raises:
        ValueError: if a tensor has the wrong shape or dtype, or the rows are not whole groups.
    """

    process: Tensor
    ends: Tensor
    values: Tensor
    mask: Tensor
    outcome: Tensor
    outcome_advantages: Tensor
    valued: Tensor
    group_size: int
    unit: float | None = None
    sum_over_ranks: Callable[[Tensor], Tensor] = field(default=lambda sums: sums)

    def __post_init__(self) -> None:
        check_tensor("process", self.process, "floats", N=None, T=None)
        rows, tokens = self.process.shape
        for name, kind in {"values": "floats", "ends": "bools", "mask": "bools"}.items():
            check_tensor(name, getattr(self, name), kind, N=rows, T=tokens)
        for name, kind in {"outcome": "floats", "outcome_advantages": "floats", "valued": "bools"}.items():
            check_tensor(name, getattr(self, name), kind, N=rows)
        if self.group_size < 1 or rows % self.group_size:
            raise ValueError(f"{rows} rows do not split into groups of {self.group_size}: pass whole groups.")


@dataclass(frozen=True)
class CreditSettings:
    """Settings of the credit estimators; `SETTINGS` says which estimator has which of them.

    Args:
        outcome_weight: w_o >= 0, the weight of the outcome part of the advantage.
        process_weight: w_p >= 0, the weight of the process part. With "auto", which needs anchored values, it is the
            weight w that V earned in the previous windows (`worth.Watch`), and the outcome part gets 1 − w. While w is
            0, the advantages are exactly those without the callback, for every estimator.
        scale_floor: > 0, in the unit of V. Process rewards are divided by their spread, or by this if it is larger:
            where V hardly moves, its noise should not become an advantage of 1. None: 0.1 for log-probs, 0.01 for other
            values (`FLOORS`).
        gamma: γ in [0, 1], discount per token; with `gae`, per episode.
        lam: λ of `gae` in [0, 1], per episode.
    Raises:
        ValueError: if a number is out of range, or outcome_weight is set beside "auto".
    """

    outcome_weight: float = 1.0
    process_weight: float | Literal["auto"] = 1.0
    scale_floor: float | None = None
    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        auto = self.process_weight == "auto"
        if auto and self.outcome_weight != 1:
            raise ValueError(
                f"outcome_weight={self.outcome_weight!r} beside process_weight='auto', which sets both weights from "
                "how well V predicts outcomes: leave outcome_weight at 1, or give both weights as numbers."
            )
        weights = (self.outcome_weight, 0.0 if auto else self.process_weight)
        right = all(not isinstance(weight, str) and weight >= 0 for weight in weights)
        right &= self.scale_floor is None or self.scale_floor > 0
        if not (right and 0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(
                f"{self} is out of range: weights are >= 0 (process_weight may also be 'auto'), scale_floor is > 0 in "
                "the unit of V, e.g. 0.1, gamma and lam are from 0 to 1."
            )


def anchor(boundaries: Tensor, values: Tensor, lengths: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a boundary at the end of each row, with the outcome as its value.

    The final answer becomes an episode: U_{n+1} = outcome − V_n. So ΣU = outcome − V_0, however V moves in between: if
    one episode is paid too much because V was made to look good, a later episode loses as much. If all U are known,
    this is the return of VinePPO (arXiv 2410.01679, eq. 5), whose terminal state has a reward and no value. If no token
    follows b_n, the outcome replaces V_n.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], NaN = missing.
        lengths: [N] int, the number of completion tokens.
        outcomes: [N], NaN = unscored.
    Returns:
        The new boundaries and values, [N, K+1] each.
    """
    boundaries = torch.nn.functional.pad(boundaries, (0, 1), value=-1)
    values = torch.nn.functional.pad(values, (0, 1), value=torch.nan)
    count = (boundaries >= 0).sum(dim=1)
    last = boundaries.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    end = torch.arange(boundaries.shape[1]) == torch.where(last == lengths, count - 1, count).unsqueeze(1)
    outcomes = outcomes.unsqueeze(1).to(values.dtype)
    return torch.where(end, lengths.unsqueeze(1), boundaries), torch.where(end, outcomes, values)


def place_rewards(
    boundaries: Tensor, values: Tensor, lengths: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turns values at boundaries into process rewards: the last token of episode i gets U_i = V_i − V_{i−1}.

    So ΣU = V_n − V_0. If an inner value is missing, the two episodes beside it become one. A row without V_0 or V_n, or
    without a token (a masked completion), is not valued.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], NaN or infinite = missing.
        lengths: [N] int, the number of completion tokens.
        width: T, the number of columns.
    Returns:
        `process`, `ends`, `values` and `valued` of `Rewards`.
    Raises:
        ValueError: if a tensor has the wrong shape or dtype.
    """
    check_tensor("boundaries", boundaries, "integers", N=None, K=None)
    rows, most = boundaries.shape
    check_tensor("values", values, "floats", N=rows, K=most)
    check_tensor("lengths", lengths, "integers", N=rows)
    values, lengths, number = values.double(), lengths.unsqueeze(1), torch.arange(most)
    present = boundaries >= 0
    known = present & values.isfinite()
    last = present.sum(dim=1, keepdim=True) - 1
    valued = known[:, :1].any(dim=1) & (known & (number == last)).any(dim=1) & (lengths > 0).any(dim=1)
    known &= valued.unsqueeze(1)

    before = torch.where(known, number, 0).cummax(dim=1).values[:, :-1]  # the last known boundary before each
    utilities = values[:, 1:] - values.gather(1, before)
    row, k = known[:, 1:].nonzero(as_tuple=True)
    token = boundaries[row, k + 1] - 1
    process, ends = torch.zeros(rows, width, dtype=torch.double), torch.zeros(rows, width, dtype=torch.bool)
    process[row, token], ends[row, token] = utilities[row, k], True

    # Each value holds from its boundary to the next known one or to the row's end; 0 before the first and in padding.
    starts = torch.where(known, boundaries, lengths).flip(1).cummin(dim=1).values.flip(1)
    edges = torch.cat([torch.zeros_like(lengths), starts, lengths, torch.full_like(lengths, width)], dim=1)
    levels = torch.nn.functional.pad(torch.where(known, values, 0.0), (1, 1))
    per_token = levels.flatten().repeat_interleave(edges.diff(dim=1).flatten(), output_size=rows * width)
    return process, ends, per_token.view(rows, width), valued


# ------------------------------------------------------------------------------------------------------- estimators


def grpo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = the outcome advantage: no process reward. This is the baseline of every comparison."""
    return _broadcast(rewards.outcome_advantages, rewards)


def centered_return(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·(R_t − mean_{j≠i} R_{j,t}) / σ.

    R_{j,t} is 0 after the end of row j. σ is the standard deviation of the group's totals ΣU, at least the floor; for
    anchored values see `_scaled`. The baseline depends on other rows only, so it leaves the policy gradient unbiased. σ
    contains the row itself, as in GRPO, and so weights the groups. This is our default; it keeps all laws.
    """
    returns = _returns_to_go(rewards.process)
    centred = returns.sub_(_mean_of_others(returns, rewards))
    std = _pooled(rewards.process.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[1]
    return _with_outcome(_scaled(centred, std, rewards, settings), rewards, settings)


def episode(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·U_k / σ for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    σ is the root mean square of the group's U, at least the floor; for anchored values see `_scaled`. Breaks law 1:
    each half of a split episode gets only its own U.
    """
    own = spread_over_episodes(rewards.process, rewards.ends)
    rms = _pooled(rewards.process, rewards.ends, rewards, centre=False)[1]
    return _with_outcome(_scaled(own, rms, rewards, settings), rewards, settings)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ over episode ends s.

    This is the remedy of "Training-Free Process Rewards for LLM RL" for mixed scales: outcome and process rewards are
    normalised separately. μ and σ are the mean and standard deviation of all U of the group (σ at least the floor; for
    anchored values see `_scaled`). Breaks laws 1 and 2: n·μ/σ is taken off the first token of a row with n episodes, so
    the number of episodes counts.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = _scaled(rewards.process - mean, std, rewards, settings).masked_fill_(~rewards.ends, 0)
    return _with_outcome(_returns_to_go(normalised), rewards, settings)


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ with μ and σ over all tokens of the group, the outcome on the last token.

    DeepSeekMath's process supervision (arXiv 2402.03300, 4.1.3) in the form of the post "Implementing Process Rewards
    in VeRL", which takes μ and σ over all tokens. Breaks laws 1, 2, 5 and 6: a token without reward gets −μ/σ, which
    adds up over the length, and σ includes the outcome.
    """
    combined = _combined(rewards, settings)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = combined.sub_(mean).div_(std + STD_EPSILON).masked_fill_(~rewards.mask, 0)
    return _or_outcome(_returns_to_go(normalised), rewards, settings)


def prime_rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = W(Σ_sources Σ_{s ≥ t} (r_s·n/(n−1) − b)), b = Σ_j mean_j / (n−1), with s over the places of each source.

    PRIME (arXiv 2502.01456, eq. 5): a leave-one-out baseline b for each source of rewards, then whitening W over the
    batch. n is the number of rows of the group that have the source, and mean_j the mean of row j over its places: the
    last token for the outcome, the ends of episodes for the process rewards. Deviation: PRIME's reward model scores
    every token, so PRIME subtracts b at every token; here process rewards and their b are at the ends of episodes only.
    Breaks laws 1 (b is subtracted once per episode), 2, 5 and 6 (the whitening mixes the sources).
    """
    last = torch.zeros_like(rewards.mask)
    last[_last_token(rewards)] = True
    total = _prime_source(rewards.process, rewards.ends, rewards).mul_(float(settings.process_weight))
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1) * last, last, rewards)
    total.add_(outcome, alpha=settings.outcome_weight)
    return _or_outcome(_whitened(_returns_to_go(total), rewards), rewards, settings)


def rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = s_i − mean_{j≠i} s_j with s = w_o·outcome + w_p·ΣU (Ahmadian et al. 2024, arXiv 2402.14740).

    All tokens of a row get the same number: ΣU telescopes to V_n − V_0, so the structure is lost. Breaks laws 2 (tokens
    of a trailing episode get the number of their row), 5 (there is no division by the spread) and 6.
    """
    total = _combined(rewards, settings).sum(dim=1)
    return _or_outcome(
        _broadcast(total - _mean_of_others(total.unsqueeze(1), rewards).flatten(), rewards), rewards, settings
    )


def reinforce_plus_plus(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A = W(G) with G_t = r_t + γ·G_{t+1} and the outcome on the last token (REINFORCE++, arXiv 2501.03262).

    W is the whitening over all tokens of the batch. Breaks laws 1 (another split changes the mean over tokens), 2, 5
    and 6: W mixes outcome and process rewards and ignores groups.
    """
    returns = _discounted(_combined(rewards, settings), torch.full_like(rewards.process, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def reinforce_plus_plus_baseline(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`reinforce_plus_plus` with the group's mean total subtracted from the outcome.

    This is the paper's "REINFORCE++ w/ baseline": A = W(G) with G_t = r_t + γ·G_{t+1}. The last token has the outcome
    minus mean_j s_j, with s = w_o·outcome + w_p·ΣU. Without process rewards and with γ = 1 this is verl's
    W(s_i − mean_j s_j). Deviation: with process rewards, verl still gives this one number to all tokens; here a token
    is paid for what comes after it. Breaks laws 1, 2, 5 and 6, because of W.
    """
    combined = _combined(rewards, settings)
    baseline = _pooled(combined.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[0]
    row, token = _last_token(rewards)
    combined[row, token] -= baseline[row, 0]
    returns = _discounted(combined, torch.full_like(combined, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_k = δ_k + γλ·A_{k+1}, δ_k = r_k + γ·V_k − V_{k−1}, with V(prefix) as the critic (GAE, arXiv 1506.02438).

    Each episode k is one step, and all its tokens get its A. The final answer is a step, too: its r is the outcome, and
    V is 0 after it. V must be in the outcome's unit. The result is not whitened: a row that did what its values
    promised has no advantage. So choose `gradient_filter_threshold` in the unit of the reward. There are no weights,
    since there is only one part, the outcome minus what V expected. Breaks laws 1 (λ counts episodes), 2 (the outcome
    is paid on the last token), 3 (V is compared with the outcome), 5 and 6.
    """
    values = rewards.values.masked_fill(~rewards.mask, 0)
    after = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    one = values.new_ones(())
    deltas = torch.where(rewards.ends, settings.gamma, one) * after - values
    row, token = _last_token(rewards)
    deltas[row, token] = rewards.outcome.nan_to_num()[row] - values[row, token]
    discounts = torch.where(rewards.ends, settings.gamma * settings.lam, one)
    return _or_outcome(_discounted(deltas, discounts), rewards, CreditSettings(process_weight=0))


ESTIMATORS: dict[str, Callable[[Rewards, CreditSettings], Tensor]] = {
    estimator.__name__: estimator
    for estimator in (
        centered_return,
        grpo,
        grpo_process,
        deepseek_process,
        prime_rloo,
        rloo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        gae,
        episode,
    )
}

_WEIGHTS = {"outcome_weight", "process_weight"}
# The fields of `CreditSettings` that each estimator uses. Setting another one would do nothing and is an error.
SETTINGS: dict[str, set[str]] = {
    "centered_return": _WEIGHTS | {"scale_floor"},
    "episode": _WEIGHTS | {"scale_floor"},
    "grpo_process": _WEIGHTS | {"scale_floor"},
    "grpo": set(),
    "deepseek_process": _WEIGHTS,
    "prime_rloo": _WEIGHTS,
    "rloo": _WEIGHTS,
    "reinforce_plus_plus": _WEIGHTS | {"gamma"},
    "reinforce_plus_plus_baseline": _WEIGHTS | {"gamma"},
    "gae": {"gamma", "lam"},
}


def check_settings(estimator: str, settings: CreditSettings) -> None:
    """Raises a `ValueError` for a setting that the estimator (one of `ESTIMATORS`) does not use."""
    names = {one.name for one in fields(settings)}
    has = SETTINGS.get(estimator, names)  # a user's estimator may use any setting
    for name in sorted(names - has):
        if (value := getattr(settings, name)) != getattr(CreditSettings, name):
            raise ValueError(
                f"{name}={value!r} does nothing with estimator={estimator!r}, whose settings are "
                f"{', '.join(sorted(has)) or 'none'}. Leave it out, or choose an estimator that has it."
            )


# ---------------------------------------------------------------------------------------- helpers of the estimators


def _broadcast(per_row: Tensor, rewards: Rewards) -> Tensor:
    return torch.where(rewards.mask, per_row.double().unsqueeze(1), 0.0)


def _with_outcome(process: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`_outcome_part` + w_p·process, the second on valued rows only. It overwrites `process`."""
    process.mul_(float(settings.process_weight) * rewards.valued.double().unsqueeze(1))
    process.add_(_outcome_part(rewards, settings))
    return process.masked_fill_(~rewards.mask, 0)


def _or_outcome(advantages: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`advantages` on valued rows, `_outcome_part` on the others."""
    outcome = _outcome_part(rewards, settings)
    return torch.where(rewards.valued.unsqueeze(1), advantages, outcome).masked_fill_(~rewards.mask, 0)


def _outcome_part(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """[N, 1]: w_o·A_outcome.

    An anchored process part contains the outcome, too. So with anchored values a row that is not valued gets
    (w_o + w_p)·A_outcome, as if its V did not move. With process_weight="auto" this is A_outcome.
    """
    weight = alone = settings.outcome_weight
    if rewards.unit is not None:
        alone += float(settings.process_weight)
    outcome = rewards.outcome_advantages
    return torch.where(rewards.valued, weight * outcome, alone * outcome).unsqueeze(1)


def _combined(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """[N, T]: w_p·r_t, plus w_o·outcome on the last token."""
    row, token = _last_token(rewards)
    combined = float(settings.process_weight) * rewards.process
    combined[row, token] += settings.outcome_weight * rewards.outcome.nan_to_num()[row]
    return combined


def _last_token(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """The rows that have tokens, and the position of the last token of each."""
    lengths = rewards.mask.sum(dim=1)
    row = lengths.nonzero().squeeze(1)
    return row, lengths[row] - 1


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """[N, T]: G_t = v_t + d_t·G_{t+1} with the discounts d, [N, T]."""
    if (discounts == 1).all():
        return _returns_to_go(values)
    sums, discounts = values.t().contiguous(), discounts.t().contiguous()  # [T, N]: a token of all rows is contiguous
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _scaled(values: Tensor, spread: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Brings process rewards to the unit of the outcome advantages. It overwrites `values`.

    If values are not anchored, process rewards are divided by their own spread [N, 1], at least the floor.

    Anchored process rewards have the outcome's unit. They are multiplied by the advantage that a reward of 1 has in
    their group, Σ A_i·Δo_i / Σ Δo_i² with the outcome advantages A and the centred outcomes Δo. In GRPO this is 1/σ, so
    that w_o = 1 − w and w_p = w give (outcome − w·V) / σ. If all outcomes of a group are the same, A says nothing; then
    the factor comes from other groups whose outcomes differ (`Rewards.unit`). So a problem that no completion solves is
    paid for its progress, and the noise of V has no more weight there than elsewhere.
    """
    if rewards.unit is None:
        floor = FLOORS["log"] if settings.scale_floor is None else settings.scale_floor
        return values.div_(spread.clamp(min=floor))
    products, squares, alike = outcome_units(
        rewards.outcome, rewards.outcome_advantages, rewards.valued, rewards.group_size
    )
    unit = torch.where(alike, rewards.unit, products / squares)
    return values.mul_(unit.repeat_interleave(rewards.group_size).unsqueeze(1))


def outcome_units(outcome: Tensor, advantages: Tensor, used: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums from which the advantage of a reward of 1 follows: Σ A·Δo and Σ Δo² over the used rows of each group.

    Args:
        outcome: [N], o; may be NaN where not used.
        advantages: [N], A.
        used: [N] bool, True = the row counts.
        group_size: G, which divides N.
    Returns:
        Σ A·Δo and Σ Δo² in float64, with Δo from the mean of the used rows, and a bool tensor that is True where the
        outcomes of a group are all the same; each [N / G].
    """
    used = used.view(-1, group_size)
    of_used = outcome.double().view(-1, group_size).masked_fill(~used, 0)
    mean = of_used.sum(dim=1, keepdim=True) / used.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (of_used - mean).masked_fill(~used, 0)
    products = (centred * advantages.double().view(-1, group_size)).sum(dim=1)
    return products, centred.square().sum(dim=1), centred.abs().amax(dim=1) < ALIKE


def _returns_to_go(values: Tensor) -> Tensor:
    return values.flip(1).cumsum_(dim=1).flip(1)


def _groups(values: Tensor, rewards: Rewards) -> Tensor:
    """[N, …] → [M, G, …]."""
    return values.reshape(-1, rewards.group_size, *values.shape[1:])


def _mean_of_others(values: Tensor, rewards: Rewards) -> Tensor:
    """[N, T]: at each token, the mean over the other valued rows of the group; 0 if there is none."""
    used = _groups(rewards.valued.unsqueeze(1).to(values.dtype), rewards)
    grouped = _groups(values, rewards) * used
    total = grouped.sum(dim=1, keepdim=True)
    return grouped.neg_().add_(total).div_((used.sum(dim=1, keepdim=True) - used).clamp(min=1)).reshape(values.shape)


def _pooled(values: Tensor, places: Tensor, rewards: Rewards, *, centre: bool = True) -> tuple[Tensor, Tensor]:
    """[N, 1] each: mean and unbiased standard deviation over the `places` of a group.

    Args:
        values: [N, T], or [N, 1] for one number per row.
        places: bool, of the shape of `values`, True = the value counts; those of rows without a value never do.
        rewards: has the groups and the valued rows.
        centre: if False, the root mean square takes the place of the standard deviation.
    """
    used = _groups(places & rewards.valued.unsqueeze(1), rewards)
    grouped, count = _groups(values, rewards).masked_fill(~used, 0), used.sum(dim=(1, 2), keepdim=True)
    mean = grouped.sum(dim=(1, 2), keepdim=True) / count.clamp(min=1)
    if centre:
        grouped.sub_(mean).masked_fill_(~used, 0)
    squares = grouped.square_().sum(dim=(1, 2), keepdim=True)
    std = (squares / ((count - 1) if centre else count).clamp(min=1)).sqrt()
    shape = (used.shape[0], rewards.group_size, 1)
    return mean.expand(shape).reshape(-1, 1), std.expand(shape).reshape(-1, 1)


def _prime_source(values: Tensor, places: Tensor, rewards: Rewards) -> Tensor:
    """r·n/(n−1) − b at the places of a source of rewards, 0 elsewhere; see `prime_rloo`."""
    places = places & rewards.valued.unsqueeze(1)
    means = (values * places).sum(dim=1) / places.sum(dim=1).clamp(min=1)
    counted = _groups(places.any(dim=1).to(values.dtype), rewards)
    others = (counted.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    baseline = _groups(means, rewards).sum(dim=1, keepdim=True) / others
    factor = counted.sum(dim=1, keepdim=True).clamp(min=1) / others
    source = (_groups(values, rewards) * factor.unsqueeze(2)).sub_(baseline.unsqueeze(2))
    return source.reshape(values.shape).masked_fill_(~places, 0)


def _whitened(values: Tensor, rewards: Rewards) -> Tensor:
    """(x − mean) / √(σ² + 1e-8) over the tokens of the valued rows of all ranks; unchanged for fewer than two."""
    places = rewards.mask & rewards.valued.unsqueeze(1)
    count, mean, variance = moments([(values[places], 1)], rewards.sum_over_ranks)
    if count < 2:
        return values
    return (values - mean).div_((variance + VARIANCE_EPSILON).sqrt())


def moments(
    samples: Iterable[tuple[Tensor, Tensor | int]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased variance of S samples over all ranks, each [S] float64; NaN where values are too few.

    Σ(x − mean)² takes a second sum over the ranks, since computing it from Σx² would lose digits.

    Args:
        samples: S pairs of this rank: a tensor of values, which may be empty, and how often each of them counts.
        sum_over_ranks: see `Rewards`.
    """
    weighed = [(values.double(), torch.as_tensor(times).expand_as(values)) for values, times in samples]
    sums = [torch.stack([times.sum().double(), (values * times).sum()]) for values, times in weighed]
    count, total = sum_over_ranks(torch.stack(sums)).unbind(1)
    mean = total / count
    centred = zip(weighed, mean, strict=True)
    squares = [(values - centre).square_().mul_(times).sum() for (values, times), centre in centred]
    return count, mean, sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)


def spread_over_episodes(values: Tensor, ends: Tensor) -> Tensor:
    """[N, T]: each token gets the value at the end of its episode; tokens of the final answer get 0."""
    stops = ends.clone()
    stops[:, -1:] = True  # the tokens after a row's last end are a run, too
    stop = stops.flatten().nonzero().squeeze(1)
    levels = torch.where(ends.flatten()[stop], values.flatten()[stop], 0)
    runs = stop.diff(prepend=stop.new_tensor([-1]))
    return levels.repeat_interleave(runs, output_size=values.numel()).view(values.shape)
