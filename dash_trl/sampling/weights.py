"""Sends weights by files, which every server loads in place. The version that a server reports is a tag of ours.

If only a LoRA adapter is trained, it may be sent alone: it is small, and no merged weight is rounded. Every request
then names it, and vLLM adds B·A·x to the outputs of the base model.
"""

import logging
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from dash_trl.sampling.vllm import VLLMServer

logger = logging.getLogger(__name__)

WEIGHT_DIR = "_vllm_weights"  # in `output_dir`; push_to_hub leaves out names that begin with an underscore
SHARD_BYTES = 4 << 30  # bytes at which a file is written; a weight sync takes about this much host memory
# Names the processes among which a process id is unique: this machine and, in a container, its own process ids.
HERE = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').resolve().name.strip('pid:[]')}"
NamedTensors = Iterable[tuple[str, Tensor]]

UNTAGGED = "default"  # vLLM's tag of a server that has loaded no version
TRAINED = "default"  # name of the adapter that TRL trains
# Options that an adapter's configuration must not set: vLLM refuses them or computes something else.
UNSERVED = (
    "bias",
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "use_qalora",
    "arrow_config",
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_")  # so begin PEFT's names of initialisations that change it


class WeightMismatch(RuntimeError):
    """Raised if a server computes with other weights than it was given, or its base model may be another."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent to the servers.

    Attributes:
        tag: name of the version, unique over all runs. It begins with `FileWeights.kind`, and ends with the version.
            A server stores it after it has loaded the weights.
        path: folder with the files.
    """

    version: int
    tag: str
    path: str


@dataclass(eq=False)
class FileWeights:
    """Sends weights by files that every server loads in place.

    The end of the process removes the run's folder. After a killed run, the next run in the same directory and on the
    same machine removes it; the process id in the folder's name protects the files of a live run.

    Attributes:
        directory: folder that trainer and servers see under the same path; several runs may share it.
        dtype: dtype of the servers' weights, in which weights are sent.
        run: folder of this run, with a folder for each version.
        kind: what the files contain.
    """

    directory: str | Path
    dtype: torch.dtype
    kind = "model"

    def __post_init__(self) -> None:
        self.run = Path(self.directory).absolute() / f"{HERE}-{os.getpid()}-{secrets.token_hex(4)}"

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Write the folder of a new version of the unsharded parameters, and remove those of older versions."""
        if not self.run.exists():  # not in the constructor, which all ranks run
            self._begin()
        older = list(self.run.iterdir())
        folder = self.run / f"version-{version}"
        folder.mkdir()
        self._fill(folder, parameters)
        for other in older:
            shutil.rmtree(other, ignore_errors=True)
        return Snapshot(version, f"{self.kind}-{self.run.name}-{version}", str(folder))

    def _fill(self, folder: Path, parameters: NamedTensors) -> None:
        """Write a version's files."""
        shard: dict[str, Tensor] = {}
        size = 0
        for name, tensor in parameters:
            tensor = tensor.detach().to(self.dtype)
            shard[name] = tensor.cpu().contiguous().clone()  # a copy: gathering the next parameter frees this one
            size += tensor.nbytes
            if size >= SHARD_BYTES:
                _save(shard, folder)
                shard = {}
                size = 0
        _save(shard, folder)

    def _begin(self) -> None:
        """Remove the folders of killed runs, and create this run's folder."""
        for other in self.run.parent.glob(f"{HERE}-*-*"):
            if not psutil.pid_exists(int(other.name.split("-")[-2])):
                shutil.rmtree(other, ignore_errors=True)
        self.run.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, self.run, ignore_errors=True)

    async def refit(self, snapshot: Snapshot, server: VLLMServer) -> int:
        """Let a server load a version unless it holds it already, and return that version.

        Comparing the tags is enough, because the tag is set only after loading, and a restart of the server resets it.
        """
        tag = await server.weight_tag()
        of_run = tag.rpartition("-")[0] == snapshot.tag.rpartition("-")[0]  # of any rank
        # Before the first version, a server may hold weights of an earlier run.
        if snapshot.version > 1 and tag != UNTAGGED and not of_run:
            logger.warning(
                f"{server.url} was given weights by another run (version {tag!r}) after this run's. In the meantime it "
                "may have sampled rows of this run from the other run's policy. Give each run, and each evaluation "
                "beside a run, servers of its own (vllm_server_urls)."
            )
        if tag == snapshot.tag:
            await server.resume()  # if the last `resume` was lost, the server would stay paused
        else:
            await self._load(server, snapshot, tag)
        return snapshot.version

    async def _load(self, server: VLLMServer, snapshot: Snapshot, held: str) -> None:
        """Let a server load a version in place of the version with the tag `held`."""
        await server.load_weights(snapshot.path, snapshot.tag)


