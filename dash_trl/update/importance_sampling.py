"""The correction for a sampler whose log-probs differ from the trainer's (vLLM).

TRL computes the ratio inside the method that also generates, before rewards are known; DASH computes it afterwards, on
survivors only. Letters: B rows, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_trl.update.arguments import check_tensor


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

    Truncated: w clipped to [clip_min, clip_max] (TIS). Masked: w outside of it becomes 0 (MIS).

    Args:
        old_per_token_logps, sampling_per_token_logps: [B, T]. A NaN (a token that the sampler could not score) counts
            as a ratio of 1.
        loss_mask: [B, T], 1 = a token that the loss counts.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_min, clip_max: `None` = unbounded.
    Returns:
        [B, T] for the token modes, [B, 1] for the sequence modes.
    Raises:
        ValueError: for an unknown mode, or a tensor of another rank, length or dtype.
    """
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        raise ValueError(
            f"vllm_importance_sampling_mode={mode!r} is unknown: use 'token_truncate', 'token_mask', "
            "'sequence_truncate' or 'sequence_mask'."
        )
    check_tensor("old_per_token_logps", old_per_token_logps, "floats", B=None, T=None)
    rows, tokens = old_per_token_logps.shape
    check_tensor("sampling_per_token_logps", sampling_per_token_logps, "floats", B=rows, T=tokens)
    check_tensor("loss_mask", loss_mask, B=rows, T=tokens)
    difference = ((old_per_token_logps - sampling_per_token_logps) * loss_mask).nan_to_num(nan=0.0)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    low, high = -torch.inf if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
