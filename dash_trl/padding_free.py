"""Padding-free model passes: the samples of a micro-batch laid end to end in one row, attention within each sample.

Positions restart at every sample. Attention is kept apart by FlashAttention's varlen kernels where the model uses
them, else by `sdpa_segments`: SDPA run once per sample, through transformers' attention interface. Either way no
position is spent on padding, and attention costs Σ L_i² instead of B · (max L)².

Letters: B rows, P prompt tokens, T completion tokens, L tokens of the packed row (the sum of the mask).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SEGMENT_ATTENTION = "sdpa_segments"


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segment_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal SDPA within each of the segments that the sequence consists of; plain SDPA when there are none.

    Args:
        query: [1, heads, L, head size]; key and value may have fewer heads (GQA).
        attention_mask: not used with segments.
        segment_lengths: tokens of each segment, adding up to L; `None` outside packed passes (generation,
            evaluation).
    """
    if segment_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    segments = zip(*(states.split(segment_lengths, dim=2) for states in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in segments]
    return torch.cat(outputs, dim=1), None


def plain_causal_attention(model: PreTrainedModel) -> bool:
    """Whether every layer is plain causal attention through transformers' attention interface.

    Sliding windows, linear attention and state-space layers would mix what shares a packed row.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return bool(model._supports_attention_backend) and set(layers) == {"full_attention"} and not windowed


def enable_padding_free(model: PreTrainedModel) -> bool:
    """Prepare `model` for packed passes; returns whether it can run them.

    It can with plain causal attention on SDPA (which is switched to `sdpa_segments`, equal to SDPA outside packed
    passes) or FlashAttention; eager and flex attention know no segments.
    """
    config = model.config.get_text_config()
    if not plain_causal_attention(model):
        return False
    attention = config._attn_implementation or ""
    if "flash" in attention:
        return True
    if attention == "sdpa":
        AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)
        # Without a mask function of the same name, transformers would build no mask at all, in generation too.
        AttentionMaskInterface.register(SEGMENT_ATTENTION, sdpa_mask)
        model.set_attn_implementation(SEGMENT_ATTENTION)
    return config._attn_implementation == SEGMENT_ATTENTION


def pack_inputs(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *, flash: bool) -> dict[str, Any]:
    """The model inputs of one packed row, for TRL's fused LM head.

    Args:
        input_ids, attention_mask: [B, P + T]; rows without any token are left out.
        logits_to_keep: T.
        flash: the model runs FlashAttention's varlen kernels.
    Returns:
        `input_ids`, `position_ids`, `labels` [1, L] (−100 where the next-token log-prob is not wanted) and what the
        attention needs to keep the samples apart.
    """
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    lengths = lengths[lengths > 0]
    wanted = mask.clone()
    wanted[:, :-logits_to_keep] = False
    packed_ids = input_ids[mask]
    inputs: dict[str, Any] = {
        "input_ids": packed_ids.unsqueeze(0),
        "position_ids": (mask.long().cumsum(dim=1) - 1)[mask].unsqueeze(0),
        "labels": packed_ids.masked_fill(~wanted[mask], -100).unsqueeze(0),
    }
    if flash:
        ends = torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).int()
        longest = int(lengths.max())
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    else:
        # An all-ones mask: with none at all, transformers would find the restarting positions and build an L × L mask.
        inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"]), "segment_lengths": tuple(lengths.tolist())}
    return inputs


def unpack(values: Tensor, attention_mask: Tensor, logits_to_keep: int) -> Tensor:
    """Per-token values of a packed row → [B, T], 0 elsewhere.

    `values` is [1, L − 1]: position i belongs to packed token i + 1, as the fused LM head returns it. The result stays
    connected to the model even if no value is wanted, so that a dummy micro-batch has a gradient of zeros.
    """
    mask = attention_mask.bool()
    wanted = mask.clone()
    wanted[:, :-logits_to_keep] = False
    values = values[0][wanted[mask][1:]]
    target = wanted[:, -logits_to_keep:]
    return values.new_zeros(target.shape).masked_scatter(target, values)


def packed_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    flash: bool,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs [B, T], entropies [B, T] and MoE auxiliary loss by one packed pass; arguments as in TRL's method.

    `ignored` takes TRL's image arguments, which are None for a text model.
    """
    inputs = pack_inputs(input_ids, attention_mask, logits_to_keep, flash=flash)
    if compute_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model(**inputs, fused_lm_head=True)
    entropies = unpack(outputs.entropy, attention_mask, logits_to_keep) if compute_entropy else None
    return unpack(outputs.log_probs, attention_mask, logits_to_keep), entropies, outputs.aux_loss


def real_rows_only(
    log_probs: Callable[..., tuple[Tensor | None, ...]],
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """For models that need padding: TRL's `log_probs` on the rows that have a token; 0 for the masked dummy rows."""
    real = attention_mask.bool().any(dim=1)
    *per_token, aux_loss = log_probs(model, input_ids[real], attention_mask[real], logits_to_keep, **kwargs)
    target = real.unsqueeze(1).expand(-1, logits_to_keep)
    logps, entropies = (
        None if values is None else values.new_zeros(target.shape).masked_scatter(target, values)
        for values in per_token
    )
    return logps, entropies, aux_loss
