"""Workaround for ZeRO-3 with TRL's fused LM head: DeepSpeed must forget the order in which a plain pass used weights.

DeepSpeed prefetches weights in the order of the last pass. A plain pass (as for V(prefix)) calls the LM head as a
module; TRL's training passes only read its weight. So in a training pass after a plain pass, DeepSpeed prefetches this
weight, but the module is not called. If the weight is not tied to the embeddings, DeepSpeed releases it before its
gradient arrives, and raises "The size of tensor a (0) must match the size of tensor b".

DeepSpeed records a new order only if a pass calls a module that the order lacks, not if a pass leaves one out.
"""

from typing import Any

from torch.utils.hooks import RemovableHandle


def forget_plain_passes(engine: Any) -> RemovableHandle | None:
    """Make a DeepSpeed engine record a new order of weights after each call of the LM head as a module.

    Args:
        engine: the trained model. Without DeepSpeed's ZeRO-3, nothing is done.
    Returns:
        The hook's handle, which must be removed before another engine gets the model; `None` if nothing was done.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return None
    coordinator = offload.get_param_coordinator()

    def forget(*_: object) -> None:
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return engine.module.get_output_embeddings().register_forward_hook(forget)
