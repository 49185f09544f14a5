"""Agreements of ranks after one rank has failed: all ranks fail, and none waits for ever."""

import torch.distributed as dist

from dash_trl.distributed import RankFailed, wait_for_all
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


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    for rank, others in ((2, r"\[0, 1\]"), (0, r"\[1\]")):
        said = f"Rank {rank} has waited 0 s .* for the ranks {others}"
        refused(said, wait_for_all, store, rank, 3, None, 1, error=RankFailed, timeout=0.0)
