"""Tree passes: one pass over prompt and completion (the trunk) with short continuations of its prefixes (the branches).

A tree pass returns the same log-probs as one pass per branch, but computes the trunk only once. So it costs about as
much as a pass over the trunk alone. The trunk has plain causal attention; branches attend to their prefix
(`dash_trl.update.trees`). Several trees are packed into one sequence.

Letters: L tokens of the packed sequence, Q branch tokens of a tree, S tokens of a tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

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
        scored: index in `tokens` of the first scored token. Log-probs of this token and all later tokens are computed.
    """

    attach: int
    tokens: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Tree:
    """A trunk with its branches.

    Args:
        trunk: token ids of the trunk.
        branches: the branches.
    """

    trunk: tuple[int, ...]
    branches: tuple[Branch, ...]

    def __len__(self) -> int:
        return len(self.trunk) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def scored(self) -> int:
        """Number of scored tokens. For each scored token, the model returns the logits of one position."""
        return sum(len(branch.tokens) - branch.scored for branch in self.branches)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def tree_log_probs(model: Any, base_model: Any, trees: Sequence[Tree]) -> list[list[list[float]]]:
    """Computes log P of the scored tokens of all branches in one pass, at temperature 1.

    Args:
        model: the model to call. It may be wrapped or have adapters.
        base_model: the transformers model inside `model`. During the pass, its attention is `tree_attention`.
        trees: the trees, packed into one sequence.
    Returns:
        Nested lists of log-probs: one list per tree, which contains one list per branch, with one number per scored
        token.
    """
    ids: list[int] = []
    positions: list[int] = []
    shapes = []
    predictors: list[int] = []  # positions in the packed sequence whose logits predict a scored token
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
        shapes.append(TreeShape(trunk, lengths, tuple(branch.attach for branch in tree.branches)))
    kernel = {} if varlen_flaw(base_model, device) else varlen_arguments(shapes, device)
    with _attention(base_model, TREE_ATTENTION):
        logits = model(
            input_ids=to_device(torch.tensor([ids]), device),
            position_ids=to_device(torch.tensor([positions]), device),
            logits_to_keep=to_device(torch.tensor(predictors), device),
            trees=tuple(shapes),
            use_cache=False,
            **kernel,
        ).logits[0]
    wanted = to_device(torch.tensor(targets), device).unsqueeze(1).split(LOGITS_AT_ONCE)
    # In parts, because a float32 copy and a log-softmax of all logits at once would need much memory.
    parts = zip(logits.split(LOGITS_AT_ONCE), wanted, strict=True)
    log_probs = [part.float().log_softmax(dim=-1).gather(1, tokens) for part, tokens in parts]
    values = iter(torch.cat(log_probs).flatten().tolist())
    return [[[next(values) for _ in branch.tokens[branch.scored :]] for branch in tree.branches] for tree in trees]


def tree_flaw(model: Any, base_model: Any) -> str | None:
    """Tests whether tree passes of a model return the right log-probs; see `isolation_flaw`.

    Under ZeRO-3 and FSDP, the test is a collective, because each model pass is a collective.

    Args:
        model: see `tree_log_probs`. It must be in evaluation mode.
        base_model: see `tree_log_probs`.
    Returns:
        The reason why tree passes are wrong; None = they are right.
    """

    def tree(sample: Sequence[int]) -> Tree:
        """Makes a trunk from the first half of the sample, and three branches from the second half.

        The branches attach after the first token of the trunk, in its middle, and at its end.
        """
        half, part = len(sample) // 2, len(sample) // 6
        tokens = [tuple(sample[start : start + part]) for start in range(half, half + 3 * part, part)]
        attached = zip((1, half // 2, half), tokens, strict=True)
        return Tree(tuple(sample[:half]), tuple(Branch(attach, branch, scored=0) for attach, branch in attached))

    def log_probs(function: Any, samples: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.tensor(branches).flatten() for branches in function([tree(sample) for sample in samples])]

    with short_windows(base_model):
        return isolation_flaw(
            partial(log_probs, partial(tree_log_probs, model, base_model)),
            partial(log_probs, partial(loop_log_probs, model)),
            vocabulary=base_model.config.get_text_config().vocab_size,
            dtype=computing_dtype(base_model),
        )


def loop_log_probs(model: Any, trees: Sequence[Tree]) -> list[list[list[float]]]:
    """Computes the same log-probs as `tree_log_probs`, with one pass per branch, for models without tree passes.

    Args:
        model: the model to call.
        trees: see `tree_log_probs`.
    Returns:
        See `tree_log_probs`.
    """
    device = next(model.parameters()).device
    results = []
    for tree in trees:
        branches = []
        for branch in tree.branches:
            forget_longest(model)
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
