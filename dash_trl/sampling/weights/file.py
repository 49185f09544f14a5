"""Weights by files, which every server loads in place."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save_file
from torch import Tensor

from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, _errors, _holds

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30  # of a file: the host memory that a sync takes
LOCK = ".dash_trl.lock"  # ends the name of a run's lock file: the directory may hold other programs' locks, too


class FileWeights:
    """Weights by files that every server loads in place: works on any device, and over a shared filesystem.

    A version is a directory that appears under its name when it is complete. Older ones are removed after a sync, the
    last one at the end of the process. What a killed run left is removed by the next one in the same directory: a run
    holds a lock on a file, and the kernel takes it away with the process, whatever ended it. Where there are no locks
    there is no such file, and nobody removes another run's weights.

    Args:
        directory: must be seen by trainer and servers under the same path; several runs may share it.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        self.directory = Path(directory).absolute()
        self.dtype = dtype
        self.run = secrets.token_hex(4)
        self._lock: IO[str] | None = None

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        snapshot = self.write(parameters, version)
        outcome = on_each(lambda server: self._load(server, snapshot))
        _remove_versions(self.directory, self.run, keep=snapshot.tag)
        return snapshot, _errors(outcome)

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """A new version's directory: shards, and `version.json` with its number and checksum."""
        if self._lock is None:  # not in the constructor, which all ranks run
            self._begin()
        tag = f"{self.run}-{version}"
        final, partial = self.directory / tag, self.directory / f"{self.run}-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shard: dict[str, Tensor] = {}
        size = checksum = 0
        for name, tensor in parameters:
            tensor = tensor.detach().to(self.dtype)
            checksum = (checksum + tensor_checksum(tensor)) % MODULUS
            shard[name] = tensor.cpu().contiguous().clone()  # the parameter is released when the next one is gathered
            size += tensor.nbytes
            if size >= SHARD_BYTES:
                self._save(shard, partial)
                shard, size = {}, 0
        self._save(shard, partial)
        snapshot = Snapshot(version, tag, checksum, str(final))
        (partial / "version.json").write_text(json.dumps(asdict(snapshot)))
        os.replace(partial, final)
        return snapshot

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for lock_file in self.directory.glob("*" + LOCK):
            _remove_if_dead(lock_file)
        lock_file, unlocked = self.directory / (self.run + LOCK), self.directory / (self.run + ".unlocked")
        self._lock = unlocked.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(unlocked, lock_file)  # it appears under its name when it is held
        except OSError as error:
            unlocked.unlink()
            logger.warning(
                f"Files in {self.directory} cannot be locked ({error}), so that no later run can know whether this one "
                f"is alive: if it is killed, remove {self.run}-* there."
            )
        weakref.finalize(self, _remove_run, self.directory, self.run, self._lock)

    def _save(self, shard: dict[str, Tensor], directory: Path) -> None:
        if shard:
            number = len(list(directory.glob("*.safetensors"))) + 1
            save_file(shard, directory / f"model-{number:05}.safetensors")

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        if not await _holds(server, snapshot):
            await self._load(server, snapshot)
        return snapshot.version

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        assert snapshot.path is not None
        snapshot.verify(await server.load_weights(snapshot.path, snapshot.tag), server.url)


def _remove_versions(directory: Path, run: str, keep: str | None = None) -> None:
    for version in directory.glob(f"{run}-*"):
        if version.name != keep:
            shutil.rmtree(version, ignore_errors=True)


def _remove_run(directory: Path, run: str, lock: IO[str]) -> None:
    _remove_versions(directory, run)
    (directory / (run + LOCK)).unlink(missing_ok=True)  # last: a removal that is interrupted is made again
    lock.close()


def _remove_if_dead(lock_file: Path) -> None:
    """What is left of a run whose lock is free. (A pid says nothing on another host, and may be another's by now.)"""
    try:
        with lock_file.open("r+") as lock:  # NFS gives no exclusive lock on what was opened for reading
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_run(lock_file.parent, lock_file.name.removesuffix(LOCK), lock)
    except OSError:
        pass  # the run lives, or nobody can tell
