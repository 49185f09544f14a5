"""What changed between two tensors, without a server: `test_vllm.py` has the real ones."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_trl.sampling import decode_gaps, encode_gaps, find_changes, pack, unpack

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def by_hand(steps: list[int]) -> list[int]:
    """Returns the bytes of the gaps, encoded one after the other."""
    encoded, before = [], -1
    for step in steps:
        gap, before = step - before - 1, step
        while gap >= 255:
            encoded.append(255)
            gap -= 255
        encoded.append(gap)
    return encoded


@given(st.sets(st.integers(0, 3000)))
def test_gaps_are_bytes(steps):
    ordered = torch.tensor(sorted(steps), dtype=torch.int64)
    encoded = encode_gaps(ordered)
    assert encoded.tolist() == by_hand(sorted(steps))
    assert torch.equal(decode_gaps(encoded), ordered)


def test_gaps_of_any_length():
    for gap in (0, 1, 254, 255, 256, 509, 510, 511, 10**8):
        steps = torch.tensor([0, gap + 1, gap + 2])
        assert torch.equal(decode_gaps(encode_gaps(steps)), steps), gap


def after(old: torch.Tensor, new: torch.Tensor, part_bytes: int = 1 << 20) -> tuple[torch.Tensor, int]:
    """Packs changes from `old` to `new` into messages; returns `old` with the changes and the number of messages."""
    integer, result = INTEGERS[old.dtype], old.clone()
    messages = list(pack(find_changes("w", old, new, part_bytes=part_bytes), part_bytes=part_bytes))
    for message in messages:
        assert all(isinstance(value, str) for value in message.values())
        for one in unpack(**message):
            assert (one.name, one.shape, one.values.dtype) == ("w", tuple(old.shape), integer)
            result.view(integer).view(-1)[one.positions] = one.values
    return result, len(messages)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(INTEGERS[a.dtype]), b.view(INTEGERS[b.dtype]))


@given(
    st.sampled_from(list(INTEGERS)),
    st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=60),
    st.dictionaries(st.integers(0, 59), st.integers(-(2**15), 2**15 - 1)),
    st.integers(1, 40),
)
def test_old_and_changes_are_new(dtype, bits, changed, part_bytes):
    """Bits are drawn, so that NaNs, infinities and both zeros are among them; messages are as small as may be."""
    old = torch.tensor(bits, dtype=INTEGERS[dtype])
    new = old.clone()
    for place, value in changed.items():
        new[place % len(bits)] = value
    result, _ = after(old.view(dtype), new.view(dtype), part_bytes)
    assert same_bits(result, new.view(dtype))


def test_places_of_a_matrix():
    torch.manual_seed(0)
    old = torch.randn(300, 257).bfloat16()
    for places in ([], [0], [-1], [0, -1], [70_000], slice(None)):
        new = old.clone()
        new.view(-1)[places] = 7.0
        result, messages = after(old, new)
        assert same_bits(result, new) and messages == (places != []), places


def test_bits_count_and_not_values():
    old = torch.tensor([math.nan, 0.0, -0.0, 1.0]).bfloat16()
    (same,), (sign,) = (list(find_changes("w", old, new)) or [None] for new in (old.clone(), -old.abs()))
    assert same is None  # although NaN != NaN
    assert sign.positions.tolist() == [0, 1, 3]  # although 0.0 == -0.0


def test_whole_tensors_need_no_gaps_and_are_split():
    tensor = torch.arange(10.0)
    parts = list(find_changes("w", None, tensor, part_bytes=20))  # a value and its gap are 5 bytes
    assert [one.positions.tolist() for one in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sum(one.nbytes for one in parts) == tensor.nbytes
    assert [len(list(unpack(**one))) for one in pack(parts, part_bytes=32)] == [2, 1]
    assert torch.equal(torch.cat([one.values for one in parts]).view(torch.float32), tensor)


def test_few_changes_of_many_are_few_bytes():
    """Three for each of a bfloat16, and one for every 255 elements that are passed over."""
    old = torch.zeros(1 << 20).bfloat16()
    new = old.clone()
    new[torch.randperm(len(old))[:1000]] = 1.0
    assert sum(one.nbytes for one in find_changes("w", old, new)) <= 3 * 1000 + len(old) / 255
