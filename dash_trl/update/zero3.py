"""ZeRO-3 with TRL's fused LM head: DeepSpeed must forget the order of weights from plain passes.

DeepSpeed fetches weights ahead in the order in which the last pass used them. A plain forward (V(prefix), the proof of
a weight sync, a callback's own pass) calls the LM head as a module; TRL's training passes only read its weight. If the
weight of an untied head is fetched ahead for a module that is never called, it is released before its gradient arrives:
"The size of tensor a (0) must match the size of tensor b". DeepSpeed records a new order by itself if it meets an
unexpected module, but not if an expected module is not called.
"""

from typing import Any

from torch.utils.hooks import RemovableHandle


def forget_plain_passes(engine: Any) -> RemovableHandle | None:
    """Make a training engine record its order of weights anew after each call of the LM head as a module.

    Args:
        engine: DeepSpeed's wrapper of the model. Anything else, and stages other than 3, are left alone.
    Returns:
        The hook, to be removed before another engine takes the model; `None` if the engine was left alone.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return None
    coordinator = offload.get_param_coordinator()

    def forget(*_: Any) -> None:
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return engine.module.get_output_embeddings().register_forward_hook(forget)
