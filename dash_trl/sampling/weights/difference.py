"""Only the weights that changed, over HTTP: at RL's learning rates most bf16 weights do not change in a step.

    the version before, in the trainer's memory ──► what changed ──► servers that say that they hold it
                       this version, by file or over HTTP, whole ──► all others

The version that a server says that it holds is only what it was told. So it reports its checksum after every change,
before it goes on sampling; if that is not the trainer's, it is given all weights.
"""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dash_trl.sampling.changes import Change, changes, pack
from dash_trl.sampling.checksum import tensor_checksum
from dash_trl.sampling.server import ServerError, VLLMServer, WeightReport
from dash_trl.sampling.weights.file import FileWeights
from dash_trl.sampling.weights.snapshot import NamedTensors, Snapshot

logger = logging.getLogger(__name__)

MOST = 0.5  # of the bytes of all weights: a larger difference is not kept, and all weights are sent


class DifferenceWeights(FileWeights):
    """
    The first version is sent whole over HTTP, so that the proof of the first sync is one of weights that are changed
    where they lie, too: vLLM may compute with copies of them (as it does for MLA).

    Args:
        directory, dtype: see `FileWeights`. A server that does not see the directory gets all weights over HTTP.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        super().__init__(directory, dtype)
        self._held: dict[str, Tensor] = {}  # the weights of `_tag`, on the CPU
        self._tag: str | None = None  # None: `_held` is no version
        self._first: str | None = None
        self._base: str | None = None  # the version that `_parts` change into `_tag`; None: there is no difference
        self._parts: list[dict[str, str]] = []
        self._writing = asyncio.Lock()

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Keeps a new version, and what changed since the last one; no server is looked at meanwhile."""
        self._base, self._tag, self._parts = self._tag, None, []
        room = MOST * sum(one.nbytes for one in self._held.values())
        found: list[Change] = []
        checksum = 0
        for name, tensor in parameters:
            new = tensor.detach().to(self.dtype)
            checksum += tensor_checksum(new)
            new = new.cpu()
            if self._base is not None:
                found += changes(name, self._held[name], new)
                if sum(one.nbytes for one in found) > room:
                    self._base, found = None, []
            if name in self._held:
                self._held[name].copy_(new)  # in place: there is never room for two versions
            else:
                self._held[name] = new.clone()
        snapshot = self._snapshot(version, checksum)
        self._parts = list(pack(found))
        self._tag = snapshot.tag
        self._first = self._first or snapshot.tag
        return snapshot

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        assert snapshot.tag == self._tag, "what is held is another version"
        if self._base is not None and await server.weight_tag() == self._base:
            if await self._changed(server, snapshot):
                return
        if snapshot.tag == self._first or not await server.sees(str(self.run)):
            whole = pack(one for name, tensor in self._held.items() for one in changes(name, None, tensor))
            snapshot.verify(await self._send(server, snapshot, whole), server.url)
            return
        async with self._writing:  # the first server that needs the files has them written
            folder = self._folder(snapshot.version)
            if not folder.exists():
                await asyncio.to_thread(self._write, self._held.items(), folder)
        await super()._load(server, snapshot)

    async def _changed(self, server: VLLMServer, snapshot: Snapshot) -> bool:
        """Sends the difference; whether the server holds the weights then."""
        try:
            report = await self._send(server, snapshot, iter(self._parts))
        except ServerError as error:
            if error.gone:
                raise
            why = str(error)
        else:
            if report.checksum == snapshot.checksum:
                return True
            why = f"it held others than those of {self._base}, which it said"
        logger.warning(f"{server.url} could not change its weights to version {snapshot.version}, and gets all: {why}")
        return False

    async def _send(self, server: VLLMServer, snapshot: Snapshot, parts: Iterator[dict[str, str]]) -> WeightReport:
        dtype = str(self.dtype).removeprefix("torch.")
        return await server.load_differences(parts, dtype, snapshot.tag, snapshot.checksum)
