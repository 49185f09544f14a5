"""Sends weights by files, which every server loads in place."""

import os
import secrets
import shutil
import socket
import weakref
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, errors_of, held_tag, holds

WEIGHT_DIR = "_vllm_weights"  # in `output_dir`; push_to_hub leaves out names that begin with an underscore
SHARD_BYTES = 4 << 30  # bytes at which a file is written; a weight sync takes about this much host memory
# Names the processes among which a process id is unique: this machine and, in a container, its own process ids.
HERE = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').resolve().name.strip('pid:[]')}"


class FileWeights:
    """Sends weights by files that every server loads in place. Works on any device, and over a shared filesystem.

    Each run has its own folder in `directory`, which has one folder per version. A version's folder gets its final name
    when it is complete. Older versions are removed after a weight sync, and the run's folder is removed at the end of
    the process.

    If a run is killed, the next run in the same directory and on the same machine removes the killed run's files. A
    run's folder has its process id in its name, so that no run removes the files of a live run.

    Args:
        directory: folder that trainer and servers see under the same path; several runs may share it.
        dtype: dtype of the servers' weights; weights are converted to it before they are sent.

    Attributes:
        run: folder of this run.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        self.directory = Path(directory).absolute()
        self.dtype = dtype
        self.run = self.directory / f"{HERE}-{os.getpid()}-{secrets.token_hex(4)}"

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        """Write a new version and let servers load it.

        Args:
            parameters: name and value of each parameter, unsharded.
            version: weight version.
            on_each: `ServerPool.on_each` for the servers that get the weights.

        Returns:
            The version that was sent; URL → error message, or None if the server has the weights.

        Raises:
            WeightMismatch: if a server holds other weights than it was given.
            ValueError: if a server refused a request.
        """
        snapshot = self.write(parameters, version)
        outcome = on_each(lambda server: self._load(server, snapshot))
        for older in self.run.glob("version-*"):
            if str(older) != snapshot.path:
                shutil.rmtree(older, ignore_errors=True)
        return snapshot, errors_of(outcome)

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Write the folder of a new version.

        Args:
            parameters: name and value of each parameter, unsharded.
            version: weight version.

        Returns:
            Description of the version.
        """
        if not self.run.exists():  # not in the constructor, which all ranks run
            self._begin()
        folder = self.run / f"version-{version}"
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by an attempt that failed
        partial.mkdir()
        checksum = self._fill(partial, parameters)
        partial.rename(folder)
        return Snapshot(version, f"{self.run.name}-{version}", checksum % MODULUS, str(folder))

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        """Write a version's files; return the checksum that servers have to report."""
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
        for other in self.directory.glob(f"{HERE}-*-*"):
            if not psutil.pid_exists(int(other.name.split("-")[-2])):
                shutil.rmtree(other, ignore_errors=True)
        self.run.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, self.run, ignore_errors=True)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        """Let a server load the current version, unless the server holds it already.

        Args:
            server: the server.
            snapshot: the current version.

        Returns:
            The weight version that the server now holds.
        """
        if not await holds(server, snapshot):
            await self._load(server, snapshot)
        return snapshot.version

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        """Let a server load a version, and verify the server's report."""
        await held_tag(server)
        snapshot.verify(await server.load_weights(snapshot.path, snapshot.tag), server.url)


def _save(shard: dict[str, Tensor], directory: Path) -> None:
    """Write the next file of a version."""
    if shard:
        save_file(shard, directory / f"model-{len(list(directory.iterdir())) + 1:05}.safetensors")
