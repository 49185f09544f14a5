"""The proof that servers compute with the weights that they were given: log-probs of a few tokens.

The first sync of a run sends weights that are changed in a known way, and the servers' log-probs have to follow:
all weights scaled by a factor, or, where an adapter is sent alone, its B matrices shifted by a constant (those of a new
adapter are zero).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_available
from torch import Tensor, nn

from dash_trl.sampling.weights.snapshot import NamedTensors, WeightMismatch
from dash_trl.update import evaluating

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32
PERTURBATION = 0.5  # exact in every dtype, and it moves log-probs towards uniform, where they are stable
SHIFT = 0.25  # of the B matrices of an adapter

# Mean absolute difference of log-probs between trainer and server that rounding explains. The perturbation moves them
# by an order of magnitude more in any trained model.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def probe_tokens(vocabulary: int) -> list[int]:
    """`PROBE_TOKENS` ids spread over the vocabulary."""
    return [(7919 * (i + 1)) % vocabulary for i in range(PROBE_TOKENS)]


@dataclass(frozen=True)
class Perturbation:
    """A change of the weights, and the same change of the model's outputs, on any sharding.

    Args:
        parameters: what is sent → what is sent in its place.
        outputs: gives a context in which the model computes as if it had these weights.
    """

    parameters: Callable[[NamedTensors], NamedTensors]
    outputs: Callable[[], AbstractContextManager[None]]


def of_all_weights(model: nn.Module, plain_name: Callable[[str], str]) -> Perturbation:
    """Linear layers and embeddings, scaled; `plain_name` as for `scale_linear`."""
    return Perturbation(
        partial(scale_linear, model, scale=PERTURBATION, plain_name=plain_name),
        partial(scaled_outputs, model, PERTURBATION),
    )


def of_adapter(model: nn.Module) -> Perturbation:
    """The B matrices of LoRA layers, shifted."""
    return Perturbation(shift_adapter, partial(shifted_outputs, model))


def shift_adapter(parameters: NamedTensors) -> Iterator:
    """The parameters, those of B matrices + `SHIFT`."""
    for name, tensor in parameters:
        yield name, tensor + SHIFT if ".lora_B." in name else tensor


@contextmanager
def shifted_outputs(model: nn.Module) -> Iterator[None]:
    """The model as if `SHIFT` were added to its B matrices: B gives `SHIFT` · Σ of its inputs more, at each output."""
    handles = [
        module.register_forward_hook(lambda module, inputs, output: output + SHIFT * inputs[0].sum(-1, keepdim=True))
        for name, module in model.named_modules()
        if ".lora_B." in name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def scale_linear(
    model: nn.Module, parameters: NamedTensors, scale: float, plain_name: Callable[[str], str]
) -> Iterator:
    """The parameters, those of linear layers and embeddings multiplied by `scale`.

    Args:
        plain_name: a name in `model.named_parameters()` → the name in `parameters`.
    """
    names = {
        plain_name(f"{prefix}.{name}")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for name in ("weight", "bias")
    }
    for name, tensor in parameters:
        yield name, tensor * scale if name in names else tensor


def is_adapter(module: Any) -> bool:
    """Whether a module is a layer that PEFT adapts: of none without PEFT, which is an extra."""
    if not is_peft_available():
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


@contextmanager
def scaled_outputs(model: nn.Module, scale: float) -> Iterator[None]:
    """The model as if its linear layers and embeddings were multiplied by `scale`, on any sharding.

    A layer that is linear in its parameters gives `scale` times its output when they are scaled, so the outputs are
    scaled and no parameter is touched. An adapter with its base layer counts as one layer.
    """
    adapters = tuple(name + "." for name, module in model.named_modules() if is_adapter(module))
    handles = [
        module.register_forward_hook(lambda module, inputs, output: output * scale)
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear | nn.Embedding) or is_adapter(module)) and not name.startswith(adapters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def model_log_probs(model: nn.Module, ids: list[int], changed: AbstractContextManager[None] | None = None) -> Tensor:
    """[len(ids) − 1], log P(ids[t] | ids[:t]) of the trainer's model; a collective under ZeRO-3 and FSDP.

    Args:
        changed: in which the model computes, such as `scaled_outputs`.
    """
    row = torch.tensor([ids], device=next(model.parameters()).device)
    with evaluating(model), changed or nullcontext():
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(dim=-1).gather(1, row[0, 1:, None]).squeeze(1).cpu()


def check_probe(expected: Tensor, plain: Tensor, served: dict[str, list[float]], dtype: torch.dtype) -> None:
    """Whether servers compute what the trainer computes.

    Args:
        expected: the trainer's log-probs with the weights that the servers were given; plain: without a perturbation.
        served: url → the server's.
    Raises:
        WeightMismatch: a server computes something else.
    """
    tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
    effect = (expected - plain).abs().mean().item()
    if expected is not plain and effect < 3 * tolerance:
        logger.warning(
            f"Scaling the weights moves the model's log-probs by {effect:.2g} only, so that the first weight sync "
            f"proves little (tolerance {tolerance}). Expected of an untrained model."
        )
    for url, values in served.items():
        difference = (torch.tensor(values) - expected).abs().mean().item()
        if not difference <= tolerance:  # NaN, too
            raise WeightMismatch(
                f"{url} holds the weights that it was given but computes with others: its log-probs differ by "
                f"{difference:.2g} from the trainer's (tolerance {tolerance}; the first sync scales the weights, which "
                f"moves them by {effect:.2g}). On a CPU build of vLLM install dash_trl in the server's environment: "
                "its plugin stops vLLM from computing with packed copies. Else: is it the same model, "
                "without quantisation or adapters?"
            )
