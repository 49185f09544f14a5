"""Proof that samples which share a packed row do not see each other, taken of the model itself.

Whether a model keeps them apart depends on whether each of its layers hands the keyword arguments of a pass on to its
attention, and on masks of its own making; no configuration tells, and where it does not, the update is wrong without an
error. So three samples are packed and looked at before the first pass that counts:

    isolation   other tokens in the first sample may not move the log-probs of the second
    layout      packed, a sample has the log-probs that it has alone, within rounding
    prompt      where the samples share a prompt, another token in it moves all of them

Isolation compares passes of the same shapes, which round alike, so that the slightest leak shows, in bfloat16 and for
a model whose log-probs hardly depend on their context, too. Only in a mixture of experts do other tokens change the
rounding, since they regroup the experts. How much is seen by changing the third sample, which comes after the second.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# (samples of token ids) → the log-probs of each sample's scored tokens
LogProbs = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]

SAMPLE_TOKENS = (24, 12, 18)  # even, so that a sample splits into a prompt and a completion, or a trunk and branches
DRAWS = 2  # of other tokens: a leak shows in each of them, a router that changes its mind in few
NOISE = 8.0  # by how much regrouped experts may differ from one draw to the next; a leak exceeds it by far
SEEN = 0.5  # of how far another prompt moves a sample that is alone: as far at least where the prompt is shared
SAME = 1e-6  # nats; equal shapes round alike
# Mean difference of log-probs that other shapes may make by rounding, as a share of their spread: logits round in
# proportion to their size. float32 leaves room for TF32.
ROUNDING = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.15}


def isolation_flaw(
    packed: LogProbs,
    alone: LogProbs,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    others: tuple[LogProbs, LogProbs] | None = None,
) -> str | None:
    """What is wrong with packed passes, in words; None = nothing.

    Args:
        packed: all samples in one row. An exception is a flaw, too: a `forward` may not take what packing needs.
        alone: each sample in a row of its own.
        vocabulary: token ids lie below it.
        dtype: in which the model computes.
        others: the same two, of samples behind a prompt with other tokens before its last, where all share a prompt.
    """
    samples = [_tokens(length, start, vocabulary) for start, length in enumerate(SAMPLE_TOKENS)]
    expected = alone(samples)
    try:
        found = packed(samples)
        leak, noise = _leak(packed, samples, found[1], vocabulary)
    except Exception as error:  # whatever a model's code may raise
        said = (str(error).splitlines() or [""])[0].rstrip(".")
        return f"a packed pass raises {type(error).__name__}: {said}"
    if not leak <= max(SAME, NOISE * noise):  # NaN, too
        return f"other tokens in one sample move the log-probs of the next by {leak:.2g}"
    shift = max(_distance(one, other) for one, other in zip(found, expected, strict=True))
    if others is not None:
        moved, due = (
            [_distance(one, other) for one, other in zip(function(samples), before, strict=True)]
            for function, before in zip(others, (found, expected), strict=True)
        )
        if any(not one >= SEEN * other for one, other in zip(moved, due, strict=True)):
            return (
                f"another prompt moves the log-probs of a sample by {min(moved):.2g}, where it should by {min(due):.2g}"
            )
    spread = torch.cat([one.float() for one in expected]).std().item()
    if not shift <= ROUNDING.get(dtype, max(ROUNDING.values())) * spread:
        return f"the log-probs of a sample differ by {shift:.2g} from those that it has alone"
    return None


def _leak(packed: LogProbs, samples: Sequence[Sequence[int]], found: Tensor, vocabulary: int) -> tuple[float, float]:
    """How far other tokens in the first sample move the second from what was `found`, and other tokens in the third."""
    first, second, third = samples
    moved, regrouped = [], []
    for draw in range(DRAWS):
        others = [_tokens(len(one), 3 + 2 * draw + i, vocabulary) for i, one in enumerate((first, third))]
        moved.append(_distance(packed([others[0], second, third])[1], found))
        regrouped.append(_distance(packed([first, second, others[1]])[1], found))
    return min(moved), max(regrouped)


def _tokens(length: int, start: int, vocabulary: int) -> list[int]:
    """Ids spread over the vocabulary, other ones for each `start`."""
    return [(7919 * (i + 1) + 104729 * start) % vocabulary for i in range(length)]


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().mean().item()


def computing_dtype(model: Any) -> torch.dtype:
    """In which a transformers model computes: autocast's, or that of its weights."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


@contextmanager
def evaluating(model: nn.Module, *, checkpointing: bool = False) -> Iterator[None]:
    """The model without dropout; each module gets its own mode back.

    Args:
        checkpointing: modules that are checkpointed in training still are: they may hand on other arguments then.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    for module in training if checkpointing else ():
        module.training = bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
