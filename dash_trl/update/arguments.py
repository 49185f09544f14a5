"""Checks of tensor arguments: a wrong shape or dtype is a `ValueError` that names the argument, not a silent
broadcast.
"""

from typing import Any

import torch
from torch import Tensor

_KINDS = {
    "floats": lambda dtype: dtype.is_floating_point,
    "bools": lambda dtype: dtype == torch.bool,
    "integers": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
}


def check_tensor(name: str, value: Any, kind: str | None = None, **sizes: int | None) -> None:
    """Refuse a tensor with a wrong number of dimensions, length or dtype.

    Args:
        name: the argument to name in the error.
        value: the argument.
        kind: "floats", "integers" or "bools". `None`: any dtype.
        sizes: the dimensions in their order, each with its length. `None`: any length.
    Raises:
        ValueError: names the argument, what it is and what it should be.
    """
    expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}. Pass a tensor [{expected}].")
    lengths = zip(value.shape, sizes.values(), strict=False)
    if value.dim() != len(sizes) or any(size not in (None, length) for length, size in lengths):
        raise ValueError(f"{name} has the shape {list(value.shape)}, which is not [{expected}].")
    if kind is not None and not _KINDS[kind](value.dtype):
        raise ValueError(f"{name} [{expected}] has the dtype {value.dtype}. Pass {kind}.")
