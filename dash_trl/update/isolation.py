"""Tests on the model itself that samples in the same packed row do not see each other.

A model keeps samples apart only if each of its layers passes the keyword arguments of a pass on to its attention, and
if it builds no attention mask of its own. No configuration tells whether that holds. If it does not, the update is
wrong without an error. So three samples are packed before the first pass that counts, and these properties are tested::

    isolation   other tokens in the first sample do not change the log-probs of the second
    layout      a packed sample has the log-probs that it has alone, within rounding
    prompt      if the samples share a prompt, another token in it changes the log-probs of all of them

The isolation test compares passes of the same shapes, which round alike. So it finds the slightest leak, even in
bfloat16 and for a model whose log-probs hardly depend on their context. Only in a mixture of experts do other tokens
change the rounding, because they regroup the experts. The size of that effect is measured by changing the third sample:
it comes after the second, so causal attention hides its tokens from the second.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# (samples of token ids) → the log-probs of each sample's scored tokens
LogProbs = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]

SAMPLE_TOKENS = (24, 12, 18)  # even, so that a sample splits into a prompt and a completion, or a trunk and branches
DRAWS = 2  # draws of other tokens: a leak shows in every draw, a change in a router's decision only in some
NOISE = 8.0  # a leak is far more than this number of times the effect of regrouped experts
SEEN = 0.5  # another shared prompt must move a sample by at least this share of what it does if the sample is alone
SAME = 1e-6  # nats: a difference below this is none, since equal shapes round alike
# The mean difference of log-probs that rounding may cause between passes of different shapes, as a share of the spread
# of the log-probs (logits round in proportion to their size). The value for float32 leaves room for TF32.
ROUNDING = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.15}


def isolation_flaw(
    packed: LogProbs,
    alone: LogProbs,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    others: tuple[LogProbs, LogProbs] | None = None,
) -> str | None:
    """Test packed passes, and describe what is wrong with them.

    Args:
        packed: runs all samples in one row. An exception counts as a flaw, because a `forward` may not accept what
            packing needs.
        alone: runs each sample in a row of its own.
        vocabulary: token ids are below this number.
        dtype: the dtype in which the model computes.
        others: the same two functions with another prompt before the samples, which differs before its last token.
            `None`: the samples do not share a prompt.
    Returns:
        The flaw in words; `None` if there is none.
    """
    samples = [_tokens(length, start, vocabulary) for start, length in enumerate(SAMPLE_TOKENS)]
    expected = alone(samples)
    try:
        found = packed(samples)
        leak, noise = _leak(packed, samples, found[1], vocabulary)
    except Exception as error:  # a model's code may raise anything
        said = (str(error).splitlines() or [""])[0].rstrip(".")
        return f"a packed pass raises {type(error).__name__}: {said}"
    if not leak <= max(SAME, NOISE * noise):  # also if the leak is NaN
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
    """Return how far other tokens in the first sample move the second from `found`, and how far other tokens in the
    third do.
    """
    first, second, third = samples
    moved, regrouped = [], []
    for draw in range(DRAWS):
        others = [_tokens(len(one), 3 + 2 * draw + i, vocabulary) for i, one in enumerate((first, third))]
        moved.append(_distance(packed([others[0], second, third])[1], found))
        regrouped.append(_distance(packed([first, second, others[1]])[1], found))
    return min(moved), max(regrouped)


def _tokens(length: int, start: int, vocabulary: int) -> list[int]:
    """Return token ids spread over the vocabulary; they differ for each `start`."""
    return [(7919 * (i + 1) + 104729 * start) % vocabulary for i in range(length)]


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().mean().item()


def computing_dtype(model: Any) -> torch.dtype:
    """Return the dtype in which a transformers model computes: autocast's, or that of its weights."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


@contextmanager
def evaluating(model: nn.Module, *, checkpointing: bool = False) -> Iterator[None]:
    """Put the model into evaluation mode, without dropout; afterwards, restore the mode of each module.

    Args:
        model: the model.
        checkpointing: leave modules with gradient checkpointing in training mode. They may pass on other arguments
            then.
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
