"""How ranks meet where one of them has failed: the error reaches all, and nobody waits for a rank that has gone."""

import threading

import pytest
import torch.distributed as dist

from dash_trl.distributed import RankFailed, meet


class Unpicklable(RuntimeError):
    def __init__(self, first, second):
        super().__init__(f"{first}, {second}")


def agreements(*works) -> list[str]:
    """What comes of a work on each of so many ranks, threads here, and of an agreement that follows it."""
    store, outcome = dist.HashStore(), [""] * len(works)

    def come(rank: int) -> None:
        failure, left = None, []
        try:
            works[rank](store, rank, left)
        except KeyError as error:
            failure = error
        said = meet(store, rank, len(works), failure, ["1"], left, timeout=20.0)
        after = meet(store, rank, len(works), None, ["2"], left, timeout=20.0)
        outcome[rank] = f"{ {one: text for one, (text, _) in said.items()} } {after}"

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def works(store, rank, left) -> None:
    pass


def fails(store, rank, left) -> None:
    raise KeyError(rank)


def agrees_within(store, rank, left) -> None:
    """An agreement within the work, to which the rank that failed before does not come."""
    for _, error in meet(store, rank, 2, None, ["1", "1.1"], left, timeout=20.0).values():
        raise error


def test_every_rank_is_told_what_failed_and_the_next_agreement_is_a_new_one():
    assert agreements(works, works, works) == ["{} {}"] * 3
    assert agreements(works, fails, fails) == ["{1: 'KeyError: 1', 2: 'KeyError: 2'} {}"] * 3


def test_who_waits_within_an_agreement_hears_of_a_failure_around_it():
    assert agreements(agrees_within, fails) == ["{0: 'KeyError: 1', 1: 'KeyError: 1'} {}"] * 2


def test_a_rank_that_failed_does_not_wait_for_ever_for_the_others():
    assert meet(dist.HashStore(), 1, 2, KeyError(1), ["1"], [], patience=0.0)[1][0] == "KeyError: 1"


def test_a_failure_is_known_before_its_rank_has_come():
    """Else who comes last would find all there, and no failure."""
    order = []

    class Store(dist.HashStore):
        def set(self, key, value):
            order.append(key)
            super().set(key, value)

    meet(Store(), 1, 2, KeyError(1), ["1"], [], patience=0.0)
    assert order == ["dash_trl/1/failed", "dash_trl/1/1"]


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RankFailed, match=r"Rank 1 has waited 0 s .* for the ranks \[0, 2\]"):
        meet(dist.HashStore(), 1, 3, None, ["1"], [], timeout=0.0)


def test_an_error_that_cannot_be_pickled_is_said():
    (said,) = meet(dist.HashStore(), 0, 1, Unpicklable("a", "b"), ["1"], []).values()
    assert said == ("Unpicklable: a, b", None)


def test_meetings_leave_nothing_behind():
    store, left = dist.HashStore(), []
    for number in range(1, 20):
        meet(store, 0, 1, KeyError() if number % 3 == 0 else None, [str(number)], left)
    assert store.num_keys() <= 3
