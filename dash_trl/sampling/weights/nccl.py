"""Sends weights over NCCL, from GPU to GPU."""

import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from dash_trl.sampling.checksum import MODULUS, tensor_checksum
from dash_trl.sampling.key import key_header
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights.snapshot import NamedTensors, OnEach, Snapshot, errors_of, held_tag, holds
from dash_trl.workers import ThreadCalls, call_all

BUCKET_BYTES = 1 << 30  # bytes of one broadcast; memory holds one bucket
Bucket = list[tuple[str, Tensor]]


class NCCLWeights:
    """Sends weights over NCCL, from GPU to GPU. It uses TRL's client, one for each server.

    The main thread gathers the weights, because under ZeRO-3 and FSDP gathering is a collective. It copies the weights
    into buckets, and each bucket is sent by one daemon thread per server. A server that hangs counts as dead after
    `timeout`. This is experimental: the broadcast has never run on GPUs.

    Args:
        urls: addresses of all servers.
        group_port: port of the first server's process group; the other servers use the ports after it.
        device: the trainer's GPU.
        timeout: seconds to wait for a server.
        dtype: dtype of the servers' weights; weights are converted to it before they are sent.

    Attributes:
        ports: URL → port of the server's process group.
        run: random name of this run, with which its version tags begin.
    """

    def __init__(self, urls: Sequence[str], group_port: int, device: torch.device, timeout: float, dtype: torch.dtype):
        self.ports = {url: group_port + number for number, url in enumerate(urls)}
        self.device, self.timeout, self.dtype = device, timeout, dtype
        self.run = secrets.token_hex(4)
        self._clients: dict[str, Any] = {}
        self._updates: dict[str, ExitStack] = {}  # the updates that are under way

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        """Broadcast a new version to servers. Arguments, result and errors are those of `FileWeights.send`."""
        failed: dict[str, Any] = {}  # URL → first error of the server
        urls = list(self._on_each(on_each, lambda server: server.pause(), failed))
        try:
            checksum = self._broadcast_all(parameters, [url for url in urls if url not in failed], failed)
            snapshot = Snapshot(version, f"{self.run}-{version}", checksum)
            self._on_each(on_each, lambda server: self._verify(server, snapshot, failed), failed)
        finally:
            self._on_each(on_each, lambda server: server.resume(), failed)
        for url in failed.keys() & self._clients.keys():
            self._clients.pop(url).close_communicator()  # a failed client cannot be reused
            self._updates.pop(url, None)
        return snapshot, errors_of(dict.fromkeys(urls) | failed)

    def _on_each(self, on_each: OnEach, ask: Callable[[VLLMServer], Awaitable[Any]], failed: dict[str, Any]) -> Any:
        """Call an async function with each server, and add the first error of each server to `failed`.

        Returns:
            URL → return value of the function, or the exception that it raised.
        """
        outcome = on_each(ask)
        failures = {url: result for url, result in outcome.items() if isinstance(result, BaseException)}
        failed.update(failures | failed)
        return outcome

    def _broadcast_all(self, parameters: NamedTensors, urls: list[str], failed: dict[str, Any]) -> int:
        """Broadcast all parameters to servers; return the checksum of what was sent."""
        threads, checksum = ThreadCalls(max(1, len(urls))), 0
        for bucket in itertools.chain(self._buckets(parameters), [None]):
            checksum += sum(tensor_checksum(tensor) for _, tensor in bucket or ())
            left = [{"url": url, "bucket": bucket} for url in urls if url not in failed]
            for call in call_all(threads.submit, self._broadcast, left, timeout=self.timeout):
                if call.error is not None:
                    failed[call.arguments["url"]] = call.error
        threads.close()
        return checksum % MODULUS

    def _buckets(self, parameters: NamedTensors) -> Iterator[Bucket]:
        """Copy parameters into buckets of about `BUCKET_BYTES`."""
        bucket: Bucket = []
        for name, tensor in parameters:
            bucket.append((name, tensor.detach().to(self.dtype, copy=True).contiguous()))
            if sum(tensor.nbytes for _, tensor in bucket) >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _broadcast(self, url: str, bucket: Bucket | None) -> None:
        """Broadcast a bucket to one server, on a daemon thread. None: no more buckets come."""
        torch.cuda.set_device(self.device)  # a new thread uses device 0
        client = self._clients.get(url) or self._connect(url)
        if url not in self._updates:
            self._updates[url] = ExitStack()
            self._updates[url].enter_context(client.weight_update())
        if bucket is None:
            self._updates.pop(url).close()
        else:
            metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket]
            client.update_named_params(metadata, iter(bucket))

    def _connect(self, url: str) -> Any:
        """Create TRL's client for a server."""
        from trl.generation.vllm_client import VLLMClient

        class Client(VLLMClient):
            def check_server(self, *_: Any, **__: Any) -> None:
                """Set the key, in place of TRL's first request, which lacks the key. The server is known to answer."""
                self.session.trust_env = False  # the key must not go to a proxy or be replaced by ~/.netrc
                self.session.headers.update(key_header(url))

        client = Client(base_url=url, group_port=self.ports[url], connection_timeout=self.timeout)
        self._clients[url] = client
        client.init_communicator(device=self.device)
        return client

    async def _verify(self, server: VLLMServer, snapshot: Snapshot, failed: dict[str, Any]) -> None:
        """End the weight update on a server, and verify its report. If the server has failed, do nothing."""
        if server.url not in failed:
            await held_tag(server)
            await server.end_weight_update(snapshot.tag)
            snapshot.verify(await server.weight_report(), server.url)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        """Check whether a server holds a version. Weights are not sent, because gathering them would need all ranks.

        Args:
            server: the server.
            snapshot: the current version.

        Returns:
            The weight version if the server holds it; None if the server has to wait for the next `send`.
        """
        return snapshot.version if await holds(server, snapshot) else None
