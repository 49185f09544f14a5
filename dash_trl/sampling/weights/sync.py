"""A model's weights to all servers of a pool, in training and evaluation, and the proof that they compute with them.

gather ──► FileWeights or NCCLWeights ──► checksums are the model's     every time
perturbed weights, then plain ones    ──► log-probs are the model's     the first time

An evaluation has one checkpoint for all servers, in place of what they hold:

checkpoint ──► checksum is the servers'? ── yes ──► its log-probs are, too
                                         └─ no ───► `WeightSync`, as in training
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from dash_trl.distributed import Ranks
from dash_trl.sampling.checksum import weights_checksum
from dash_trl.sampling.pool import PoolError, ServerPool
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.vllm_plugin import model_shape
from dash_trl.sampling.weights.file import FileWeights
from dash_trl.sampling.weights.nccl import NCCLWeights
from dash_trl.sampling.weights.proof import Perturbation, check_probe, model_log_probs, of_all_weights, probe_tokens
from dash_trl.sampling.weights.snapshot import NamedTensors, Snapshot


def check_servers(pool: ServerPool, config: Any, name: str) -> torch.dtype:
    """The dtype of the servers' weights, into which those of a model with this config fit.

    Args:
        name: of the model, for the command in the error.
    Raises:
        ValueError: a server holds a model of another shape, or the servers are of several dtypes.
        PoolError: a server does not answer.
    """
    pool.wait_until_ready()
    reports = pool.ask_all(lambda server: server.weight_report())
    own = model_shape(config.get_text_config())
    for url, report in reports.items():
        different = {
            key: (report.shape.get(key), value) for key, value in own.items() if report.shape.get(key) != value
        }
        if different:
            raise ValueError(
                f"{url} serves a model of another shape than {name!r} (there, here): {different}. Weights of one shape "
                f"are loaded in place; for this one start servers of its own: python -m dash_trl.serve {name}"
                + (f" --servers {len(pool.urls)}" if len(pool.urls) > 1 else "")
            )
    dtypes = {url: report.dtype for url, report in reports.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"The servers run in different dtypes ({dtypes}), as different models: start them alike.")
    return getattr(torch, next(iter(dtypes.values())))


class WeightSync:
    """Gives all servers of a pool the weights of a model.

    All ranks gather, the main one sends; after each of both, the ranks agree on whether it worked before any other
    collective, so that a failure of one is the same error on all.

    Args:
        pool: this rank's. A server that comes back gets the weights by it.
        weights: the way to the servers.
        model: whose log-probs the servers' have to be.
        vocabulary: ids that the tokenizer has.
        gather: (name, tensor) of all parameters, or of the adapter's, under the servers' names; called by all ranks,
            once for each version.
        perturbation: by which the first sync is proven; `None`: that of all weights, which have the model's names.
    """

    def __init__(
        self,
        pool: ServerPool,
        ranks: Ranks,
        weights: FileWeights | NCCLWeights,
        model: nn.Module,
        vocabulary: int,
        gather: Callable[[], NamedTensors],
        perturbation: Perturbation | None = None,
    ):
        self.pool = pool
        self.ranks = ranks
        self.weights = weights
        self.model = model
        self.gather = gather
        self.perturbation = perturbation or of_all_weights(model, str)
        self.probe = probe_tokens(min(model.config.get_text_config().vocab_size, vocabulary))  # type: ignore[union-attr, operator]
        self._proven = False  # that servers which say that they have the weights compute with them
        self._snapshot: Snapshot | None = None
        pool.refit = self._refit

    def send(self) -> None:
        """Give all servers the model's weights, and see that they have them. The first time, prove that it can be seen.

        Raises:
            WeightMismatch: a server holds other weights than it was given, or computes with others.
            PoolError: a server did not take the weights the first time.
        """
        if self._proven:
            self._send()
            return
        self.ranks.agree(self.pool.wait_until_ready)
        plain = model_log_probs(self.model, self.probe)
        perturbed = model_log_probs(self.model, self.probe, self.perturbation.outputs())
        for expected in (perturbed, plain):
            errors = self._send(perturbed=expected is perturbed)
            if errors:
                raise PoolError(self.pool.message(f"At the start {len(errors)} servers did not take the weights"))
            self.ranks.agree(partial(self.check, expected, plain), main_only=True)
        self._proven = True

    def check(self, expected: Tensor, plain: Tensor) -> None:
        """Whether all servers compute with the weights; see `check_probe`."""
        served = self.pool.ask_all(lambda server: server.log_probs(self.probe))
        check_probe(expected, plain, served, self.weights.dtype)

    def _send(self, *, perturbed: bool = False) -> dict[str, str]:
        """Gather on all ranks, send from the main process, and tell all ranks which servers have them.

        Returns:
            url → error of those that have not.
        """
        version = self.pool.fleet.version + 1
        parameters = self.perturbation.parameters(self.gather()) if perturbed else self.gather()
        errors: dict[str, str | None] = {}
        waiting: list[str] = []

        def send() -> Any:
            try:
                if self.ranks.rank == 0:
                    return self.weights.send(parameters, version, partial(self.pool.on_each, urls=waiting))
            finally:  # gathering is a collective: every rank takes part to the end, whatever fails on the way
                for _ in parameters:
                    pass

        try:
            waiting = self.ranks.agree(lambda: self.pool.new_version(version))
            self._snapshot, errors = self.ranks.agree(send, from_main=True)
        finally:
            missing = "the main process takes it for dead, or failed"
            self.pool.weights_sent(version, {url: errors.get(url, missing) for url in waiting})
        return {url: error for url, error in errors.items() if error is not None}

    async def _refit(self, server: VLLMServer) -> int | None:
        return None if self._snapshot is None else await self.weights.refit(server, self._snapshot)


def takes_seeds(pool: ServerPool) -> bool:
    """Whether the servers survive a request with a seed.

    vLLM 0.31 rewinds the request's generator when a prompt is computed in parts, and a generator on a CPU cannot be:
    the engine dies ("CPU Generator does not use offset", vllm/v1/worker/gpu_model_runner.py).
    """
    return all(
        config.get("device_config", {}).get("device") != "cpu"
        for config in pool.ask_all(lambda server: server.config()).values()
    )


def load_checkpoint(pool: ServerPool, model: nn.Module, vocabulary: int, weight_dir: str | Path) -> None:
    """Have all servers sample from this model, those that die and come back, too.

    Args:
        model: on any device, in the servers' dtype (`check_servers`).
        vocabulary: ids that the tokenizer has.
        weight_dir: where the weights are written, if the servers hold others; seen by them under the same path.
    Raises:
        WeightMismatch: a server holds other weights than it was given, or computes with others.
        PoolError: a server did not take the weights.
    """
    weights = FileWeights(weight_dir, next(model.parameters()).dtype)
    sync = WeightSync(pool, Ranks(PartialState()), weights, model, vocabulary, model.named_parameters)
    held = Snapshot(pool.fleet.version, "", weights_checksum(model.parameters()))
    reports = pool.ask_all(lambda server: server.weight_report())
    if any(report.checksum != held.checksum for report in reports.values()):
        sync.send()
        return

    async def verify(server: VLLMServer) -> int:
        """A server that restarts has its own checkpoint again, which was the wanted one."""
        held.verify(await server.weight_report(), server.url)
        return held.version

    pool.refit = verify
    plain = model_log_probs(model, sync.probe)
    sync.check(plain, plain)
