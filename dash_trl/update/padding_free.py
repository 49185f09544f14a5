"""Padding-free model passes: the rows of a micro-batch lie end to end in one packed row, and attend only to themselves.

Rows with the same prompt p share it: the prompt is computed once, except for its last token. This token predicts the
first token of a completion c, so it is computed before each completion::

    packed row   [p_1 … p_(P−1)] [p_P c¹_1 c¹_2 …] [p_P c²_1 …] …     each prompt a trunk, each completion a branch
    positions     0 … P−2         P−1 P P+1 …       P−1 P …

FlashAttention's varlen kernels, or `tree_attention` for SDPA, restrict the attention of each token to its own row.
Attention costs Σ L_i² instead of B · (max L)², where L_i is the length of row i.

Letters: B rows, P prompt tokens, T completion tokens, L tokens of the packed row.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dash_trl.distributed import Ranks
from dash_trl.rollout import RolloutBatch
from dash_trl.update.isolation import SAMPLE_TOKENS, RunPass, packing_flaw, padding_effect
from dash_trl.update.mixers import keep_rows_apart
from dash_trl.update.trees import (
    VARLEN_DTYPES,
    Trees,
    TreeShape,
    copied,
    enable_padding_free,
    first_reason,
    has_dropout,
    no_mask,
    rope_by_width,
    varlen_arguments,
    varlen_flaw,
)
from dash_trl.update.zero3 import forget_plain_passes

logger = logging.getLogger(__name__)

# Number of tokens; see `ModelPasses.min_shared`. Sharing a short prompt saves next to nothing, because a branch
# copies the prompt's keys and computes the last prompt token again. Speed relative to passes without sharing, groups of
# 8: 1.0 to 1.1 with prompts of 8 and 16 tokens, 1.1 with 32
# (`python benchmarks/update_phase.py --prompts 8 16 32`, one thread).
MIN_SHARED = 15


@dataclass(frozen=True)
class PackedLayout:
    """Which tokens of a padded micro-batch form the packed row, and which log-probs of the packed row are needed.

    Build the layout on the CPU, where the masks are, because the CPU would have to wait for a mask on a GPU.

    Attributes:
        tokens: [L] int64, the packed tokens as positions in the flattened [B, P + T].
        position_ids: [1, L] int64, position of each token in its row.
        sources: [K] int64, positions in the packed row of the tokens before the K tokens whose log-probs are needed.
        targets: [K] int64, positions of these log-probs in the flattened [B, T].
        trees: the trees; their tokens add up to L.
        rows: number of rows that have a token.
    """

    tokens: Tensor
    position_ids: Tensor
    sources: Tensor
    targets: Tensor
    trees: Trees
    rows: int

    @classmethod
    def of(cls, attention_mask: Tensor, logits_to_keep: int, same_prompt: Tensor | None = None) -> Self:
        """Build the layout of a padded micro-batch.

        Args:
            attention_mask: [B, P + T], 1 = a token, 0 = padding; on the CPU.
            logits_to_keep: T; the last T columns are completions.
            same_prompt: [B] bool, True = the row shares the previous row's prompt. `None`: no row does.
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
            sources=in_row[1:].nonzero().squeeze(1),
            targets=wanted[:, -logits_to_keep:].flatten().nonzero().squeeze(1),
            trees=tuple(_trees(prompts.tolist(), lengths, shared.tolist())),
            rows=sum(length > 0 for length in lengths),
        )


