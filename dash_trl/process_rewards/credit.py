"""Credit: values at episode boundaries → an advantage per token. Pure functions of whole groups, chosen by name.

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

Letters: N rows (the G completions of a prompt adjacent), T completion tokens, K boundaries per row, G group size;
r_t process reward of token t (U_i at the end of episode i, else 0), R_t = Σ_{s ≥ t} r_s its return-to-go.

Laws that `centered_return` keeps; each other estimator says which of them it breaks:
(1) splitting an episode in two with the same total changes nothing at the first token;
(2) a trailing episode with U = 0 that outlasts the group earns nothing, in failing and in successful groups;
(3) adding a constant to all V of a group changes nothing; (4) permuting a group permutes the credit;
(5) without process rewards the credit is exactly the outcome advantage;
(6) scaling all U leaves the credit as it is (above the floor of the scale).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from dash_trl.update import check_tensor

# Lowest spread that process rewards are divided by, for each space of V, where no `scale_floor` is given.
FLOORS = {"log": 0.1, "probability": 0.01, "reward": 0.01}
ALIKE = 1e-5  # a group whose outcomes differ by less has one outcome: sums of rewards times weights are float32
# What estimators from elsewhere add: the post's formula to the standard deviation, verl's whitening to the variance.
STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class Rewards:
    """What an estimator sees: whole groups, of this rank, or of all ranks where a group lies on several.

    In completions of several turns only the policy's tokens are there, one turn behind the other.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True on those last tokens (a U may be 0).
        values: [N, T], V at the last boundary at or before token t; used by `gae`.
        mask: [N, T] bool, True = a token of the completion; each row's tokens come first.
        outcome: [N], the weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's.
        valued: [N] bool; False = no process reward (V_0 or V_n is missing, or the row is unscored, or has no token):
            the row gets its outcome advantage (`_outcome_part`) and is left out of baselines and scales.
        group_size: G, dividing N.
        unit: for anchored values, the advantage that a reward of 1 has in a group whose outcomes are alike; None = the
            values are not anchored.
        sum_over_ranks: float64 of any shape → its sum over the ranks, for statistics of the whole batch; the identity
            where all rows are here. To be called as often on every rank, also on one without a valued row.
    Raises:
        ValueError: for a tensor of another rank, length or dtype, and for rows that are not whole groups.
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
    """Which estimator has which of them: `SETTINGS`.

    Args:
        outcome_weight, process_weight: >= 0, of the two parts of the advantage. process_weight="auto", for anchored
            values: the weight w that V earned in the windows before (`worth.Watch`), and 1 − w for the outcome. While w
            is 0, the advantages are exactly those without the callback, whatever the estimator.
        scale_floor: > 0, lowest spread that process rewards are divided by, in the unit of V. Where V hardly moves, its
            noise is not worth an advantage of 1. None: 0.1 for log-probs, 0.01 for other values (`FLOORS`).
        gamma: in [0, 1], discount per token; for `gae` per episode. lam: in [0, 1], trace per episode.
    Raises:
        ValueError: for a number outside of its range; for an outcome_weight beside "auto".
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
                f"outcome_weight={self.outcome_weight!r} beside process_weight='auto', which sets both weights by what "
                "V is worth: leave outcome_weight at 1, or give both weights as numbers."
            )
        weights = (self.outcome_weight, 0.0 if auto else self.process_weight)
        right = all(not isinstance(weight, str) and weight >= 0 for weight in weights)
        right &= self.scale_floor is None or self.scale_floor > 0
        if not (right and 0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(
                f"{self} is out of range: weights are >= 0 (process_weight='auto' weighs by what V is worth), "
                "scale_floor is > 0 in the unit of V, e.g. 0.1, gamma and lam are from 0 to 1."
            )


def anchor(boundaries: Tensor, values: Tensor, lengths: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
    """Boundaries and values [N, K+1] with the end of each row for one more boundary, whose value is the outcome.

    The final answer becomes an episode: U_{n+1} = outcome − V_n, and ΣU = outcome − V_0, however V moves in between.
    What a V that was made to look good pays in one episode, a later one takes back. With all U known it is the return
    of VinePPO (arXiv 2410.01679, eq. 5), whose terminal state has no value but a reward. Where nothing comes after
    b_n, the outcome takes the place of V_n.

    Args:
        boundaries: [N, K] int, padded with −1. values: [N, K], NaN = missing. lengths: [N] completion tokens.
        outcomes: [N], NaN = unscored.
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
    """Values at boundaries → (process, ends, values, valued) of `Rewards`.

    U_i = V_i − V_{i−1}, so that ΣU = V_n − V_0. A missing interior value merges its two episodes; a row without V_0 or
    V_n, or without a token (a masked completion), is not valued.

    Args:
        boundaries: [N, K] int, padded with −1. values: [N, K], NaN or infinite = missing.
        lengths: [N] completion tokens. width: T.
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

    # Each value from its boundary to the next known one, or to the row's end; 0 before the first and behind the end.
    starts = torch.where(known, boundaries, lengths).flip(1).cummin(dim=1).values.flip(1)
    edges = torch.cat([torch.zeros_like(lengths), starts, lengths, torch.full_like(lengths, width)], dim=1)
    levels = torch.nn.functional.pad(torch.where(known, values, 0.0), (1, 1))
    per_token = levels.flatten().repeat_interleave(edges.diff(dim=1).flatten(), output_size=rows * width)
    return process, ends, per_token.view(rows, width), valued


# ------------------------------------------------------------------------------------------------------- estimators


def grpo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = the outcome advantage: no process reward (the baseline of every comparison)."""
    return _broadcast(rewards.outcome_advantages, rewards)


