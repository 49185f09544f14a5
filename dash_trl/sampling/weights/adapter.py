"""Sends only a LoRA adapter to the servers, not the merged model. An adapter is small, and no merged weight is rounded.

Path of the adapter::

    A and B of the trained adapter ──► a folder in PEFT's format ──► vLLM adds B·A·x to the base model's outputs

Every request names the adapter. While a new version replaces the last version, the server pauses. Requests in flight
then continue with the new version, as with full weights. The server uses its own base model. The checksum of this base
model has to equal the checksum of the trainer's.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.checksum import tensor_checksum
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.file import FileWeights
from dash_trl.sampling.weights.proof import is_adapter
from dash_trl.sampling.weights.snapshot import NamedTensors, Snapshot, WeightMismatch, held_tag

NAME = "default"  # name of the adapter that TRL trains
# Options that an adapter's configuration must not set: vLLM refuses them or computes something else.
WITHOUT = (
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


def obstacle(model: Any, config: dict[str, Any]) -> str | None:
    """Return the reason why this model's adapter cannot be sent alone to a server, if there is such a reason.

    Args:
        model: a PEFT model.
        config: vLLM's configuration of the server, as JSON.

    Returns:
        The reason, as the end of a log message; None if the adapter can be sent alone.
    """
    if model.active_adapters != [NAME]:
        return f"the active adapters are {model.active_adapters}, and not {NAME!r} alone"
    adapter = model.peft_config[NAME]
    if adapter.peft_type != "LORA":
        return f"vLLM supports LoRA adapters only, and this is {adapter.peft_type.value}"
    if adapter.bias != "none":
        return f"vLLM supports adapters without bias only, and this one has bias={adapter.bias!r}"
    given = [name for name in WITHOUT if getattr(adapter, name, None)]
    if given:
        return f"vLLM does not support an adapter with {', '.join(given)}"
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(map(is_adapter, ends)):
        return "it also adapts the embeddings or the output layer, which is not tested with vLLM"
    parts = (f".lora_A.{NAME}.", f".lora_B.{NAME}.")
    others = [name for name, one in model.named_parameters() if one.requires_grad and not any(map(name.count, parts))]
    if others:
        return f"other parameters are trained, too, such as {others[0]}"
    served = config.get("lora_config") or {}
    if served.get("max_lora_rank", 0) < adapter.r:
        return (
            "the servers were started without LoRA support for its rank. To send only the adapter, start them with "
            f"`python -m dash_trl.serve {model.config.name_or_path} --enable-lora --max-lora-rank {_room(adapter.r)}`"
        )
    return None


def _room(rank: int) -> int:
    """Return the smallest `--max-lora-rank` that vLLM accepts for this rank."""
    return next(room for room in (1, 8, 16, 32, 64, 128, 256, 320, 512) if room >= rank)


class AdapterWeights(FileWeights):
    """Sends only a LoRA adapter, by file.

    Args:
        directory: see `FileWeights`.
        dtype: see `FileWeights`.
        adapter: PEFT's configuration of the adapter.
        base: checksum of the base model's weights, in `dtype`.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype, adapter: Any, base: int):
        super().__init__(directory, dtype)
        self.adapter, self.base = adapter, base
        # URL → last tag that the server got. While the server reports this tag, its base model is not checked again.
        self._tags: dict[str, str] = {}

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        matrices: dict[str, Tensor] = {}
        checksum = 0
        for name, tensor in parameters:
            matrices[name] = matrix = tensor.detach().to(self.dtype).cpu().contiguous().clone()
            checksum += tensor_checksum(matrix * self.scaling if ".lora_B." in name else matrix)
        save_file(matrices, folder / "adapter_model.safetensors")
        # `adapter.save_pretrained` would also write `target_modules`, which may be a regular expression or a set. vLLM
        # does not need it: the names of the matrices show which modules the adapter changes.
        said = {"peft_type": "LORA", "r": self.adapter.r, "lora_alpha": self.adapter.lora_alpha, "target_modules": []}
        said["use_rslora"] = self.adapter.use_rslora
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return checksum

    @property
    def scaling(self) -> float:
        """LoRA's factor for B·A."""
        rank = self.adapter.r
        return self.adapter.lora_alpha / (math.sqrt(rank) if self.adapter.use_rslora else rank)

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        tag = self._tags.pop(server.url, None)
        if tag is None or await held_tag(server) != tag:  # a first load, or a restart
            base = (await server.weight_report()).checksum
            if base not in (None, self.base):
                raise WeightMismatch(
                    f"{server.url} holds another base model (checksum {base:x}) than the trainer's ({self.base:x}). "
                    "Does another run use the same server? Restart the server from the checkpoint from which the "
                    "training started."
                )
        checksum = await server.load_adapter(snapshot.path, snapshot.tag)
        if checksum != snapshot.checksum:
            raise WeightMismatch(
                f"{server.url} was given the adapter of version {snapshot.version} (checksum {snapshot.checksum:x}) "
                f"but holds another one ({checksum:x}). It would not sample from the current policy."
            )
        self._tags[server.url] = snapshot.tag
