"""Recurrent and convolutional layers in packed passes. Such a layer (a mixer) gets the rows as a padded batch::

    packed row [1, L, ·] ──► rows [R, W, ·], padded on the right ──► mixer ──► packed row [1, L, ·]

A row is a trunk, or a branch after the trunk tokens before it. A mixer is causal, so padding on the right does not
reach the tokens.

In layers with the gated delta rule, only the convolution and the rule get rows: the convolution end to end, without
padding, and the rule in batches of similar lengths. A branch begins with its trunk's last state, so a shared prompt is
computed once.

Letters: L tokens of the packed row, R rows, W tokens of the longest row, C channels.
"""

import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dash_trl.update.trees import Trees, copied, sequences

CHUNK = 64  # tokens that the delta rule computes together
ALIKE = 0.6  # of the longest row in a batch, in chunks; see `_alike`


class Rows:
    """The rows (`sequences`) of a packed pass, as a padded batch. A branch begins with the trunk tokens before it.

    Attributes:
        tokens: [R, W] int64, each row's tokens as indices in the packed row; 0 for padding.
        padding: [R, W] bool, True = padding.
        places: [·] int64, positions in the flattened [R, W] that have each token of the packed row once.
    """

    def __init__(self, found: Sequence[tuple[Tensor, Tensor]], device: torch.device):
        tokens = pad_sequence(list(map(torch.cat, found)), batch_first=True, padding_value=-1)
        starts = [row * tokens.shape[1] + len(prefix) for row, (prefix, _) in enumerate(found)]
        places = [torch.arange(len(own)) + start for start, (_, own) in zip(starts, found, strict=True)]
        self.tokens = copied(tokens.clamp(min=0), device)
        self.padding = copied(tokens < 0, device)
        self.places = copied(torch.cat(places), device)

    def unpack(self, packed: Tensor) -> Tensor:
        """Turn [1, L, …] into [R, W, …]. Padding gets the numbers of the packed row's first token."""
        return packed[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)

    def pack(self, rows: Tensor) -> Tensor:
        """Turn [R, W, …] into [·, …], the results at `places`."""
        return rows.flatten(0, 1).index_select(0, self.places)


@lru_cache(maxsize=8)  # all layers of a pass ask for the same rows
def _rows(trees: Trees, device: torch.device) -> Rows:
    return Rows(sequences(trees), device)


