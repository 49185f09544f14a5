"""Sampling from servers: a pool with the interface of TRL's sampler, server health, and weight syncs."""

from dash_trl.sampling.health import URGENT, Fleet, Job
from dash_trl.sampling.pool import PoolError, ServerPool
from dash_trl.sampling.proof import ScaledLayers, ShiftedAdapter, check_probe, model_log_probs
from dash_trl.sampling.sync import check_servers, load_checkpoint
from dash_trl.sampling.trl import ServerGeneration, install
from dash_trl.sampling.vllm import Completion, ServerGone
from dash_trl.sampling.weights import (
    WEIGHT_DIR,
    AdapterWeights,
    FileWeights,
    WeightMismatch,
    changes_base,
    obstacle,
    weights_version,
)
