"""Attention over trees. A tree is a trunk and branches that continue the trunk; each token is computed once::

    packed row   [ trunk tokens ………………………… | branch 1 | branch 2 | … ][ next tree … ]
                        ▲ attach 1    ▲ attach 2

A token of a branch attends to the trunk tokens before the position where the branch attaches, and to its own branch up
to itself. A sequence that shares no token is a tree without branches.

On a GPU, one call of a varlen kernel computes a layer (`varlen_arguments`). On a CPU, `tree_attention` computes the
trunks and branches one after the other.

Letters: H heads, L tokens of the packed row, D head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dash_trl.update.isolation import computing_dtype

# Type of device → dtypes in which PyTorch's `varlen_attn` computes the attention of models with SDPA there.
VARLEN_DTYPES: dict[str, tuple[torch.dtype, ...]] = {"cuda": (torch.float16, torch.bfloat16)}

# Types of layers (transformers' names) in which rows can be kept apart: causal attention, with a window or without, and
# layers with a state (`dash_trl.update.mixers`).
PACKABLE_LAYERS = {
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "moe",
}


@dataclass(frozen=True)
class TreeShape:
    """The numbers of tokens of a tree, and where its branches attach.

    Attributes:
        trunk: number of trunk tokens.
        branches: number of tokens of each branch.
        attach: number of trunk tokens before each branch.
    """

    trunk: int
    branches: tuple[int, ...] = ()
    attach: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.trunk + sum(self.branches)


Trees = tuple[TreeShape, ...]  # of a packed row


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    trees: Trees = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute SDPA within each tree of a packed row. Without trees, call transformers' own function for SDPA.

    Args:
        module: the attention module.
        query: [1, H, L, D].
        key: [1, ·, L, D]; it may have fewer heads than `query` (GQA).
        value: [1, ·, L, D], with the heads of `key`.
        attention_mask: with trees, `None` or the mask of `no_mask`.
        trees: the trees; their tokens add up to L. Empty outside packed passes.
        kwargs: as in transformers' function. With `varlen_arguments`, `varlen_attn` computes all trees.
    Returns:
        [1, L, H, D], and `None` in place of attention weights.
    Raises:
        ValueError: if there are trees and a model's own mask (Doge), which would be ignored.
    """
    by_varlen = "cu_seq_lens_q" in kwargs  # does not read `trees`: torch.compile needs no graph for each number of them
    if not by_varlen and not trees:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    refuse_own_mask(module, attention_mask)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # it converts the inputs of SDPA, but not those of other kernels, and masks
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    if by_varlen:
        return _by_varlen(query, key, value, **kwargs), None
    lengths = [len(tree) for tree in trees]
    parts = zip(trees, *(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([output for part in parts for output in _of_tree(module, *part, **kwargs)], dim=1), None


def no_mask(input_ids: Tensor) -> Tensor:
    """Return the attention mask of a packed pass: [1, 1, 1, L] int64, ones, which packed passes ignore.

    Transformers leaves a mask of four dimensions as it is. It would read a mask of two, and the CPU would wait for the
    GPU. Without a mask, it would notice that positions restart, and build an L × L mask. SDPA refuses integers, so a
    layer that loses the trees of its pass raises an error.
    """
    return torch.ones_like(input_ids)[None, None]


def refuse_own_mask(module: nn.Module, attention_mask: Tensor | None) -> None:
    """Raise a `ValueError` if a packed pass has another mask than that of `no_mask`."""
    if attention_mask is not None and attention_mask.dtype != torch.int64:
        raise ValueError(f"{type(module).__name__} has an attention mask of its own, which packed passes would ignore.")


def _by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    key_tokens: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **ignored: object,
) -> Tensor:
    """Compute `tree_attention` by one call of PyTorch's `varlen_attn`, whose causal mask is lower-right."""
    if dropout:
        raise ValueError(f"dropout={dropout}: PyTorch's varlen_attn has no dropout. Set it to 0 in the model's config.")
    query, key, value = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))  # [L, ·, D]
    if key_tokens is not None:
        key = key.index_select(0, key_tokens)
        value = value.index_select(0, key_tokens)
    sequences = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    kernel: Any = varlen.varlen_attn
    # torch 2.11 has no such argument, and takes fewer heads of keys all the same.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}
    return kernel(query, key, value, *sequences, scale=scaling, window_size=window, **grouped).unsqueeze(0)


def _of_tree(
    module: nn.Module,
    tree: TreeShape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Iterator[Tensor]:
    """Yield the outputs of the trunk and of each branch, [1, ·, H, D]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention of the last tokens of a row: `query` may have fewer tokens than `key`."""
        length = query.shape[2]
        keys = key.shape[2]
        mask = None
        if length < keys or sliding_window is not None and sliding_window < keys:  # SDPA has causal kernels without one
            mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
            if sliding_window is not None:
                mask = mask.triu(keys - length - sliding_window + 1)
            mask = mask[None, None]  # transformers 5.23 and newer take no other
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]

    lengths = [tree.trunk, *tree.branches]
    trunk, *branches = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    yield attend(*trunk)
    for before, branch in zip(tree.attach, branches, strict=True):
        first = 0 if sliding_window is None else max(0, before - sliding_window + 1)
        row = [torch.cat([one[:, :, first:before], own], dim=2) for one, own in zip(trunk, branch, strict=True)]
        if sliding_window is None and before < branch[0].shape[2]:  # causal attention of the whole row takes less
            yield attend(*row)[:, before:]
        else:
            yield attend(branch[0], *row[1:])


