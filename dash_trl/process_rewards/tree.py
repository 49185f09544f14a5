"""Tree-packed passes: a response once (the trunk) and many short continuations of its prefixes (the branches).

One pass over trunk and branches gives what a pass per prefix would, for about the cost of the trunk: attention of the
trunk is plain causal SDPA, only the few branch tokens need a mask (`dash_trl.update.trees`). Several trees share a row.

Letters: L tokens of the packed row, Q branch tokens of a tree, S tokens of a tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from dash_trl.update import TreeShape, computing_dtype, isolation_flaw, tree_attention

TREE_ATTENTION = "sdpa_trees"
LOGITS_AT_ONCE = 64  # scored tokens whose log-softmax is taken at a time


@dataclass(frozen=True)
class Branch:
    """Tokens that continue the first `attach` >= 1 tokens of a trunk; those from `scored` on are to be scored."""

    attach: int
    tokens: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Tree:
    trunk: tuple[int, ...]
    branches: tuple[Branch, ...]

    def __len__(self) -> int:
        return len(self.trunk) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def scored(self) -> int:
        """Tokens whose log-probs are wanted, each by a row of logits."""
        return sum(len(branch.tokens) - branch.scored for branch in self.branches)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def tree_log_probs(model: Any, base_model: Any, trees: Sequence[Tree]) -> list[list[list[float]]]:
    """log P of the scored tokens of every branch: [tree][branch][token], at temperature 1, by one pass.

    Args:
        model: what is called (it may be wrapped or have adapters). base_model: the transformers model within, whose
            attention is switched to `tree_attention` for this pass.
    """
    ids: list[int] = []
    positions: list[int] = []
    shapes = []
    predictors: list[int] = []  # the packed position whose logits predict a scored token
    targets: list[int] = []
    device = next(base_model.parameters()).device
    for tree in trees:
        start, trunk = len(ids), len(tree.trunk)
        ids += tree.trunk
        positions += range(trunk)
        for branch in tree.branches:
            first = len(ids)
            ids += branch.tokens
            positions += range(branch.attach, branch.attach + len(branch.tokens))
            for i in range(branch.scored, len(branch.tokens)):
                predictors.append(first + i - 1 if i else start + branch.attach - 1)
                targets.append(branch.tokens[i])
        lengths = tuple(len(branch.tokens) for branch in tree.branches)
        shapes.append(TreeShape(trunk, lengths, branch_mask(tree).to(device) if lengths else None))
    with _attention(base_model, TREE_ATTENTION):
        logits = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            # With none at all, transformers would find the restarting positions and build an L × L mask.
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            logits_to_keep=torch.tensor(predictors, device=device),
            trees=tuple(shapes),
            use_cache=False,
        ).logits[0]
    wanted = torch.tensor(targets, device=device).unsqueeze(1).split(LOGITS_AT_ONCE)
    parts = zip(logits.split(LOGITS_AT_ONCE), wanted, strict=True)  # not twice more as many as the model made
    log_probs = [part.float().log_softmax(dim=-1).gather(1, tokens) for part, tokens in parts]
    values = iter(torch.cat(log_probs).flatten().tolist())
    return [[[next(values) for _ in branch.tokens[branch.scored :]] for branch in tree.branches] for tree in trees]


def tree_flaw(model: Any, base_model: Any) -> str | None:
    """Why tree passes of a model would be wrong, as `isolation_flaw` finds by trying; None = they are right.

    Arguments as in `tree_log_probs`, in evaluation mode; a collective under ZeRO-3 and FSDP.
    """

    def tree(sample: Sequence[int]) -> Tree:
        """Half of the sample is the trunk; the rest are branches from its first token, its middle and its end."""
        half, part = len(sample) // 2, len(sample) // 6
        tokens = [tuple(sample[start : start + part]) for start in range(half, half + 3 * part, part)]
        attached = zip((1, half // 2, half), tokens, strict=True)
        return Tree(tuple(sample[:half]), tuple(Branch(attach, branch, scored=0) for attach, branch in attached))

    def log_probs(function: Any, samples: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.tensor(branches).flatten() for branches in function([tree(sample) for sample in samples])]

    return isolation_flaw(
        partial(log_probs, partial(tree_log_probs, model, base_model)),
        partial(log_probs, partial(loop_log_probs, model)),
        vocabulary=base_model.config.get_text_config().vocab_size,
        dtype=computing_dtype(base_model),
    )


def branch_mask(tree: Tree) -> Tensor:
    """[1, 1, Q, S] bool, True = attends: the branch tokens of a tree against all of its tokens."""
    lengths = torch.tensor([len(branch.tokens) for branch in tree.branches], dtype=torch.long)
    attach = torch.tensor([branch.attach for branch in tree.branches], dtype=torch.long)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)  # [Q], the branch of each token
    to_trunk = torch.arange(len(tree.trunk)) < attach[owner].unsqueeze(1)
    order = torch.arange(len(owner))
    to_branch = (owner.unsqueeze(1) == owner) & (order.unsqueeze(1) >= order)
    return torch.cat([to_trunk, to_branch], dim=1)[None, None]


def loop_log_probs(model: Any, trees: Sequence[Tree]) -> list[list[list[float]]]:
    """What `tree_log_probs` computes, by one pass per branch: for models that take no tree."""
    device = next(model.parameters()).device
    results = []
    for tree in trees:
        branches = []
        for branch in tree.branches:
            ids = [*tree.trunk[: branch.attach], *branch.tokens]
            count = len(branch.tokens) - branch.scored
            logits = model(
                input_ids=torch.tensor([ids], device=device), logits_to_keep=count + 1, use_cache=False
            ).logits
            log_probs = logits[0, -count - 1 : -1].float().log_softmax(dim=-1)
            targets = torch.tensor(ids[-count:], device=device)
            branches.append(log_probs.gather(1, targets.unsqueeze(1)).flatten().tolist())
        results.append(branches)
    return results
