"""Credit estimators turn values at episode boundaries into an advantage per token::

    V at b_0 … b_n ──► U_i = V_i − V_{i−1} on the last token of episode i ──► estimator ──► A [N, T]

The estimators are pure functions of whole groups. A user chooses an estimator by its name in `ESTIMATORS`. Values may
be *anchored*, which means that the outcome is the last value of a row (`anchor`).

Letters: N rows (the G completions of a prompt are adjacent), T completion tokens, K boundaries per row, G group size;
V_i value at boundary i, U_i utility of episode i, r_t process reward of token t (U_i at the last token of episode i,
else 0), R_t = Σ_{s ≥ t} r_s return-to-go. An advantage is the sum of an outcome part, which has the weight w_o, and a
process part, which has the weight w_p. `deepseek_process`, `prime_rloo`, `rloo` and the two `reinforce_plus_plus…`
weigh the rewards instead of such parts: there, w_o multiplies the outcome and w_p the process rewards, even where a
formula below leaves the weights out.

If values are not anchored, `centered_return` keeps all of the following laws. The docstring of another estimator names
the laws that it breaks. With anchored values, laws 2, 3, 5 and 6 do not hold.

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
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from dash_trl.update import check_tensor

# Unit of V (`ValueEstimator.space`) → default of `CreditSettings.scale_floor`.
FLOORS = {"log": 0.1, "probability": 0.01, "reward": 0.01, "score": 0.01}
ALIKE = 1e-5  # smaller differences of outcomes count as rounding, because weighted sums of rewards are float32
MOST_UNITS = 2.0  # limit of a group's advantage per unit of reward, as a multiple of the one of the last windows
STD_EPSILON = 1e-6  # added to a standard deviation, as in the post "Implementing Process Rewards in VeRL"
VARIANCE_EPSILON = 1e-8  # added to a variance, as in verl's whitening


@dataclass(frozen=True)
class Rewards:
    """The input of a credit estimator: the process rewards and the outcomes of the rows of whole groups.

    The rows are the rows of this rank or, if groups are spread over several ranks, the rows of all ranks. The tokens of
    tools are removed from completions of several turns, so that the policy's turns follow each other directly.

    Args:
        process: [N, T], U_i on the last token of episode i, 0 elsewhere.
        ends: [N, T] bool, True = the last token of an episode (also if its U is 0).
        values: [N, T], V at the last boundary at or before token t that has a known V; used by `gae`.
        mask: [N, T] bool, True = a token of the completion; the padding is on the right.
        outcome: [N], the weighted sum of a row's rewards; NaN = unscored.
        outcome_advantages: [N], the trainer's advantages from the outcomes.
        valued: [N] bool, True = the row has process rewards. False = the row has none, because V_0 or V_n is missing,
            or because the row is unscored or has no token. A row that is not valued gets its outcome advantage
            (`_outcome_part`) and is left out of baselines and scales.
        group_size: G, which divides N.
        unit: number, the outcome advantage per unit of reward in the last windows. It scales the process rewards of
            groups whose outcomes are nearly or exactly the same; see `_scaled`. None = the values are not anchored.
        sum_over_ranks: function that takes a float64 tensor of any shape and returns its sum over the ranks. Estimators
            use it for statistics of the whole batch. It is a collective: an estimator must call it equally often on
            every rank, also on a rank without valued rows. If each rank has the rows of all ranks, the function returns
            its argument.
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
    """Settings of the credit estimators; `SETTINGS` lists which estimator uses which settings.

    Args:
        outcome_weight: w_o >= 0, the weight of the outcome part of the advantage.
        process_weight: w_p >= 0, the weight of the process part; or "auto", which needs anchored values. With "auto",
            `worth.Watch` computes the weight w from how well V predicted the outcomes of the last windows, and the
            outcome part has the weight 1 − w. While w is 0, all advantages are exactly those of a run without the
            callback.
        scale_floor: number > 0, in the unit of V. Process rewards are divided by their spread, or by this number if it
            is larger than the spread. So if V hardly changes, its noise does not become an advantage of about 1. None =
            0.1 for log-probs, 0.01 for other values (`FLOORS`).
        gamma: γ in [0, 1], the discount per token; with `gae`, per episode.
        lam: λ of `gae` in [0, 1], per episode.
    Raises:
        ValueError: if a number is out of range, or if `outcome_weight` is not 1 and `process_weight` is "auto".
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

    The final answer becomes an episode with U_{n+1} = outcome − V_n. If no token follows b_n, the outcome replaces V_n.
    So ΣU = outcome − V_0, which does not depend on the values between. If the policy raises V within an episode without
    a better outcome, the sum of the later U is lower by the same amount. If no V is missing, each U is the advantage of
    VinePPO (arXiv 2410.01679, eq. 5), which also uses the outcome instead of a value at the end of a completion.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN = missing.
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

    So ΣU = V_n − V_0. If an inner value is missing, the episodes before and after its boundary become one episode. A
    row without V_0, without V_n or without a token (a masked completion) gets no process rewards: `valued` is False.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN or infinite = missing.
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
    return _broadcast(rewards.outcome_advantages, rewards)


def centered_return(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·(R_t − mean_{j≠i} R_{j,t}) / σ.

    This estimator is the default, and keeps all laws if values are not anchored. R_{j,t} is 0 after the end of row j.
    The baseline depends on other rows only, so it leaves the policy gradient unbiased. σ is the standard deviation of
    ΣU over the rows of the group, or the floor if the floor is larger; for anchored values see `_scaled`. As in GRPO, σ
    depends on the row itself, and the division by σ gives groups with a small σ more weight.

    If values are anchored, R_t is outcome − V at the beginning of the episode. Then V is a baseline, too: it lowers the
    variance, and pays no progress. So nothing is learned on average from a problem that the policy cannot solve.
    """
    returns = _returns_to_go(rewards.process)
    centred = returns.sub_(_mean_of_others(returns, rewards))
    std = _pooled(rewards.process.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[1]
    return _with_outcome(_scaled(centred, std, rewards, settings), rewards, settings)


def episode(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·U_k / σ for the tokens of episode k (VinePPO, arXiv 2410.01679, eq. 5).

    σ is the root mean square of all U of the group, or the floor if the floor is larger; for anchored values see
    `_scaled`. An episode is paid its own progress, also if values are anchored and no completion solves the problem.
    Breaks law 1: if an episode is split, each half gets only its own U.
    """
    own = spread_over_episodes(rewards.process, rewards.ends)
    rms = _pooled(rewards.process, rewards.ends, rewards, centre=False)[1]
    return _with_outcome(_scaled(own, rms, rewards, settings), rewards, settings)


def grpo_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = w_o·A_outcome + w_p·Σ_{s ≥ t} (U_s − μ) / σ, where s are last tokens of episodes.

    Outcome and process rewards are normalised separately, because their scales differ ("Training-Free Process Rewards
    for LLM RL"). μ and σ are the mean and the standard deviation of all U of the group. σ is at least the floor; for
    anchored values see `_scaled`. Breaks laws 1 and 2: in a row with n episodes, the sum at the first token contains
    −n·μ/σ, so the advantage depends on the number of episodes.
    """
    mean, std = _pooled(rewards.process, rewards.ends, rewards)
    normalised = _scaled(rewards.process - mean, std, rewards, settings).masked_fill_(~rewards.ends, 0)
    return _with_outcome(_returns_to_go(normalised), rewards, settings)


def deepseek_process(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = Σ_{s ≥ t} (r_s − μ) / σ, with μ and σ over all tokens of the group.

    On the last token of a row, r_s also contains the outcome. This is DeepSeekMath's process supervision (arXiv
    2402.03300, 4.1.3) in the form of the post "Implementing Process Rewards in VeRL", where μ and σ are over all
    tokens. Breaks laws 1, 2, 5 and 6: a token without reward contributes −μ/σ, and these terms add up over the length.
    μ and σ also depend on the outcomes.
    """
    combined = _combined(rewards, settings)
    mean, std = _pooled(combined, rewards.mask, rewards)
    normalised = combined.sub_(mean).div_(std + STD_EPSILON).masked_fill_(~rewards.mask, 0)
    return _or_outcome(_returns_to_go(normalised), rewards, settings)


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
    total = _prime_source(rewards.process, rewards.ends, rewards).mul_(float(settings.process_weight))
    outcome = _prime_source(rewards.outcome.nan_to_num().unsqueeze(1) * last, last, rewards)
    total.add_(outcome, alpha=settings.outcome_weight)
    return _or_outcome(_whitened(_returns_to_go(total), rewards), rewards, settings)


def rloo(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_t = s_i − mean_{j≠i} s_j with s = w_o·outcome + w_p·ΣU (Ahmadian et al. 2024, arXiv 2402.14740).

    All tokens of a row get the same advantage. It depends on ΣU = V_n − V_0, but not on the individual U. So a good
    episode gets no more credit than a bad episode of the same row. Breaks laws 2 (an episode at the end gets the
    advantage of its row), 5 (there is no division by the spread) and 6.
    """
    total = _combined(rewards, settings).sum(dim=1)
    return _or_outcome(
        _broadcast(total - _mean_of_others(total.unsqueeze(1), rewards).flatten(), rewards), rewards, settings
    )


def reinforce_plus_plus(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A = W(G) with G_t = r_t + γ·G_{t+1} and the outcome on the last token (REINFORCE++, arXiv 2501.03262).

    W is the whitening over all tokens of the batch. Breaks law 1, because splitting an episode changes the mean over
    tokens, and laws 2, 5 and 6, because W mixes outcome and process rewards and ignores groups.
    """
    returns = _discounted(_combined(rewards, settings), torch.full_like(rewards.process, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def reinforce_plus_plus_baseline(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A = W(G) as in `reinforce_plus_plus`, but the group's mean total reward is subtracted on the last token.

    This is the paper's "REINFORCE++ w/ baseline": A = W(G) with G_t = r_t + γ·G_{t+1}, where r_t on the last token also
    contains the outcome minus mean_j s_j, with s = w_o·outcome + w_p·ΣU. Without process rewards and with γ = 1, this
    is verl's W(s_i − mean_j s_j). Deviation: with process rewards, verl gives all tokens of a row the same advantage.
    Here, the advantage of a token depends on the rewards from this token on. Breaks laws 1, 2, 5 and 6, because of W.
    """
    combined = _combined(rewards, settings)
    baseline = _pooled(combined.sum(dim=1, keepdim=True), rewards.valued.unsqueeze(1), rewards)[0]
    row, token = _last_token(rewards)
    combined[row, token] -= baseline[row, 0]
    returns = _discounted(combined, torch.full_like(combined, settings.gamma))
    return _or_outcome(_whitened(returns, rewards), rewards, settings)


def gae(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """A_k = δ_k + γλ·A_{k+1}, δ_k = r_k + γ·V_k − V_{k−1}, with V(prefix) as the critic (GAE, arXiv 1506.02438).

    Each episode k is one step of GAE, and all tokens of the episode get A_k. The final answer is a step, too: its
    reward is the outcome, and V after it is 0. The other steps have the reward 0. V must have the unit of the outcome.
    The result is not whitened, so that a row gets the advantage 0 if V is equal to its outcome at each boundary (with
    γ = 1). So choose `gradient_filter_threshold` in the unit of the reward. `outcome_weight` and `process_weight` are
    not used, because the advantage cannot be divided into an outcome part and a process part. Breaks laws 1 (λ counts
    episodes), 2 (the outcome is on the last token), 3 (V is compared with the outcome), 5 and 6.
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
# The fields of `CreditSettings` that each estimator uses. Setting another field is an error, because the estimator
# would ignore it.
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
    """Raises a `ValueError` if a setting that the estimator does not use differs from its default.

    Args:
        estimator: name of the credit estimator, one of `ESTIMATORS`.
        settings: the settings for this estimator.
    """
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
    """Returns `_outcome_part`, plus w_p·process in the rows that are valued. Overwrites `process`."""
    process_weight = float(settings.process_weight)
    process.mul_(process_weight * rewards.valued.double().unsqueeze(1))
    process.add_(_outcome_part(rewards, settings))
    if rewards.unit is not None:
        share = _units(rewards)[1] * rewards.valued.unsqueeze(1)
        process.add_(process_weight * share * rewards.outcome_advantages.unsqueeze(1))
    return process.masked_fill_(~rewards.mask, 0)


def _or_outcome(advantages: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Returns `advantages` for valued rows and `_outcome_part` for the others."""
    outcome = _outcome_part(rewards, settings)
    return torch.where(rewards.valued.unsqueeze(1), advantages, outcome).masked_fill_(~rewards.mask, 0)


def _outcome_part(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Returns [N, 1]: w_o·A_outcome, or (w_o + w_p)·A_outcome for rows that are not valued if values are anchored.

    With anchored values, the process part of a valued row contains the outcome, too. So the weight w_p is added in a
    row that is not valued. With process_weight="auto", such a row then gets exactly A_outcome.
    """
    weight = alone = settings.outcome_weight
    if rewards.unit is not None:
        alone += float(settings.process_weight)
    outcome = rewards.outcome_advantages
    return torch.where(rewards.valued, weight * outcome, alone * outcome).unsqueeze(1)


def _combined(rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Returns [N, T]: w_p·r_t, plus w_o·outcome on the last token of each row."""
    row, token = _last_token(rewards)
    combined = float(settings.process_weight) * rewards.process
    combined[row, token] += settings.outcome_weight * rewards.outcome.nan_to_num()[row]
    return combined


def _last_token(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Returns the indices of the rows that have tokens, and the position of the last token of each."""
    lengths = rewards.mask.sum(dim=1)
    row = lengths.nonzero().squeeze(1)
    return row, lengths[row] - 1


def _discounted(values: Tensor, discounts: Tensor) -> Tensor:
    """Returns [N, T]: G_t = v_t + d_t·G_{t+1}, where v are the values and d are the discounts, [N, T] each."""
    if (discounts == 1).all():
        return _returns_to_go(values)
    sums, discounts = values.t().contiguous(), discounts.t().contiguous()  # [T, N]: contiguous at each t
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(sums[t + 1], discounts[t])
    return sums.t().contiguous()


def _scaled(values: Tensor, spread: Tensor, rewards: Rewards, settings: CreditSettings) -> Tensor:
    """Scales process rewards [N, T] to the unit of the outcome advantages. Overwrites `values`.

    If V is not anchored, process rewards are divided by `spread` [N, 1], or by the floor if the floor is larger.

    If V is anchored, process rewards have the unit of the outcome. They are multiplied by the outcome advantage per
    unit of reward in their group: Σ A_i·Δo_i / Σ Δo_i², with the outcome advantages A and the centred outcomes Δo. In
    GRPO this factor is 1/σ, so w_o = 1 − w and w_p = w give (outcome − w·V) / σ. See `_units` for groups whose outcomes
    are nearly or exactly the same.
    """
    if rewards.unit is None:
        floor = FLOORS["log"] if settings.scale_floor is None else settings.scale_floor
        return values.div_(spread.clamp(min=floor))
    return values.mul_(_units(rewards)[0])


def _units(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Computes the factor of anchored process rewards in each group, and the weight that V loses there.

    If all outcomes of a group are the same, all its advantages are 0 and its own factor cannot be computed. Then the
    factor of the last windows is used (`Rewards.unit`). If outcomes differ by little, such as a bonus for the format,
    1/σ is large and would multiply the noise of V. So the factor is at most `MOST_UNITS` times the factor of the last
    windows, if there is one. The share of the factor that is cut off goes to the outcome advantage. This is the same as
    a smaller w_p and a larger w_o for this group.

    Returns:
        [N, 1] each: the factor, and the share of w_p that goes to the outcome advantage, from 0 to 1.
    """
    products, squares, alike = outcome_units(
        rewards.outcome, rewards.outcome_advantages, rewards.valued, rewards.group_size
    )
    own, of_others = products / squares, float(rewards.unit or 0.0)
    most = MOST_UNITS * of_others if of_others > 0 else torch.inf
    unit = torch.where(alike, of_others, own.clamp(-most, most))
    share = torch.where(alike | (own == 0), 0.0, 1 - unit / own)
    per_row = torch.stack([unit, share], dim=1).repeat_interleave(rewards.group_size, dim=0)
    return per_row[:, :1], per_row[:, 1:]


def outcome_units(outcome: Tensor, advantages: Tensor, used: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes Σ A·Δo and Σ Δo² over the used rows of each group. Their ratio is the advantage per unit of reward.

    Args:
        outcome: [N], the outcomes o; NaN is allowed in rows that are not used.
        advantages: [N], the outcome advantages A.
        used: [N] bool, True = the row counts.
        group_size: G, which divides N.
    Returns:
        Three tensors [N / G]: Σ A·Δo and Σ Δo² in float64, where Δo is the difference from the mean of the used rows;
        and a bool tensor, True = the outcomes of the group are all the same.
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
    """Reshapes [N, …] to [N / G, G, …]."""
    return values.reshape(-1, rewards.group_size, *values.shape[1:])


def _mean_of_others(values: Tensor, rewards: Rewards) -> Tensor:
    """Returns [N, T]: at each position, the mean over the other valued rows of the group; 0 if there are no others."""
    used = _groups(rewards.valued.unsqueeze(1).to(values.dtype), rewards)
    grouped = _groups(values, rewards) * used
    total = grouped.sum(dim=1, keepdim=True)
    return grouped.neg_().add_(total).div_((used.sum(dim=1, keepdim=True) - used).clamp(min=1)).reshape(values.shape)


def _pooled(values: Tensor, places: Tensor, rewards: Rewards, *, centre: bool = True) -> tuple[Tensor, Tensor]:
    """Computes the mean and the unbiased standard deviation over all numbers of a group, repeated for each row.

    Args:
        values: [N, T], or [N, 1] for one number per row.
        places: bool, same shape as `values`, True = the number counts. Rows that are not valued never count.
        rewards: the input of the estimator. Only its `group_size` and `valued` are used.
        centre: True = standard deviation, False = root mean square.
    Returns:
        [N, 1] each: the mean, and the standard deviation or root mean square. The standard deviation of fewer than two
        numbers is unknown; infinity is returned, so what is divided by it becomes 0.
    """
    used = _groups(places & rewards.valued.unsqueeze(1), rewards)
    grouped, count = _groups(values, rewards).masked_fill(~used, 0), used.sum(dim=(1, 2), keepdim=True)
    mean = grouped.sum(dim=(1, 2), keepdim=True) / count.clamp(min=1)
    if centre:
        grouped.sub_(mean).masked_fill_(~used, 0)
    squares = grouped.square_().sum(dim=(1, 2), keepdim=True)
    std = (squares / ((count - 1) if centre else count).clamp(min=1)).sqrt()
    if centre:
        std.masked_fill_(count < 2, torch.inf)
    shape = (used.shape[0], rewards.group_size, 1)
    return mean.expand(shape).reshape(-1, 1), std.expand(shape).reshape(-1, 1)


def _prime_source(values: Tensor, places: Tensor, rewards: Rewards) -> Tensor:
    """Computes r·n/(n−1) − b for one source of rewards; see `prime_rloo`.

    Args:
        values: [N, T], the rewards r of the source.
        places: [N, T] bool, True = a token of the source.
        rewards: the input of the estimator.
    Returns:
        [N, T]; 0 where `places` is False, and in rows that are not valued.
    """
    places = places & rewards.valued.unsqueeze(1)
    means = (values * places).sum(dim=1) / places.sum(dim=1).clamp(min=1)
    counted = _groups(places.any(dim=1).to(values.dtype), rewards)
    others = (counted.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    baseline = _groups(means, rewards).sum(dim=1, keepdim=True) / others
    factor = counted.sum(dim=1, keepdim=True).clamp(min=1) / others
    source = (_groups(values, rewards) * factor.unsqueeze(2)).sub_(baseline.unsqueeze(2))
    return source.reshape(values.shape).masked_fill_(~places, 0)


def _whitened(values: Tensor, rewards: Rewards) -> Tensor:
    """Computes (x − mean) / √(σ² + 1e-8), with mean and σ² over the tokens of the valued rows of all ranks.

    If the valued rows have fewer than two tokens, the values are returned unchanged.
    """
    places = rewards.mask & rewards.valued.unsqueeze(1)
    count, mean, variance = moments([(values[places], 1)], rewards.sum_over_ranks)
    if count < 2:
        return values
    return (values - mean).div_((variance + VARIANCE_EPSILON).sqrt())


def moments(
    samples: Iterable[tuple[Tensor, Tensor | int]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes count, mean and unbiased variance of S samples over all ranks.

    The variance needs a second sum over the ranks, because a computation from Σx² would lose digits.

    Args:
        samples: this rank's part of the S samples. Each is a pair: a tensor of values, which may be empty, and the
            number of times that each value counts.
        sum_over_ranks: see `Rewards`.
    Returns:
        [S] float64 each: count, mean, variance. The mean of no values and the variance of one value are NaN.
    """
    weighed = [(values.double(), torch.as_tensor(times).expand_as(values)) for values, times in samples]
    sums = [torch.stack([times.sum().double(), (values * times).sum()]) for values, times in weighed]
    count, total = sum_over_ranks(torch.stack(sums)).unbind(1)
    mean = total / count
    centred = zip(weighed, mean, strict=True)
    squares = [(values - centre).square_().mul_(times).sum() for (values, times), centre in centred]
    return count, mean, sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)


def spread_over_episodes(values: Tensor, ends: Tensor) -> Tensor:
    """Copies the value on the last token of each episode to all tokens of the episode; other tokens get 0.

    Args:
        values: [N, T], one value on the last token of each episode.
        ends: [N, T] bool, True = the last token of an episode.
    Returns:
        [N, T].
    """
    stops = ends.clone()
    stops[:, -1:] = True  # the tokens after the last episode end of a row are a run, too
    stop = stops.flatten().nonzero().squeeze(1)
    levels = torch.where(ends.flatten()[stop], values.flatten()[stop], 0)
    runs = stop.diff(prepend=stop.new_tensor([-1]))
    return levels.repeat_interleave(runs, output_size=values.numel()).view(values.shape)
