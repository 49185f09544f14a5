"""ZeRO-3 beside TRL's fused LM head: what DeepSpeed remembers of a plain pass must not reach a fused one.

DeepSpeed fetches weights ahead, in the order in which the last pass used them. A plain forward (V(prefix), the proof
of a weight sync, a callback's own) calls the LM head as a module; TRL's training passes only read its weight. Fetched
ahead for a module that is never called, an untied head's weight is released before its gradient arrives: "The size of
tensor a (0) must match the size of tensor b". DeepSpeed starts over by itself when it meets an unexpected module; here
it has to where an expected one stays away.
"""

from typing import Any

from torch.utils.hooks import RemovableHandle


def forget_plain_passes(engine: Any) -> RemovableHandle | None:
    """Makes a training engine record its order of weights anew after each call of the LM head as a module.

    Args:
        engine: what DeepSpeed made of the model; anything else, and other stages than 3, are left alone.
    Returns:
        The hook, to be removed before another engine takes the model.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return None
    coordinator = offload.get_param_coordinator()

    def forget(*_: Any) -> None:
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return engine.module.get_output_embeddings().register_forward_hook(forget)
