"""Checks tensor arguments, so that a wrong shape or dtype raises an error that names the argument.

Without the check, PyTorch may broadcast a tensor of a wrong shape and return a wrong result without an error.
"""

from typing import Any

from torch import Tensor


def check_tensor(name: str, value: Any, *, floats: bool = False, **sizes: int | None) -> None:
    """Check that an argument is a tensor with the expected shape and dtype.

    Args:
        name: name of the argument, for the error.
        value: value of the argument.
        floats: True = the dtype must be a floating-point type.
        sizes: letter = expected length, for each dimension in order. `None`: any length.
    Raises:
        ValueError: if the value is no tensor, or has a wrong shape or dtype. The message names the argument, what the
            value is, and what is expected.
    """
    expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}. Pass a tensor [{expected}].")
    lengths = zip(value.shape, sizes.values(), strict=False)
    if value.dim() != len(sizes) or any(size not in (None, length) for length, size in lengths):
        raise ValueError(f"{name} has the shape {list(value.shape)}, which is not [{expected}].")
    if floats and not value.is_floating_point():
        raise ValueError(f"{name} [{expected}] has the dtype {value.dtype}. Pass floats.")
