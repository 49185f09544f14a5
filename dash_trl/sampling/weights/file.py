"""New weights for the servers, and the proof that they have them.

    gathered parameters ──► FileWeights: a directory per version ──► every server loads it in place
                       └──► NCCLWeights: buckets ──► a thread per server broadcasts them

A version number is only what a server was told. So every sync compares a checksum of the weights that a server's
workers hold with the trainer's, and the first sync of a run sends weights that are wrong in a known way, which the
server's log-probs must follow: workers may hold one copy and compute with another.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dash_trl.sampling.server import VLLMServer, WeightReport
from dash_trl.sampling.weights.checksum import MODULUS, tensor_checksum
from dash_trl.update.isolation import evaluating
from dash_trl.workers.processes import Feeder

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30  # of a file: the host memory that a sync takes
BUCKET_BYTES = 1 << 30  # of a broadcast: a bucket is being filled, one waits, and one is on its way
LOCK = ".dash_trl.lock"  # ends the name of a run's lock file: the directory may hold other programs' locks, too
PROBE_TOKENS = 32
# Mean absolute difference of log-probs between trainer and server that rounding explains. The perturbation moves them
# by an order of magnitude more in any trained model.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightMismatch(RuntimeError):
    """A server holds, or computes with, other weights than it was given."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent.

    Attributes:
        tag: what the servers are told; unique over runs. path: the checkpoint directory, None if it was broadcast.
    """

    version: int
    tag: str
    checksum: int
    path: str | None = None

    def verify(self, report: WeightReport, url: str) -> None:
        """Raises `WeightMismatch` if a server reports other weights."""
        if report.checksum is not None and report.checksum != self.checksum:
            raise WeightMismatch(
                f"{url} was given the weights of version {self.version} (checksum {self.checksum:x}) but holds others "
                f"({report.checksum:x}). Does a second run use it? On a CPU build of vLLM, is dash_trl with "
                "its plugin in the server's environment? Its samples would not be the policy's."
            )


class Weights(Protocol):
    """A way from the trainer to the servers."""

    dtype: torch.dtype
    """Of the servers; weights are converted before they are sent."""

    def send(self, parameters: NamedTensors, version: int, on_each: OnEach) -> tuple[Snapshot, dict[str, str | None]]:
        """Send to the servers behind `on_each`. Returns what was sent, and per server an error or None."""

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        """See that a server has `snapshot`, or give it. Returns the version; None if it waits for the next `send`."""


OnEach = Callable[[Callable[[VLLMServer], Awaitable[Any]]], dict[str, Any]]


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


async def _holds(server: VLLMServer, snapshot: Snapshot) -> bool:
    """Whether it was given these weights: a tag is told after they are loaded, and a restarted server has another."""
    if await server.weight_tag() != snapshot.tag:
        return False
    await server.resume()  # one whose last `resume` was lost would wait for ever
    return True


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
        failed: dict[str, Any] = {}
        urls = list(self._on_each(on_each, lambda server: server.pause(), failed))
        try:
            checksum = self._broadcast_all(parameters, [url for url in urls if url not in failed], failed)
            snapshot = Snapshot(version, f"{self.run}-{version}", checksum)
            self._on_each(on_each, lambda server: self._verify(server, snapshot, failed), failed)
        finally:
            self._on_each(on_each, lambda server: server.resume(), failed)
        for url in failed:  # its group cannot be used again: the next version is sent over a new one
            client = self._clients.pop(url, None)
            if client is not None:
                client.close_communicator()
        return snapshot, _errors(dict.fromkeys(urls) | failed)

    def _on_each(self, on_each: OnEach, ask: Callable[[VLLMServer], Awaitable[Any]], failed: dict[str, Any]) -> Any:
        """Notes in `failed` the first error of each server."""
        outcome = on_each(ask)
        for url, result in outcome.items():
            if isinstance(result, BaseException):
                failed.setdefault(url, result)
        return outcome

    def _broadcast_all(self, parameters: NamedTensors, urls: list[str], failed: dict[str, Any]) -> int:
        """Returns the checksum of what was sent; what went wrong with a server is noted in `failed`."""
        feeders = {url: Feeder(partial(self._broadcast, url), ahead=1, timeout=self.timeout) for url in urls}
        checksum = 0
        for bucket in self._buckets(parameters):
            checksum = (checksum + sum(tensor_checksum(tensor) for _, tensor in bucket)) % MODULUS
            for url, feeder in feeders.items():
                self._try(url, partial(feeder.put, bucket), failed)
        for url, feeder in feeders.items():
            self._try(url, feeder.finish, failed)
        return checksum

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

        client = VLLMClient(base_url=url, group_port=self.ports[url], connection_timeout=self.timeout)
        self._clients[url] = client
        client.init_communicator(device=self.device)
        return client

    def _try(self, url: str, work: Callable[[], Any], failed: dict[str, Any]) -> None:
        if url not in failed:
            try:
                work()
            except Exception as error:
                failed[url] = error

    async def _verify(self, server: VLLMServer, snapshot: Snapshot, failed: dict[str, Any]) -> None:
        if server.url not in failed:
            await server.end_weight_update(snapshot.tag)
            snapshot.verify(await server.weight_report(), server.url)

    async def refit(self, server: VLLMServer, snapshot: Snapshot) -> int | None:
        return snapshot.version if await _holds(server, snapshot) else None  # a broadcast takes all ranks


def _errors(outcome: dict[str, Any]) -> dict[str, str | None]:
    """Per server its error or None; a mismatch is not an error of a server but of the run."""
    for result in outcome.values():
        if isinstance(result, WeightMismatch | ValueError):
            raise result
    return {url: str(result) if isinstance(result, BaseException) else None for url, result in outcome.items()}


# -------------------------------------------------------------------------------------------------------- the probe


def probe_tokens(vocabulary: int) -> list[int]:
    """`PROBE_TOKENS` ids spread over the vocabulary."""
    return [(7919 * (i + 1)) % vocabulary for i in range(PROBE_TOKENS)]


def scale_linear(
    model: nn.Module, parameters: NamedTensors, scale: float, plain_name: Callable[[str], str]
) -> Iterator:
    """The parameters, those of linear layers and embeddings multiplied by `scale`.

    Args:
        plain_name: a name in `model.named_parameters()` → the name in `parameters`.
    """
    names = {
        plain_name(f"{prefix}.{name}")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        for name in ("weight", "bias")
    }
    for name, tensor in parameters:
        yield name, tensor * scale if scale != 1.0 and name in names else tensor


@contextmanager
def scaled_outputs(model: nn.Module, scale: float) -> Iterator[None]:
    """The model as if its linear layers and embeddings were multiplied by `scale`, on any sharding.

    A layer that is linear in its parameters gives `scale` times its output when they are scaled, so the outputs are
    scaled and no parameter is touched. An adapter with its base layer counts as one layer.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = nn.Linear | nn.Embedding | BaseTunerLayer
    adapters = tuple(name + "." for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    handles = [
        module.register_forward_hook(lambda module, inputs, output: output * scale)
        for name, module in model.named_modules()
        if isinstance(module, layers) and not name.startswith(adapters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def model_log_probs(model: nn.Module, ids: list[int], scale: float) -> Tensor:
    """[len(ids) − 1], log P(ids[t] | ids[:t]) of the trainer's model; a collective under ZeRO-3 and FSDP."""
    device = next(model.parameters()).device
    row = torch.tensor([ids], device=device)
    with evaluating(model), scaled_outputs(model, scale):
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(dim=-1).gather(1, row[0, 1:, None]).squeeze(1).cpu()


def check_probe(expected: Tensor, plain: Tensor, served: dict[str, list[float]], dtype: torch.dtype) -> None:
    """Whether servers compute what the trainer computes.

    Args:
        expected: the trainer's log-probs with the weights that the servers were given; plain: without a perturbation.
        served: url → the server's.
    Raises:
        WeightMismatch: a server computes something else.
    """
    tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
    effect = (expected - plain).abs().mean().item()
    if expected is not plain and effect < 3 * tolerance:
        logger.warning(
            f"Scaling the weights moves the model's log-probs by {effect:.2g} only, so that the first weight sync "
            f"proves little (tolerance {tolerance}). Expected of an untrained model."
        )
    for url, values in served.items():
        difference = (torch.tensor(values) - expected).abs().mean().item()
        if not difference <= tolerance:  # NaN, too
            raise WeightMismatch(
                f"{url} holds the weights that it was given but computes with others: its log-probs differ by "
                f"{difference:.2g} from the trainer's (tolerance {tolerance}; the first sync scales the weights, which "
                f"moves them by {effect:.2g}). On a CPU build of vLLM install dash_trl in the server's environment: "
                "its plugin stops vLLM from computing with packed copies. Else: is it the same model, "
                "without quantisation or adapters?"
            )
