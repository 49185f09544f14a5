"""Losses for rollouts of older weights, as settings of TRL's losses; the weight of each pass in an optimizer step.

The losses are sums over loss tokens::

    aipo              −(1/N) Σ min(π/μ, δ) Â                                                        δ: aipo_delta
    aipo, detached    −(1/N) Σ sg(min(π/μ, δ)) Â log π                                              sg: no gradient
    decoupled_ppo     −(1/N) Σ min(π_prox/μ, c) min(u Â, clip(u, 1 − ε, 1 + ε_high) Â),  u = π/π_prox
                                                                   c: vllm_importance_sampling_clip_max

μ is the probability that the sampler gave the token, π_prox its probability by the weights with which the generation
window began, and π its probability by the weights that are trained. Â is the advantage. N is the number of loss tokens
by which TRL's `dapo` divides (with `filter_denominator="kept"`, the survivors').

AIPO is LlamaRL's (arXiv 2505.24034), per token and without KL and entropy terms, as in PRIME-RL. It is differentiated
through the minimum: a token above δ has no gradient, whatever the sign of Â. The detached form gives such a token the
gradient δ Â ∇log π, as in PipelineRL and TRL's `cispo`. Decoupled PPO is AReaL's (arXiv 2505.24298) with its first
factor truncated at c; AReaL's formula is c = inf.

A loss is computed per pass. An optimizer step may have more or fewer passes than TRL has micro-batches, and each pass
has a share of the survivors. `loss_scale` and `regularizer_weight` give each pass its weight, so that the step does not
depend on packing. The regularizers (entropy bonus and the router loss of a mixture of experts) do not contain the
advantage. TRL adds them to every micro-batch with the weight 1 / accumulation steps; here, each pass gets them in
proportion to its tokens. That remains an approximation: they are averaged over survivors instead of all rows, and a
router loss is not linear in the batch.

Letters: B rows, T completion tokens, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dash_trl.update.schedule import Segment

# These losses compare the policy with the sampler, so they need the sampler's log-probs.
OFF_POLICY_LOSSES = ("aipo", "decoupled_ppo")

# vLLM's API writes this for a log-prob of −inf, for which JSON has no number. A sampled token cannot have that
# log-prob, so it counts as unknown.
NO_LOG_PROB = -9999.0

# TRL averages the first losses over the rows of a micro-batch, and bnpo over its tokens. The other losses (dapo, cispo,
# vespo, and ours, which are computed as dapo or cispo) divide by the tokens of the whole generation batch and need no
# correction.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
TOKEN_MEAN_LOSSES = ("bnpo",)


def trl_settings(loss_type: str, *, delta: float, detached: bool) -> dict[str, Any]:
    """Return the attributes of a `GRPOTrainer` with which TRL computes the loss. `delta` belongs to its `args`.

    aipo is TRL's `dapo` with μ as the old log-probs, so that r = π/μ. In min(min(r, delta) Â, clip(r, 1 − 1, 1 + δ − 1)
    Â), both terms are min(r, δ) Â, so the outer minimum, which depends on the sign of Â, has no effect. The detached
    form is `cispo`. Decoupled PPO is `dapo` with TRL's correction, whose ratio is π_prox/μ.

    Args:
        loss_type: TRL's or ours.
        delta: δ.
        detached: use the detached form of aipo.
    Returns:
        Attribute → value; empty for TRL's own losses.
    """
    if loss_type == "decoupled_ppo":
        correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
        return {"loss_type": "dapo", **correction}
    if loss_type != "aipo":
        return {}
    aipo = {"vllm_importance_sampling_correction": False}
    if detached:
        return {**aipo, "loss_type": "cispo", "epsilon_high": delta}
    return {**aipo, "loss_type": "dapo", "epsilon_low": 1.0, "epsilon_high": delta - 1.0, "delta": delta}


def unknown_log_probs(sampling_per_token_logps: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the loss tokens whose log-prob the sampler did not report (NaN, or what vLLM writes for −inf).

    Args:
        sampling_per_token_logps: [B, T].
        loss_mask: [B, T], 1 = a token that the loss counts.
    Returns:
        [B, T] bool.
    """
    return ~(sampling_per_token_logps > NO_LOG_PROB) & loss_mask.bool()


