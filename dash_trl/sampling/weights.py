"""Sends weights by files, which every server loads in place, and compares checksums.

The version that a server reports is only a tag, so every weight sync compares the checksum of the weights that the
server's workers hold with the trainer's. The workers may still compute with a second copy that was not updated, so the
first weight sync of a run also checks log-probs (`proof.py`).
"""

import logging
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.pool import ServerPool
from dash_trl.sampling.vllm import VLLMServer

logger = logging.getLogger(__name__)

WEIGHT_DIR = "_vllm_weights"  # in `output_dir`; push_to_hub leaves out names that begin with an underscore
SHARD_BYTES = 4 << 30  # bytes at which a file is written; a weight sync takes about this much host memory
# Names the processes among which a process id is unique: this machine and, in a container, its own process ids.
HERE = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').resolve().name.strip('pid:[]')}"
NamedTensors = Iterable[tuple[str, Tensor]]


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

    def verify(self, checksum: int | None, url: str) -> None:
        """Raise a `WeightMismatch` if a server reports another checksum. None passes, because it cannot be compared."""
        if checksum not in (None, self.checksum):
            raise WeightMismatch(
                f"{url} was given the weights of version {self.version} (checksum {self.checksum:x}) but holds others "
                f"({checksum:x}). It would not sample from the current policy. Does another run use the same "
                "server? On a CPU build of vLLM, is dash_trl with its plugin installed in the server's environment?"
            )


@dataclass(eq=False)
class FileWeights:
    """Sends weights by files that every server loads in place. Works on any device, and over a shared filesystem.

    The end of the process removes the run's folder. After a killed run, the next run in the same directory and on the
    same machine removes it. The folder's name contains the process id, which protects the files of a live run.

    Attributes:
        directory: folder that trainer and servers see under the same path; several runs may share it.
        dtype: dtype of the servers' weights, in which weights are sent.
        run: folder of this run, with a folder for each version.
    """

    directory: str | Path
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.run = Path(self.directory).absolute() / f"{HERE}-{os.getpid()}-{secrets.token_hex(4)}"

    def send(
        self, parameters: NamedTensors, version: int, pool: ServerPool, urls: Sequence[str]
    ) -> tuple[Snapshot, dict[str, str | None]]:
        """Write a new version and let servers load it.

        Args:
            parameters: name and value of each parameter, unsharded.
            urls: URLs of the servers that get the weights.

        Returns:
            The version that was sent; URL → error message, or None if the server has the weights.

        Raises:
            WeightMismatch: if a server holds other weights.
            ValueError: if a server refused a request.
        """
        snapshot = self.write(parameters, version)
        results = pool.on_each(self.refit, snapshot, urls=urls)
        for older in self.run.glob("version-*"):
            if str(older) != snapshot.path:
                shutil.rmtree(older, ignore_errors=True)
        for result in results.values():
            if isinstance(result, WeightMismatch | ValueError):  # both end the run
                raise result
        errors = {url: str(result) if isinstance(result, BaseException) else None for url, result in results.items()}
        return snapshot, errors

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Write the folder of a new version; see `send`."""
        if not self.run.exists():  # not in the constructor, which all ranks run
            self._begin()
        folder = self.run / f"version-{version}"
        folder.mkdir()
        return Snapshot(version, f"{self.run.name}-{version}", self._fill(folder, parameters) % MODULUS, str(folder))

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
                shard, size = {}, 0
        _save(shard, folder)
        return checksum

    def _begin(self) -> None:
        """Remove the folders of killed runs, and create this run's folder."""
        for other in self.run.parent.glob(f"{HERE}-*-*"):
            if not psutil.pid_exists(int(other.name.split("-")[-2])):
                shutil.rmtree(other, ignore_errors=True)
        self.run.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, self.run, ignore_errors=True)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int:
        """Let a server load a version unless it holds it already, and return that version.

        Comparing the tags is enough, because the tag is set only after loading, and a restart of the server resets it.
        Warn if another run has given the server weights meanwhile.
        """
        tag, given = await server.weight_tag(), server.given
        # After a restart, the tag is "default".
        if given is not None and tag != "default" and tag.rpartition("-")[0] != given.rpartition("-")[0]:
            logger.warning(
                f"{server.url} was given weights by another run (version {tag!r}) after this run's ({given!r}). In the "
                "meantime it may have sampled rows of this run from the other run's policy. Give each run, and each "
                "evaluation beside a run, servers of its own (vllm_server_urls)."
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
