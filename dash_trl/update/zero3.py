"""Workaround for ZeRO-3 with TRL's fused LM head: DeepSpeed must forget the order in which a plain pass used weights.

DeepSpeed prefetches weights in the order in which the last pass used them. A plain pass (for V(prefix), for the proof
of a weight sync, or in a callback) calls the LM head as a module. TRL's training passes do not call this module; they
only read its weight. In a training pass after a plain pass, DeepSpeed prefetches the weight of the LM head, but the
module is not called. If this weight is not tied to the embeddings, DeepSpeed then releases it before its gradient
arrives, and raises "The size of tensor a (0) must match the size of tensor b".

DeepSpeed records a new order if a pass calls a module that is not in the recorded order. It does not if a pass leaves
out a module of the recorded order. So `forget_plain_passes` makes DeepSpeed record the order again.
"""

from typing import Any

from torch.utils.hooks import RemovableHandle


def forget_plain_passes(engine: Any) -> RemovableHandle | None:
    """Make a DeepSpeed engine record a new order of weights after each call of the LM head as a module.

    Args:
        engine: the model as it is trained. If it is not a DeepSpeed engine with ZeRO-3, nothing is done.
    Returns:
        The handle of the hook, which must be removed before another engine gets the model; `None` if nothing was done.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return None
    coordinator = offload.get_param_coordinator()

    def forget(*_: Any) -> None:
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return engine.module.get_output_embeddings().register_forward_hook(forget)
