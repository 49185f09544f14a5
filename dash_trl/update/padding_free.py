"""Padding-free model passes: the samples of a micro-batch laid end to end in one row, attention within each sample.

Positions restart at every sample. Attention is kept apart by FlashAttention's varlen kernels where the model uses
them, else by SDPA run once per sample (`segment_attention`), through transformers' attention interface. Either way no
position is spent on padding, and attention costs Σ L_i² instead of B · (max L)².

Letters: B rows, P prompt tokens, T completion tokens, L tokens of the packed row (the sum of the mask).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dash_trl.distributed import Ranks
from dash_trl.rollout import Survivors
from dash_trl.update.isolation import computing_dtype, evaluating, isolation_flaw
from dash_trl.update.zero3 import forget_plain_passes

logger = logging.getLogger(__name__)


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
        attention_mask: `None` with segments; a model that makes one of its own would lose it (Doge).
        segment_lengths: tokens of each segment, adding up to L; `None` outside packed passes (generation,
            evaluation).
    """
    if segment_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} has an attention mask of its own, which segments would ignore.")
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


def enable_padding_free(model: PreTrainedModel) -> str | None:
    """Prepare for packed passes of `model`; returns why it cannot run them, `None` if `packing_flaw` may have a look.

    It needs plain causal attention on SDPA or FlashAttention; eager and flex attention know no segments. The model
    stays as it is: with an attention of our own in its config, a pickle of it would need this package. Instead, what
    "sdpa" names in this process learns of segments, and remains SDPA for passes without them, which all others are.
    """
    if not plain_causal_attention(model):
        return "its attention is not plain causal in every layer"
    attention = model.config.get_text_config()._attn_implementation or ""
    if attention == "sdpa":
        if AttentionInterface()["sdpa"] not in (sdpa_attention_forward, segment_attention):
            return "another function than transformers' is registered as 'sdpa'"
        AttentionInterface.register("sdpa", segment_attention)
    elif "flash" not in attention:
        return f"its attn_implementation {attention!r} keeps no segments apart: use 'sdpa' or 'flash_attention_2'"
    return None


@dataclass(frozen=True)
class PackedLayout:
    """Where the tokens of a padded micro-batch go in the packed row; indices made on the CPU, which knows the masks.

    Asked of a mask on a GPU, each of them would make the CPU wait for the device.

    Attributes:
        tokens: [L] int64, the packed tokens as positions in the flattened [B, P + T].
        position_ids: [1, L] int64, restarting in each row.
        ignored: [1, L] bool, True = the token's log-prob is not wanted.
        sources: [K] int64, the wanted tokens as positions in what the fused LM head returns, [L − 1].
        targets: [K] int64, the same as positions in the flattened [B, T].
        lengths: tokens of each row; rows without any token are left out.
    """

    tokens: Tensor
    position_ids: Tensor
    ignored: Tensor
    sources: Tensor
    targets: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, attention_mask: Tensor, logits_to_keep: int) -> PackedLayout:
        """Of a micro-batch with `attention_mask` [B, P + T] on the CPU; the last T = `logits_to_keep` columns count."""
        mask = attention_mask.bool()
        wanted = mask.clone()
        wanted[:, :-logits_to_keep] = False
        in_row = wanted[mask]  # [L]
        return cls(
            tokens=mask.flatten().nonzero().squeeze(1),
            position_ids=(mask.long().cumsum(dim=1) - 1)[mask].unsqueeze(0),
            ignored=~in_row.unsqueeze(0),
            sources=in_row[1:].nonzero().squeeze(1),
            targets=wanted[:, -logits_to_keep:].flatten().nonzero().squeeze(1),
            lengths=tuple(length for length in mask.sum(dim=1).tolist() if length),
        )


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a tensor or a layout from the CPU; to a GPU by page-locked memory, so that the GPU computes meanwhile."""
    if isinstance(value, PackedLayout):
        return PackedLayout(**{name: to_device(part, device) for name, part in vars(value).items()})
    if not isinstance(value, Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def pack_inputs(input_ids: Tensor, layout: PackedLayout, *, flash: bool) -> dict[str, Any]:
    """The model inputs of one packed row, for TRL's fused LM head.

    Args:
        input_ids: [B, P + T]. layout: of its mask, on the same device.
        flash: the model runs FlashAttention's varlen kernels.
    Returns:
        `input_ids`, `position_ids`, `labels` [1, L] (−100 where the next-token log-prob is not wanted) and what the
        attention needs to keep the samples apart.
    """
    packed_ids = input_ids.flatten()[layout.tokens].unsqueeze(0)
    inputs: dict[str, Any] = {
        "input_ids": packed_ids,
        "position_ids": layout.position_ids,
        "labels": packed_ids.masked_fill(layout.ignored, -100),
    }
    if flash:
        ends = to_device(torch.tensor([0, *accumulate(layout.lengths)], dtype=torch.int32), input_ids.device)
        longest = max(layout.lengths)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    else:
        # An all-ones mask: with none at all, transformers would find the restarting positions and build an L × L mask.
        inputs |= {"attention_mask": torch.ones_like(packed_ids), "segment_lengths": layout.lengths}
    return inputs


def packed_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    flash: bool,
    layout: PackedLayout | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs [B, T], entropies [B, T] and MoE auxiliary loss by one packed pass; arguments as in TRL's method.

    `layout` is that of `attention_mask`, `None`: made here. `ignored` takes TRL's image arguments, which are None for a
    text model.
    """
    if layout is None:
        layout = to_device(PackedLayout.of(attention_mask.cpu(), logits_to_keep), input_ids.device)
    inputs = pack_inputs(input_ids, layout, flash=flash)
    if compute_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model(**inputs, fused_lm_head=True)

    def unpacked(values: Tensor) -> Tensor:
        """[1, L − 1] → [B, T], 0 elsewhere: position i belongs to packed token i + 1, as the fused LM head returns it.

        Connected to the model even if no value is wanted, so that a dummy micro-batch has a gradient of zeros.
        """
        target = values.new_zeros(len(input_ids) * logits_to_keep)
        target = target.index_copy(0, layout.targets, values[0][layout.sources])
        return target.view(len(input_ids), logits_to_keep)

    return unpacked(outputs.log_probs), unpacked(outputs.entropy) if compute_entropy else None, outputs.aux_loss


