"""Tests by running a model that the samples of a packed row do not influence each other.

A packed row is one sequence of several samples. A model keeps them apart only if each layer hands the keyword arguments
of `forward` on to the attention function, and if the model builds no attention mask of its own. Its configuration does
not show this, and log-probs of mixed samples are wrong without an error. So before the first training pass,
`packing_flaw` packs three samples and tests these properties::

    isolation   other tokens in the first sample do not change the log-probs of the second sample
    layout      the log-probs of a packed sample equal the log-probs of the sample alone, within rounding
    gradients   with respect to the embeddings, they are equal, too, within rounding
    prompt      if the samples share a prompt, other tokens in the prompt change the log-probs of each sample

The isolation test compares passes of the same shapes, which round in the same way, so it finds even a very small leak.
In a mixture of experts, however, other tokens change the rounding, because they change which tokens an expert computes
together. Other tokens in the third sample measure this effect: they cannot leak into the second one, because attention
is causal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

# Takes samples as lists of token ids, and returns one tensor per sample with the log-probs of some of its tokens.
LogProbs = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]
# Runs a model pass: takes input_ids, attention_mask and logits_to_keep, and returns (log-probs, …), as TRL's method.
RunPass = Callable[..., tuple]

# Number of tokens of each sample; even, so that a sample splits into prompt and completion, or into trunk and branches.
SAMPLE_TOKENS = (24, 12, 18)
WINDOW = 5  # number of tokens, see `short_windows`
DRAWS = 2  # number of draws of other tokens: a leak changes log-probs in every draw, regrouped experts only in some
NOISE = 8.0  # a change counts as a leak if it is more than this number times the effect of regrouped experts
COMMON_PROMPT_TOKENS = 12  # length of the shared prompt with which `packing_flaw` tests a model
SEEN = 0.5  # another shared prompt must change the log-probs by at least this share of the change without packing
SAME = 1e-6  # nats; a change up to this size is no leak, because passes of the same shape round in the same way
# The mean difference of log-probs that rounding may cause between passes of different shapes, as a share of the
# standard deviation of the log-probs (the rounding error of a logit is proportional to its size). The value for float32
# leaves room for TF32.
ROUNDING = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.15}


def isolation_flaw(
    packed: LogProbs,
    alone: LogProbs,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    others: tuple[LogProbs, LogProbs] | None = None,
) -> str | None:
    """Test packed passes, and describe what is wrong with them; return `None` if there is no flaw.

    Args:
        packed: function that runs all samples in one packed row. An exception counts as a flaw, because a model's
            `forward` may refuse the arguments of packed passes.
        alone: function that runs each sample in its own row.
        vocabulary: upper bound of token ids.
        dtype: the dtype in which the model computes.
        others: `packed` and `alone` with another shared prompt that ends with the same token. `None`: no shared prompt.
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
        return f"other tokens in one sample change the log-probs of the next by {leak:.2g}"
    shift = max(_distance(one, other) for one, other in zip(found, expected, strict=True))
    if others is not None:
        moved, due = (
            [_distance(one, other) for one, other in zip(function(samples), before, strict=True)]
            for function, before in zip(others, (found, expected), strict=True)
        )
        if any(not one >= SEEN * other for one, other in zip(moved, due, strict=True)):
            return f"another prompt changes the log-probs of a sample by {min(moved):.2g} instead of {min(due):.2g}"
    spread = torch.cat([one.float() for one in expected]).std().item()
    if not shift <= _rounding(dtype) * spread:
        return f"the log-probs of a sample differ by {shift:.2g} from those that it has alone"
    return None


def packing_flaw(
    packed: RunPass,
    padded: RunPass,
    model: nn.Module,
    *,
    vocabulary: int,
    device: torch.device,
    shared: bool = False,
    gradients: bool = True,
) -> str | None:
    """Test whether a model can run packed passes, and describe the flaw (see `isolation_flaw`).

    Args:
        packed: function (input_ids, attention_mask, logits_to_keep) → (log-probs, …) that runs packed passes.
        padded: the same function for padded passes, by TRL's method.
        model: the model that both call.
        vocabulary: upper bound of token ids.
        shared: True = the samples have the same prompt, which `packed` computes once.
        gradients: True = test the gradients, too.
    """

    def log_probs(function: RunPass, samples: Sequence[Sequence[int]], start: int = 7) -> list[Tensor]:
        # No sample begins as a tested prompt does. All tested prompts have the same last token, which is computed in
        # each row. With another one, log-probs would change even in a row that does not attend to the shared tokens.
        common = [*_tokens(COMMON_PROMPT_TOKENS - 1, start, vocabulary), 0] * shared
        prompt = len(common) or min(map(len, samples)) // 2  # the same in all rows, so none is padded on the left
        rows = [torch.tensor([*common, *sample]) for sample in samples]
        ids, mask = (pad_sequence(one, batch_first=True) for one in (rows, [*map(torch.ones_like, rows)]))
        values = function(ids.to(device), mask.to(device), ids.shape[1] - prompt)[0]
        return [found[: len(row) - prompt] for found, row in zip(values, rows, strict=True)]

    dtype = computing_dtype(model)
    with torch.no_grad(), evaluating(model, checkpointing=True), short_windows(model):
        flaw = isolation_flaw(
            partial(log_probs, packed),
            partial(log_probs, padded),
            vocabulary=vocabulary,
            dtype=dtype,
            others=(partial(log_probs, packed, start=8), partial(log_probs, padded, start=8)) if shared else None,
        )
    if flaw or not gradients:
        return flaw
    samples = [_tokens(length, start, vocabulary) for start, length in enumerate(SAMPLE_TOKENS)]
    with torch.enable_grad(), evaluating(model), short_windows(model):
        expected, found = (_gradient(model, partial(log_probs, function, samples)) for function in (padded, packed))
    shift = _distance(found, expected) / expected.float().abs().mean().item()
    return None if shift <= _rounding(dtype) else f"the gradient of a packed pass differs by {shift:.0%}"


