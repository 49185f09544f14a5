"""Agreements of ranks after one rank has failed: all ranks get the error, and no rank waits for one that has ended."""

import json
import pickle
from functools import reduce
from pathlib import Path

import pytest
import torch.distributed as dist

from dash_trl.distributed import RankFailed, meet
from dash_trl.sampling import PoolError

HANGS = 600.0  # seconds; a last resort
NESTED: list = reduce(lambda inner, _: [inner], range(100_000), [])  # json raises a RecursionError


class Unsayable(RuntimeError):
    def __str__(self):
        raise RuntimeError("no text")


def test_a_rank_that_failed_does_not_wait_for_ever_for_the_others():
    assert meet(dist.HashStore(), 1, 2, KeyError(1), 1, patience=0.0)[1][0] == "KeyError: 1"


def test_a_failure_is_known_before_its_rank_has_come():
    """Otherwise the last rank would find that all ranks have come, and no failure."""
    order = []

    class Store(dist.HashStore):
        def set(self, key, value):
            order.append(key)
            super().set(key, value)

    meet(Store(), 1, 2, KeyError(1), 1, patience=0.0)
    assert order == ["dash_trl/1/failed", "dash_trl/1/1"]


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RankFailed, match=r"Rank 1 has waited 0 s .* for the ranks \[0, 2\]"):
        meet(dist.HashStore(), 1, 3, None, 1, timeout=0.0)


def test_an_error_reaches_the_others_as_itself_or_as_its_text():
    for error, text, relayed in (
        (KeyError("a", 1), "KeyError: ('a', 1)", KeyError("a", 1)),
        (FileNotFoundError(2, "no file"), "FileNotFoundError: [Errno 2] no file", FileNotFoundError(2, "no file")),
        (ValueError(object), "ValueError: <class 'object'>", ValueError("<class 'object'>")),
        (PoolError("no server"), "PoolError: no server", PoolError("no server")),
        (json.JSONDecodeError("why", "", 0), "JSONDecodeError: why: line 1", None),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "why"), "UnicodeDecodeError: 'utf-8' codec", None),
        (Unsayable(), "Unsayable: <exception str() failed>", None),
        (KeyError(NESTED), "KeyError: <exception str() failed>", KeyError("<exception str() failed>")),
        (ExceptionGroup("why", [ValueError()]), "ExceptionGroup: why", None),
    ):
        ((said, rebuilt),) = meet(dist.HashStore(), 0, 1, error, 1).values()
        assert said.startswith(text) and repr(rebuilt) == repr(relayed)


def test_nothing_that_stands_in_the_store_is_run(tmp_path):
    """Whoever reaches its port may write there."""

    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was run",)

    store = dist.HashStore()
    store.set("dash_trl/1/1", pickle.dumps(Attack()))
    store.set("dash_trl/1/failed", "")
    with pytest.raises(ValueError):
        meet(store, 0, 2, None, 1, timeout=HANGS)
    file = str(tmp_path / "was run")
    group = ["builtins", "ExceptionGroup", ["why", []]]  # cannot be made
    for attack in (["subprocess", "Popen", [["touch", file]]], ["builtins", "open", [file, "w"]], group):
        store.set("dash_trl/1/1", json.dumps(["text", *attack]))
        assert meet(store, 0, 2, None, 1, timeout=HANGS) == {1: ("text", None)}
    assert not (tmp_path / "was run").exists()


def test_meetings_leave_nothing_behind():
    store = dist.HashStore()
    for number in range(1, 20):
        meet(store, 0, 1, KeyError() if number % 3 == 0 else None, number)
    assert store.num_keys() <= 3
