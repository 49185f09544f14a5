"""Plugin inside a vLLM server: it describes the model, loads LoRA adapters, and lets CPU builds update weights.

vLLM finds `register` through the entry point group `vllm.general_plugins` (setup.cfg), and `WorkerMethods` through
`--worker-extension-cls`, which `dash_trl serve` passes. The trainer calls the methods of `WorkerMethods` over HTTP.
"""

from typing import Any

import torch

WORKER_EXTENSION = f"{__name__}.WorkerMethods"
# Our adapter's name in requests, and its id in the workers. A server numbers adapters from 1, in the order in which
# requests first name them; ours is the first.
ADAPTER = "dash_trl_adapter"
ADAPTER_ID = 1


def register() -> None:
    """Register the name of our adapter with vLLM, and make weight updates effective on CPU builds of vLLM.

    After the first load, a CPU build computes with a copy of linear weights, packed for its kernels (oneDNN, or AMX for
    small weights in half precision). It silently ignores weights that are loaded later, or fails because their
    parameter was removed. So these layers compute with `torch.nn.functional.linear`, which reads the current weights.
    """
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
    from vllm.platforms import current_platform

    class Resolver(LoRAResolver):
        """Resolves our adapter's name. `dash_load_adapter` loads it into all workers before requests name it."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            return LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER) if lora_name == ADAPTER else None

    LoRAResolverRegistry.register_resolver(ADAPTER, Resolver())

    if current_platform.is_cpu():
        from vllm.model_executor.layers import utils

        packing = utils.dispatch_cpu_unquantized_gemm

        def plain_linear(layer: Any, remove_weight: bool) -> None:
            """Call vLLM's function only for convolutions, experts, and layers that this worker lacks."""
            if layer.weight.is_meta or layer.weight.ndim != 2:
                packing(layer, remove_weight)
            else:
                layer.cpu_linear = torch.nn.functional.linear

        utils.dispatch_cpu_unquantized_gemm = plain_linear


class WorkerMethods:
    """Mixin for vLLM's worker class. The names of its methods begin with `dash`, so they override no method."""

    def dash_load_adapter(self: Any, path: str) -> None:
        """Load a LoRA adapter, whose folder has PEFT's format, in place of the last one."""
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(ADAPTER, ADAPTER_ID, path, load_inplace=True))

    def dash_model(self: Any) -> dict[str, Any]:
        """Return the model's `dtype` and `shape` (see `model_shape`)."""
        config = self.vllm_config.model_config
        return {"dtype": str(config.dtype).removeprefix("torch."), "shape": model_shape(config.hf_config)}


def model_shape(config: Any) -> dict[str, Any]:
    """Return the fields of a config that must be equal if the weights of one model are to fit another.

    "multimodal" is among them, because a multimodal model names its weights differently from its language model alone.
    A missing field is None.
    """
    text = config.get_text_config()
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {"multimodal": text is not config, **{name: getattr(text, name, None) for name in names}}
