"""Losses for rollouts that older weights sampled, and the weight of each pass in an optimizer step.

Each loss of `OFF_POLICY_LOSSES` is a sum over loss tokens::

    aipo              −(1/N) Σ min(π/μ, δ) Â                                                        δ: aipo_delta
    decoupled_ppo     −(1/N) Σ min(π_prox/μ, c) min(u Â, clip(u, 1 − ε, 1 + ε_high) Â),  u = π/π_prox
                                                                   c: vllm_importance_sampling_clip_max

μ, π_prox and π are the probabilities of a token under the sampler, under the weights at the beginning of the generation
window, and under the weights in training. Â is the advantage. N is the number of loss tokens by which TRL's `dapo`
divides; with `filter_denominator="kept"`, only survivors count.

AIPO comes from LlamaRL (arXiv 2505.24034); here it is per token and without KL and entropy terms, as in PRIME-RL. The
gradient passes through the minimum: a token with π/μ above δ has the gradient 0, whatever the sign of Â. Decoupled PPO
comes from AReaL (arXiv 2505.24298), which does not truncate the first factor (c = inf).

Letters: B rows, T completion tokens, R ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dash_trl.update.schedule import Share

# These losses compare the policy with the sampler, so they need the sampler's log-probs. TRL computes each as `dapo`,
# with these attributes of the trainer: aipo from the loss of each token that `aipo` returns, and decoupled PPO with its
# importance sampling correction, whose ratio is π_prox/μ.
OFF_POLICY_LOSSES = {
    "aipo": {"loss_type": "dapo", "vllm_importance_sampling_correction": False},
    "decoupled_ppo": {
        "loss_type": "dapo",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
}

# vLLM's API returns this number for a log-prob of −inf, because JSON has no number for −inf. A sampled token cannot
# have the log-prob −inf, so its log-prob counts as unknown.
NO_LOG_PROB = -9999.0

# TRL averages the losses of `ROW_MEAN_LOSSES` over the rows of a micro-batch, and bnpo over the tokens of a
# micro-batch. The other losses (dapo, cispo, vespo, and ours, which are computed as dapo) divide by the tokens
# of the whole generation batch, which does not depend on packing.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
TOKEN_MEAN_LOSSES = ("bnpo",)
# The losses that TRL computes from −min(r Â, clip(r) Â) of each token.
CLIPPED_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", *OFF_POLICY_LOSSES)


def aipo(log_probs: Tensor, behaviour: Tensor, advantages: Tensor, *, delta: float) -> Tensor:
    """Return −min(π/μ, δ) Â of each token, [B, T].

    Args:
        log_probs: [B, T], log π.
        behaviour: [B, T], log μ.
        advantages: [B, 1] or [B, T].
        delta: δ, the upper bound of π/μ.
    """
    return -(log_probs - behaviour).exp().clamp(max=delta) * advantages


def with_token_loss(
    inputs: dict[str, Any],
    log_probs: Tensor,
    mask: Tensor,
    per_token_loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None],
    args: Any,
) -> dict[str, Any]:
    """Return inputs with which TRL's loss computes `per_token_loss` for each token.

    TRL computes −min(r Â, clip(r) Â), r = π/π_old. With π_old = π and Â = −loss, this is the loss, and so is its
    gradient, because the gradients of π and π_old in r cancel.

    Args:
        inputs: the inputs of a pass.
        log_probs: [B, T], log π in this pass.
        mask: [B, T], 1 = a token that the loss counts.
        per_token_loss: `DASHTrainer.per_token_loss`. If it returns `None`, the inputs stay as they are.
        args: the settings of the run.
    Raises:
        ValueError: if the function does not return one loss per token, if `loss_type` has another formula, or if TRL
            would use r for its mask or KL term.
    """
    old = inputs.get("old_per_token_logps", log_probs.detach())
    loss = per_token_loss(log_probs, old, inputs["advantages"].view(len(mask), -1), mask)
    if loss is None:
        return inputs
    if loss.shape != log_probs.shape or args.loss_type not in CLIPPED_LOSSES:
        raise ValueError(
            f"per_token_loss needs loss_type to say how TRL takes the mean (one of {', '.join(CLIPPED_LOSSES)}), and "
            f"has to return one loss per token, {[*log_probs.shape]}: here loss_type={args.loss_type!r}, and a tensor "
            f"of shape {[*loss.shape]}."
        )
    if args.off_policy_mask_threshold is not None:
        raise ValueError(
            f"off_policy_mask_threshold={args.off_policy_mask_threshold} does not go with per_token_loss: TRL computes "
            "the mask from its own ratio and advantages, which a loss of your own does not have. Leave it out."
        )
    if args.beta and args.use_bias_correction_kl:
        raise ValueError(
            f"beta={args.beta} with use_bias_correction_kl=True does not go with per_token_loss: TRL multiplies the KL "
            "term by its own ratio, which a loss of your own does not have. Set use_bias_correction_kl=False."
        )
    return {**inputs, "old_per_token_logps": log_probs, "advantages": -loss}


def unknown_log_probs(sampling_per_token_logps: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [B, T] bool, True = a loss token whose log-prob the sampler did not report (NaN or `NO_LOG_PROB`).

    Args:
        sampling_per_token_logps: [B, T].
        loss_mask: [B, T], 1 = a token that the loss counts.
    """
    return ~(sampling_per_token_logps > NO_LOG_PROB) & loss_mask.bool()


