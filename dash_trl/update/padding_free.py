"""Padding-free model passes: the samples of a micro-batch lie end to end in one row, and attention stays within each.

Rows with the same prompt p share it. Its last token is repeated, so that each completion c follows its own predictor::

    packed row   [p_1 … p_(P−1)] [p_P c¹_1 c¹_2 …] [p_P c²_1 …] …     each prompt a trunk, each completion a branch
    positions     0 … P−2         P−1 P P+1 …       P−1 P …

If the model uses FlashAttention, its varlen kernels keep the samples apart; otherwise SDPA does (`tree_attention`).
Both work through transformers' attention interface. In both cases no position is spent on padding, and attention costs
Σ L_i² instead of B · (max L)².

Letters: B rows, P prompt tokens, T completion tokens, L tokens of the packed row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dash_trl.distributed import Ranks
from dash_trl.rollout import Survivors
from dash_trl.update.isolation import SAMPLE_TOKENS, computing_dtype, evaluating, isolation_flaw
from dash_trl.update.trees import TreeShape, flash_arguments, flash_tree_attention, tree_attention
from dash_trl.update.zero3 import forget_plain_passes

logger = logging.getLogger(__name__)

# In tokens; see `ModelPasses.min_shared`. A branch needs attention in two parts and computes the last prompt token
# again. For short prompts that costs more than sharing saves. Speed relative to packing without sharing, groups of 8:
# 0.97 with prompts of 8 tokens, 1.09 and 1.12 with 16, 1.20 and 1.20 with 32
# (`python benchmarks/update_phase.py --prompts 8 16 32`, one thread).
MIN_SHARED = 15
COMMON_PROMPT_TOKENS = 12  # prompt tokens of the rows that test sharing


def plain_causal_attention(model: PreTrainedModel) -> bool:
    """Whether every layer has plain causal attention through transformers' attention interface.

    Sliding windows, linear attention and state-space layers would mix samples in a packed row.

    Args:
        model: a transformers model.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return bool(model._supports_attention_backend) and set(layers) == {"full_attention"} and not windowed


def has_dropout(model: nn.Module) -> bool:
    """Whether a pass in training mode draws random numbers.

    It looks for dropout modules, and for rates that some models keep as a float and pass to a function (OPT's
    `dropout`, Mixtral's `jitter_noise`).

    Args:
        model: any module.
    """
    return any(
        isinstance(module, nn.Dropout)
        and module.p > 0
        or any(
            isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
            for name, value in vars(module).items()
        )
        for module in model.modules()
    )


def enable_padding_free(model: PreTrainedModel) -> str | None:
    """Prepare packed passes of a model, which need plain causal attention on SDPA or FlashAttention.

    Eager and flex attention cannot keep samples apart. The model itself is not changed: with our own attention in its
    config, a pickle of it would need this package. Instead, the function that this process has registered as "sdpa" is
    replaced by one that can handle trees. It remains plain SDPA for all passes without trees.

    Args:
        model: a transformers model.
    Returns:
        The reason why the model cannot run packed passes; `None` if `packing_flaw` should test it.
    """
    if not plain_causal_attention(model):
        return "its attention is not plain causal in every layer"
    attention = model.config.get_text_config()._attn_implementation or ""
    if attention == "sdpa":
        if AttentionInterface()["sdpa"] not in (sdpa_attention_forward, tree_attention):
            return "another function than transformers' is registered as 'sdpa'"
        AttentionInterface.register("sdpa", tree_attention)
    elif "flash" in attention:
        functions = AttentionInterface()
        if attention in functions and not hasattr(functions[attention], "__wrapped__"):
            AttentionInterface.register(attention, flash_tree_attention(functions[attention]))
    else:
        return f"its attn_implementation {attention!r} cannot keep samples apart: use 'sdpa' or 'flash_attention_2'"
    return None


