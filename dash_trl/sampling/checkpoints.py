"""A checkpoint for all servers of a pool, in place of what they hold: what evaluation needs of a weight sync.

checkpoint ──► checksum is the servers'? ── yes ──► its log-probs are, too
                                         └─ no ───► FileWeights, perturbed and then plain, proven as in training
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dash_trl.sampling.pool import PoolError, ServerPool
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.vllm_plugin import model_shape
from dash_trl.sampling.weights import (
    PERTURBATION,
    FileWeights,
    Snapshot,
    check_probe,
    model_log_probs,
    probe_tokens,
    scale_linear,
    weights_checksum,
)


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
        if report.shape != own:
            both = {key: (report.shape.get(key), value) for key, value in own.items()}
            different = {key: values for key, values in both.items() if values[0] != values[1]}
            raise ValueError(
                f"{url} serves a model of another shape than {name!r} (there, here): {different}. Weights of one shape "
                f"are loaded in place; for this one start servers of its own: python -m dash_trl.serve {name}"
                + (f" --servers {len(pool.urls)}" if len(pool.urls) > 1 else "")
            )
    dtypes = {url: report.dtype for url, report in reports.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"The servers run in different dtypes ({dtypes}), as different models: start them alike.")
    return getattr(torch, next(iter(dtypes.values())))


def takes_seeds(pool: ServerPool) -> bool:
    """Whether the servers survive a request with a seed.

    vLLM 0.31 rewinds the request's generator when a prompt is computed in parts, and a generator on a CPU cannot be:
    the engine dies ("CPU Generator does not use offset", vllm/v1/worker/gpu_model_runner.py).
    """
    configs = pool.ask_all(lambda server: server.config())
    return all(config.get("device_config", {}).get("device") != "cpu" for config in configs.values())


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
    dtype = next(model.parameters()).dtype
    ids = probe_tokens(min(model.config.get_text_config().vocab_size, vocabulary))  # type: ignore[union-attr, operator]
    plain = model_log_probs(model, ids, 1.0)
    snapshot = Snapshot(pool.fleet.version, "", weights_checksum(model.parameters()))
    reports = pool.ask_all(lambda server: server.weight_report())
    if all(report.checksum == snapshot.checksum for report in reports.values()):
        pool.refit = partial(_verify, snapshot)
        _prove(pool, ids, plain, plain, dtype)
        return
    weights = FileWeights(weight_dir, dtype)
    for scale, expected in ((PERTURBATION, model_log_probs(model, ids, PERTURBATION)), (1.0, plain)):
        snapshot = _send(pool, weights, scale_linear(model, model.named_parameters(), scale, str))
        pool.refit = partial(weights.refit, snapshot=snapshot)
        _prove(pool, ids, expected, plain, dtype)


async def _verify(snapshot: Snapshot, server: VLLMServer) -> int:
    """A server that restarts has its own checkpoint again, which was the wanted one."""
    snapshot.verify(await server.weight_report(), server.url)
    return snapshot.version


def _send(pool: ServerPool, weights: FileWeights, parameters: Iterator[tuple[str, Tensor]]) -> Snapshot:
    version = pool.fleet.version + 1
    errors: dict[str, str | None] = {}
    waiting = pool.new_version(version)
    try:
        snapshot, errors = weights.send(parameters, version, partial(pool.on_each, urls=waiting))
    finally:
        pool.weights_sent(version, {url: errors.get(url, "the weights could not be sent") for url in waiting})
    missing = len(pool.urls) - sum(error is None for error in errors.values())
    if missing:
        raise PoolError(pool.message(f"{missing} of {len(pool.urls)} servers did not take the weights"))
    return snapshot


def _prove(pool: ServerPool, ids: list[int], expected: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    check_probe(expected, plain, pool.ask_all(lambda server: server.log_probs(ids)), dtype)
