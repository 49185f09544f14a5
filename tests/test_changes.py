"""What changed between two tensors, without a server: `test_vllm.py` has the real ones."""

import json
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_trl.sampling import decode_gaps, encode_gaps, find_changes, pack, unpack

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


# gap → its bytes: 255 goes on
GAPS = {0: [0], 1: [1], 254: [254], 255: [255, 0], 256: [255, 1], 509: [255, 254], 510: [255, 255, 0]}


def test_gaps_are_bytes():
    for gap, encoded in GAPS.items():
        steps = torch.tensor([0, gap + 1, gap + 2])
        assert encode_gaps(steps).tolist() == [0, *encoded, 0], gap
        assert torch.equal(decode_gaps(encode_gaps(steps)), steps), gap


@given(
    st.sampled_from(list(INTEGERS)),
    st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=60),
    st.dictionaries(st.integers(0, 59), st.integers(-(2**15), 2**15 - 1)),
    st.integers(1, 40),
)
def test_old_and_changes_are_new(dtype, bits, changed, part_bytes):
    """Bits are drawn, so that NaNs, infinities and both zeros are among them; messages are as small as may be."""
    old = torch.tensor([bits], dtype=INTEGERS[dtype])
    new, result = old.clone(), old.clone()
    for place, value in changed.items():
        new[0, place % len(bits)] = value
    found = find_changes("w", old.view(dtype), new.view(dtype), part_bytes=part_bytes)
    for message in pack(found, part_bytes=part_bytes):
        for one in unpack(**json.loads(json.dumps(message))):
            assert (one.name, one.shape, one.values.dtype) == ("w", tuple(old.shape), old.dtype)
            result.view(-1)[one.positions] = one.values
    assert torch.equal(result, new)


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