@dataclass(frozen=True)
class PackedLayout:
    """Where the tokens of a padded micro-batch go in the packed row.

    The indices are computed on the CPU, where the masks are. To compute them from a mask on a GPU, the CPU would have
    to wait for the device each time.

    Attributes:
        tokens: [L] int64, the packed tokens as positions in the flattened [B, P + T].
        position_ids: [1, L] int64, position of each token in its row.
        ignored: [1, L] bool, True = the token's log-prob is not needed.
        sources: [K] int64, the K tokens whose log-probs are needed, as positions in the L − 1 outputs of the fused LM
            head.
        targets: [K] int64, the same tokens as positions in the flattened [B, T].
        trees: the trees that the packed row consists of; their tokens add up to L.
        rows: number of rows that have a token.
    """

    tokens: Tensor
    position_ids: Tensor
    ignored: Tensor
    sources: Tensor
    targets: Tensor
    trees: tuple[TreeShape, ...]
    rows: int

    @classmethod
    def of(cls, attention_mask: Tensor, logits_to_keep: int, same_prompt: Tensor | None = None) -> PackedLayout:
        """Build the layout of a padded micro-batch.

        Args:
            attention_mask: [B, P + T], on the CPU.
            logits_to_keep: T; the log-probs of the last T columns are needed.
            same_prompt: [B] bool, True = the row has the same prompt as the row before it and shares it. `None`: no row
                does.
        """
        mask = attention_mask.bool()
        wanted = mask.clone()
        wanted[:, :-logits_to_keep] = False
        positions = mask.long().cumsum(dim=1) - 1
        prompts = (mask & ~wanted).sum(dim=1)
        shared = torch.zeros(len(mask), dtype=torch.bool) if same_prompt is None else same_prompt
        computed = mask & ~(shared.unsqueeze(1) & (positions < prompts.unsqueeze(1) - 1))
        in_row = wanted[computed]  # [L]
        lengths = mask.sum(dim=1).tolist()
        return cls(
            tokens=computed.flatten().nonzero().squeeze(1),
            position_ids=positions[computed].unsqueeze(0),
            ignored=~in_row.unsqueeze(0),
            sources=in_row[1:].nonzero().squeeze(1),
            targets=wanted[:, -logits_to_keep:].flatten().nonzero().squeeze(1),
            trees=tuple(_trees(prompts.tolist(), lengths, shared.tolist())),
            rows=sum(length > 0 for length in lengths),
        )


def _trees(prompts: list[int], lengths: list[int], shared: list[bool]) -> Iterator[TreeShape]:
    """Yield the trees of the rows that have a token. A row that shares its prompt with no other is a tree without
    branches.
    """
    starts = [row for row, length in enumerate(lengths) if length and not shared[row]]
    for first, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        family = [row for row in range(first, end) if lengths[row]]
        if len(family) == 1:
            yield TreeShape(lengths[first])
        else:
            trunk = prompts[first] - 1
            yield TreeShape(trunk, tuple(lengths[row] - trunk for row in family))


