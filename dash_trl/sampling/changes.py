"""What changed between two versions of a tensor: gaps between changed elements, and their new values.

    old  a b c d e f g        positions  1 4 5    gaps  1 2 0    values  B E F
    new  a B c d E F g

Elements are compared and sent as the integers of their bits: a NaN and −0.0 arrive as they are. The values are the new
ones, so that it does no harm to set them twice. Shapes: C elements of a tensor changed.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.sampling.checksum import bits_of

PART_BYTES = 64 << 20  # of gaps and values in one message; what is larger is sent in several
MORE = 255  # the byte that adds so much to a gap and does not end it; smaller ones do


@dataclass(frozen=True)
class Change:
    """Elements of one tensor with new values.

    Attributes:
        name, shape: of the tensor.
        start: position of the first of them in the flattened tensor.
        gaps: uint8, see `encode_gaps`; empty: the elements from `start` on, without a gap.
        values: [C], the new bits.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    gaps: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes

    @property
    def positions(self) -> Tensor:
        """[C] int64, ascending, in the flattened tensor."""
        steps = decode_gaps(self.gaps) if len(self.gaps) else torch.arange(len(self.values))
        return self.start + steps


def encode_gaps(steps: Tensor) -> Tensor:
    """uint8, [≥ C]: the gap before each position as bytes, 255 + 255 + … + what is left (< 255).

    It takes a byte for each position, and one more for every 255 elements that are passed over.

    Args:
        steps: [C] int64, ascending and distinct, from 0 on.
    """
    gaps = steps.diff(prepend=steps.new_tensor([-1])) - 1
    ends = (gaps // MORE + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), MORE, dtype=torch.uint8)
    encoded[ends] = (gaps % MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """[C] int64: the inverse of `encode_gaps`."""
    ends = encoded != MORE
    passed = encoded.cumsum(0, dtype=torch.int64)[ends]
    return passed + torch.arange(len(passed))


def changes(name: str, old: Tensor | None, new: Tensor, *, part_bytes: int = PART_BYTES) -> Iterator[Change]:
    """What turns `old` into `new`, each at most about `part_bytes` large; nothing where they are equal.

    Args:
        old, new: of one shape and dtype, on the CPU. `old` `None`: every element counts as changed.
    """
    bits, shape = bits_of(new), tuple(new.shape)
    most = max(1, part_bytes // (bits.element_size() + 1))
    if old is None:
        for start, values in zip(range(0, len(bits), most), bits.split(most), strict=True):
            yield Change(name, shape, start, torch.empty(0, dtype=torch.uint8), values)
        return
    for positions in (bits_of(old) != bits).nonzero().squeeze(1).split(most):
        if len(positions):
            start = int(positions[0])
            yield Change(name, shape, start, encode_gaps(positions - start), bits[positions])


def pack(some: Iterable[Change], *, part_bytes: int = PART_BYTES) -> Iterator[dict[str, str]]:
    """Messages of strings, as many changes in each as make `part_bytes`."""
    waiting: list[Change] = []
    for change in some:
        if waiting and sum(one.nbytes for one in waiting) + change.nbytes > part_bytes:
            yield _message(waiting)
            waiting = []
        waiting.append(change)
    if waiting:
        yield _message(waiting)


def unpack(head: str, body: str) -> Iterator[Change]:
    """The changes of one message."""
    data, place = bytearray(base64.b64decode(body)), 0

    def read(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal place
        if not count:
            return torch.empty(0, dtype=dtype)
        begin, place = place, place + count * dtype.itemsize
        return torch.frombuffer(data[begin:place], dtype=dtype)

    for name, shape, start, gaps, values, dtype in json.loads(head):
        yield Change(name, tuple(shape), start, read(gaps, torch.uint8), read(values, getattr(torch, dtype)))


def _message(some: list[Change]) -> dict[str, str]:
    head: list[Any] = []
    for one in some:
        dtype = str(one.values.dtype).removeprefix("torch.")
        head.append([one.name, one.shape, one.start, len(one.gaps), len(one.values), dtype])
    body = b"".join(tensor.numpy().tobytes() for one in some for tensor in (one.gaps, one.values))
    return {"head": json.dumps(head), "body": base64.b64encode(body).decode()}
