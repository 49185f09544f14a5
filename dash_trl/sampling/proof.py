"""Checks, by the log-probs of a few tokens, that servers compute with the weights that they were given.

No other check can replace this one: a server may hold the right numbers, and compute with a copy that it does not
update, or with numbers in other places, as vLLM's experts do on a CPU. The first weight sync of a run sends perturbed
weights, and compares the servers' log-probs with the trainer's under the same change: a factor for linear layers,
experts and embeddings, whose weights vLLM may convert when it loads them. If an adapter is sent alone, a constant is
added to its B matrices instead, because a new adapter's B matrices are zero.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from trl.trainer.utils import selective_log_softmax

from dash_trl.sampling.weights import NamedTensors, WeightMismatch
from dash_trl.update import evaluating

PROBE_TOKENS = 32
PERTURBATION = 0.5  # factor; exact in every dtype. It makes log-probs more uniform, so that rounding matters less
SHIFT = 0.25  # added to the B matrices of an adapter

# dtype → largest mean absolute difference between the log-probs of trainer and server that rounding can explain. In a
# trained model the perturbation changes log-probs by an order of magnitude more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class ScaledLayers:
    """The perturbation of full weights: linear layers, embeddings, and what experts put out, scaled by `PERTURBATION`.

    Attributes:
        plain_name: maps a name in `model.named_parameters()` to its name on the servers.
    """

    model: nn.Module
    plain_name: Callable[[str], str] = str

    def parameters(self, parameters: NamedTensors) -> NamedTensors:
        """Yield the names and the changed values of the parameters."""
        names = {
            self.plain_name(f"{prefix}.{name}")
            for prefix, module in self.model.named_modules()
            for name in scaled_by(module)
        }
        for name, tensor in parameters:
            yield name, tensor * PERTURBATION if name in names else tensor

    def outputs(self) -> AbstractContextManager[None]:
        """Context manager in which the outputs of layers are those of the changed weights, with any sharding."""
        # A layer that PEFT adapts contains linear layers: its base layer, A and B. Only the output of the whole is
        # scaled, not theirs.
        adapters = tuple(name + "." for name, module in self.model.named_modules() if is_adapter(module))
        modules = [
            module
            for name, module in self.model.named_modules()
            if (scaled_by(module) or is_adapter(module)) and not name.startswith(adapters)
        ]
        return _hooked(modules, _scale)


class ShiftedAdapter(ScaledLayers):
    """The perturbation of an adapter: `SHIFT` is added to the B matrices of its LoRA layers."""

    def parameters(self, parameters: NamedTensors) -> NamedTensors:
        for name, tensor in parameters:
            yield name, tensor + SHIFT if ".lora_B." in name else tensor

    def outputs(self) -> AbstractContextManager[None]:
        return _hooked([module for name, module in self.model.named_modules() if ".lora_B." in name], _shift)


def _scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * PERTURBATION


def _shift(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Shift the output of a B matrix by `SHIFT` · Σ of its inputs, as if `SHIFT` were added to the matrix."""
    return output + SHIFT * inputs[0].sum(-1, keepdim=True)


@contextmanager
def _hooked(
    modules: list[nn.Module], hook: Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]
) -> Iterator[None]:
    """`with` block in which `hook` replaces the output of each module."""
    with ExitStack() as handles:
        for module in modules:
            handles.enter_context(module.register_forward_hook(hook))
        yield


def scaled_by(module: nn.Module) -> tuple[str, ...]:
    """Return the names of those parameters of a module itself that its output is proportional to."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return "weight", "bias"
    # The experts of a layer, whose weights are stacked. Zero experts have no weights, but an output.
    are_experts = isinstance(getattr(module, "down_proj", None), nn.Parameter)
    return ("down_proj", "down_proj_bias") if are_experts and not getattr(module, "zero_expert_num", 0) else ()


def is_adapter(module: object) -> bool:
    """Return whether a module is a layer that PEFT adapts."""
    return hasattr(module, "get_base_layer")  # of PEFT's `BaseTunerLayer`


@torch.no_grad()
def model_log_probs(model: nn.Module, ids: list[int]) -> Tensor:
    """Compute log P(ids[t] | ids[:t]) with the trainer's model. This is a collective under ZeRO-3 and FSDP.

    Args:
        ids: token ids of one sequence.

    Returns:
        [len(ids) − 1] float32 on the CPU, for t = 1 … len(ids) − 1.
    """
    row = torch.tensor([ids], device=next(model.parameters()).device)
    with evaluating(model):
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits
    return selective_log_softmax(logits[0, :-1].float(), row[0, 1:]).cpu()


def check_probe(expected: Tensor, served: dict[str, list[float]], dtypes: Iterable[torch.dtype]) -> None:
    """Raise a `WeightMismatch` if servers' log-probs differ from the trainer's by more than rounding.

    Args:
        expected: [tokens] the trainer's log-probs.
        served: URL → the server's log-probs.
        dtypes: dtypes in which servers and trainer compute. The coarsest determines the tolerance.
    """
    tolerance = max(TOLERANCE.get(dtype, max(TOLERANCE.values())) for dtype in dtypes)
    for url, values in served.items():
        difference = (torch.tensor(values) - expected).abs().mean().item()
        if not difference <= tolerance:  # also if the difference is NaN
            raise WeightMismatch(
                f"{url} does not compute with the weights that it was given: its log-probs differ by "
                f"{difference:.2g} from the trainer's (tolerance for {sorted(map(str, dtypes))}: {tolerance}). On a "
                "CPU build of vLLM, install dash_trl in the server's environment: its plugin stops vLLM from computing "
                "with packed copies. Otherwise check that the server runs the same model, without quantisation or "
                "adapters."
            )
