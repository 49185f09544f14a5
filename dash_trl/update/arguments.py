"""Checks tensor arguments, because PyTorch may broadcast a tensor of a wrong shape and return a wrong result."""

from torch import Tensor


def check_tensor(name: str, value: object, *, floats: bool = False, **sizes: int | None) -> None:
    """Raise a `ValueError` if an argument is no tensor, or has a wrong shape or dtype.

    Args:
        name: the argument's name, for the error.
        value: the argument's value.
        floats: True = the dtype must be a floating-point type.
        sizes: letter = expected length, for each dimension in order. `None`: any length.
    """
    expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}. Pass a tensor [{expected}].")
    lengths = zip(value.shape, sizes.values(), strict=False)
    if value.dim() != len(sizes) or any(size not in (None, length) for length, size in lengths):
        raise ValueError(f"{name} has the shape {list(value.shape)}, which is not [{expected}].")
    if floats and not value.is_floating_point():
        raise ValueError(f"{name} [{expected}] has the dtype {value.dtype}. Pass floats.")