def _save(shard: dict[str, Tensor], directory: Path) -> None:
    if shard:
        save_file(shard, directory / f"model-{len(list(directory.iterdir())) + 1:05}.safetensors")


@dataclass(eq=False)
class AdapterWeights(FileWeights):
    """Sends only a LoRA adapter, by file; see `FileWeights`."""

    adapter: Any
    kind = "adapter"

    def _fill(self, folder: Path, parameters: NamedTensors) -> None:
        matrices = {name: tensor.detach().to(self.dtype).cpu().contiguous().clone() for name, tensor in parameters}
        save_file(matrices, folder / "adapter_model.safetensors")
        # Without modules: the names of the matrices show vLLM which modules the adapter changes.
        replace(self.adapter, target_modules=[]).save_pretrained(folder)

    async def _load(self, server: VLLMServer, snapshot: Snapshot, held: str) -> None:
        if held != UNTAGGED and not held.startswith(self.kind):
            raise WeightMismatch(
                f"{server.url} was given a whole model by another run (version {held!r}), so its base model may be "
                "another than this run's, which sends its adapter alone. Restart the server, and give each run its own."
            )
        await server.load_adapter(snapshot.path, snapshot.tag)


def changes_base(adapter: Any) -> str | None:
    """Return the option of an adapter (its configuration, or `None`) whose initialisation has changed the base model.

    `None`: none has.
    """
    init = getattr(adapter, "init_lora_weights", None)
    if getattr(adapter, "kasa_config", None) is not None:
        return "kasa_config"
    return f"init_lora_weights={init!r}" if str(init).lower().startswith(CHANGES_BASE) else None


def obstacle(model: Any, most: int) -> str | None:
    """Return why this model's adapter cannot be sent alone, as the end of a log message; None if it can.

    Args:
        most: largest rank that the servers take; 0 = they take no adapter.
    """
    if model.active_adapters != [TRAINED]:
        return f"the active adapters are {model.active_adapters}, and not {TRAINED!r} alone"
    adapter = model.peft_config[TRAINED]
    if adapter.peft_type != "LORA":
        return f"vLLM supports LoRA adapters only, and this is {adapter.peft_type.value}"
    if option := changes_base(adapter):
        return f"{option} has changed its base model"
    if getattr(model.get_base_model(), "hf_quantizer", None):
        return "the weights of its base model are quantised here"
    if given := [name for name in UNSERVED if getattr(adapter, name, None) not in (None, "none", False, [], {})]:
        return f"vLLM does not support an adapter with {', '.join(given)}"
    parts = (f".lora_A.{TRAINED}.", f".lora_B.{TRAINED}.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(map(name.count, parts)):
            return f"other parameters are trained, too, such as {name}"
    if most < adapter.r:
        room = next(room for room in (1, 8, 16, 32, 64, 128, 256, 320, 512) if room >= adapter.r)  # vLLM's choices
        return (
            "the servers were started without LoRA support for its rank. To send only the adapter, start them with "
            f"`dash_trl serve {model.config.name_or_path} --enable-lora --max-lora-rank {room}`"
        )
    return None


def weights_version(parameters: Iterable[Tensor]) -> list[int]:
    """Compute a value that shows whether any weights have changed since an earlier call.

    PyTorch's version counters miss changes of `parameter.data`, so this adds up the bits of each tensor as 8-byte
    integers.

    Args:
        parameters: all parameters of the model; of sharded parameters, this rank's shards count.
    """
    sums = []
    for one in parameters:
        share = getattr(one, "ds_tensor", one).detach()  # under ZeRO-3, the parameter itself is empty
        share = share.to_local() if hasattr(share, "to_local") else share
        raw = share.flatten().view(torch.uint8)
        padded = pad(raw, (0, -len(raw) % 8))  # a copy, which begins at a multiple of 8 bytes
        sums.append(padded.view(torch.int64).sum())
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist()
