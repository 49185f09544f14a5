"""The state machine of the servers: its laws under any order of events, and the stories that it was made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dash_trl.sampling.health import FAILURES_UNTIL_DEAD, SEQUENCES_PER_SERVER, Fleet, State

A, B = "http://a", "http://b"


def ready(*urls: str, version: int = 1) -> Fleet:
    fleet = Fleet(urls)
    fleet.new_version(version, 0.0)
    for url in urls:
        fleet.answered(url)
        fleet.refitted(url, version, 0.0)
    return fleet


EVENTS = st.sampled_from(
    ["started", "served", "failed", "gone", "abandoned", "answered", "refitted", "refitted old", "refit_failed", "new"]
)


@given(st.lists(st.tuples(EVENTS, st.sampled_from([A, B])), max_size=60))
def test_only_a_server_with_the_current_weights_is_given_a_prompt(events):
    """The reference: which version each server was given since it was last dead, kept in a plain dict."""
    fleet, now, version = Fleet([A, B]), 0.0, 0
    holds: dict[str, int | None] = {A: None, B: None}
    for number, (event, url) in enumerate(events):
        now += 1.0
        before = fleet.servers[url].state
        if event == "started":
            fleet.started(url, number, 10, 1)
        elif event in ("served", "abandoned"):
            getattr(fleet, event)(url, number - 1)
        elif event in ("failed", "gone"):
            fleet.failed(url, number - 1, "broken", now, gone=event == "gone")
        elif event == "answered":
            fleet.answered(url)
        elif event.startswith("refitted"):
            given = version - (event == "refitted old")
            fleet.refitted(url, given, now)
            if before == State.REFITTING:
                holds[url] = given
        elif event == "refit_failed":
            fleet.refit_failed(url, "no", now)
        else:
            version += 1
            fleet.new_version(version, now)
        for one in (A, B):
            if fleet.servers[one].state == State.DEAD:
                holds[one] = None
        if before == State.DEAD:  # back only through refitting
            assert fleet.servers[url].state in (State.DEAD, State.REFITTING)
        chosen = fleet.choose(1, now + 100.0)
        assert chosen is None or holds[chosen] == version
        assert fleet.lost(now + 10.0, 10.0) <= (chosen is None)


def test_a_failure_makes_a_server_suspect_and_three_in_a_row_dead():
    fleet = ready(A)
    for failures in range(1, FAILURES_UNTIL_DEAD):
        fleet.failed(A, 0, "500", now=10.0 * failures)
        assert fleet.servers[A].state == State.SUSPECT
    fleet.failed(A, 0, "500", now=100.0)
    assert fleet.servers[A].state == State.DEAD
    assert fleet.to_probe(100.5) == [] and fleet.to_probe(101.0) == [A]


def test_what_a_suspect_serves_makes_it_healthy_again():
    fleet = ready(A)
    fleet.failed(A, 0, "500", now=0.0)
    assert fleet.choose(1, now=0.4) is None  # it rests
    assert fleet.choose(1, now=0.5) == A
    fleet.started(A, 1, 10, 1)
    assert fleet.choose(1, now=0.5) is None  # one job at a time
    fleet.served(A, 1)
    assert fleet.servers[A].state == State.HEALTHY
    fleet.failed(A, 2, "500", now=1.0)
    assert fleet.servers[A].failures == 1  # in a row


def test_a_server_that_is_gone_is_dead_at_once_and_probes_do_not_make_it_healthy():
    fleet = ready(A, B)
    fleet.failed(A, 0, "connection refused", now=0.0, gone=True)
    assert fleet.servers[A].state == State.DEAD and fleet.choose(1, now=99.0) == B
    fleet.answered(A)
    assert fleet.servers[A].state == State.REFITTING and fleet.choose(1, now=99.0) == B
    fleet.refitted(A, 0, now=99.0)  # the weights before the last ones
    assert fleet.servers[A].state == State.DEAD


def test_the_fewest_outstanding_tokens_and_not_where_it_failed_before():
    fleet = ready(A, B)
    fleet.started(A, 0, 100, 4)
    fleet.started(B, 1, 99, 4)
    assert fleet.choose(1, now=0.0) == B
    assert fleet.choose(1, now=0.0, avoid=[B]) == A
    assert fleet.choose(1, now=0.0, avoid=[A, B]) == B  # better than nobody
    fleet.started(B, 2, 1, SEQUENCES_PER_SERVER)
    assert fleet.choose(1, now=0.0, avoid=[A]) is None  # it waits for B, which has no room
    assert fleet.choose(1, now=0.0) == A


def test_a_job_larger_than_the_limit_goes_to_an_idle_server():
    fleet = ready(A)
    assert fleet.choose(SEQUENCES_PER_SERVER + 1, now=0.0) == A


def test_the_time_without_a_server_counts_from_the_loss_or_the_start_of_work():
    fleet = Fleet([A])
    fleet.begin(5.0)
    assert not fleet.lost(9.0, timeout=5.0) and fleet.lost(10.0, timeout=5.0)
    fleet.answered(A)
    fleet.refitted(A, 0, 10.0)
    assert not fleet.lost(99.0, timeout=5.0)
    fleet.failed(A, 0, "gone", 100.0, gone=True)
    fleet.failed(A, 1, "gone", 103.0, gone=True)
    assert fleet.lost(105.0, timeout=5.0)
    assert "http://a is dead; last error: gone" in fleet.describe()
