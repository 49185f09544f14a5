"""Sampling from servers: a pool with the interface of TRL's sampler, server health, API keys and weight syncs."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:  # the names below, for type checkers
    from dash_trl.sampling.health import URGENT, Fleet, Job
    from dash_trl.sampling.key import API_KEY, MIDDLEWARE, check_urls, key_file, key_header, own_key
    from dash_trl.sampling.pool import PoolError, ServerPool
    from dash_trl.sampling.proof import ScaledLayers, ShiftedAdapter, check_probe, model_log_probs
    from dash_trl.sampling.sync import check_servers, load_checkpoint
    from dash_trl.sampling.trl import ServerGeneration, install
    from dash_trl.sampling.vllm import Completion, ServerGone
    from dash_trl.sampling.vllm_plugin import WORKER_EXTENSION
    from dash_trl.sampling.weights import (
        CHANGES_BASE,
        WEIGHT_DIR,
        AdapterWeights,
        FileWeights,
        WeightMismatch,
        obstacle,
        weights_version,
    )

__getattr__, __dir__ = lazy(
    __name__,
    health=["URGENT", "Fleet", "Job"],
    key=["API_KEY", "MIDDLEWARE", "check_urls", "key_file", "key_header", "own_key"],
    pool=["PoolError", "ServerPool"],
    proof=["ScaledLayers", "ShiftedAdapter", "check_probe", "model_log_probs"],
    sync=["check_servers", "load_checkpoint"],
    trl=["ServerGeneration", "install"],
    vllm=["Completion", "ServerGone"],
    vllm_plugin=["WORKER_EXTENSION"],
    weights=[
        "CHANGES_BASE",
        "WEIGHT_DIR",
        "AdapterWeights",
        "FileWeights",
        "WeightMismatch",
        "obstacle",
        "weights_version",
    ],
)
