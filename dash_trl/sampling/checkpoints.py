"""A checkpoint for all servers of a pool, in place of what they hold: what evaluation needs of a weight sync.

checkpoint ──► checksum is the servers'? ── yes ──► its log-probs are, too
                                         └─ no ───► `WeightSync`, as in training
"""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState
from torch import nn

from dash_trl.distributed import Ranks
from dash_trl.sampling.checksum import weights_checksum
from dash_trl.sampling.pool import ServerPool
from dash_trl.sampling.server import VLLMServer
from dash_trl.sampling.weights import FileWeights, Snapshot, WeightSync, model_log_probs


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
    plain = model_log_probs(model, sync.probe, 1.0)
    sync.check(plain, plain)
