"""Sends new weights to the servers, and checks that the servers compute with them."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.sampling.weights.adapter import NAME, AdapterWeights, obstacle
    from dash_trl.sampling.weights.file import WEIGHT_DIR, FileWeights
    from dash_trl.sampling.weights.proof import check_probe, is_adapter, model_log_probs, of_adapter, of_all_weights
    from dash_trl.sampling.weights.snapshot import Snapshot, WeightMismatch
    from dash_trl.sampling.weights.sync import WeightSync, check_servers, load_checkpoint, takes_seeds

__getattr__, __dir__, __all__ = lazy(__name__)
