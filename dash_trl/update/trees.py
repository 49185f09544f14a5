"""Attention over trees. A tree is a trunk and branches that continue the trunk; each token is computed once::

    packed row   [ trunk tokens ………………………… | branch 1 | branch 2 | … ][ next tree … ]
                        ▲ attach 1    ▲ attach 2

A token of the trunk attends to the trunk up to itself. A token of a branch attends to the trunk tokens before the
position where the branch attaches, and to the tokens of its own branch up to itself. A sequence that shares no token
with another one is a tree without branches.

Letters: H heads, L tokens of the packed row, D head size, Q branch tokens of a tree, P tokens of its trunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

flash_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
flash_cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
PADDED_TOKENS = 256  # sequences of at most so many tokens may share a batch, however different their lengths are


@dataclass(frozen=True)
class TreeShape:
    """The numbers of tokens of a tree, and which tokens attend to which.

    Attributes:
        trunk: number of trunk tokens.
        branches: number of tokens of each branch.
        mask: [1, 1, Q, P + Q] bool, True = the branch token attends to the token of the tree. `None`: all branches
            attach at the end of the trunk.
    """

    trunk: int
    branches: tuple[int, ...] = ()
    mask: Tensor | None = None

    def __len__(self) -> int:
        return self.trunk + sum(self.branches)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    trees: tuple[TreeShape, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute SDPA within each tree of a packed row. Without trees, call transformers' own function for SDPA.

    Args:
        module: the attention module.
        query: [1, H, L, D].
        key: [1, ·, L, D]; it may have fewer heads than `query` (GQA).
        value: [1, ·, L, D]; it may have fewer heads, too.
        attention_mask: must be `None` if there are trees. Some models (Doge) build a mask of their own, which this
            function would ignore.
        trees: the trees; their tokens add up to L. `None` outside packed passes (generation, evaluation).
        kwargs: further arguments of transformers' SDPA.
    Returns:
        [1, L, H, D], and `None` in place of attention weights.
    Raises:
        ValueError: if there are both trees and a mask.
    """
    if trees is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} has an attention mask of its own, which packed passes would ignore.")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # autocast converts the inputs of SDPA, but not those of `flash_cpu` and masks
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    if not _has_cpu_kernel(query, value) and all(tree.mask is None for tree in trees):
        return batched_attention(module, query, key, value, trees, **kwargs), None
    lengths = [len(tree) for tree in trees]
    parts = zip(trees, *(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    outputs = [output for part in parts for output in _of_tree(module, *part, **kwargs)]
    return torch.cat(outputs, dim=1), None


def _has_cpu_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash kernel for the CPU can compute the attention."""
    known = flash_cpu is not None and query.dtype in (torch.float32, torch.bfloat16)
    return known and query.device.type == "cpu" and query.shape[3] == value.shape[3]


def _of_tree(
    module: nn.Module, tree: TreeShape, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
) -> list[Tensor]:
    """Return the outputs of the trunk and of the branches, [1, ·, H, D] each."""
    if not tree.branches:
        return [sdpa_attention_forward(module, query, key, value, None, **kwargs)[0]]
    trunk, states = tree.trunk, (query, key, value)
    output = sdpa_attention_forward(module, *(one[:, :, :trunk] for one in states), None, **kwargs)[0]
    if tree.mask is not None:
        return [output, sdpa_attention_forward(module, query[:, :, trunk:], key, value, tree.mask, **kwargs)[0]]
    scale = kwargs.get("scaling") or query.shape[3] ** -0.5
    return [output, _BranchAttention.apply(query[:, :, trunk:], key, value, tree.branches, scale).transpose(1, 2)]


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences whose attention is computed by one call of SDPA; Q tokens each, after P tokens that they continue.

    A trunk continues nothing, a branch continues its trunk. A shorter sequence is padded by its last token: later
    tokens are not seen, and the outputs of padding are not used.

    Attributes:
        queries: [n, Q] int64, the tokens as positions in the packed row.
        keys: [n, P + Q] int64, the tokens that they continue, and then the tokens themselves; `queries` if P is 0.
    """

    queries: Tensor
    keys: Tensor


class _Sequence(NamedTuple):
    """A trunk or a branch: P, its length, and where the trunk and the sequence start in the packed row."""

    continued: int
    length: int
    trunk: int
    start: int


@lru_cache(maxsize=2)  # each layer asks for the same
@torch.inference_mode(False)  # else a training pass could not use what an evaluation has cached
def attention_batches(trees: tuple[TreeShape, ...], device: torch.device) -> tuple[tuple[AttentionBatch, ...], Tensor]:
    """Divide the trunks and branches of a packed row into few batches.

    A sequence of more than `PADDED_TOKENS` tokens is padded by at most a third. The keys of a batch, padding included,
    are at most twice the tokens of the packed row, so that the memory of a batch has a bound.

    Args:
        trees: the trees, without masks.
        device: device of the tensors.
    Returns:
        The batches, and [L] int64: the positions of the packed tokens in the outputs of all batches, end to end.
    """
    sequences, end = [], 0
    for tree in trees:
        trunk = end
        sequences.append(_Sequence(0, tree.trunk, trunk, trunk))
        end += tree.trunk
        for length in tree.branches:
            sequences.append(_Sequence(tree.trunk, length, trunk, end))
            end += length
    buckets: list[list[_Sequence]] = []
    for one in sorted(sequences, reverse=True):
        longest = buckets[-1][0] if buckets else None
        fits = longest and (len(buckets[-1]) + 1) * (longest.continued + longest.length) <= 2 * end
        close = longest and (one.length >= 0.75 * longest.length or longest.length <= PADDED_TOKENS)
        if longest and one.continued == longest.continued and fits and close:
            buckets[-1].append(one)
        else:
            buckets.append([one])
    batches, outputs, restored = [], 0, torch.empty(end, dtype=torch.long)
    for bucket in buckets:
        _, lengths, trunks, starts = (column.unsqueeze(1) for column in torch.tensor(bucket).unbind(1))  # [n, 1] each
        steps = torch.arange(bucket[0].length)
        real = steps < lengths
        queries = starts + torch.minimum(steps, lengths - 1)
        keys = torch.cat([trunks + torch.arange(bucket[0].continued), queries], dim=1)
        own = copied(queries, device)
        batches.append(AttentionBatch(own, copied(keys, device) if bucket[0].continued else own))
        restored[queries[real]] = outputs + real.flatten().nonzero().squeeze(1)
        outputs += real.numel()
    return tuple(batches), copied(restored, device)


def copied(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device.

    A copy from the CPU to a GPU goes through page-locked memory, so that the GPU can compute during the copy.
    """
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def batched_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, trees: tuple[TreeShape, ...], **kwargs: Any
) -> Tensor:
    """Compute `tree_attention` for trees without masks by one call of SDPA per `AttentionBatch`.

    One call per trunk and branch would start many kernels, and on a GPU, to start a small kernel can take longer than
    its work. The mask of branches is PyTorch's `causal_lower_right`, which GPU kernels support. The backward pass makes
    the copies of keys and values that branches share again, so that none are kept.

    Args:
        module: see `tree_attention`.
        query: see `tree_attention`.
        key: see `tree_attention`.
        value: see `tree_attention`.
        trees: see `tree_attention`.
        kwargs: see `tree_attention`.
    Returns:
        [1, L, H, D].
    """
    batches, restored = attention_batches(trees, query.device)

    def taken(states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states of tokens [n, K], as [n, H, K, D]."""
        return states.squeeze(0).index_select(1, tokens.flatten()).unflatten(1, tokens.shape).transpose(0, 1)

    def of_trunks(batch: AttentionBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (taken(one, batch.keys) for one in (key, value))
        output, _ = sdpa_attention_forward(module, taken(query, batch.queries), keys, values, None, **kwargs)
        return output.flatten(0, 1)

    def of_branches(batch: AttentionBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (repeat_kv(taken(one, batch.keys), query.shape[1] // key.shape[1]) for one in (key, value))
        mask: Any = causal_lower_right(batch.queries.shape[1], batch.keys.shape[1])
        own, scale = taken(query, batch.queries), kwargs.get("scaling")
        output = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
        return output.transpose(1, 2).flatten(0, 1)

    outputs, states = [], (query, key, value)
    for batch in batches:
        if batch.keys is batch.queries:
            outputs.append(of_trunks(batch, *states))
        else:  # the states are arguments: a checkpoint of the whole layer could not free those in a closure
            outputs.append(checkpoint(of_branches, batch, *states, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs).index_select(0, restored).unsqueeze(0)


class _BranchAttention(torch.autograd.Function):
    """Computes the attention of branches with PyTorch's flash kernel for the CPU, which has no lower-right causal mask.

    The kernel is called once for the attention of all branch tokens to the trunk (without a mask), and once per branch
    for the attention of its tokens to each other (causal). The arguments of a call are a block. A branch token is in
    two blocks, so it gets two outputs, each with the log-sum-exp of its scores. The result is the weighted sum of the
    two outputs; the two log-sum-exps determine the weights. In the backward pass, the kernel is called once per block.
    It is given the output and the log-sum-exp of the result, not those of the block, and returns the block's
    contribution to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, branches: tuple[int, ...], scale: float) -> Tensor:
        blocks = _blocks(query, key, value, branches)
        (trunk, weight), *own = (flash_cpu(*block, 0.0, causal, scale=scale) for *block, causal in blocks)
        own_outputs, own_weights = (torch.cat(one, dim=2) for one in zip(*own, strict=True))
        total = torch.logaddexp(weight, own_weights)
        output = trunk * (weight - total).exp().unsqueeze(3) + own_outputs * (own_weights - total).exp().unsqueeze(3)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.branches, ctx.scale = branches, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, output, total = ctx.saved_tensors
        blocks = _blocks(query, key, value, ctx.branches)
        lengths = list(ctx.branches)
        of_blocks = zip(*([one, *one.split(lengths, dim=2)] for one in (gradient, output, total)), strict=True)
        (of_query, *of_trunk), *own = (
            flash_cpu_backward(of, *states, out, weight, 0.0, causal, scale=ctx.scale)
            for (*states, causal), (of, out, weight) in zip(blocks, of_blocks, strict=True)
        )
        of_own_query, *of_own = (torch.cat(one, dim=2) for one in zip(*own, strict=True))
        of_key, of_value = (torch.cat(both, dim=2) for both in zip(of_trunk, of_own, strict=True))
        return of_query + of_own_query, of_key, of_value, None, None


def _blocks(query: Tensor, key: Tensor, value: Tensor, branches: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return the blocks of `_BranchAttention`: all branches against the trunk, then each branch against itself.

    Each block is a tuple (query, key, value, bool), where True = causal.
    """
    trunk, lengths = key.shape[2] - query.shape[2], list(branches)
    own = (query.split(lengths, dim=2), *(one[:, :, trunk:].split(lengths, dim=2) for one in (key, value)))
    return [
        (query, key[:, :, :trunk], value[:, :, :trunk], False),
        *((*states, True) for states in zip(*own, strict=True)),
    ]


def flash_tree_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Extend transformers' FlashAttention function to trees, where a branch has fewer queries than keys.

    FlashAttention's varlen kernels have a lower-right causal mask. So each branch is passed as a sequence: its queries
    are the tokens of the branch, its keys are the tokens of the trunk and of the branch. `flash_arguments` returns the
    indices of the keys as `key_tokens`.

    Args:
        attention: the function that transformers has registered.
    Returns:
        A function with the additional argument `key_tokens`. Without this argument, it does what `attention` does.
    """

    @wraps(attention)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        key_tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if key_tokens is not None:
            key, value = key.index_select(2, key_tokens), value.index_select(2, key_tokens)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def flash_arguments(trees: tuple[TreeShape, ...]) -> dict[str, Any]:
    """Return the arguments with which FlashAttention's varlen kernels compute the attention of the trees.

    Args:
        trees: the trees of a packed row.
    Returns:
        Name of the argument → value, with tensors on the CPU. `key_tokens` is included if a tree has branches.
    """
    queries: list[int] = []
    keys: list[int] = []
    key_tokens: list[Tensor] = []
    start = 0
    for tree in trees:
        trunk, *branches = torch.arange(start, start + len(tree)).split([tree.trunk, *tree.branches])
        of_tree = [trunk, *(torch.cat([trunk, branch]) for branch in branches)]
        queries += [tree.trunk, *tree.branches]
        keys += map(len, of_tree)
        key_tokens += of_tree
        start += len(tree)
    arguments: dict[str, Any] = {"max_length_q": max(queries), "max_length_k": max(keys)}
    for name, lengths in (("cu_seq_lens_q", queries), ("cu_seq_lens_k", keys)):
        arguments[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    if keys != queries:
        arguments["key_tokens"] = torch.cat(key_tokens)
    return arguments
