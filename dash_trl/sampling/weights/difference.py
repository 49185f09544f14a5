"""Sends only changed weights, over HTTP. At RL's learning rates, most bf16 weights do not change in an optimizer step.

Weights that a server gets::

    the changes since the last version ──► servers that report that they hold the last version
    all weights                        ──► all other servers

The version that a server reports is only a tag: it does not depend on the server's weights. So after every change,
before sampling continues, the checksum of the server's weights is compared with the trainer's. If the two differ, the
server is given all weights.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dash_trl.sampling.changes import Change, find_changes, pack
from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.server import ServerError, VLLMServer, WeightReport
from dash_trl.sampling.weights.file import FileWeights
from dash_trl.sampling.weights.snapshot import NamedTensors, Snapshot, held_tag

logger = logging.getLogger(__name__)

MOST = 0.5  # largest size of the changes, as a fraction of all weights; above it all weights are sent


class DifferenceWeights(FileWeights):
    """Sends the changed weights over HTTP. If this is not possible, it sends all weights, as changes of every element.

    So the log-prob check of the first sync shows whether changes reach the weights that a server computes with. They do
    not if the server computes with copies of its weights (vLLM does so for MLA).

    Args:
        directory: see `FileWeights`. Nothing is written there.
        dtype: see `FileWeights`.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype):
        super().__init__(directory, dtype)
        self._held: dict[str, Tensor] = {}  # weights of version `_tag`, on the CPU
        self._tag: str | None = None  # None: `_held` does not hold a complete version
        # tag of the version before `_tag`; a server that holds it needs only `_parts`. None: send all weights
        self._base: str | None = None
        self._parts: list[dict[str, str]] = []  # messages with the changes

    def write(self, parameters: NamedTensors, version: int) -> Snapshot:
        """Keep a new version and its changes since the last version in memory.

        No server is given weights during this call, so no server gets a mixture of two versions.

        Args:
            parameters: name and value of each parameter, unsharded.
            version: weight version.

        Returns:
            Description of the version.
        """
        self._base, self._tag, self._parts = self._tag, None, []
        room = MOST * sum(one.nbytes for one in self._held.values())
        found: list[Change] = []
        checksum = 0
        for name, tensor in parameters:
            new = tensor.detach().to(self.dtype)
            checksum += tensor_checksum(new)
            new = new.cpu()
            if self._base is not None:
                found += find_changes(name, self._held[name], new)
                if sum(one.nbytes for one in found) > room:
                    self._base, found = None, []
            if name in self._held:
                self._held[name].copy_(new)  # in place, so that memory never has to hold two versions
            else:
                self._held[name] = new.clone()
        snapshot = Snapshot(version, f"{self.run.name}-{version}", checksum % MODULUS)
        self._parts = list(pack(found))
        self._tag = snapshot.tag
        return snapshot

    async def _load(self, server: VLLMServer, snapshot: Snapshot) -> None:
        if snapshot.tag != self._tag:  # only the main process holds the weights
            raise ServerError("it waits until the main process has given it the current weights")
        if await held_tag(server) == self._base and await self._changed(server, snapshot):
            return
        whole = pack(one for name, tensor in self._held.items() for one in find_changes(name, None, tensor))
        snapshot.verify(await self._send(server, snapshot, whole), server.url)

    async def _changed(self, server: VLLMServer, snapshot: Snapshot) -> bool:
        """Send the changes to a server; return whether the server then holds the new weights."""
        try:
            report = await self._send(server, snapshot, iter(self._parts))
        except ServerError as error:
            if error.gone:
                raise
            why = str(error)
        else:
            if report.checksum == snapshot.checksum:
                return True
            why = f"it did not hold the weights of {self._base}, although it reported this version"
        logger.warning(
            f"{server.url} could not change its weights to version {snapshot.version} and gets all weights: {why}"
        )
        return False

    async def _send(self, server: VLLMServer, snapshot: Snapshot, parts: Iterator[dict[str, str]]) -> WeightReport:
        """Send messages of `changes.pack` to a server; return its report."""
        dtype = str(self.dtype).removeprefix("torch.")
        return await server.load_differences(parts, dtype, snapshot.tag, snapshot.checksum)