def centered_return(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·(R_t − mean_{j≠i} R_{j,t}) / σ.

    R_{j,t} is 0 after the end of row j; σ is the standard deviation of the group's totals ΣU, at least the floor; for
    anchored values see `_scaled`. The baseline depends on other rows only, so it leaves the policy gradient unbiased;
    σ contains the row itself, as GRPO's does, which weighs groups. Our default; keeps all laws.
    """
    returns = _returns_to_go(rewards.process)
    centred = returns.sub_(_mean_of_others(returns, rewards))
    std = _pooled(rewards.process.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[1]
    return _with_outcome(_scaled(centred, std, rewards, settings), rewards, settings)


def episode(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·U_k / σ for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    σ is the root mean square of the group's U, at least the floor; for anchored values see `_scaled`. Breaks law 1: two
    halves of an episode get half its credit each.
    """
    own = spread_over_episodes(rewards.process, rewards.ends)
    rms = _pooled(rewards.process, rewards.ends, rewards, centre=False)[1]
    return _with_outcome(_scaled(own, rms, rewards, settings), rewards, settings)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ over episode ends s.

    The post's remedy for mixed scales: outcome and process are normalised apart, μ and σ over all U of the group (σ at
    least the floor; for anchored values see `_scaled`), then cumulated. Breaks laws 1 and 2: a row of n episodes pays
    n·μ/σ on its first token, so the number of episodes counts.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = _scaled(rewards.process - mean, std, rewards, settings).masked_fill_(~rewards.ends, 0)
    return _with_outcome(_returns_to_go(normalised), rewards, settings)


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ, μ and σ over all tokens of the group, the outcome on the last token.

    DeepSeekMath (arXiv 2402.03300, 4.1.3) as the post "Implementing Process Rewards in VeRL" has it: every token is
    pooled. Breaks laws 1, 2, 5 and 6: a token without reward gets −μ/σ, which adds up over the length, and σ is that of
    the outcome, too.
    """
    combined = _combined(rewards, settings)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = combined.sub_(mean).div_(std + STD_EPSILON).masked_fill_(~rewards.mask, 0)
    return _or_outcome(_returns_to_go(normalised), rewards, settings)


def prime_rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = W(Σ_sources Σ_{s ≥ t} (r_s·n/(n−1) − b)), b = Σ_j mean_j / (n−1), over the places of each source.

    PRIME (arXiv 2502.01456, eq. 5): leave-one-out per source (outcome: the last token; process: episode ends), then
    W, the whitening over the batch. PRIME's reward model scores every token, and its b is taken at all of them; here
    the process has rewards at episode ends only, and b is taken there. Breaks laws 1 (b is paid per episode), 2, 5 and
    6 (whitening mixes the sources).
    """
    last = torch.zeros_like(rewards.mask)
    last[_last_token(rewards)] = True
    total = _prime_source(rewards.process, rewards.ends, rewards).mul_(float(settings.process_weight))
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1) * last, last, rewards)
    total.add_(outcome, alpha=settings.outcome_weight)
    return _or_outcome(_whitened(_returns_to_go(total), rewards), rewards, settings)


def rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = s_i − mean_{j≠i} s_j with s = w_o·outcome + w_p·ΣU (Ahmadian et al. 2024, arXiv 2402.14740).

    One number per row: ΣU telescopes to V_n − V_0, the structure is gone. Breaks laws 2 (trailing tokens get the row's
    number), 5 (no division by the spread) and 6.
    """
    total = _combined(rewards, settings).sum(dim=1)
    return _or_outcome(
        _broadcast(total - _mean_of_others(total.unsqueeze(1), rewards).flatten(), rewards), rewards, settings
    )


def reinforce_plus_plus(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A = W(G), G_t = r_t + γ·G_{t+1}, the outcome on the last token, W over the batch (REINFORCE++, arXiv 2501.03262).

    Breaks laws 1 (W is over tokens, so that another split is another mean), 2, 5 and 6: W mixes outcome and process,
    and knows no groups.
    """
    returns = _discounted(_combined(rewards, settings), torch.full_like(rewards.process, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def reinforce_plus_plus_baseline(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`reinforce_plus_plus` with the group's mean total taken off the outcome (REINFORCE++ w/ baseline, same paper).

    A = W(G), G_t = r_t + γ·G_{t+1}; on the last token the outcome minus mean_j s_j, s = w_o·outcome + w_p·ΣU. Without
    process rewards and with γ = 1 it is verl's W(s_i − mean_j s_j); verl gives that number to all tokens with process
    rewards, too, where here a token is paid for what comes after it. Breaks laws 1, 2, 5 and 6, by W.
    """
    combined = _combined(rewards, settings)
    baseline = _pooled(combined.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[0]
    row, token = _last_token(rewards)
    combined[row, token] -= baseline[row, 0]
    returns = _discounted(combined, torch.full_like(combined, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_k = δ_k + γλ·A_{k+1}, δ_k = r_k + γ·V_k − V_{k−1}, over episodes k, V(prefix) as the critic (arXiv 1506.02438).

    An episode is a step, and all its tokens have its A; so is the final answer, whose r is the outcome and after which
    V is 0. V is in the outcome's unit. Not whitened: a row that did what its values promised has no advantage; choose
    `gradient_filter_threshold` in the unit of the reward. Outcome and process are one here, the outcome minus what V
    expected of it, so that it has no weights. Breaks laws 1 (λ counts episodes), 2 (the outcome is paid for on the last
    token), 3 (V is compared with the outcome), 5 and 6.
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
# Which of `CreditSettings` an estimator has; another one that is set would do nothing, and is refused.
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
    """Refuse a setting that the estimator (one of `ESTIMATORS`) would not use."""
    names = {one.name for one in fields(settings)}
    has = SETTINGS.get(estimator, names)  # a user's own estimator may use any
    for name in sorted(names - has):
        if (value := getattr(settings, name)) != getattr(CreditSettings, name):
            raise ValueError(
                f"{name}={value!r} does nothing with estimator={estimator!r}, whose settings are "
                f"{', '.join(sorted(has)) or 'none'}. Leave it out, or choose an estimator that has it."
            )


# -------------------------------------------------------------------------------------------------------- their parts


def _broadcast(per_row: Tensor, rewards: Rewards) -> Tensor:
    return torch.where(rewards.mask, per_row.double().unsqueeze(1), 0.0)


def _with_outcome(process: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`_outcome_part` + w_p·process, the second on valued rows only; in the memory of `process`."""
    process.mul_(float(settings.process_weight) * rewards.valued.double().unsqueeze(1))
    process.add_(_outcome_part(rewards, settings))
    return process.masked_fill_(~rewards.mask, 0)


def _or_outcome(advantages: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """`advantages` on valued rows, `_outcome_part` on the others."""
    outcome = _outcome_part(rewards, settings)
    return torch.where(rewards.valued.unsqueeze(1), advantages, outcome).masked_fill_(~rewards.mask, 0)


def _outcome_part(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """[N, 1]: w_o·A_outcome.

    An anchored process part pays the outcome, too. So a row that is not valued gets (w_o + w_p)·A_outcome there, as if
    its V did not move; with process_weight="auto" that is A_outcome.
    """
    weight = alone = settings.outcome_weight
    if rewards.unit is not None:
        alone += float(settings.process_weight)
    outcome = rewards.outcome_advantages
    return torch.where(rewards.valued, weight * outcome, alone * outcome).unsqueeze(1)


def _combined(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """[N, T]: w_p·r_t, and w_o·outcome on the last token."""
    row, token = _last_token(rewards)
    combined = float(settings.process_weight) * rewards.process
    combined[row, token] += settings.outcome_weight * rewards.outcome.nan_to_num()[row]
    return combined


def _last_token(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Row and column of each row's last token; a row without tokens has none."""
    lengths = rewards.mask.sum(dim=1)
    row = lengths.nonzero().squeeze(1)
    return row, lengths[row] - 1


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """[N, T]: G_t = v_t + d_t·G_{t+1}, with discounts d [N, T]."""
    if (discounts == 1).all():
        return _returns_to_go(values)
    sums, discounts = values.t().contiguous(), discounts.t().contiguous()  # [T, N]: a token of all rows is one run
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _scaled(values: Tensor, spread: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Process rewards in the unit of the outcome advantages; in the memory of `values`.

    Not anchored: divided by their own spread [N, 1], at least the floor. Anchored ones are in the outcome's unit: a
    group's outcome advantages A say what a reward is worth there, Σ A_i·Δo_i / Σ Δo_i², which is 1/σ of GRPO, so that
    w_o = 1 − w and w_p = w pay (outcome − w·V) / σ. Where all outcomes of a group are alike, A says nothing, and a
    reward is worth what it was in the groups of other outcomes (`Rewards.unit`): a problem that nobody solves is paid
    for its progress, and the noise of V counts no more than elsewhere.
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
    """Σ A·Δo and Σ Δo² over the used rows of each group, Δo from their mean; and whether their outcomes are alike.

    Args:
        outcome, advantages: [N], A and o; NaN where not used. used: [N] bool.
    Returns:
        float64, float64 and bool, each [N / group_size].
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
    """[N, T] → the mean of the other valued members of the group at each token; 0 where there is none."""
    used = _groups(rewards.valued.unsqueeze(1).to(values.dtype), rewards)
    grouped = _groups(values, rewards) * used
    total = grouped.sum(dim=1, keepdim=True)
    return grouped.neg_().add_(total).div_((used.sum(dim=1, keepdim=True) - used).clamp(min=1)).reshape(values.shape)


def _pooled(values: Tensor, places: Tensor, rewards: Rewards, *, centre: bool = True) -> tuple[Tensor, Tensor]:
    """[N, 1] mean and unbiased standard deviation (or, not centred, root mean square) over a group's `places`.

    Args:
        values, places: [N, T], or [N, 1] for one number per row. Places of rows that are not valued do not count.
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
    """r·n/(n−1) − b on the places of a source, 0 elsewhere; rows without a place have mean 0."""
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
    """Count, mean and unbiased variance of S samples over all ranks, each [S] float64; NaN where there are too few.

    Σ(x − mean)² is a second sum over the ranks: from Σx² in the first it would lose digits.

    Args:
        samples: this rank's (values, how often each of them counts); may be empty.
    """
    weighed = [(values.double(), torch.as_tensor(times).expand_as(values)) for values, times in samples]
    sums = [torch.stack([times.sum().double(), (values * times).sum()]) for values, times in weighed]
    count, total = sum_over_ranks(torch.stack(sums)).unbind(1)
    mean = total / count
    centred = zip(weighed, mean, strict=True)
    squares = [(values - centre).square_().mul_(times).sum() for (values, times), centre in centred]
    return count, mean, sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)


def spread_over_episodes(values: Tensor, ends: Tensor) -> Tensor:
    """[N, T]: each token gets the value at the end of its episode; 0 in the final answer."""
    stops = ends.clone()
    stops[:, -1:] = True  # what follows a row's last end is a run, too
    stop = stops.flatten().nonzero().squeeze(1)
    levels = torch.where(ends.flatten()[stop], values.flatten()[stop], 0)
    runs = stop.diff(prepend=stop.new_tensor([-1]))
    return levels.repeat_interleave(runs, output_size=values.numel()).view(values.shape)
