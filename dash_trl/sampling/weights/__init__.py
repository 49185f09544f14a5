"""New weights for the servers, and the proof that they have them."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.sampling.weights.checksum import combine_workers, tensor_checksum, weights_checksum
    from dash_trl.sampling.weights.file import FileWeights
    from dash_trl.sampling.weights.nccl import NCCLWeights
    from dash_trl.sampling.weights.proof import PERTURBATION, check_probe, model_log_probs, probe_tokens, scale_linear
    from dash_trl.sampling.weights.snapshot import Snapshot, Weights

__getattr__, __dir__, __all__ = lazy(__name__)
