"""Files from which an interrupted run continues, wherever it was interrupted, and the check that they are its own."""

import json

import pytest

from dash_trl.evaluation import Records

SETTINGS = {"model": "a", "temperature": 0.7, "k": (1, 2)}
ROWS = {0: {"text": "zwölf\n"}, 1: {"text": "b"}, 2: {"text": "", "rewards": [None, 1.0]}}

BROKEN = b'{"settings": {}}\n{"index": 0, "te\n{"index": 1}\n'  # not at its end


def write(path, rows=ROWS, settings=SETTINGS):
    """Writes records like a run: existing records are not made again."""
    with Records(path, settings) as records:
        for index, row in rows.items():
            if index not in records.rows:
                records.add(index, row)
        records.sort()
    return path.read_bytes()


def test_a_file_is_its_settings_and_a_line_per_row_in_their_order(tmp_path):
    content = write(tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in content.decode().splitlines()]
    assert lines[0] == {"settings": {"model": "a", "temperature": 0.7, "k": [1, 2]}}
    assert lines[1:] == [{"index": index, **row} for index, row in ROWS.items()]
    assert write(tmp_path / "b.jsonl", dict(reversed(ROWS.items()))) == content
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl"}


def test_wherever_it_was_cut_it_becomes_the_same_file(tmp_path, caplog):
    whole = write(tmp_path / "whole.jsonl")
    ends = [length for length in range(len(whole) + 1) if whole[:length].endswith(b"\n")]
    for length in range(len(whole) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(whole[:length])
        caplog.clear()
        with Records(cut, SETTINGS) as records:
            assert records.rows == dict(list(ROWS.items())[: sum(end <= length for end in ends[1:])])
        assert ("ends with half a line" in caplog.text) == (length not in (0, *ends))
        assert write(cut) == whole, whole[:length]


def test_other_settings_are_refused_by_name_and_nothing_is_overwritten(tmp_path):
    before = write(tmp_path / "a.jsonl")
    other = {"model": "a", "temperature": 1.0, "seed": 3}
    with pytest.raises(ValueError) as error:
        Records(tmp_path / "a.jsonl", other)
    for difference in (
        "temperature is 0.7 there and 1.0 here",
        "k is [1, 2] there and 'missing'",
        "seed is 'missing' there",
    ):
        assert difference in str(error.value)
    assert "model" not in str(error.value).partition("other settings")[2]
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_settings_without_a_row_bind_nobody(tmp_path):
    write(tmp_path / "a.jsonl", {})
    assert write(tmp_path / "a.jsonl", settings={"seed": 1}) == write(tmp_path / "b.jsonl", settings={"seed": 1})


def test_a_file_of_another_form_is_left_alone(tmp_path):
    path, row = tmp_path / "a.jsonl", b'{"settings": {}}\n{"text": "b"}\n'
    for content in (b"# notes\n", b'{"problem": "1+1"}\n', row, b"[1]\n", b"\xff\n", b"half", BROKEN):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.jsonl is not a file of records"):
            Records(path, {})
        assert path.read_bytes() == content


def test_two_runs_do_not_write_one_file(tmp_path):
    with Records(tmp_path / "a.jsonl", SETTINGS), pytest.raises(ValueError, match="Another process is writing"):
        Records(tmp_path / "a.jsonl", SETTINGS)
    write(tmp_path / "a.jsonl")  # it is free again
