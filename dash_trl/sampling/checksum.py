"""A checksum of a model's weights that trainer and server can compare although they store them differently.

vLLM fuses tensors (q, k, v into one), splits them over its workers and pads vocabularies with zeros. The checksum is
therefore a sum over elements of a hash of each element's bits: concatenating, splitting and padding leave it unchanged,
one flipped bit does not. What it cannot see is the same values at other places; the log-prob probe can
(`weights/proof.py`).
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

# h(x) = x (A x + B) mod 2^64 with A even and B odd is a permutation of the 64-bit integers with h(0) = 0.
A, B = 0x2545F4914F6CDD1E - (1 << 61), 0x1E3779B97F4A7C15
MODULUS = 1 << 64
CHUNK = 1 << 24  # elements at a time: the temporary int64 copies stay at 128 MiB

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """[elements], each as the integer of its bits."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def tensor_checksum(tensor: Tensor) -> int:
    """Σ h(bits of an element) mod 2^64; any shape and dtype, independent of the order of the elements."""
    total = 0
    for part in bits_of(tensor).split(CHUNK):
        x = part.to(torch.int64)
        total += int((x * (A * x + B)).sum())  # wraps around, which is the arithmetic modulo 2^64
    return total % MODULUS


def weights_checksum(tensors: Iterable[Tensor]) -> int:
    """Of all tensors of a model, each given once."""
    return sum(map(tensor_checksum, tensors)) % MODULUS


def combine_workers(reports: Sequence[Mapping[str, str]]) -> int:
    """The checksum of a model that is spread over a server's workers (tensor parallelism).

    Args:
        reports: per worker, tensor name → hexadecimal checksum of its part. A tensor with the same checksum on all of
            several workers is replicated and counts once.
    """
    total = 0
    for name in {name for report in reports for name in report}:
        parts = [int(report[name], 16) for report in reports if name in report]
        total += parts[0] if len(set(parts)) == 1 else sum(parts)
    return total % MODULUS
