"""Sends weights by files, which every server loads in place."""

import fcntl
import logging
import secrets
import shutil
import weakref
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, errors_of, held_tag, holds

logger = logging.getLogger(__name__)

WEIGHT_DIR = "_vllm_weights"  # in `output_dir`; push_to_hub leaves out names that begin with an underscore
SHARD_BYTES = 4 << 30  # bytes at which a file is written; a weight sync takes about this much host memory
LOCK = ".dash_trl.lock"


class FileWeights:
    """Sends weights by files that every server loads in place. Works on any device, and over a shared filesystem.

    Each run has its own folder in `directory`, which has one folder per version. A version's folder gets its final name
    when it is complete. Older versions are removed after a weight sync, and the run's folder is removed at the end of
    the process.

    If a run is killed, the next run in the same directory removes the killed run's files. To protect the files of a
    live run, each run holds a lock on a file in its folder. The kernel releases the lock when the process ends for any
    reason. If the filesystem has no locks, the lock file is missing, and no run removes another run's weights.

    Args:
        directory: folder that trainer and servers see under the same path; several runs may share it.
        dtype: dtype of the servers' weights; weights are converted to it before they are sent.

    Attributes:
        run: folder of this run.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        self.directory = Path(directory).absolute()
        self.dtype = dtype
        self.run = self.directory / secrets.token_hex(4)
        self._lock: IO[str] | None = None

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
        if self._lock is None:  # not in the constructor, which all ranks run
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
        """Remove the folders of killed runs, and create and lock this run's folder."""
        for lock_file in self.directory.glob(f"*/{LOCK}"):
            _remove_if_dead(lock_file)
        self.run.mkdir(parents=True)
        unlocked = self.run / "unlocked"
        self._lock = unlocked.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.run / LOCK)  # the file gets its final name once the lock is held
        except OSError as error:
            logger.warning(
                f"Files in {self.directory} cannot be locked ({error}), so later runs cannot tell whether this run is "
                f"alive. If this run is killed, remove {self.run}."
            )
        weakref.finalize(self, _remove, self.run, self._lock)

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


def _remove(run: Path, lock: IO[str]) -> None:
    """Remove all files of a run, and release its lock."""
    shutil.rmtree(run, ignore_errors=True)
    lock.close()


def _remove_if_dead(lock_file: Path) -> None:
    """Remove the files of a run whose lock is free.

    A process id would not show whether a run is alive: the run may be on another host, and a new process may have got
    the same id.
    """
    try:
        with lock_file.open("r+") as lock:  # NFS gives no exclusive lock on a file that is open for reading only
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock_file.parent, lock)
    except OSError:
        pass  # the run is alive, or we cannot tell
