"""What runs inside a vLLM server: a fix for CPU builds, the report by which a weight sync is proven, a LoRA adapter,
and changes of single weights.

None is called from the trainer. vLLM finds `register` through the entry point group `vllm.general_plugins`
(setup.cfg), and the class through `--worker-extension-cls` (`python -m dash_trl.serve` passes it).
"""

import functools
import os
from typing import Any

import torch

from dash_trl.sampling.changes import unpack
from dash_trl.sampling.checksum import tensor_checksum, weights_checksum

WORKER_EXTENSION = f"{__name__}.WeightReport"
ADAPTER, ADAPTER_ID = "dash_trl_adapter", 1  # the name that requests give; the first number that a server gives to one


def register() -> None:
    """Tells vLLM of our adapter, and makes weight updates effective on its CPU builds.

    A CPU build packs the weights of linear layers for its kernels (oneDNN; small ones in half precision for AMX) once,
    after the first load, and goes on computing with that copy: weights loaded later are silently ignored, or find no
    parameter to be loaded into. Plain layers read the weights that they hold.
    """
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
    from vllm.platforms import current_platform

    class Resolver(LoRAResolver):
        """Says that there is our adapter. The workers have it, by `dash_load_adapter`, before any request names it."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            return LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER) if lora_name == ADAPTER else None

    LoRAResolverRegistry.register_resolver(ADAPTER, Resolver())

    if current_platform.is_cpu():
        from vllm.model_executor.layers import utils

        packing = utils.dispatch_cpu_unquantized_gemm
        utils.dispatch_cpu_unquantized_gemm = functools.partial(_plain_linear, packing)


def _plain_linear(packing: Any, layer: Any, remove_weight: bool) -> None:
    """`dispatch_cpu_unquantized_gemm` without packing; what is no matrix (convolutions, experts) is left to vLLM."""
    if layer.weight.is_meta or layer.weight.ndim != 2:
        packing(layer, remove_weight)
    else:
        layer.cpu_linear = torch.nn.functional.linear


def model_shape(config: Any) -> dict[str, Any]:
    """What two models must have in common for one's weights to fit into the other: fields of their text configs."""
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: getattr(config, name, None) for name in names}


def _several(matrices: Any) -> list[Any]:
    """Of a layer that vLLM has fused of several, a list; `None` where the adapter leaves one of them as it is."""
    return list(matrices) if isinstance(matrices, list | tuple) else [matrices]


class WeightReport:
    """Mixed into vLLM's worker class. The methods' names begin with `dash`, lest they be the worker's own."""

    def dash_load_adapter(self: Any, path: str) -> str:
        """Puts a LoRA adapter in the place of the last one.

        Returns:
            The hexadecimal checksum of the adapter as this worker holds it: A, and B · scaling.
        """
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(ADAPTER, ADAPTER_ID, path, load_inplace=True))
        layers = self.model_runner.lora_manager._adapter_manager.get_adapter(ADAPTER_ID).loras.values()
        held = [matrix for layer in layers for side in (layer.lora_a, layer.lora_b) for matrix in _several(side)]
        return f"{weights_checksum(matrix for matrix in held if matrix is not None):x}"

    def dash_load_differences(self: Any, dtype: str, head: str, body: str) -> None:
        """Sets some elements of the model's weights (`changes.pack`); vLLM's loader finds their places."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        kind = getattr(torch, dtype)
        patches = [
            CheckpointWeightPatch(one.name, one.shape, kind, one.values.view(kind), one.positions)
            for one in unpack(head, body)
        ]
        load_checkpoint_weight_patches(self.get_model(), patches)

    def dash_sees(self: Any, folder: str) -> str:
        """Whether a folder of the trainer's is here, too."""
        return str(os.path.isdir(folder))

    def dash_weight_report(self: Any) -> dict[str, Any]:
        """Of this worker's part of the model: tensor name → hexadecimal checksum, its dtype and its shape."""
        config = self.vllm_config.model_config
        heads = config.get_total_num_kv_heads()
        return {
            "checksums": {name: f"{tensor_checksum(value):x}" for name, value in self.get_model().named_parameters()},
            "dtype": str(config.dtype).removeprefix("torch."),
            "shape": model_shape(config.hf_text_config),
            # Quantised weights, and KV heads copied to several workers, have no checksum that a trainer could know.
            "comparable": config.quantization is None and self.parallel_config.tensor_parallel_size <= heads,
        }
