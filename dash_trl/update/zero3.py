"""A workaround for ZeRO-3 with TRL's fused LM head: DeepSpeed must forget the order of weights of plain passes.

DeepSpeed fetches weights ahead, in the order in which the last pass used them. A plain forward (for V(prefix), for the
proof of a weight sync, or in a callback) calls the LM head as a module. TRL's training passes only read the weight of
the LM head. If DeepSpeed fetches this weight ahead (of a head that is not tied to the embeddings) and the module is not
called, DeepSpeed releases the weight before its gradient arrives. The error is "The size of tensor a (0) must match the
size of tensor b". DeepSpeed records a new order by itself if a pass calls an unexpected module, but not if a pass does
not call an expected module.
"""

from typing import Any

from torch.utils.hooks import RemovableHandle


def forget_plain_passes(engine: Any) -> RemovableHandle | None:
    """Make a DeepSpeed engine record the order of weights anew after each call of the LM head as a module.

    Args:
        engine: the model as it is trained. If it is not a DeepSpeed engine with ZeRO-3, nothing is done.
    Returns:
        The hook, which must be removed before another engine gets the model; `None` if nothing was done.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return None
    coordinator = offload.get_param_coordinator()

    def forget(*_: Any) -> None:
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return engine.module.get_output_embeddings().register_forward_hook(forget)
