"""What a tensor argument has to be: a wrong one is a `ValueError` that names it, not a broadcast that goes on."""

from typing import Any

import torch
from torch import Tensor

_KINDS = {
    "floats": lambda dtype: dtype.is_floating_point,
    "bools": lambda dtype: dtype == torch.bool,
    "integers": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
}


def check_tensor(name: str, value: Any, kind: str | None = None, **sizes: int | None) -> None:
    """Refuse another rank, length or dtype.

    Args:
        kind: "floats", "integers" or "bools"; None: any.
        sizes: the dimensions in their order, each with its length; None: any.
    """
    expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}. Pass a tensor [{expected}].")
    lengths = zip(value.shape, sizes.values(), strict=False)
    if value.dim() != len(sizes) or any(size not in (None, length) for length, size in lengths):
        raise ValueError(f"{name} has the shape {list(value.shape)}, which is not [{expected}].")
    if kind is not None and not _KINDS[kind](value.dtype):
        raise ValueError(f"{name} [{expected}] has the dtype {value.dtype}. Pass {kind}.")
