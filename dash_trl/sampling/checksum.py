"""Checksum of a model's weights that trainer and server can compare although they store the weights differently.

vLLM fuses tensors (q, k, v into one), splits them over its workers and pads vocabularies with zeros. None of this
changes the checksum, a sum of hashes of each element's bits, but one flipped bit does. It misses values that move to
other positions; the comparison of log-probs (`proof.py`) detects them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

# h(x) = x (A x + B) mod 2^64 with A even and B odd is a permutation of the 64-bit integers with h(0) = 0.
A = 0x2545F4914F6CDD1E - (1 << 61)
B = 0x1E3779B97F4A7C15
MODULUS = 1 << 64
CHUNK = 1 << 24  # elements at a time, so that a temporary int64 copy takes 128 MiB at most

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksum(tensor: Tensor) -> int:
    """Compute Σ h(bits of an element) mod 2^64, which does not depend on the order of the elements.

    Args:
        tensor: any shape; elements of 1, 2, 4 or 8 bytes.
    """
    total = 0
    flat = tensor.detach().flatten()
    for part in flat.view(_INTEGERS[flat.element_size()]).split(CHUNK):
        x = part.to(torch.int64)
        total += int((x * (A * x + B)).sum())  # int64 overflow wraps around: arithmetic modulo 2^64
    return total % MODULUS


def weights_version(parameters: Iterable[Tensor]) -> list[int]:
    """Compute a value that shows whether any weights have changed since an earlier call.

    PyTorch's version counters miss changes of `parameter.data`, so this adds up the bits of each tensor as 8-byte
    integers.

    Args:
        parameters: all parameters of the model; of sharded parameters, this rank's shards count.
    """
    sums = []
    for one in parameters:
        share = getattr(one, "ds_tensor", one).detach()  # under ZeRO-3, the parameter itself is empty
        share = share.to_local() if hasattr(share, "to_local") else share
        raw = share.flatten().view(torch.uint8)
        padded = pad(raw, (0, -len(raw) % 8))  # a copy, which begins at a multiple of 8 bytes
        sums.append(padded.view(torch.int64).sum())
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist()


def weights_checksum(tensors: Iterable[Tensor]) -> int:
    """Compute the checksum of a model from all its tensors."""
    return sum(map(tensor_checksum, tensors)) % MODULUS


def combine_workers(reports: Sequence[Mapping[str, str]]) -> int:
    """Combine the checksums of a model that is split over a server's workers (tensor parallelism).

    Args:
        reports: for each worker, tensor name → hexadecimal checksum of its part. Equal checksums mean a replicated
            tensor, which counts once.
    """
    total = 0
    for name in {name for report in reports for name in report}:
        parts = [int(report[name], 16) for report in reports if name in report]
        total += parts[0] if len(set(parts)) == 1 else sum(parts)
    return total % MODULUS
