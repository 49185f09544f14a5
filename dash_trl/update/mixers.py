"""Recurrent and convolutional layers in packed passes. Such a layer (a mixer) gets the rows as a padded batch::

    packed row [1, L, ·] ──► rows [R, W, ·], padded on the right ──► mixer ──► packed row [1, L, ·]

A row is a trunk, or a branch after the trunk tokens before it. A mixer is causal, so padding on the right does not
reach the tokens.

In layers with the gated delta rule, only the convolution and the rule get rows. A branch begins with its trunk's last
state, so a shared prompt is computed once.

Letters: L tokens of the packed row, R rows, W tokens of the longest row, C channels.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dash_trl.update.trees import TreeShape, copied, sequences


@dataclass(frozen=True)
class Rows:
    """The rows of a packed pass, as a padded batch.

    Attributes:
        tokens: [R, W] int64, each row's tokens as indices in the packed row; 0 for padding.
        padding: [R, W] bool, True = padding.
        places: [·] int64, positions in the flattened [R, W] that have each token of the packed row once.
    """

    tokens: Tensor
    padding: Tensor
    places: Tensor

    @classmethod
    def of(cls, found: Sequence[tuple[Tensor, Tensor]], device: torch.device, before: int | None = None) -> "Rows":
        """Build rows from `sequences`. A branch begins with its last `before` trunk tokens (`None`: with all)."""
        prefixes = [one if before is None else one[max(0, len(one) - before) :] for one, _ in found]
        tokens = pad_sequence(
            [torch.cat([prefix, own]) for prefix, (_, own) in zip(prefixes, found, strict=True)],
            batch_first=True,
            padding_value=-1,
        )
        starts = [row * tokens.shape[1] + len(prefix) for row, prefix in enumerate(prefixes)]
        places = [torch.arange(len(own)) + start for start, (_, own) in zip(starts, found, strict=True)]
        tables = tokens.clamp(min=0), tokens < 0, torch.cat(places)
        return cls(*(copied(one, device) for one in tables))

    def unpack(self, packed: Tensor) -> Tensor:
        """Turn [1, L, …] into [R, W, …]. Padding gets the numbers of the packed row's first token."""
        return packed[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)

    def pack(self, rows: Tensor) -> Tensor:
        """Turn [R, W, …] into [·, …], the results at `places`."""
        return rows.flatten(0, 1).index_select(0, self.places)


@lru_cache(maxsize=8)  # all layers of a pass ask for the same rows
def _rows(trees: tuple[TreeShape, ...], device: torch.device, before: int | None = None) -> Rows:
    return Rows.of(sequences(trees), device, before)


@lru_cache(maxsize=2)
def _trunks_and_branches(trees: tuple[TreeShape, ...], device: torch.device) -> tuple[Rows, Rows, Tensor, Tensor]:
    """Return trunks, branches without trunk tokens, each branch's trunk, and the order of their tokens."""
    trunks: list[tuple[Tensor, Tensor]] = []
    branches: list[tuple[Tensor, Tensor]] = []
    owners = []
    for before, own in sequences(trees):
        if len(before):
            owners.append(len(trunks) - 1)
        (branches if len(before) else trunks).append((own[:0], own))
    order = torch.cat([own for _, own in trunks + branches]).argsort()
    both = Rows.of(trunks, device), Rows.of(branches, device)
    return *both, copied(torch.tensor(owners), device), copied(order, device)


def _convolution(
    function: Any, channels: Tensor, weight: Tensor, *others: Any, trees: Any = None, **kwargs: Any
) -> Tensor:
    """Convolve [1, C, L] within each row of a packed pass; otherwise call `function`."""
    if trees is None:
        return function(channels, weight, *others, **kwargs)
    rows = _rows(trees, channels.device, weight.shape[-1] - 1)
    found = function(rows.unpack(channels.mT).mT, weight, *others, **kwargs)
    return rows.pack(found.mT).mT.unsqueeze(0)


def _delta_rule(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    trees: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule within each tree of a packed pass; otherwise call `function`."""
    if trees is None:
        return function(query, key, value, g=g, beta=beta, **kwargs)

    def run(rows: Rows, state: Tensor | None) -> tuple[Tensor, Tensor]:
        decay, rate = (rows.unpack(one).masked_fill(rows.padding.unsqueeze(-1), 0) for one in (g, beta))
        states = {"initial_state": state, "output_final_state": True, "cu_seqlens": None}
        # With 0 for both, padding does not change the state.
        found, last = function(*map(rows.unpack, (query, key, value)), g=decay, beta=rate, **kwargs | states)
        return rows.pack(found), last

    if {before == tree.trunk for tree in trees for before in tree.attached} != {True}:
        # No branches, or those of V(prefix): a trunk has a state for each of its tokens, of which the last one is kept.
        return run(_rows(trees, query.device), None)[0].unsqueeze(0), None
    trunks, branches, owners, order = _trunks_and_branches(trees, query.device)
    of_trunks, states = run(trunks, None)
    of_branches, _ = run(branches, states.index_select(0, owners))
    return torch.cat([of_trunks, of_branches]).index_select(0, order).unsqueeze(0), None


FUNCTIONS: dict[str, Any] = {"causal_conv1d_fn": _convolution, "torch_chunk_gated_delta_rule": _delta_rule}


def _note_trees(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
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


def _pack(mixer: Any, args: Any, output: Tensor) -> Tensor | None:
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
            module: Any = sys.modules[type(mixer).__module__]
            if hasattr(module, "torch_chunk_gated_delta_rule"):  # the global functions that its `forward` calls
                for name, apart in FUNCTIONS.items():
                    if not isinstance(getattr(module, name), partial):
                        setattr(module, name, partial(apart, getattr(module, name)))
            elif _pack not in mixer._forward_hooks.values():
                mixer.trees = None  # type: ignore[assignment]
                layer.register_forward_pre_hook(_note_trees, with_kwargs=True)
                mixer.register_forward_pre_hook(_unpack, with_kwargs=True)
                mixer.register_forward_hook(_pack)
