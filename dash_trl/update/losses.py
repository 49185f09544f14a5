"""Losses for rollouts that older weights wrote, as losses of TRL's; what each pass weighs in an optimizer step.

    aipo              −(1/N) Σ min(π/μ, δ) Â                                                        δ: aipo_delta
    aipo, detached    −(1/N) Σ sg(min(π/μ, δ)) Â log π                                              sg: no gradient
    decoupled_ppo     −(1/N) Σ min(π_prox/μ, c) min(u Â, clip(u, 1 − ε, 1 + ε_high) Â),  u = π/π_prox
                                                                   c: vllm_importance_sampling_clip_max

over loss tokens: μ is the probability that the sampler gave the token, π_prox that of the weights with which the
generation window began, π that of the weights that learn; Â the advantage, N the loss tokens that TRL's `dapo` divides
by (`filter_denominator="kept"`: the survivors').

AIPO is LlamaRL's (arXiv 2505.24034), at the level of tokens and without KL and entropy terms as PRIME-RL has it, which
differentiates through the minimum: a token above δ has no gradient, whatever the sign of Â. In the detached form it
keeps δ Â ∇log π, as in PipelineRL and TRL's `cispo`. Decoupled PPO is AReaL's (arXiv 2505.24298) with its first factor
truncated at c; AReaL's formula is c = inf.

A loss is computed per pass. An optimizer step may have more or fewer passes than TRL has micro-batches, each on its
share of the survivors: `loss_scale` and `regularizer_weight` give a pass its weight, so that the step does not depend
on packing. The regularizers, entropy bonus and router loss of a mixture of experts, do not carry the advantage. TRL
adds them to every micro-batch at 1 / accumulation steps; here every pass gets them in proportion to its tokens. What is
averaged stays an approximation: survivors in place of all rows, and a router loss that is not linear in the batch.

Letters: B rows, T completion tokens, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dash_trl.update.schedule import Segment

# They compare the policy with the sampler, whose log-probs they need.
OFF_POLICY_LOSSES = ("aipo", "decoupled_ppo")

# What vLLM's API writes for a log-prob of −inf, which JSON cannot. Its token was sampled: that is no log-prob.
NO_LOG_PROB = -9999.0

# Losses that TRL averages over the rows of a micro-batch, and the one that it averages over its tokens. The others
# (dapo, cispo, vespo, and ours, which are computed as the first two) divide by the tokens of the whole generation batch
# and need no correction.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
TOKEN_MEAN_LOSSES = ("bnpo",)


def trl_settings(loss_type: str, *, delta: float, detached: bool) -> dict[str, Any]:
    """The attributes of a `GRPOTrainer` with which TRL computes the loss; `delta` is one of its `args`.

    aipo is `dapo` with μ as the old log-probs and r = π/μ: of min(min(r, delta) Â, clip(r, 1 − 1, 1 + δ − 1) Â) both
    terms are min(r, δ) Â, so that the outer minimum, which looks at the sign of Â, has no say. Detached it is `cispo`.
    Decoupled PPO is `dapo` with TRL's correction, whose ratio is π_prox/μ.

    Args:
        delta: δ. detached: the form of aipo.
    Returns:
        Nothing for a loss of TRL's own.
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
    """[B, T] bool: the loss tokens whose log-prob the sampler did not report (NaN, or what vLLM writes for −inf).

    Args:
        sampling_per_token_logps: [B, T]. loss_mask: [B, T], 1 = a token that the loss counts.
    """
    return ~(sampling_per_token_logps > NO_LOG_PROB) & loss_mask.bool()


def behaviour_log_probs(sampling_per_token_logps: Tensor, old_per_token_logps: Tensor) -> Tensor:
    """[B, T]: the sampler's log-probs, and the trainer's where the sampler reported none.

    Args:
        sampling_per_token_logps: [B, T].
        old_per_token_logps: [B, T], of the weights at the window's start, so that the ratio begins at 1; finite, and
            read only where it is needed.
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
    """w = π_old / π_sampler per token, or its product over the sequence, truncated or masked (TRL 1.16's definition).

    TRL computes it in the method that also generates, before rewards are known; here it is that of survivors only.

    Truncated: w clipped to [clip_min, clip_max] (TIS). Masked: w outside of it becomes 0 (MIS).

    Args:
        old_per_token_logps, sampling_per_token_logps: [B, T]. A token whose log-prob the sampler did not report
            (`unknown_log_probs`) counts as a ratio of 1.
        loss_mask: [B, T], 1 = a token that the loss counts.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min, clip_max: `None` = unbounded.
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
    """What a re-packed micro-batch's loss is multiplied by, so that the sum over a segment does not depend on packing.

    TRL's mean over a micro-batch of b rows, averaged over a micro-steps and R ranks, gives each row the weight
    1 / (b·a·R) = 1 / all_rows, but gives the rows of a re-packed micro-batch 1 / (rows·a·R). With `passes` = a·R:

        all:   rows · passes / all_rows   (row means)      tokens · passes / all_tokens   (bnpo)      1 (token sums)
        kept:  rows · passes / kept_rows                   tokens · passes / kept_tokens      all_tokens / kept_tokens

    "all" is exactly GRPO's update, "kept" an average over the segment's survivors. bnpo divides by the tokens of each
    *local* micro-batch in TRL; here by those of the segment, which differs by design but does not depend on packing.

    Args:
        loss_type: TRL's or ours.
        denominator: "all" or "kept".
        rows: rows of this micro-batch, dummies included (TRL's mean counts them too).
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
    """The weight of a pass relative to a micro-batch of TRL's; its sum over a segment's passes is `segment.passes`.

    tokens · passes / kept_tokens, where `passes` counts micro-steps × ranks.

    Args:
        tokens: loss tokens of the pass on this rank; 0 for a dummy, which has no say.
    """
    return tokens * segment.passes / max(segment.kept_tokens, 1)


class ScaledCoefficient(float):
    """A coefficient of TRL's that is `scale` times itself as a factor, and itself in sums, comparisons and logs.

    TRL multiplies by the coefficient, logs it, and adapts it (`use_adaptive_entropy`), all within one method.
    """

    scale: float

    def __new__(cls, value: float, scale: float) -> ScaledCoefficient:
        coefficient = super().__new__(cls, value)
        coefficient.scale = scale
        return coefficient

    def __mul__(self, other: Any) -> Any:
        return float(self) * self.scale * other