def _key(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> tuple[int, ...]:
    """Identify tensors and their contents without reading them."""
    return id(input_ids), input_ids._version, id(attention_mask), attention_mask._version, logits_to_keep


def _trees(prompts: list[int], lengths: list[int], shared: list[bool]) -> Iterator[TreeShape]:
    """Yield one tree for the rows that share a prompt, and one for each other row with a token."""
    starts = [row for row, length in enumerate(lengths) if length and not shared[row]]
    for first, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        family = [row for row in range(first, end) if lengths[row]]
        if len(family) == 1:
            yield TreeShape(lengths[first])
        else:
            trunk = prompts[first] - 1
            yield TreeShape(trunk, tuple(lengths[row] - trunk for row in family), (trunk,) * len(family))


def same_prompt(inputs: dict[str, Tensor], min_shared: int) -> Tensor:
    """Return [B] bool, True = the row shares the previous row's prompt, for `PackedLayout.of`.

    Args:
        inputs: the inputs of a pass.
        min_shared: only prompts with more tokens are shared.
    """
    real = inputs["prompt_mask"].bool()
    prompts = inputs["prompt_ids"].masked_fill(~real, -1)
    same = (prompts[1:] == prompts[:-1]).all(dim=1) & (real[1:].sum(dim=1) > min_shared)
    return pad(same, (1, 0))


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a tensor or the tensors of a layout to a device, see `copied`; return any other value unchanged."""
    if isinstance(value, PackedLayout):
        return PackedLayout(**{name: to_device(part, device) for name, part in vars(value).items()})
    return copied(value, device) if isinstance(value, Tensor) else value


def pack_inputs(input_ids: Tensor, layout: PackedLayout, *, flash: bool) -> dict[str, Any]:
    """Build the inputs of a model with TRL's fused LM head from token ids [B, P + T].

    `input_ids` and `position_ids` are [1, L], `shift_labels` is [1, K]. The other inputs tell the attention function
    (FlashAttention if `flash`, otherwise SDPA) how to keep rows apart.
    """
    packed_ids = input_ids.flatten()[layout.tokens].unsqueeze(0)
    inputs = {
        "input_ids": packed_ids,
        "attention_mask": no_mask(packed_ids),
        "position_ids": layout.position_ids,
        "trees": layout.trees,
        "shift_labels": packed_ids.index_select(1, layout.sources + 1),
    }
    if flash or input_ids.device.type in VARLEN_DTYPES:
        inputs |= varlen_arguments(layout.trees, input_ids.device)
    return inputs


@contextmanager
def _scored(model: nn.Module, sources: Tensor) -> Iterator[None]:
    """Give TRL's LM head only the hidden states at `sources`. It would select them by a mask, and wait for a GPU."""

    def select(backbone: object, args: object, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, sources)

    backbone = next(one for one in model.modules() if isinstance(one, PreTrainedModel)).base_model
    with backbone.register_forward_hook(select), patch("trl.trainer.utils._use_triton", _every_position):
        yield


def _every_position(device: torch.device) -> bool:
    """Let TRL's LM head score all positions that it gets. Its kernel is the same."""
    return False


def packed_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    flash: bool,
    layout: PackedLayout | None = None,
    same_prompt: Tensor | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **ignored: object,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs, entropies and the MoE auxiliary loss by one packed pass.

    It replaces TRL's method `_get_per_token_logps_and_entropies`. Arguments that are not listed are as in TRL's method.

    Args:
        input_ids: [B, P + T].
        attention_mask: [B, P + T], 1 = a token, 0 = padding.
        logits_to_keep: T.
        flash: True = FlashAttention, False = SDPA.
        layout: the layout of `attention_mask`. `None`: it is built here.
        same_prompt: see `PackedLayout.of`; only used without `layout`.
        ignored: TRL's image arguments, which are `None` for a text model.
    Returns:
        Log-probs [B, T], entropies [B, T] or `None`, and the auxiliary loss or `None`.
    """
    if layout is None:
        layout = to_device(PackedLayout.of(attention_mask.cpu(), logits_to_keep, same_prompt), input_ids.device)
    options = {"output_router_logits": True} if compute_aux_loss else {}
    with _scored(model, layout.sources):
        outputs = model(**pack_inputs(input_ids, layout, flash=flash), **options, fused_lm_head=True)

    def unpacked(values: Tensor) -> Tensor:
        """Turn [1, K] into [B, T], 0 for padding. `values` is used even if K = 0, so dummy rows have gradients."""
        target = values.new_zeros(len(input_ids) * logits_to_keep).index_copy(0, layout.targets, values[0])
        return target.view(len(input_ids), logits_to_keep)

    return unpacked(outputs.log_probs), unpacked(outputs.entropy) if compute_entropy else None, outputs.aux_loss


class ModelPasses:
    """Decides whether passes are padding-free, builds their inputs, and runs them in place of TRL's method.

    Args:
        models: transformers models without wrappers and adapters; the policy first, then the reference if there is one.
        invoked_adapter: True = an aLoRA adapter is active from its last invocation in a row on. In a packed row,
            earlier samples would run without it.
        continuous_batching: True = generation replaces the model's attention by a paged variant.
        noisy_embeddings: True = NEFTune adds noise to the embeddings.
        compiled: True = torch.compile compiles the model.
        share_prompts: see `DASHConfig`.
        router_losses: True = the loss includes the MoE auxiliary loss, which would count a shared prompt once instead
            of once per row.
    Attributes:
        flash: True = the policy uses FlashAttention.
        padded_because: why passes are padded. `None`: they are padding-free.
        alone_because: why no row shares its prompt. `None`: rows may share prompts.
        full_width: True = passes are as wide as their window, as in TRL, because their width changes their results.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        invoked_adapter: bool,
        continuous_batching: bool,
        noisy_embeddings: bool,
        compiled: bool,
        share_prompts: bool | None,
        router_losses: bool,
    ):
        self.flash = "flash" in (models[0].config.get_text_config()._attn_implementation or "")
        self.full_width = noisy_embeddings or any(map(rope_by_width, models))
        against_packing = {
            "NEFTune's noise depends on the width of a pass": noisy_embeddings,
            "continuous batching brings its own attention": continuous_batching,
            "an aLoRA adapter is active from its last invocation in a row on": invoked_adapter,
        }
        against_sharing = {
            "share_prompts=False": share_prompts is False,
            "the router's loss counts every token of every row": router_losses,
            "the model has dropout, which differs from row to row": any(map(has_dropout, models)),
        }
        obstacles = filter(None, map(enable_padding_free, models))
        self.padded_because = first_reason(against_packing) or next(obstacles, None)
        for model in models if self.padded_because is None else ():
            keep_rows_apart(model)
        self.alone_because = first_reason(against_sharing)
        self._least_shared = 1 if share_prompts else MIN_SHARED
        self.compiled = compiled
        self._name = type(models[0]).__name__
        self._takes_positions = "position_ids" in signature(models[0].forward).parameters
        self._places = False
        # The key of the running pass, and its layout.
        self._running: tuple[tuple[int, ...] | None, PackedLayout | None] = None, None
        self._hook: RemovableHandle | None = None

    @property
    def padding_free(self) -> bool:
        """Whether passes are padding-free."""
        return self.padded_because is None

    @property
    def min_shared(self) -> int | None:
        """Rows share a prompt if it has more tokens than this number. `None`: no row shares its prompt."""
        return None if self.padded_because or self.alone_because else self._least_shared

    def prepare(
        self,
        wrapped: nn.Module,
        models: Sequence[PreTrainedModel],
        padded: RunPass,
        *,
        vocabulary: int,
        pad_token_id: int,
        device: torch.device,
        ranks: Ranks,
        gradients: bool,
    ) -> None:
        """Test passes of the models; warn if passes must be padded, or if the test of shared prompts fails.

        Call it on every rank, because a pass is a collective under ZeRO-3 and FSDP, and after the models are prepared
        for training.

        Args:
            wrapped: the policy with the training loop's wrappers.
            models: the policy and the reference model, if there is one, without these wrappers.
            padded: TRL's method for log-probs.
            vocabulary: upper bound of token ids that the model and the tokenizer have.
            gradients: True = test the policy's gradients, too. Pass False under ZeRO-3 and FSDP, where a backward pass
                is a collective.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = forget_plain_passes(wrapped)
        if not self.full_width:
            placed = self._placed(padded) if self._takes_positions else padded
            effects = [
                padding_effect(
                    partial(padded, model),
                    partial(placed, model),
                    model,
                    vocabulary=vocabulary,
                    pad_token_id=pad_token_id,
                    device=device,
                )
                for model in models
            ]
            effect = ranks.largest(max(effects))
            self._places = effect == 1
            if effect == 2:
                self.full_width = True
                self.padded_because = "padding before a prompt changes its results"
        if self.padding_free and not self.flash:
            if device.type in VARLEN_DTYPES:
                self.padded_because = next(filter(None, (varlen_flaw(model, device) for model in models)), None)
            elif self.compiled:
                self.padded_because = "torch.compile would trace packed SDPA anew for each number of rows on a CPU"
        if self.padding_free:
            # A compiled policy is tested as the training loop calls it, because its compiled code may differ from the
            # model's own code. It is not unwrapped, because accelerate's unwrapping would remove DDP's `no_sync`.
            called = [wrapped if self.compiled and model is models[0] else model for model in models]

            def flaw(shared: bool) -> str | None:
                """Return a flaw that any rank finds in packed passes, with or without a shared prompt."""
                same_prompt = torch.tensor([False, *[shared] * (len(SAMPLE_TOKENS) - 1)])
                flaws = [
                    packing_flaw(
                        partial(packed_log_probs, one, flash=self.flash, same_prompt=same_prompt),
                        partial(padded, one),
                        model,
                        vocabulary=vocabulary,
                        device=device,
                        shared=shared,
                        # DDP, which a compiled policy may be called with, would wait for gradients of parameters.
                        gradients=gradients and not self.compiled and model is models[0],
                    )
                    for one, model in zip(called, models, strict=True)
                ]
                found = ranks.sum(torch.tensor(len(flaws) - flaws.count(None)))
                return next(filter(None, flaws), "another rank found a flaw") if found else None

            self.padded_because = flaw(shared=False)
            if self.min_shared is not None:
                self.alone_because = flaw(shared=True)
                if self.alone_because and ranks.rank == 0:
                    logger.warning(
                        f"{self._name}: rows with the same prompt do not share it, because {self.alone_because}. The "
                        "update is the same, but it takes longer."
                    )
        if not self.padding_free and ranks.rank == 0:
            logger.warning(
                f"{self._name}: model passes are padded, not padding-free, because {self.padded_because}. The update "
                "is the same, but it takes longer."
            )

    def inputs(self, survivors: RolloutBatch, rows: list[int], *, size: int, pad_token_id: int) -> dict[str, Any]:
        """Build a pass's inputs on the CPU (see `RolloutBatch.micro_batch`), with its `PackedLayout` as `layout`."""
        inputs = survivors.micro_batch(rows, size=size, pad_token_id=pad_token_id, trimmed=not self.full_width)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        shared = None if self.min_shared is None else same_prompt(inputs, self.min_shared)
        return {**inputs, "layout": PackedLayout.of(mask, inputs["completion_mask"].shape[1], shared)}

    def run(self, log_probs: RunPass, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> tuple:
        """Run a pass over `inputs` by `log_probs`, the trainer's method, and return its result."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        # No argument of `log_probs`, which may be a user's override of TRL's method, and may change the tensors.
        self._running = _key(ids, mask, width), inputs["layout"]
        try:
            return log_probs(model, ids, mask, width, **kwargs)
        finally:
            self._running = None, None

    def padded(self, log_probs: RunPass) -> RunPass:
        """Return `log_probs`, TRL's method, with position ids if padding before a prompt would shift positions."""
        return self._placed(log_probs) if self._places else log_probs

    def _placed(self, log_probs: RunPass) -> RunPass:
        def run(model: nn.Module, *batch: Any, **kwargs: Any) -> tuple:
            def placed(*, attention_mask: Tensor, **others: Any) -> Any:
                positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
                return model(attention_mask=attention_mask, position_ids=positions, **others)

            return log_probs(placed, *batch, **kwargs)

        return run

    def log_probs(
        self,
        padded: RunPass,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Compute log-probs by a packed pass if passes are padding-free, otherwise by a padded pass without dummy rows.

        `padded` is the result of `self.padded`; everything else is as in TRL's method.
        """
        key, layout = self._running
        if layout is None or key != _key(input_ids, attention_mask, logits_to_keep):  # a layout belongs to its mask
            if (
                not attention_mask.any()
            ):  # only dummy rows, of an override; the LM head needs a position to predict from
                attention_mask = attention_mask.clone()
                attention_mask[0, :2] = 1
            layout = to_device(PackedLayout.of(attention_mask.cpu(), logits_to_keep), input_ids.device)
        if self.padding_free:
            batch = input_ids, attention_mask, logits_to_keep
            return packed_log_probs(model, *batch, flash=self.flash, layout=layout, **kwargs)
        real = layout.rows  # the rows after the first `real` are dummy rows without tokens
        *per_token, aux_loss = padded(model, input_ids[:real], attention_mask[:real], logits_to_keep, **kwargs)
        logps, entropies = (
            None if values is None else pad(values, (0, 0, 0, len(input_ids) - real)) for values in per_token
        )
        return logps, entropies, aux_loss
