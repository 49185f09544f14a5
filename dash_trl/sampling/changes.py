"""Encodes the changed elements of a tensor as the gaps between their positions, and their new values.

Example::

    old  a b c d e f g        positions  1 4 5    start 1, gaps 0 2 0    values  B E F
    new  a B c d E F g

Elements are compared and sent as the integers of their bits, so NaN and −0.0 arrive unchanged. A change holds new
values, not differences, so applying it twice does no harm. In shapes, C is the number of changed elements of a tensor.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from dash_trl.sampling.checksum import bits_of

PART_BYTES = 64 << 20  # bytes of gaps and values in one message; larger changes are split over several messages
MORE = 255  # this byte adds 255 to a gap and continues it; any smaller byte ends the gap


@dataclass(frozen=True)
class Change:
    """New values for some elements of one tensor.

    Attributes:
        name: name of the tensor.
        shape: shape of the tensor.
        start: position of the first changed element in the flattened tensor.
        gaps: [≥ C] uint8, `encode_gaps` of the positions minus `start`, so the first gap is 0. If empty, the changed
            elements are C consecutive elements from `start` on.
        values: [C] integers, the bits of the new values.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    gaps: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of gaps and values."""
        return self.gaps.nbytes + self.values.nbytes

    @property
    def positions(self) -> Tensor:
        """[C] int64, ascending positions of the changed elements in the flattened tensor."""
        steps = decode_gaps(self.gaps) if len(self.gaps) else torch.arange(len(self.values))
        return self.start + steps


def encode_gaps(steps: Tensor) -> Tensor:
    """Encode positions as the gaps between them, in bytes.

    A gap is the number of elements between a position and the previous one; the first gap is the number of elements
    before the first position. A gap is written as 255 + 255 + … + a remainder below 255. So a position takes one byte,
    plus one for every 255 unchanged elements before it.

    Args:
        steps: [C] int64, ascending and distinct positions, at least 0.

    Returns:
        [≥ C] uint8.
    """
    gaps = steps.diff(prepend=steps.new_tensor([-1])) - 1
    ends = (gaps // MORE + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), MORE, dtype=torch.uint8)
    encoded[ends] = (gaps % MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Decode the positions that `encode_gaps` has encoded.

    Args:
        encoded: [≥ C] uint8.

    Returns:
        [C] int64, ascending positions.
    """
    ends = encoded != MORE
    passed = encoded.cumsum(0, dtype=torch.int64)[ends]
    return passed + torch.arange(len(passed))


def find_changes(name: str, old: Tensor | None, new: Tensor, *, part_bytes: int = PART_BYTES) -> Iterator[Change]:
    """Yield the changes that turn `old` into `new`. If the two are equal, yield nothing.

    Args:
        name: name of the tensor.
        old: old values on the CPU, with the shape and dtype of `new`. If None, every element counts as changed.
        new: new values on the CPU.
        part_bytes: approximate upper limit for the bytes of one change; larger changes are split.

    Yields:
        Changes with ascending positions.
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
    """Pack changes into messages for `unpack`.

    Args:
        some: the changes.
        part_bytes: upper limit for the bytes of the changes in one message, unless a single change is larger.

    Yields:
        Messages with the strings `head` (JSON) and `body` (safetensors in base64).
    """
    waiting: list[Change] = []
    for change in some:
        if waiting and sum(one.nbytes for one in waiting) + change.nbytes > part_bytes:
            yield _message(waiting)
            waiting = []
        waiting.append(change)
    if waiting:
        yield _message(waiting)


def unpack(head: str, body: str) -> Iterator[Change]:
    """Yield the changes of one message of `pack`.

    Args:
        head: JSON with the name, the shape and the start of each change.
        body: their gaps and values as safetensors, in base64.

    Yields:
        The changes, in the order in which they were packed.
    """
    tensors = load(base64.b64decode(body))
    for number, (name, shape, start) in enumerate(json.loads(head)):
        yield Change(name, tuple(shape), start, tensors[f"{number}.gaps"], tensors[f"{number}.values"])


def _message(some: list[Change]) -> dict[str, str]:
    """Pack changes into one message."""
    gaps = {f"{number}.gaps": one.gaps for number, one in enumerate(some)}
    values = {f"{number}.values": one.values for number, one in enumerate(some)}
    head = json.dumps([(one.name, one.shape, one.start) for one in some])
    return {"head": head, "body": base64.b64encode(save(gaps | values)).decode()}
