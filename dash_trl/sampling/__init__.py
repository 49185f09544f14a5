"""Sampling from servers: a pool with the interface of TRL's sampler, server health, API keys and weight syncs."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.sampling.key import MIDDLEWARE, key_file, key_header, own_key
    from dash_trl.sampling.pool import PoolError, ServerPool
    from dash_trl.sampling.sync import check_servers, load_checkpoint
    from dash_trl.sampling.trl import ServerGeneration, install
    from dash_trl.sampling.urls import API_KEY, check_urls, is_loopback, without_user
    from dash_trl.sampling.vllm_plugin import WORKER_EXTENSION
    from dash_trl.sampling.weights import WEIGHT_DIR

if TYPE_CHECKING:  # imported by other folders of the package and by tests, not public
    from dash_trl.sampling.adapter import obstacle
    from dash_trl.sampling.checksum import combine_workers, tensor_checksum, weights_checksum, weights_version
    from dash_trl.sampling.health import URGENT, Fleet, Job
    from dash_trl.sampling.proof import ScaledLayers, ShiftedAdapter, check_probe, model_log_probs
    from dash_trl.sampling.server import Completion, ServerGone
    from dash_trl.sampling.sync import WeightSync
    from dash_trl.sampling.weights import FileWeights, WeightMismatch

__getattr__, __dir__, __all__ = lazy(__name__)