def behaviour_log_probs(sampling_per_token_logps: Tensor, old_per_token_logps: Tensor) -> Tensor:
    """Return the sampler's log-probs, with the trainer's in place of those that the sampler did not report.

    Args:
        sampling_per_token_logps: [B, T].
        old_per_token_logps: [B, T], log-probs by the weights at the start of the window, so that the ratio of such a
            token begins at 1. They are read, and must be finite, only where they are needed.
    Returns:
        [B, T].
    """
    return torch.where(sampling_per_token_logps > NO_LOG_PROB, sampling_per_token_logps, old_per_token_logps)


def importance_sampling_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Compute w = π_old / π_sampler per token, or its product over the sequence; truncate or mask it (TRL 1.16's
    definition).

    Truncated: w is clipped to [clip_min, clip_max] (TIS). Masked: w outside of this range becomes 0 (MIS).

    TRL computes it in the method that also generates, before rewards are known. Here it is computed for survivors only.

    Args:
        old_per_token_logps: [B, T].
        sampling_per_token_logps: [B, T]. A token whose log-prob the sampler did not report (`unknown_log_probs`) counts
            as a ratio of 1.
        loss_mask: [B, T], 1 = a token that the loss counts.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min: lower bound. `None`: unbounded.
        clip_max: upper bound. `None`: unbounded.
    Returns:
        [B, T] for the token modes, [B, 1] for the sequence modes.
    """
    level, _, action = mode.partition("_")
    known = loss_mask.bool() & ~unknown_log_probs(sampling_per_token_logps, loss_mask)
    difference = torch.where(known, old_per_token_logps - sampling_per_token_logps, 0.0)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    low, high = -torch.inf if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def loss_scale(loss_type: str, denominator: str, *, rows: int, tokens: int, segment: Segment) -> float:
    """Return the factor of a re-packed micro-batch's loss that makes the sum over a segment independent of packing.

    TRL takes the mean over a micro-batch of b rows and averages over a micro-steps and R ranks. So each row has the
    weight 1 / (b·a·R) = 1 / all_rows. A row of a re-packed micro-batch would have the weight 1 / (rows·a·R). With
    `passes` = a·R, the factors are::

        all:   rows · passes / all_rows   (row means)      tokens · passes / all_tokens   (bnpo)      1 (token sums)
        kept:  rows · passes / kept_rows                   tokens · passes / kept_tokens      all_tokens / kept_tokens

    "all" is exactly GRPO's update; "kept" is an average over the segment's survivors. Deviation: in TRL, bnpo divides
    by the tokens of each *local* micro-batch. Here it divides by those of the segment, which does not depend on
    packing.

    Args:
        loss_type: TRL's or ours.
        denominator: "all" or "kept".
        rows: rows of this micro-batch, dummies included, because TRL's mean counts them, too.
        tokens: loss tokens of this micro-batch on this rank.
        segment: the counts of the segment, over all ranks.
    """
    divisor_rows, divisor_tokens = segment.all_rows, segment.all_tokens
    if denominator == "kept":
        divisor_rows, divisor_tokens = segment.kept_rows, segment.kept_tokens
    if loss_type in ROW_MEAN_LOSSES:
        return rows * segment.passes / max(divisor_rows, 1)
    if loss_type in TOKEN_MEAN_LOSSES:
        return tokens * segment.passes / max(divisor_tokens, 1)
    return max(segment.all_tokens, 1) / max(divisor_tokens, 1)


def regularizer_weight(tokens: int, segment: Segment) -> float:
    """Return the weight of a pass relative to a micro-batch of TRL's: tokens · passes / kept_tokens.

    Here `passes` = micro-steps × ranks. The weights of a segment's passes add up to `segment.passes`.

    Args:
        tokens: loss tokens of the pass on this rank; 0 for a dummy, which then has no weight.
        segment: the counts of the segment, over all ranks.
    """
    return tokens * segment.passes / max(segment.kept_tokens, 1)


class ScaledCoefficient(float):
    """A coefficient that counts `scale` times when it is a factor, and once in sums, comparisons and logs.

    Within one method, TRL multiplies by the coefficient, logs it, and adapts it (`use_adaptive_entropy`).

    Args:
        value: the coefficient.
        scale: its factor.
    """

    scale: float

    def __new__(cls, value: float, scale: float) -> ScaledCoefficient:
        coefficient = super().__new__(cls, value)
        coefficient.scale = scale
        return coefficient

    def __mul__(self, other: Any) -> Any:
        return float(self) * self.scale * other