def flash_tree_attention(attention: Callable[..., tuple]) -> Callable[..., tuple]:
    """Extend transformers' FlashAttention function to trees, where a branch has fewer queries than keys."""

    @wraps(attention)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        key_tokens: Tensor | None = None,
        trees: object = None,
        **kwargs: Any,
    ) -> tuple:
        if "cu_seq_lens_q" in kwargs:
            refuse_own_mask(module, attention_mask)
            attention_mask = None
            kwargs.pop("position_ids", None)  # each layer would look in them for packed rows
        if key_tokens is not None:
            key = key.index_select(2, key_tokens)
            value = value.index_select(2, key_tokens)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def sequences(trees: Sequence[TreeShape]) -> list[tuple[Tensor, Tensor]]:
    """Return each trunk and each branch as indices in the packed row: the tokens before it, and its own tokens."""
    found = []
    start = 0
    for tree in trees:
        trunk, *branches = torch.arange(start, start + len(tree)).split([tree.trunk, *tree.branches])
        found.append((trunk[:0], trunk))
        found += [(trunk[:before], branch) for before, branch in zip(tree.attach, branches, strict=True)]
        start += len(tree)
    return found


def varlen_arguments(trees: Sequence[TreeShape], device: torch.device) -> dict[str, Any]:
    """Return the arguments with which varlen kernels compute the attention of the trees, under transformers' names.

    Each trunk and each branch is a sequence. The keys of a branch are the trunk tokens before it and its own tokens;
    `key_tokens` has their indices, if there are branches. Tensors are made on the CPU, so nothing waits for a GPU.
    """
    found = sequences(trees)
    key_tokens = [*map(torch.cat, found)]
    queries = [len(own) for _, own in found]
    keys = [*map(len, key_tokens)]
    arguments: dict[str, Any] = {"max_length_q": max(queries), "max_length_k": max(keys)}
    for name, lengths in (("cu_seq_lens_q", queries), ("cu_seq_lens_k", keys)):
        arguments[name] = copied(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    if keys != queries:
        arguments["key_tokens"] = copied(torch.cat(key_tokens), device)
    return arguments


def copied(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU from page-locked memory, so that the GPU computes meanwhile."""
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Return why rows of a model cannot be packed together. `None`: nothing is known against it."""
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if others := sorted({*layers} - PACKABLE_LAYERS):
        return f"it has layers of the type {others[0]}"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return rope_by_width(model)


def rope_by_width(model: nn.Module) -> str | None:
    """Return why a model's RoPE depends on the longest position of a pass. `None`: it does not."""
    types = (str(getattr(module, "rope_type", "")) for module in model.modules())  # a dict if layers differ
    found = next((one for one in types if "dynamic" in one or "longrope" in one), None)
    return found and f"its RoPE ({found}) depends on the longest position of a pass"


def forget_longest(model: nn.Module) -> None:
    """Let the next pass compute dynamic RoPE from its own positions, not from earlier ones."""
    for module in model.modules():
        for name in vars(module):
            if name.endswith("max_seq_len_cached"):
                setattr(module, name, 0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a pass in training mode draws random numbers.

    Some modules have no `nn.Dropout`, but a rate that they pass to a function (OPT's `dropout`, Mixtral's
    `jitter_noise`). So a float attribute above 0 with "drop" or "jitter" in its name counts as dropout, too.
    """
    return any(map(_draws, model.modules()))


def _draws(module: nn.Module) -> bool:
    """Whether a module itself, without its children, has dropout."""
    return (
        isinstance(module, nn.Dropout)
        and module.p > 0
        or any(
            isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
            for name, value in vars(module).items()
        )
    )


def varlen_flaw(model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why PyTorch's `varlen_attn` cannot compute the attention of a model with SDPA. `None`: it can."""
    config = model.config.get_text_config()
    dtype = computing_dtype(model)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ampere = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    reasons = {
        f"SDPA has no varlen kernel for {dtype} on {device.type} (use bf16=True)": dtype
        not in VARLEN_DTYPES.get(device.type, ()),
        "SDPA's varlen kernel needs a GPU of the Ampere generation or newer": not ampere,
        f"SDPA's varlen kernel needs heads of at most 256 numbers, a multiple of 8, not {size}": size > 256 or size % 8,
        "SDPA's varlen kernel needs values of the keys' size": getattr(config, "v_head_dim", size) != size,
        "SDPA's varlen kernel has no dropout": any(
            _draws(part) for one in model.modules() if hasattr(one, "is_causal") for part in (one, *one.children())
        ),
    }
    return first_reason(reasons)


def first_reason(reasons: Mapping[str, object]) -> str | None:
    """Return the first reason that holds, or `None`."""
    return next((why for why, holds in reasons.items() if holds), None)


def enable_padding_free(model: PreTrainedModel) -> str | None:
    """Register an attention function with which a model can run packed passes, or return why it cannot.

    The model must have plain causal attention with SDPA or FlashAttention; eager and flex attention cannot keep rows
    apart. The new function replaces the one registered under the name of the model's attention ("sdpa", …). A new name
    would be in the model's config, and a pickle of the model could be used only with this package.

    If the result is `None`, `packing_flaw` still has to test the model.
    """
    if (obstacle := packing_obstacle(model)) is not None:
        return obstacle
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
        return f"its attn_implementation {attention!r} cannot keep rows apart: use 'sdpa' or 'flash_attention_2'"
    return None
