"""What runs inside a vLLM server: one fix for CPU builds, and the report by which a weight sync is proven.

Neither is called from the trainer. vLLM finds `register` through the entry point group `vllm.general_plugins`
(setup.cfg), and the class through `--worker-extension-cls` (`python -m dash_trl.serve` passes it).
"""

import functools
from typing import Any

import torch

from dash_trl.sampling.checksum import tensor_checksum

WORKER_EXTENSION = f"{__name__}.WeightReport"


def register() -> None:
    """Makes weight updates effective on CPU builds of vLLM; does nothing on a GPU.

    A CPU build packs the weights of linear layers for its kernels (oneDNN; small ones in half precision for AMX) once,
    after the first load, and goes on computing with that copy: weights loaded later are silently ignored, or find no
    parameter to be loaded into. Plain layers read the weights that they hold.
    """
    from vllm.platforms import current_platform

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


class WeightReport:
    """Mixed into vLLM's worker class. The name of the method is long since it must not be one of the worker's own."""

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
