"""Sends only a LoRA adapter to the servers, not the merged model: it is small, and no merged weight is rounded::

    A and B of the trained adapter ──► a folder in PEFT's format ──► vLLM adds B·A·x to the base model's outputs

Every request names the adapter. The server pauses while it replaces the adapter, and requests in flight continue with
the new version. Server and trainer must have base models with the same checksum.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.checksum import tensor_checksum
from dash_trl.sampling.vllm import VLLMServer
from dash_trl.sampling.weights import FileWeights, NamedTensors, Snapshot, WeightMismatch

NAME = "default"  # name of the adapter that TRL trains
# Options that an adapter's configuration must not set: vLLM refuses them or computes something else.
WITHOUT = (
    "bias",
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "use_qalora",
    "arrow_config",
)


def obstacle(model: Any, most: int) -> str | None:
    """Return why this model's adapter cannot be sent alone, as the end of a log message; None if it can.

    Args:
        most: largest rank that the servers take; 0 = they take no adapter.
    """
    if model.active_adapters != [NAME]:
        return f"the active adapters are {model.active_adapters}, and not {NAME!r} alone"
    adapter = model.peft_config[NAME]
    if adapter.peft_type != "LORA":
        return f"vLLM supports LoRA adapters only, and this is {adapter.peft_type.value}"
    if getattr(model.get_base_model(), "hf_quantizer", None):
        return "the weights of its base model are quantised here"
    if given := [name for name in WITHOUT if getattr(adapter, name, None) not in (None, "none", False, [], {})]:
        return f"vLLM does not support an adapter with {', '.join(given)}"
    parts = (f".lora_A.{NAME}.", f".lora_B.{NAME}.")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if others := [name for name in trained if not any(map(name.count, parts))]:
        return f"other parameters are trained, too, such as {others[0]}"
    if most < adapter.r:
        room = next(room for room in (1, 8, 16, 32, 64, 128, 256, 320, 512) if room >= adapter.r)  # vLLM's choices
        return (
            "the servers were started without LoRA support for its rank. To send only the adapter, start them with "
            f"`dash_trl serve {model.config.name_or_path} --enable-lora --max-lora-rank {room}`"
        )
    return None


@dataclass(eq=False)
class AdapterWeights(FileWeights):
    """Sends only a LoRA adapter, by file; see `FileWeights`.

    Attributes:
        base: checksum of the base model's weights, in `dtype`.
    """

    adapter: Any
    base: int

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        rank = self.adapter.r
        scaling = self.adapter.lora_alpha / (math.sqrt(rank) if self.adapter.use_rslora else rank)  # of B·A
        matrices: dict[str, Tensor] = {}
        checksum = 0
        for name, tensor in parameters:
            matrices[name] = matrix = tensor.detach().to(self.dtype).cpu().contiguous().clone()
            checksum += tensor_checksum(matrix * scaling if ".lora_B." in name else matrix)
        save_file(matrices, folder / "adapter_model.safetensors")
        # `adapter.save_pretrained` would also write `target_modules`, which may be a regular expression or a set. vLLM
        # does not need it: the names of the matrices show which modules the adapter changes.
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": self.adapter.lora_alpha, "target_modules": []}
        said["use_rslora"] = self.adapter.use_rslora
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return checksum

    async def _load(self, server: VLLMServer, snapshot: Snapshot, held: str) -> None:
        if held != server.given:  # a first load, a restart, or weights of another run
            base = await server.weight_checksum()
            if base not in (None, self.base):
                raise WeightMismatch(
                    f"{server.url} holds another base model (checksum {base:x}) than the trainer's ({self.base:x}). "
                    "Does another run use the same server? Restart the server from the checkpoint from which the "
                    "training started, in the trainer's dtype."
                )
        snapshot.verify(await server.load_adapter(snapshot.path, snapshot.tag), server.url)