def same_prompt(inputs: dict[str, Tensor], min_shared: int) -> Tensor:
    """Return which rows of a micro-batch have the same prompt as the row before, for `PackedLayout.of`.

    Args:
        inputs: the inputs of a pass.
        min_shared: only prompts with more tokens than this count.
    Returns:
        [B] bool.
    """
    real = inputs["prompt_mask"].bool()
    prompts = inputs["prompt_ids"].masked_fill(~real, -1)
    same = (prompts[1:] == prompts[:-1]).all(dim=1) & (real[1:].sum(dim=1) > min_shared)
    return torch.nn.functional.pad(same, (1, 0))


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a tensor or a layout from the CPU to a device; other values are returned as they are.

    To a GPU, the copy goes through page-locked memory, so that the GPU computes meanwhile.

    Args:
        value: a tensor, a `PackedLayout`, or anything else.
        device: the device.
    """
    if isinstance(value, PackedLayout):
        return PackedLayout(**{name: to_device(part, device) for name, part in vars(value).items()})
    if not isinstance(value, Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def pack_inputs(input_ids: Tensor, layout: PackedLayout, *, flash: bool) -> dict[str, Any]:
    """Build the model inputs of one packed row, for TRL's fused LM head.

    Args:
        input_ids: [B, P + T].
        layout: the layout of its mask, on the same device.
        flash: the model runs FlashAttention's varlen kernels.
    Returns:
        `input_ids`, `position_ids`, `labels` ([1, L] each; the label is −100 if the next-token log-prob is not needed),
        and the arguments by which the attention keeps samples apart.
    """
    packed_ids = input_ids.flatten()[layout.tokens].unsqueeze(0)
    inputs: dict[str, Any] = {
        "input_ids": packed_ids,
        "position_ids": layout.position_ids,
        "labels": packed_ids.masked_fill(layout.ignored, -100),
    }
    if flash:
        arguments = flash_arguments(layout.trees)
        inputs |= {name: to_device(value, input_ids.device) for name, value in arguments.items()}
    else:
        # A mask of ones: without a mask, transformers would notice that positions restart and build an L × L mask.
        inputs |= {"attention_mask": torch.ones_like(packed_ids), "trees": layout.trees}
    return inputs


def packed_log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    flash: bool,
    layout: PackedLayout | None = None,
    same_prompt: Tensor | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs, entropies and the MoE auxiliary loss by one packed pass. It replaces TRL's method for
    log-probs.

    Args:
        model: the model.
        input_ids: [B, P + T].
        attention_mask: [B, P + T].
        logits_to_keep: T, the number of completion columns.
        flash: the model runs FlashAttention's varlen kernels.
        layout: the layout of `attention_mask`. `None`: it is built here.
        same_prompt: see `PackedLayout.of`; used if `layout` is `None`.
        compute_entropy: return entropies, too.
        compute_aux_loss: return the MoE auxiliary loss, too.
        ignored: TRL's image arguments, which are `None` for a text model.
    Returns:
        Log-probs [B, T], entropies [B, T] or `None`, and the auxiliary loss or `None`.
    """
    if layout is None:
        layout = to_device(PackedLayout.of(attention_mask.cpu(), logits_to_keep, same_prompt), input_ids.device)
    inputs = pack_inputs(input_ids, layout, flash=flash)
    if compute_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model(**inputs, fused_lm_head=True)

    def unpacked(values: Tensor) -> Tensor:
        """[1, L − 1] → [B, T], 0 for padding. Value i belongs to packed token i + 1, as the fused LM head returns it.

        The result depends on the model's output even if no value is needed, so that a dummy micro-batch has a gradient
        of zeros.
        """
        target = values.new_zeros(len(input_ids) * logits_to_keep)
        target = target.index_copy(0, layout.targets, values[0][layout.sources])
        return target.view(len(input_ids), logits_to_keep)

    return unpacked(outputs.log_probs), unpacked(outputs.entropy) if compute_entropy else None, outputs.aux_loss


