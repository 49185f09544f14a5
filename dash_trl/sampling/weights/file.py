"""Weights by files, which every server loads in place."""

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
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, errors_of, holds

logger = logging.getLogger(__name__)

WEIGHT_DIR = "_vllm_weights"  # in a run's folder; push_to_hub leaves out what begins with an underscore
SHARD_BYTES = 4 << 30  # of a file: the host memory that a sync takes
LOCK = ".dash_trl.lock"


class FileWeights:
    """Weights by files that every server loads in place: works on any device, and over a shared filesystem.

    A run has a folder of its own, with a folder per version that appears under its name when it is complete. Older
    versions are removed after a sync, the run's folder at the end of the process. What a killed run left is removed by
    the next one in the same directory: a run holds a lock on a file in its folder, and the kernel takes it away with
    the process, whatever ended it. Where there are no locks there is no such file, and nobody removes another run's
    weights.

    Args:
        directory: must be seen by trainer and servers under the same path; several runs may share it.
        dtype: of the servers; weights are converted before they are sent.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        self.directory = Path(directory).absolute()
        self.dtype = dtype
        self.run = self.directory / secrets.token_hex(4)
        self._lock: IO[str] | None = None

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        """Send to the servers behind `on_each`. Returns what was sent, and per server an error or None."""
        snapshot = self.write(parameters, version)
        outcome = on_each(lambda server: self._load(server, snapshot))
        for older in self.run.glob("version-*"):
            if str(older) != snapshot.path:
                shutil.rmtree(older, ignore_errors=True)
        return snapshot, errors_of(outcome)

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """A new version's directory."""
        folder = self._folder(version)
        return self._snapshot(version, self._write(parameters, folder))

    def _folder(self, version: int) -> Path:
        if self._lock is None:  # not in the constructor, which all ranks run
            self._begin()
        return self.run / f"version-{version}"

    def _snapshot(self, version: int, checksum: int) -> Snapshot:
        path = str(self._folder(version))
        return Snapshot(version, f"{self.run.name}-{version}", checksum % MODULUS, path)

    def _write(self, parameters: NamedTensors, folder: Path) -> int:
        """A folder that appears when it is complete; returns the checksum of what a server will hold."""
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
        partial.mkdir()
        checksum = self._fill(partial, parameters)
        partial.rename(folder)
        return checksum

    def _fill(self, folder: Path, parameters: NamedTensors) -> int:
        """Writes the files; returns the checksum of what a server will hold."""
        shard: dict[str, Tensor] = {}
        size = checksum = 0
        for name, tensor in parameters:
            tensor = tensor.detach().to(self.dtype)
            checksum += tensor_checksum(tensor)
            shard[name] = tensor.cpu().contiguous().clone()  # the parameter is released when the next one is gathered
            size += tensor.nbytes
            if size >= SHARD_BYTES:
                _save(shard, folder)
                shard, size = {}, 0
        _save(shard, folder)
        return checksum

    def _begin(self) -> None:
        for lock_file in self.directory.glob(f"*/{LOCK}"):
            _remove_if_dead(lock_file)
        self.run.mkdir(parents=True)
        unlocked = self.run / "unlocked"
        self._lock = unlocked.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.run / LOCK)  # it appears under its name when it is held
        except OSError as error:
            logger.warning(
                f"Files in {self.directory} cannot be locked ({error}), so that no later run can know whether this one "
                f"is alive: if it is killed, remove {self.run}."
            )
        weakref.finalize(self, _remove, self.run, self._lock)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        """See that a server has `snapshot`, or give it. Returns the version."""
        if not await holds(server, snapshot):
            await self._load(server, snapshot)
        return snapshot.version

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        assert snapshot.path is not None
        snapshot.verify(await server.load_weights(snapshot.path, snapshot.tag), server.url)


def _save(shard: dict[str, Tensor], directory: Path) -> None:
    if shard:
        save_file(shard, directory / f"model-{len(list(directory.iterdir())) + 1:05}.safetensors")


def _remove(run: Path, lock: IO[str]) -> None:
    """All of a run; its lock file last, so that a removal that is interrupted is made again."""
    for version in run.glob("version-*"):
        shutil.rmtree(version, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)
    lock.close()


def _remove_if_dead(lock_file: Path) -> None:
    """What is left of a run whose lock is free. (A pid says nothing on another host, and may be another's by now.)"""
    try:
        with lock_file.open("r+") as lock:  # NFS gives no exclusive lock on what was opened for reading
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock_file.parent, lock)
    except OSError:
        pass  # the run lives, or nobody can tell
