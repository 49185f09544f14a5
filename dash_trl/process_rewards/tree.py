"""Tree passes: one pass over prompt and completion (the trunk) with short continuations of its prefixes (the branches).

The log-probs are those of one pass per branch, but the trunk is computed once. It has causal attention; branches attend
to their prefix (`dash_trl.update.trees`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, PreTrainedModel

from dash_trl.update import (
    TreeShape,
    computing_dtype,
    forget_longest,
    isolation_flaw,
    short_windows,
    to_device,
    tree_attention,
    varlen_arguments,
    varlen_flaw,
)

TREE_ATTENTION = "sdpa_trees"
LOGITS_AT_ONCE = 64  # number of scored tokens whose log-softmax is computed at once, to bound memory


@dataclass(frozen=True)
class Branch:
    """A continuation of a prefix of the trunk.

    Args:
        attach: number of trunk tokens before the branch, at least 1.
        tokens: token ids of the branch.
        scored: index of its first token whose log-prob is computed.
    """

    attach: int
    tokens: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Tree:
    """A trunk of token ids, and its branches."""

    trunk: tuple[int, ...]
    branches: tuple[Branch, ...]

    @property
    def shape(self) -> TreeShape:
        lengths = tuple(len(branch.tokens) for branch in self.branches)
        return TreeShape(len(self.trunk), lengths, tuple(branch.attach for branch in self.branches))

    @property
    def scored(self) -> int:
        """Number of scored tokens. Each needs the logits of one position."""
        return sum(len(branch.tokens) - branch.scored for branch in self.branches)


BranchLogProbs = list[list[list[float]]]  # [tree][branch][scored token]


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none")


def tree_log_probs(model: Module, base_model: PreTrainedModel, trees: Sequence[Tree]) -> BranchLogProbs:
    """Return log P of the scored tokens, [tree][branch][token], from one pass over the packed trees, at temperature 1.

    Args:
        model: the model to call. It may be wrapped or have adapters.
        base_model: the transformers model inside, whose attention is `tree_attention` during the pass.
        trees: the trees.
    """
    ids: list[int] = []
    positions: list[int] = []
    shapes = tuple(tree.shape for tree in trees)
    predictors: list[int] = []  # positions in the packed sequence whose logits predict a scored token
    targets: list[int] = []
    device = next(base_model.parameters()).device
    for tree in trees:
        start = len(ids)
        ids += tree.trunk
        positions += range(len(tree.trunk))
        for branch in tree.branches:
            first = len(ids)
            ids += branch.tokens
            positions += range(branch.attach, branch.attach + len(branch.tokens))
            predictors += [start + branch.attach - 1, *range(first, len(ids) - 1)][branch.scored :]
            targets += branch.tokens[branch.scored :]
    kernel = {} if varlen_flaw(base_model, device) else varlen_arguments(shapes, device)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    before = base_model.config.get_text_config()._attn_implementation
    base_model.set_attn_implementation(TREE_ATTENTION)
    try:
        logits = model(
            input_ids=to_device(torch.tensor([ids]), device),
            position_ids=to_device(torch.tensor([positions]), device),
            logits_to_keep=to_device(torch.tensor(predictors), device),
            trees=shapes,
            use_cache=False,
            **kernel,
        ).logits[0]
    finally:
        base_model.set_attn_implementation(before)
    # In parts, because a float32 copy and a log-softmax of all logits at once would need much memory.
    wanted = to_device(torch.tensor(targets), device).split(LOGITS_AT_ONCE)
    parts = zip(logits.split(LOGITS_AT_ONCE), wanted, strict=True)
    values = iter(torch.cat([_log_probs(part, tokens) for part, tokens in parts]).tolist())
    return [[[next(values) for _ in branch.tokens[branch.scored :]] for branch in tree.branches] for tree in trees]


def tree_flaw(model: Module, base_model: PreTrainedModel) -> str | None:
    """Return why a model's tree passes are wrong, or None; see `isolation_flaw`.

    The model is in evaluation mode. The test is a collective under ZeRO-3 and FSDP, as each model pass is.
    """

    def tree(sample: Sequence[int]) -> Tree:
        """Return half of a sample as the trunk, and branches after its first token, in its middle and at its end."""
        half = len(sample) // 2
        part = len(sample) // 6
        starts = zip((1, half // 2, half), range(half, len(sample), part), strict=False)
        branches = [Branch(attach, tuple(sample[start : start + part]), scored=0) for attach, start in starts]
        return Tree(tuple(sample[:half]), tuple(branches))

    def log_probs(function: Callable[..., BranchLogProbs], samples: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.tensor(branches).flatten() for branches in function([tree(sample) for sample in samples])]

    with short_windows(base_model):
        return isolation_flaw(
            partial(log_probs, partial(tree_log_probs, model, base_model)),
            partial(log_probs, partial(loop_log_probs, model)),
            vocabulary=base_model.config.get_text_config().vocab_size,
            dtype=computing_dtype(base_model),
        )


def loop_log_probs(model: Module, trees: Sequence[Tree]) -> BranchLogProbs:
    """Return what `tree_log_probs` does, from one pass per branch, for models without tree passes."""
    device = next(model.parameters()).device

    def log_probs(trunk: tuple[int, ...], branch: Branch) -> list[float]:
        forget_longest(model)
        ids = torch.tensor([[*trunk[: branch.attach], *branch.tokens]], device=device)
        count = len(branch.tokens) - branch.scored
        logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False).logits
        return _log_probs(logits[0, -count - 1 : -1], ids[0, -count:]).tolist()

    return [[log_probs(tree.trunk, branch) for branch in tree.branches] for tree in trees]
