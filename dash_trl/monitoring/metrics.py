"""Computes figures of the filter, the packer, the sampler and the loss for TRL's log.

Letters: B rows of a rank, T completion tokens, R ranks.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_trl.rollout import CHECKSUM, COMPLETION, PROMPT, RolloutBatch
from dash_trl.update import KEPT, MicroBatch, Pass, Share, importance_sampling_ratio, unknown_log_probs

logger = logging.getLogger(__name__)

OverRanks = Callable[[Tensor], Tensor]  # adds up a tensor over the ranks, or concatenates the vectors of all ranks
EMPTY_WINDOWS = 10  # number of windows in a row before a warning, because fewer windows may be chance
# The figures of dropped rows in the order of `filter_rows`, with what is said of such rows.
DROPPED = {
    "filter/dropped_constant": "have no signal, mostly because all rewards of their group are equal: are the problems "
    "too easy or too hard, is num_generations too small, the reward constant, or every completion cut off at "
    "max_completion_length? If earlier windows had signal, is learning_rate too large?",
    "filter/dropped_threshold": "are under gradient_filter_threshold={threshold}: lower it.",
    "filter/dropped_unscored": "are unscored: reward functions failed (see the warnings), or returned None (is a "
    "return missing?).",
}


def filter_metrics(rollouts: RolloutBatch, reduce_sum: OverRanks) -> dict[str, float]:
    """Return the shares of rows that the filter kept and dropped, and the mean absolute advantage of the survivors.

    The shares are over the rows of all ranks and add up to 1. `reduce_sum`, which adds up a tensor over the ranks, gets
    an int64 and a float32 tensor, because MPS has no float64.
    """
    tokens = rollouts.loss_mask.sum(dim=1)
    advantages = replace(rollouts, advantages=rollouts.advantages.abs()).mean_advantages()
    keep = rollouts.dropped == KEPT
    counts = [*rollouts.dropped.bincount(minlength=1 + len(DROPPED)), tokens[keep].sum(), tokens.sum()]
    *rows, kept_tokens, all_tokens = reduce_sum(torch.stack(counts)).tolist()
    kept_advantage = reduce_sum(advantages[keep].sum()).item()
    return {
        **{name: count / sum(rows) for name, count in zip(("filter/kept_rows", *DROPPED), rows, strict=True)},
        "filter/kept_tokens": kept_tokens / max(all_tokens, 1),
        "advantage/abs_mean": kept_advantage / rows[0] if rows[0] else float("nan"),
    }


class EmptyWindows:
    """Warns about windows without a survivor, from which nothing is learned.

    A warning follows the first such window of a run, and `EMPTY_WINDOWS` in a row.
    """

    def __init__(self) -> None:
        self._said = False
        self._count = 0  # number of windows since the last window with a survivor

    def note(self, metrics: Mapping[str, float], threshold: float | None) -> None:
        """Count the next window by its `filter_metrics`, and log a warning with the reasons if one is due."""
        empty = metrics["filter/kept_rows"] == 0
        self._count = (self._count + 1) * empty
        if self._count == EMPTY_WINDOWS or (empty and not self._said):
            self._said = True
            where = "a generation window" if self._count == 1 else f"{self._count} generation windows in a row"
            reasons = [f"{metrics[name]:.0%} {reason}" for name, reason in DROPPED.items() if metrics[name]]
            logger.warning(
                f"No row was kept in {where}, so that nothing was learned. Of the last window's rows "
                + " ".join(reasons).format(threshold=threshold)
            )


# Figure of the sampler → how it is reduced, first over the tokens of a rank and then over the ranks.
OF_SAMPLER: dict[str, OverRanks] = {
    "sampling/sampling_logp_difference/mean": torch.mean,
    "sampling/sampling_logp_difference/max": torch.max,
    "sampling/importance_sampling_ratio/min": torch.min,
    "sampling/importance_sampling_ratio/mean": torch.mean,
    "sampling/importance_sampling_ratio/max": torch.max,
}


def sampler_metrics(
    sampling_per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    importance_sampling_ratio: Tensor,
    loss_mask: Tensor,
    gather: OverRanks,
) -> dict[str, float]:
    """Return TRL's figures of the difference between the sampler's and the trainer's log-probs, over survivors.

    Args:
        sampling_per_token_logps: [B, T], the sampler's log-probs; NaN = not reported.
        old_per_token_logps: [B, T].
        importance_sampling_ratio: [B, T] or [B, 1].
        loss_mask: [B, T], 1 = a token that the loss counts.
        gather: function that concatenates the vectors of all ranks.
    Returns:
        Name → value; empty if no rank has a survivor with known log-probs.
    """
    mask = loss_mask.bool()
    ratio = importance_sampling_ratio
    ratio = ratio[mask] if ratio.shape == mask.shape else ratio.flatten()
    delta = (old_per_token_logps - sampling_per_token_logps).abs()[mask]
    delta = delta[~delta.isnan()]
    local = torch.full((len(OF_SAMPLER),), torch.nan)
    if delta.numel():
        local = torch.stack([reduce(delta if "logp" in name else ratio) for name, reduce in OF_SAMPLER.items()])
    ranks = gather(local).view(-1, len(OF_SAMPLER))
    ranks = ranks[~ranks.isnan().any(dim=1)]
    if not len(ranks):
        return {}
    return {name: reduce(column).item() for (name, reduce), column in zip(OF_SAMPLER.items(), ranks.T, strict=True)}


def corrected_share(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    loss_mask: Tensor,
    *,
    correction: Mapping[str, Any],
    reduce_sum: OverRanks,
) -> dict[str, float]:
    """Return the share of survivors' loss tokens, on all ranks, whose importance sampling ratio is truncated or masked.

    A sequence mode truncates or masks all tokens of a row together.

    Args:
        old_per_token_logps: [B, T].
        sampling_per_token_logps: [B, T].
        loss_mask: [B, T], 1 = a token that the loss counts.
        correction: the keyword arguments of `importance_sampling_ratio`.
    """
    others = old_per_token_logps, sampling_per_token_logps, loss_mask
    # Both ratios are computed here, on one device: the exponentials of a GPU and of a CPU differ in the last bit.
    without_bounds = {**correction, "clip_min": None, "clip_max": None}
    changed = importance_sampling_ratio(*others, **correction) != importance_sampling_ratio(*others, **without_bounds)
    clipped, tokens = reduce_sum(torch.stack([(changed & loss_mask.bool()).sum(), loss_mask.sum()])).tolist()
    return {"off_policy/clipped_share": clipped / tokens} if tokens else {}


class OffPolicyMetrics:
    """Measures per optimizer step how far the policy is from the sampler, over the survivors' loss tokens on all ranks.

    Let r = π/μ be the ratio of a token, where π is its probability by the policy that the step changes, and μ its
    probability by the sampler::

        off_policy/ratio_mean       the mean of r; 1 is expected, since E_μ[r] = 1 if μ can sample every token
        off_policy/clipped_share    the share of tokens with r > bound
        off_policy/kl               the mean of r − 1 − log r: the k3 estimator of KL(μ‖π), never below 0

    For k3 see http://joschu.net/blog/kl-approx.html. If top_p, top_k or min_p exclude tokens, the expected mean of r is
    the total probability by π of the other tokens. Tokens without a log-prob of the sampler are left out.

    Args:
        bound: the upper bound of r in the loss. `None`: there is no bound, and no `off_policy/clipped_share`.
    """

    def __init__(self, bound: float | None):
        self._bound = bound
        self._sums = torch.zeros(4)  # sums of r, r > bound, r − 1 − log r, and the number of tokens

    def see(self, inputs: Mapping[str, Any], log_probs: Tensor, mask: Tensor) -> None:
        """Add the loss tokens (`mask` = 1) of a pass, with the policy's `log_probs` [B, T], to the sums.

        If the sampler's log-probs are not known, this does nothing.
        """
        if (mu := inputs.get("sampling_per_token_logps")) is None:
            return
        known = mask.bool() & ~unknown_log_probs(mu, mask)
        log_ratio = torch.where(known, log_probs.detach().float() - mu, 0.0)  # 0 for tokens that do not count
        ratio = log_ratio.exp() * known
        clipped = ratio > (torch.inf if self._bound is None else self._bound)
        terms = torch.stack([ratio, clipped.float(), log_ratio.expm1() - log_ratio, known.float()])
        self._sums = self._sums.to(terms.device, non_blocking=True) + terms.flatten(1).sum(dim=1)

    def of_step(self, reduce_sum: OverRanks) -> dict[str, float]:
        """Return the figures of the ending optimizer step, and reset the sums. All ranks must call this."""
        ratio, clipped, kl, tokens = reduce_sum(self._sums).tolist()
        self._sums = torch.zeros(4)
        if not tokens:
            return {}
        share = {} if self._bound is None else {"off_policy/clipped_share": clipped / tokens}
        return {"off_policy/ratio_mean": ratio / tokens, **share, "off_policy/kl": kl / tokens}


def staleness_metrics(policy_version: Tensor, step: int, gather: OverRanks) -> dict[str, float]:
    """Return the mean and maximum staleness of the rows of all ranks.

    The staleness of a row is the number of optimizer steps since the oldest weights that may have sampled its tokens.
    `policy_version` is [B, 2]; see `RolloutBatch`. `step` is the number of optimizer steps before the window.
    """
    staleness = step - gather(policy_version[:, 0]).float()
    return {"async/staleness_mean": staleness.mean().item(), "async/staleness_max": staleness.max().item()}


def packing_metrics(
    micro_batches: Sequence[MicroBatch], lengths: Tensor, *, padding_free: bool, min_shared: int | None, width: int
) -> dict[str, float]:
    """Return figures of how the rows of all ranks were packed into passes.

    `packing/padding_share` is the share of processed positions that are padding. `packing/shared_tokens` is the share
    of tokens that passes leave out, because they have computed the same prompt for another row. `packing/max_tokens` is
    the number of positions in the largest pass.

    Args:
        lengths: [R, B, 4] of the window; see `RolloutBatch.lengths`.
        min_shared: see `plan_share`.
        width: tokens of each row of a padded pass. 0: as many as its longest prompt and completion have.
    """
    real = processed = saved = largest = 0
    for micro_batch in micro_batches:
        for rank, rows in enumerate(micro_batch.rows):
            of_pass = lengths[rank, list(rows)]
            texts = of_pass[:, [PROMPT, COMPLETION]]
            tokens = int(texts.sum())
            size = tokens
            if not padding_free and rows:
                size = len(rows) * (width or int(texts.amax(dim=0).sum()))
            if min_shared is not None:
                shared = Counter(map(tuple, of_pass[:, [PROMPT, CHECKSUM]].tolist()))
                twice = sum((count - 1) * (prompt - 1) for (prompt, _), count in shared.items() if prompt > min_shared)
                size -= twice
                saved += twice
            real += tokens
            processed += size
            largest = max(largest, size)
    return {
        "packing/padding_free": float(padding_free),
        "packing/padding_share": (processed - real + saved) / max(processed, 1),
        "packing/shared_tokens": saved / max(real, 1),
        "packing/max_tokens": largest,
    }


# Shares of clipped tokens among the tokens of all rows. Dropped rows have no clipped tokens, because TRL counts a token
# as clipped only if its advantage is not 0.
CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
# Means over the tokens of survivors, or over survivors (`vespo/phi_seq_mean`). Dropped rows run in no model pass, so
# their numbers are not known.
OF_SURVIVORS = ("entropy", "kl", "vespo/phi_seq_mean")
# A mean over micro-steps. A pass has the same weight in this mean as its loss has in the optimizer step.
PER_MICRO_STEP = ("policy_loss",)


class PassMetrics:
    """Combines the figures that TRL's loss logs in every pass into one figure per optimizer step.

    TRL averages the means of its micro-batches. Here, passes have different sizes and contain survivors only, so a pass
    is weighted by its tokens, and clipped tokens are divided by the tokens of all rows of the optimizer step. If TRL's
    micro-batches have equally many tokens, the figures equal TRL's, except that those in `OF_SURVIVORS` leave out
    dropped rows. `per_row` means that TRL clips whole rows, which are then counted unless advantages are per token.
    """

    def __init__(self, *, per_row: bool):
        self.per_row = per_row
        self.passes = 0
        self._taken: list[tuple[Mapping[str, Sequence[Tensor | float]], Pass, float, bool]] = []
        self._zeros: dict[str, float] = {}  # the names so far: the shares of a step without a pass are logged as 0

    def take(
        self, figures: Mapping[str, Sequence[Tensor | float]], one: Pass, loss_scale: float, *, per_token: bool
    ) -> None:
        """Keep the figures of a pass that TRL's loss has logged: name → one number or 0-dimensional tensor."""
        self.passes += 1
        self.per_row &= not per_token
        self._taken.append((figures, one, loss_scale, per_token))

    def of_step(self, shares: Collection[Share]) -> list[dict[str, float]]:
        """Return the combined figures of the ending optimizer step, and each pass's other figures; forget the passes.

        Tensors are read here at once, because the CPU waits for the GPU whenever it reads one.
        """
        found: list[dict[str, float]] = [{}]
        sums = defaultdict(float, self._zeros)
        counts = defaultdict[str, float](float)
        values = iter(_read([value for figures, *_ in self._taken for (value,) in figures.values()]))
        for figures, one, loss_scale, per_token in self._taken:
            found.append(dict(zip(figures, values, strict=False)))  # `values` has those of the next passes, too
            tokens = float(sum(one.tokens))
            rows = float(one.micro_batch.size * len(one.tokens))
            for name in filter({*CLIPPED, *OF_SURVIVORS, *PER_MICRO_STEP}.__contains__, figures):
                of_rows = name == "vespo/phi_seq_mean" and not per_token
                per_row = of_rows or (self.per_row and name in CLIPPED)
                count = loss_scale if name in PER_MICRO_STEP else rows if per_row else tokens
                dummies = rows - sum(map(len, one.micro_batch.rows)) if of_rows else 0.0  # their weight is 1
                sums[name] += found[-1].pop(name) * count - dummies
                counts[name] += count - dummies
        clipped = sum(one.all_rows if self.per_row else one.all_tokens for one in shares)
        divisors = counts | {  # 0 for a name without a pass
            **dict.fromkeys(CLIPPED, clipped),
            **dict.fromkeys(PER_MICRO_STEP, sum(one.micro_steps for one in shares)),
        }
        found[0] = {name: value / divisors[name] for name, value in sums.items() if divisors[name]}
        self._taken = []
        self._zeros = dict.fromkeys(sums, 0.0)
        return found


def _read(values: Sequence[Tensor | float]) -> list[float]:
    tensors = [one for one in values if isinstance(one, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(one, Tensor) else one for one in values]