def packing_flaw(packed: Any, padded: Any, model: Any, *, vocabulary: int, device: torch.device) -> str | None:
    """Why a model cannot run packed passes, as `isolation_flaw` finds by trying; None = it can.

    Args:
        packed, padded: (input_ids, attention_mask, logits_to_keep) → (log-probs, …), as in TRL's method.
        model: which they call.
    """

    def log_probs(function: Any, samples: Sequence[Sequence[int]]) -> list[Tensor]:
        prompt = min(map(len, samples)) // 2  # the same for all, so that no row is padded on its left
        kept = max(map(len, samples)) - prompt
        ids, mask = torch.zeros(2, len(samples), prompt + kept, dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, : len(sample)], mask[row, : len(sample)] = torch.tensor(sample), 1
        values = function(ids.to(device), mask.to(device), kept)[0]
        return [row[: len(sample) - prompt] for row, sample in zip(values, samples, strict=True)]

    with torch.no_grad(), evaluating(model, checkpointing=True):
        return isolation_flaw(
            partial(log_probs, packed),
            partial(log_probs, padded),
            vocabulary=vocabulary,
            dtype=computing_dtype(model),
        )


class ModelPasses:
    """Makes the inputs of passes, and runs them in TRL's method for log-probs.

    Args:
        models: transformers models, the policy first, without wrappers and adapters.
        virtual_tokens: prompt tuning puts some before each prompt. Padding lies between them and the prompt, so that
            its width is part of the input.
        continuous_batching: samples with paged variants of the attention that a model came with.
        noisy_embeddings: NEFTune adds noise to them, the less the longer a row is.
        compiled: torch.compile traces SDPA segment by segment: a graph for each number of rows that share a pass, of
            which it makes 8 before it gives up. FlashAttention takes any number in one graph.
    Attributes:
        padded_because: why passes are padded; `None`: they are padding-free.
    """

    def __init__(
        self,
        models: Sequence[Any],
        *,
        virtual_tokens: bool,
        continuous_batching: bool,
        noisy_embeddings: bool,
        compiled: bool,
    ):
        self.flash = "flash" in (models[0].config.get_text_config()._attn_implementation or "")
        self.padded_because: str | None = None
        if continuous_batching:
            self.padded_because = "continuous batching brings its own attention"
        elif noisy_embeddings:
            self.padded_because = "NEFTune's noise depends on the length of a row"
        elif virtual_tokens:
            self.padded_because = "every sample has virtual tokens before it"
        elif compiled and not self.flash:
            self.padded_because = "torch.compile would trace packed SDPA anew for each number of rows (leave it off)"
        else:
            self.padded_because = next(filter(None, map(enable_padding_free, models)), None)
        self.compiled = compiled
        self._name = type(models[0]).__name__
        self._trim_prompts = not virtual_tokens
        self._layout: PackedLayout | None = None  # of the pass that is running; `None`: found from its mask
        self._hook: Any = None

    @property
    def padding_free(self) -> bool:
        return self.padded_because is None

    def prepare(
        self,
        wrapped: Any,
        models: Sequence[Any],
        padded: Callable[..., Any],
        *,
        vocabulary: int,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Try packed passes of models that are prepared for training; warn if passes have to be padded.

        Called on every rank: a trial is a collective under ZeRO-3 and FSDP.

        Args:
            wrapped: the policy as the training loop calls it. models: the policy and, if there is one, the reference.
            padded: TRL's method for log-probs.
            vocabulary: token ids below it are known to model and tokenizer.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = forget_plain_passes(wrapped)
        if self.padding_free:
            # A trace may take another way through the policy. Unwrapped by accelerate, it would lose DDP's `no_sync`.
            called = [wrapped if self.compiled and model is models[0] else model for model in models]
            flaws = [self._flaw(*both, padded, vocabulary, device) for both in zip(called, models, strict=True)]
            flaws = [flaw for flaw in flaws if flaw]
            if ranks.sum(torch.tensor(len(flaws))):  # all ranks pad if one has to
                self.padded_because = next(iter(flaws), "of what another rank found")
        if not self.padding_free and ranks.rank == 0:
            logger.warning(
                f"{self._name}: model passes are padded, not padding-free, because {self.padded_because}. The update "
                "is the same; it takes longer."
            )

    def _flaw(
        self, called: Any, model: Any, padded: Callable[..., Any], vocabulary: int, device: torch.device
    ) -> str | None:
        return packing_flaw(
            partial(packed_log_probs, called, flash=self.flash),
            partial(padded, called),
            model,
            vocabulary=vocabulary,
            device=device,
        )

    def inputs(self, survivors: Survivors, rows: list[int], *, size: int, pad_token_id: int) -> dict[str, Any]:
        """The inputs of a pass over `rows`, and its `layout`, on the CPU; arguments as in `Survivors.micro_batch`."""
        inputs = survivors.micro_batch(rows, size=size, pad_token_id=pad_token_id, trim_prompts=self._trim_prompts)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return {**inputs, "layout": PackedLayout.of(mask, inputs["completion_mask"].shape[1])}

    def run(self, log_probs: Callable[..., tuple], model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple:
        """What the trainer's method for log-probs finds of `inputs`, which are on the device."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self.laid_out(inputs):
            return log_probs(model, ids, mask, inputs["completion_ids"].shape[1], **kwargs)

    @contextmanager
    def laid_out(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Within it, `log_probs` knows the layout of `inputs`, of which TRL hands on the masks only."""
        self._layout = inputs["layout"]
        try:
            yield
        finally:
            self._layout = None

    def log_probs(
        self,
        padded: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """By one pass on real rows and tokens only; arguments and results of TRL's method, which is `padded`."""
        batch = input_ids, attention_mask, logits_to_keep
        if self.padding_free:
            return packed_log_probs(model, *batch, flash=self.flash, layout=self._layout, **kwargs)
        layout = self._layout or PackedLayout.of(attention_mask.cpu(), logits_to_keep)
        real = len(layout.lengths)  # the rows behind them are masked dummies
        *per_token, aux_loss = padded(model, input_ids[:real], attention_mask[:real], logits_to_keep, **kwargs)
        logps, entropies = (
            None if values is None else torch.cat([values, values.new_zeros(len(input_ids) - real, values.shape[1])])
            for values in per_token
        )
        return logps, entropies, aux_loss
