"""Weights over NCCL, from GPU to GPU."""

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.key import key_header
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, errors_of, holds
from dash_trl.workers import Feeder

BUCKET_BYTES = 1 << 30  # of a broadcast: a bucket is being filled, one waits, and one is on its way


class NCCLWeights:
    """Weights over NCCL, from GPU to GPU: TRL's client, once per server.

    The main thread gathers, since under ZeRO-3 and FSDP that is a collective of its own, and hands cloned buckets to
    one daemon thread per server. A server that hangs costs `timeout` and is then dead. Experimental: the broadcast
    itself was never run on GPUs here.

    Args:
        urls: of all servers. group_port: of the first one's group; the others take the ports after it.
    """

    def __init__(self, urls: Sequence[str], group_port: int, device: torch.device, timeout: float, dtype: torch.dtype):
        self.ports = {url: group_port + number for number, url in enumerate(urls)}
        self.device = device
        self.timeout = timeout
        self.dtype = dtype
        self.run = secrets.token_hex(4)
        self._clients: dict[str, Any] = {}

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        """Send to the servers behind `on_each`. Returns what was sent, and per server an error or None."""
        failed: dict[str, Any] = {}  # server → its first error
        urls = list(self._on_each(on_each, lambda server: server.pause(), failed))
        try:
            checksum = self._broadcast_all(parameters, [url for url in urls if url not in failed], failed)
            snapshot = Snapshot(version, f"{self.run}-{version}", checksum)
            self._on_each(on_each, lambda server: self._verify(server, snapshot, failed), failed)
        finally:
            self._on_each(on_each, lambda server: server.resume(), failed)
        for url in failed.keys() & self._clients.keys():
            self._clients.pop(url).close_communicator()  # it cannot be used again: the next version takes a new one
        return snapshot, errors_of(dict.fromkeys(urls) | failed)

    def _on_each(self, on_each: OnEach, ask: Callable[[VLLMServer], Awaitable[Any]], failed: dict[str, Any]) -> Any:
        outcome = on_each(ask)
        failures = {url: result for url, result in outcome.items() if isinstance(result, BaseException)}
        failed.update(failures | failed)
        return outcome

    def _broadcast_all(self, parameters: NamedTensors, urls: list[str], failed: dict[str, Any]) -> int:
        """Returns the checksum of what was sent."""
        feeders = {url: Feeder(partial(self._broadcast, url), ahead=1, timeout=self.timeout) for url in urls}
        checksum = 0
        for bucket in self._buckets(parameters):
            checksum += sum(tensor_checksum(tensor) for _, tensor in bucket)
            for url, feeder in feeders.items():
                _try(url, partial(feeder.put, bucket), failed)
        for url, feeder in feeders.items():
            _try(url, feeder.finish, failed)
        return checksum % MODULUS

    def _buckets(self, parameters: NamedTensors) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in parameters:
            bucket.append((name, tensor.detach().to(self.dtype, copy=True).contiguous()))
            if sum(tensor.nbytes for _, tensor in bucket) >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _broadcast(self, url: str, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        """On the thread of one server."""
        torch.cuda.set_device(self.device)  # a thread starts on device 0
        client = self._clients.get(url) or self._connect(url)
        with client.weight_update():
            for bucket in buckets:
                metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket]
                client.update_named_params(metadata, iter(bucket))

    def _connect(self, url: str) -> Any:
        from trl.generation.vllm_client import VLLMClient

        class Client(VLLMClient):
            def check_server(self, *_: Any, **__: Any) -> None:
                """In place of TRL's first request, which would carry no key. That the server answers is known here."""
                self.session.trust_env = False  # no proxy gets the key, and no ~/.netrc replaces it
                self.session.headers.update(key_header(url))

        client = Client(base_url=url, group_port=self.ports[url], connection_timeout=self.timeout)
        self._clients[url] = client
        client.init_communicator(device=self.device)
        return client

    async def _verify(self, server: VLLMServer, snapshot: Snapshot, failed: dict[str, Any]) -> None:
        if server.url not in failed:
            await server.end_weight_update(snapshot.tag)
            snapshot.verify(await server.weight_report(), server.url)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        """The version, if a server has `snapshot`. None: it waits for the next `send`, which takes all ranks."""
        return snapshot.version if await holds(server, snapshot) else None


def _try(url: str, work: Callable[[], Any], failed: dict[str, Any]) -> None:
    if url not in failed:
        try:
            work()
        except Exception as error:
            failed[url] = error