def _gradient(model: Any, log_probs: Callable[[], Sequence[Tensor]]) -> Tensor:
    """Return the gradient of the sum of the log-probs with respect to a vector that is added to all embeddings."""
    added: list[Tensor] = []

    def add(module: nn.Module, args: object, output: Tensor) -> Tensor:
        added.append(output.new_zeros(output.shape[-1], requires_grad=True))
        return output + added[-1]

    with model.get_input_embeddings().register_forward_hook(add):
        total = torch.cat([*log_probs()]).sum()
    return torch.autograd.grad(total, added[0])[0]


def padding_effect(
    plain: RunPass, placed: RunPass, model: nn.Module, *, vocabulary: int, pad_token_id: int, device: torch.device
) -> int:
    """Test whether padding before a row changes the log-probs of its second half.

    Args:
        plain: function like `padded` of `packing_flaw`.
        placed: `plain` with position ids that do not count padding.
        model: the model that both call.
        vocabulary: upper bound of token ids.
    Returns:
        1 if padding does not change `placed`; otherwise 0 if it does not change `plain`, 2 if it changes both.
    """
    row = _tokens(SAMPLE_TOKENS[0], 0, vocabulary)

    def log_probs(function: RunPass, padding: int) -> Tensor:
        ids = torch.tensor([[pad_token_id] * padding + row], device=device)
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        return function(ids, mask, len(row) // 2)[0]

    with torch.no_grad(), evaluating(model, checkpointing=True):
        alone = log_probs(plain, 0)
        shift, rest = (_distance(log_probs(one, SAMPLE_TOKENS[1]), alone) for one in (plain, placed))
    most = _rounding(computing_dtype(model)) * alone.float().std().item()
    # Not by which one is smaller: if both are rounding, another run, such as a resumed one, would choose the other one.
    return 1 if rest <= most else 0 if shift <= most else 2


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Context manager that shortens a model's sliding windows to `WINDOW` tokens, fewer than a sample has.

    Otherwise, a sample is too short to show that a layer loses its window.
    """
    owners = [one for module in model.modules() for one in (module, getattr(module, "config", None))]
    found: list[Any] = [one for one in owners if isinstance(getattr(one, "sliding_window", None), int)]
    before = [one.sliding_window for one in found]
    for one in found:
        one.sliding_window = min(one.sliding_window, WINDOW)
    try:
        yield
    finally:
        for one, window in zip(found, before, strict=True):
            one.sliding_window = window


def _leak(packed: LogProbs, samples: Sequence[Sequence[int]], found: Tensor, vocabulary: int) -> tuple[float, float]:
    """Return how other tokens in the first sample, and in the third, change the log-probs `found` of the second."""
    first, second, third = samples
    moved = []
    regrouped = []
    for draw in range(DRAWS):
        others = [_tokens(len(one), 3 + 2 * draw + i, vocabulary) for i, one in enumerate((first, third))]
        moved.append(_distance(packed([others[0], second, third])[1], found))
        regrouped.append(_distance(packed([first, second, others[1]])[1], found))
    return min(moved), max(regrouped)


def _tokens(length: int, start: int, vocabulary: int) -> list[int]:
    """Return token ids spread over the vocabulary; they differ for each `start`."""
    return [(7919 * (i + 1) + 104729 * start) % vocabulary for i in range(length)]


def _rounding(dtype: torch.dtype) -> float:
    return ROUNDING.get(dtype, max(ROUNDING.values()))


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().mean().item()


def computing_dtype(model: Any) -> torch.dtype:
    """Return the dtype in which a transformers model computes: autocast's, or that of its weights."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


@contextmanager
def evaluating(model: nn.Module, *, checkpointing: bool = False) -> Iterator[None]:
    """Context manager that puts a model into evaluation mode (no dropout), and restores each module's mode at the end.

    With `checkpointing`, modules with gradient checkpointing are in training mode. In this mode they may pass other
    arguments on to their layers, and a test of packed passes must run the same code as training.
    """
    training = {module: module.training for module in model.modules()}
    for module in training:  # `model.eval()` would replace the layers of a model with `use_kernels`
        module.training = checkpointing and bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
