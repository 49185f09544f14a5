"""Agreements of ranks after one rank has failed: all ranks fail, and no rank waits for one that has ended."""

import gc
import socket

import torch.distributed as dist

from dash_trl.distributed import Lines, RankFailed, wait_for_all
from tests.tiny import refused


class Unsayable(RuntimeError):
    def __str__(self):
        raise RuntimeError("no text")


def test_a_rank_that_failed_does_not_wait_for_ever_for_the_others():
    assert wait_for_all(dist.HashStore(), 1, 2, KeyError(1), 1, patience=0.0) == {1: "KeyError: 1"}


def test_the_text_of_an_error_reaches_the_others():
    for error, text in (
        (KeyError("a", 1), "KeyError: ('a', 1)"),
        (FileNotFoundError(2, "no file"), "FileNotFoundError: [Errno 2] no file"),
        (ValueError("half \ud83d"), r"ValueError: half \ud83d"),  # half of an emoji, which UTF-8 cannot hold
        (Unsayable(), "Unsayable: <exception str() failed>"),
        (ExceptionGroup("why", [ValueError()]), "ExceptionGroup: why"),
    ):
        (said,) = wait_for_all(dist.HashStore(), 0, 1, error, 1).values()
        assert said.startswith(text)


def test_barriers_leave_nothing_behind():
    store = dist.HashStore()
    for number in range(1, 20):
        wait_for_all(store, 0, 1, KeyError() if number % 3 == 0 else None, number)
    assert store.num_keys() <= 3


def test_a_rank_that_has_ended_is_named_at_once():
    """As `srun` starts ranks: nobody ends the others."""
    store = dist.HashStore()
    lines = [Lines(store, rank, "localhost") for rank in range(3)]
    with socket.create_connection(("localhost", int(store.get("dash_trl/port")))) as stranger:
        stranger.sendall(b"GET / HTTP/1")
    for rank, others in ((2, r"\[0, 1\]"), (0, r"\[1\]")):
        said = f"Rank {rank} has waited 0 s .* for the ranks {others}"
        settings = {"timeout": 0.0, "lines": lines[rank]}
        refused(said, wait_for_all, store, rank, 3, None, 1, error=RankFailed, **settings)
    lines[1] = None  # its connection is closed, as when its process is killed
    gc.collect()
    refused("Rank 1 has ended", wait_for_all, store, 0, 3, ValueError(), 2, error=RankFailed, lines=lines[0])
