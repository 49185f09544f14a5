"""Sends weights by files, which every server loads in place, and compares checksums.

The version that a server reports is only a tag, so every weight sync compares the checksum of the weights that the
server's workers hold with the trainer's. The workers may still compute with a second copy that was not updated, so the
first weight sync of a run also checks log-probs (`proof.py`).

If only a LoRA adapter is trained, it may be sent alone: it is small, and no merged weight is rounded. Every request
then names it, and vLLM adds B·A·x to the outputs of the base model, which must have the trainer's checksum.
"""

import logging
import math
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

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.vllm import VLLMServer

logger = logging.getLogger(__name__)

WEIGHT_DIR = "_vllm_weights"  # in `output_dir`; push_to_hub leaves out names that begin with an underscore
SHARD_BYTES = 4 << 30  # bytes at which a file is written; a weight sync takes about this much host memory
# Names the processes among which a process id is unique: this machine and, in a container, its own process ids.
HERE = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').resolve().name.strip('pid:[]')}"
NamedTensors = Iterable[tuple[str, Tensor]]

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
    "trainable_token_indices",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "use_qalora",
    "arrow_config",
)


class WeightMismatch(RuntimeError):
    """Raised if a server holds other weights than it was given, or computes with other weights."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent to the servers.

    Attributes:
        tag: name of the version, unique over all runs. A server stores it after it has loaded the weights.
        path: folder with the files; empty if no files were written.
    """

    version: int
    tag: str
    checksum: int
    path: str = ""

    def is_of_run(self, tag: str) -> bool:
        """Return whether the run of this version, on any of its ranks, has sent the version with a tag."""
        return tag.rpartition("-")[0] == self.tag.rpartition("-")[0]

    def verify(self, checksum: int | None, url: str) -> None:
        """Raise a `WeightMismatch` if a server reports another checksum; None cannot be compared."""
        if checksum not in (None, self.checksum):
            raise WeightMismatch(
                f"{url} was given the weights of version {self.version} (checksum {self.checksum:x}) but holds others "
                f"({checksum:x}). It would not sample from the current policy. Does another run use the same "
                "server? On a CPU build of vLLM, is dash_trl with its plugin installed in the server's environment?"
            )


@dataclass(eq=False)
class FileWeights:
    """Sends weights by files that every server loads in place.

    The end of the process removes the run's folder. After a killed run, the next run in the same directory and on the
    same machine removes it; the process id in the folder's name protects the files of a live run.

    Attributes:
        directory: folder that trainer and servers see under the same path; several runs may share it.
        dtype: dtype of the servers' weights, in which weights are sent.
        run: folder of this run, with a folder for each version.
    """

    directory: str | Path
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.run = Path(self.directory).absolute() / f"{HERE}-{os.getpid()}-{secrets.token_hex(4)}"

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Write the folder of a new version of the unsharded parameters, and remove those of older versions."""
        if not self.run.exists():  # not in the constructor, which all ranks run
            self._begin()
        older = list(self.run.iterdir())
        folder = self.run / f"version-{version}"
        folder.mkdir()
        checksum = self._fill(folder, parameters) % MODULUS
        for other in older:
            shutil.rmtree(other, ignore_errors=True)
        return Snapshot(version, f"{self.run.name}-{version}", checksum, str(folder))

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        """Write a version's files, and return the checksum that servers have to report."""
        shard: dict[str, Tensor] = {}
        size = checksum = 0
        for name, tensor in parameters:
            tensor = tensor.detach().to(self.dtype)
            checksum += tensor_checksum(tensor)
            shard[name] = tensor.cpu().contiguous().clone()  # a copy: gathering the next parameter frees this one
            size += tensor.nbytes
            if size >= SHARD_BYTES:
                _save(shard, folder)
                shard = {}
                size = 0
        _save(shard, folder)
        return checksum

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
        # Before the first version, a server may hold weights of an earlier run. After a restart, the tag is "default".
        if snapshot.version > 1 and tag != "default" and not snapshot.is_of_run(tag):
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
        """Let a server load a version in place of the version with the tag `held`, and verify the result."""
        snapshot.verify(await server.load_weights(snapshot.path, snapshot.tag), server.url)


def _save(shard: dict[str, Tensor], directory: Path) -> None:
    if shard:
        save_file(shard, directory / f"model-{len(list(directory.iterdir())) + 1:05}.safetensors")


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
        # Without modules: the names of the matrices show vLLM which modules the adapter changes.
        replace(self.adapter, target_modules=[]).save_pretrained(folder)
        return checksum

    async def _load(self, server: VLLMServer, snapshot: Snapshot, held: str) -> None:
        if not snapshot.is_of_run(held):  # a first load, a restart, or weights of another run
            base = await server.weight_checksum()
            if base not in (None, self.base):
                raise WeightMismatch(
                    f"{server.url} holds another base model (checksum {base:x}) than the trainer's ({self.base:x}). "
                    "Does another run use the same server? Restart the server from the checkpoint from which the "
                    "training started, in the trainer's dtype."
                )
        snapshot.verify(await server.load_adapter(snapshot.path, snapshot.tag), server.url)


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