@lru_cache(maxsize=2)
def _end_to_end(trees: Trees, device: torch.device, before: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a packed pass with the last `before` tokens before each row, and the places of each token.

    Index L stands for zeros, before the first token.
    """
    found = sequences(trees)
    zeros = torch.full((before,), sum(map(len, trees)))
    tokens = [torch.cat([torch.cat([zeros, prefix])[len(prefix) :], own]) for prefix, own in found]
    starts = accumulate(map(len, tokens), initial=0)
    places = [torch.arange(start + before, start + len(one)) for start, one in zip(starts, tokens, strict=False)]
    return copied(torch.cat(tokens), device), copied(torch.cat(places), device)


@lru_cache(maxsize=2)
def _batches(trees: Trees, device: torch.device) -> tuple[list[tuple[Rows, Tensor | None]], Tensor]:
    """Return batches of rows with similar lengths, and the order of their tokens.

    With a batch of branches come the places of their trunks' last states among the last states of the batches before.
    """
    found = sequences(trees)
    trunks = [row for row, (prefix, _) in enumerate(found) if not len(prefix)]
    stages: list[Sequence[int]] = [range(len(found))]
    if {before == tree.trunk for tree in trees for before in tree.attach} == {True}:
        # Otherwise there are no branches, or those of V(prefix): a trunk has a state for each of its tokens, but only
        # the last one is kept.
        stages = [trunks, sorted({*range(len(found))}.difference(trunks))]
        found = [(prefix[:0], own) for prefix, own in found]
    batches: list[tuple[Rows, Tensor | None]] = []
    ran: list[int] = []
    for stage in stages:
        for batch in _alike(stage, [-(-(len(prefix) + len(own)) // CHUNK) for prefix, own in found]):
            owners = None
            if stage is not stages[0]:
                owners = copied(torch.tensor([ran.index(trunks[bisect(trunks, row) - 1]) for row in batch]), device)
            batches.append((Rows([found[row] for row in batch], device), owners))
            ran += batch
    return batches, copied(torch.cat([found[row][1] for row in ran]).argsort(), device)


def _alike(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches in which the shortest row has at least the share `ALIKE` of the longest one."""
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batch and lengths[row] < ALIKE * lengths[batch[0]]:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _convolution(
    function: Callable[..., Tensor],
    channels: Tensor,
    weight: Tensor,
    *others: Any,
    trees: Trees | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve [1, C, L] within each row of a packed pass; otherwise call `function`."""
    if trees is None:
        return function(channels, weight, *others, **kwargs)
    tokens, places = _end_to_end(trees, channels.device, weight.shape[-1] - 1)
    rows = nn.functional.pad(channels, (0, 1)).index_select(2, tokens)
    return function(rows, weight, *others, **kwargs).index_select(2, places)


def _delta_rule(
    function: Callable[..., tuple],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    trees: Trees | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule within each tree of a packed pass; otherwise call `function`."""
    if trees is None:
        return function(query, key, value, g=g, beta=beta, **kwargs)
    batches, order = _batches(trees, query.device)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for rows, owners in batches:
        first = None if owners is None else torch.cat(states).index_select(0, owners)
        decay, rate = (rows.unpack(one).masked_fill(rows.padding.unsqueeze(-1), 0) for one in (g, beta))
        own = {"initial_state": first, "output_final_state": True, "cu_seqlens": None}
        # With 0 for both, padding does not change the state.
        found, last = function(*map(rows.unpack, (query, key, value)), g=decay, beta=rate, **kwargs | own)
        outputs.append(rows.pack(found))
        states.append(last)
    return torch.cat(outputs).index_select(0, order).unsqueeze(0), None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


def _note_trees(layer: Any, args: object, kwargs: dict[str, Any]) -> None:
    """Tell a layer's mixers the trees of a pass. The hook also runs when checkpointing computes the layer again."""
    for mixer in layer.children():
        mixer.trees = kwargs.get("trees")


def _unpack(mixer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if mixer.trees is None:
        return None
    states, *others = args or (kwargs.pop("hidden_states"),)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = None
    return (_rows(mixer.trees, states.device).unpack(states), *others), kwargs


def _pack(mixer: Any, args: object, output: Tensor) -> Tensor | None:
    return None if mixer.trees is None else _rows(mixer.trees, output.device).pack(output).unsqueeze(0)


def keep_rows_apart(model: nn.Module) -> None:
    """Let the mixers of a transformers model keep the rows of packed passes apart.

    Modules with a `torch.nn.Conv1d` count as mixers; `packing_flaw` finds others. Mixers without the delta rule get
    hooks, so a pickle of the model can be used only with this package.
    """
    for layer in [*model.modules()]:
        for mixer in layer.children():
            if not any(isinstance(one, nn.Conv1d) for one in mixer.children()):
                continue
            module = sys.modules[type(mixer).__module__]
            if hasattr(module, "torch_chunk_gated_delta_rule"):  # the global functions that its `forward` calls
                for name, apart in FUNCTIONS.items():
                    if not isinstance(getattr(module, name), partial):
                        setattr(module, name, partial(apart, getattr(module, name)))
            elif _pack not in mixer._forward_hooks.values():
                mixer.trees = None  # type: ignore[assignment]
                layer.register_forward_pre_hook(_note_trees, with_kwargs=True)
                mixer.register_forward_pre_hook(_unpack, with_kwargs=True)
                mixer.register_forward_hook(_pack)