def importance_sampling_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    loss_mask: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Compute the importance sampling ratio w = π_old / π_sampler, as TRL 1.16 defines it.

    In the token modes, w is the ratio of each token; in the sequence modes, it is the product of a row's token ratios.
    The truncate modes clip w to [clip_min, clip_max] (TIS); the mask modes set w to 0 outside of this range (MIS). TRL
    computes w before rewards are known; our trainer computes it afterwards, for survivors only.

    Args:
        old_per_token_logps: [B, T], log π_old.
        sampling_per_token_logps: [B, T], log π_sampler. An unknown log-prob (`unknown_log_probs`) gives a ratio of 1.
        loss_mask: [B, T], 1 = a token that the loss counts.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min: lower bound of w, or `None`.
        clip_max: upper bound of w, or `None`.
    Returns:
        [B, T] for the token modes, [B, 1] for the sequence modes.
    """
    level, _, action = mode.partition("_")
    known = loss_mask.bool() & ~unknown_log_probs(sampling_per_token_logps, loss_mask)
    difference = torch.where(known, old_per_token_logps - sampling_per_token_logps, 0.0)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    low = -torch.inf if clip_min is None else clip_min
    high = torch.inf if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def loss_scale(loss_type: str, denominator: str, *, rows: int, tokens: int, share: Share) -> float:
    """Return the factor for a micro-batch's loss that makes the loss of a share independent of packing.

    TRL averages the loss over the b rows of a micro-batch, the `a` micro-steps and the R ranks, so each row has the
    weight 1 / (b·a·R) = 1 / all_rows. Packing changes b. With `passes` = a·R, these factors correct the weight::

        all:   rows · passes / all_rows   (row means)      tokens · passes / all_tokens   (bnpo)      1 (token sums)
        kept:  rows · passes / kept_rows                   tokens · passes / kept_tokens      all_tokens / kept_tokens

    With "all", the update is exactly GRPO's. With "kept", the loss is an average over survivors. Deviation: TRL's bnpo
    divides by the tokens of each *local* micro-batch, which depend on packing.

    Args:
        loss_type: one of TRL's losses or of `OFF_POLICY_LOSSES`.
        denominator: "all" or "kept" (`filter_denominator`).
        rows: rows of this micro-batch. Dummy rows count, because TRL's mean counts them.
        tokens: loss tokens of this micro-batch on this rank.
        share: the counts of the share, over all ranks.
    """
    divisor_rows = share.all_rows
    divisor_tokens = share.all_tokens
    if denominator == "kept":
        divisor_rows = share.kept_rows
        divisor_tokens = share.kept_tokens
    if loss_type in ROW_MEAN_LOSSES:
        return rows * share.passes / max(divisor_rows, 1)
    if loss_type in TOKEN_MEAN_LOSSES:
        return tokens * share.passes / max(divisor_tokens, 1)
    return max(share.all_tokens, 1) / max(divisor_tokens, 1)
