"""A LoRA adapter to the servers, in place of the merged model: megabytes, and no rounding of merged weights.

    A and B of the trained adapter ──► a folder as PEFT writes it ──► vLLM adds B·A·x to what the base model computes

Requests name the adapter. It takes the place of the last version while the server pauses, so that requests in flight go
on with it, as with whole weights. The base model is the server's own: its checksum has to be the trainer's.
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
from dash_trl.sampling.weights.snapshot import NamedTensors, Snapshot, WeightMismatch

NAME = "default"  # of the adapter that TRL trains
# What an adapter's configuration must not have: vLLM refuses it, or computes something else.
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
    """Why a server cannot be given this model's adapter, so that the merged model is sent; None: it can.

    Args:
        model: a PEFT model. config: vLLM's own, as JSON.
    """
    adapter = model.peft_config[NAME]
    if adapter.peft_type != "LORA":
        return f"vLLM takes LoRA, and this is {adapter.peft_type.value}"
    if adapter.bias != "none":
        return f"vLLM takes an adapter without bias, and this one has bias={adapter.bias!r}"
    given = [name for name in WITHOUT if getattr(adapter, name, None)]
    if given:
        return f"vLLM does not take an adapter with {', '.join(given)}"
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(map(is_adapter, ends)):
        return "it is of the embeddings or of the output layer, too, which is not tried out"
    if model.active_adapters != [NAME]:
        return f"the active adapters are {model.active_adapters}"
    served = config.get("lora_config") or {}
    if served.get("max_lora_rank", 0) < adapter.r:
        return (
            "the servers were started without room for it; with it, only the adapter would be sent: "
            f"python -m dash_trl.serve {model.config.name_or_path} --enable-lora --max-lora-rank {_room(adapter.r)}"
        )
    return None


def _room(rank: int) -> int:
    """The smallest `--max-lora-rank` that vLLM knows for this rank."""
    return next(room for room in (1, 8, 16, 32, 64, 128, 256, 320, 512) if room >= rank)


class AdapterWeights(FileWeights):
    """
    Args:
        directory, dtype: see `FileWeights`.
        adapter: the configuration of the adapter.
        base: the checksum of the base model's weights, in `dtype`.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype, adapter: Any, base: int):
        super().__init__(directory, dtype)
        self.adapter, self.base = adapter, base
        self._tags: dict[str, str] = {}  # server → what it was told last; it has the base then

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        matrices: dict[str, Tensor] = {}
        checksum = 0
        for name, tensor in parameters:
            matrices[name] = matrix = tensor.detach().to(self.dtype).cpu().contiguous().clone()
            checksum += tensor_checksum(matrix * self.scaling if ".lora_B." in name else matrix)
        save_file(matrices, folder / "adapter_model.safetensors")
        # Not `adapter.save_pretrained`: regular expressions and sets of modules say nothing more than the file's names.
        said = {"peft_type": "LORA", "r": self.adapter.r, "lora_alpha": self.adapter.lora_alpha, "target_modules": []}
        said["use_rslora"] = self.adapter.use_rslora
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return checksum

    @property
    def scaling(self) -> float:
        rank = self.adapter.r
        return self.adapter.lora_alpha / (math.sqrt(rank) if self.adapter.use_rslora else rank)

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        assert snapshot.path is not None
        tag = self._tags.pop(server.url, None)
        if tag is None or await server.weight_tag() != tag:  # it has restarted, or somebody else gave it weights
            base = (await server.weight_report()).checksum
            if base not in (None, self.base):
                raise WeightMismatch(
                    f"{server.url} holds another base model (checksum {base:x}) than the adapter's ({self.base:x}). "
                    "Does a second run use it? Start it anew, from the checkpoint from which the trainer began."
                )
        checksum = await server.load_adapter(snapshot.path, snapshot.tag)
        if checksum != snapshot.checksum:
            raise WeightMismatch(
                f"{server.url} was given the adapter of version {snapshot.version} (checksum {snapshot.checksum:x}) "
                f"but holds another ({checksum:x}). Its samples would not be the policy's."
            )
        self._tags[server.url] = snapshot.tag