def packing_flaw(
    packed: Any, padded: Any, model: Any, *, vocabulary: int, device: torch.device, shared: bool = False
) -> str | None:
    """Test whether a model can run packed passes; see `isolation_flaw`.

    Args:
        packed: (input_ids, attention_mask, logits_to_keep) → (log-probs, …), by packed passes.
        padded: the same by TRL's method.
        model: the model that both call.
        vocabulary: token ids are below this number.
        device: the device of the model.
        shared: the rows have the same prompt, which `packed` computes once.
    Returns:
        The flaw in words; `None` if the model can.
    """

    def log_probs(function: Any, samples: Sequence[Sequence[int]], first: int = 0) -> list[Tensor]:
        # All prompts have the same last token. It is computed in each row, so a row would see a change of it even if it
        # did not see the rest of its prompt.
        common = [*((first + 5 * i) % vocabulary for i in range(COMMON_PROMPT_TOKENS - 1)), 0] * shared
        prompt = len(common) or min(map(len, samples)) // 2  # the same for all, so that no row is padded on its left
        rows = [[*common, *sample] for sample in samples]
        kept = max(map(len, rows)) - prompt
        ids, mask = torch.zeros(2, len(rows), prompt + kept, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
        values = function(ids.to(device), mask.to(device), kept)[0]
        return [found[: len(row) - prompt] for found, row in zip(values, rows, strict=True)]

    with torch.no_grad(), evaluating(model, checkpointing=True):
        return isolation_flaw(
            partial(log_probs, packed),
            partial(log_probs, padded),
            vocabulary=vocabulary,
            dtype=computing_dtype(model),
            others=(partial(log_probs, packed, first=1), partial(log_probs, padded, first=1)) if shared else None,
        )


class ModelPasses:
    """Builds the inputs of passes, and runs the passes for which TRL's method for log-probs is called.

    Args:
        models: transformers models without wrappers and adapters; the policy first, then the reference if there is one.
        virtual_tokens: prompt tuning puts virtual tokens before each prompt. Padding lies between them and the prompt,
            so the width of the padding is part of the input.
        continuous_batching: generation uses paged variants of the attention that the model was loaded with.
        noisy_embeddings: NEFTune adds noise to the embeddings. The longer a row, the smaller the noise.
        compiled: the model is compiled by torch.compile. It traces SDPA sample by sample, so it needs a graph for each
            number of rows in a pass, and gives up after 8 graphs. FlashAttention takes any number of rows in one graph.
        share_prompts: see `DASHConfig`.
        router_losses: the loss has a term over all tokens that the model computes.
    Attributes:
        flash: the policy uses FlashAttention.
        padded_because: the reason why passes are padded. `None`: they are padding-free.
        alone_because: the reason why no row shares its prompt. `None`: rows do.
        compiled: as above.
    """

    def __init__(
        self,
        models: Sequence[Any],
        *,
        virtual_tokens: bool,
        continuous_batching: bool,
        noisy_embeddings: bool,
        compiled: bool,
        share_prompts: bool | None,
        router_losses: bool,
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
        self.alone_because: str | None = None
        if share_prompts is False:
            self.alone_because = "share_prompts=False"
        elif router_losses:
            self.alone_because = "the router's loss counts every token of every row"
        elif any(map(has_dropout, models)):
            self.alone_because = "the model has dropout, which differs from row to row"
        self._least_shared = 1 if share_prompts else MIN_SHARED
        self.compiled = compiled
        self._name = type(models[0]).__name__
        self._trim_prompts = not virtual_tokens
        self._layout: PackedLayout | None = None  # of the running pass; `None`: built from its mask
        self._hook: Any = None

    @property
    def padding_free(self) -> bool:
        """Whether passes are padding-free."""
        return self.padded_because is None

    @property
    def min_shared(self) -> int | None:
        """Rows share a prompt if it has more tokens than this. `None`, if no row shares its prompt."""
        return None if self.padded_because or self.alone_because else self._least_shared

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
        """Test packed passes of the models once they are prepared for training, and warn if passes have to be padded.

        Every rank calls it, because a pass is a collective under ZeRO-3 and FSDP.

        Args:
            wrapped: the policy as the training loop calls it.
            models: the policy and, if there is one, the reference model.
            padded: TRL's method for log-probs.
            vocabulary: model and tokenizer know all token ids below this number.
            device: the device of the models.
            ranks: the ranks of the run.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = forget_plain_passes(wrapped)
        if self.padding_free:
            # Test a compiled policy as the training loop calls it: a trace may take another way through it. If
            # accelerate unwrapped it, it would lose DDP's `no_sync`.
            called = [wrapped if self.compiled and model is models[0] else model for model in models]
            trials = partial(self._flaw, list(zip(called, models, strict=True)), padded, vocabulary, device, ranks)
            self.padded_because = trials(shared=False)
            if self.min_shared is not None:
                self.alone_because = trials(shared=True)
                if self.alone_because and ranks.rank == 0:
                    logger.warning(
                        f"{self._name}: rows with the same prompt do not share it, because {self.alone_because}. The "
                        "update is the same; it takes longer."
                    )
        if not self.padding_free and ranks.rank == 0:
            logger.warning(
                f"{self._name}: model passes are padded, not padding-free, because {self.padded_because}. The update "
                "is the same; it takes longer."
            )

    def _flaw(
        self,
        models: Sequence[tuple[Any, Any]],
        padded: Callable[..., Any],
        vocabulary: int,
        device: torch.device,
        ranks: Ranks,
        *,
        shared: bool,
    ) -> str | None:
        """Return what is wrong with packed passes of one of the models, on any rank; `None` if nothing is.

        Each entry of `models` is (the model as it is called, the model itself).
        """
        same_prompt = torch.tensor([False, *[shared] * (len(SAMPLE_TOKENS) - 1)])
        flaws = [
            packing_flaw(
                partial(packed_log_probs, called, flash=self.flash, same_prompt=same_prompt),
                partial(padded, called),
                model,
                vocabulary=vocabulary,
                device=device,
                shared=shared,
            )
            for called, model in models
        ]
        found = [flaw for flaw in flaws if flaw]
        return next(iter(found), "another rank found a flaw") if ranks.sum(torch.tensor(len(found))) else None

    def inputs(self, survivors: Survivors, rows: list[int], *, size: int, pad_token_id: int) -> dict[str, Any]:
        """Build the inputs of a pass, with its `layout`, on the CPU.

        Args:
            survivors: the rows of a window.
            rows: as in `Survivors.micro_batch`.
            size: as in `Survivors.micro_batch`.
            pad_token_id: as in `Survivors.micro_batch`.
        """
        inputs = survivors.micro_batch(rows, size=size, pad_token_id=pad_token_id, trim_prompts=self._trim_prompts)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        shared = None if self.min_shared is None else same_prompt(inputs, self.min_shared)
        return {**inputs, "layout": PackedLayout.of(mask, inputs["completion_mask"].shape[1], shared)}

    def run(self, log_probs: Callable[..., tuple], model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple:
        """Run a pass over `inputs`.

        Args:
            log_probs: the trainer's method for log-probs.
            model: the model.
            inputs: the inputs of the pass, on the device.
            kwargs: further arguments of `log_probs`.
        Returns:
            What `log_probs` returns.
        """
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self.laid_out(inputs):
            return log_probs(model, ids, mask, inputs["completion_ids"].shape[1], **kwargs)

    @contextmanager
    def laid_out(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Within the context, `log_probs` uses the layout of `inputs`. TRL passes on only the masks.

        Args:
            inputs: the inputs of a pass.
        """
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
        """Run one pass on real rows and tokens only.

        Args:
            padded: TRL's method for log-probs.
            model: as in TRL's method.
            input_ids: as in TRL's method.
            attention_mask: as in TRL's method.
            logits_to_keep: as in TRL's method.
            kwargs: as in TRL's method.
        Returns:
            As TRL's method: log-probs [B, T], entropies [B, T] or `None`, and the auxiliary loss or `None`.
        """
        batch = input_ids, attention_mask, logits_to_keep
        if self.padding_free:
            return packed_log_probs(model, *batch, flash=self.flash, layout=self._layout, **kwargs)
        layout = self._layout or PackedLayout.of(attention_mask.cpu(), logits_to_keep)
        real = layout.rows  # the rows behind them are masked dummies
        *per_token, aux_loss = padded(model, input_ids[:real], attention_mask[:real], logits_to_keep, **kwargs)
        logps, entropies = (
            None if values is None else torch.cat([values, values.new_zeros(len(input_ids) - real, values.shape[1])])
            for values in per_token
        )
        return logps, entropies, aux_loss
