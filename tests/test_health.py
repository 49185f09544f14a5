"""The state machine of the servers, in the situations that it was made for."""

from dash_trl.sampling import Fleet, Job

A, B, C = "http://a", "http://b", "http://c"


def ready(*urls: str, version: int = 1) -> Fleet:
    fleet = Fleet(urls, sequences=64)
    fleet.new_version(version)
    for url in urls:
        fleet.answered(url)
        fleet.refitted(url, version, 0.0)
    return fleet


def test_a_failure_makes_a_server_suspect_and_three_in_a_row_dead():
    fleet = ready(A)
    for failures in (1, 2):
        fleet.failed(A, "500", now=10.0 * failures)
        assert fleet.servers[A].state == "suspect"
        fleet.answered(A)
        fleet.refitted(A, 1, now=10.0 * failures + 5.0)  # well again, but nothing served
    fleet.failed(A, "500", now=100.0)
    assert fleet.servers[A].state == "dead"
    assert fleet.to_probe(100.5) == [] and fleet.to_probe(101.0) == [A]


def test_a_suspect_rests_and_is_looked_at_before_it_gets_a_prompt():
    fleet = ready(A)
    fleet.failed(A, "500", now=0.0)
    assert fleet.to_probe(0.4) == [] and fleet.to_probe(0.5) == [A]
    fleet.served(A, 0.0)  # one that was under way
    assert fleet.choose(1) is None
    fleet.answered(A)
    assert fleet.choose(1) is None and fleet.to_probe(9.0) == []
    fleet.refitted(A, 1, now=0.6)
    assert fleet.choose(1) == A
    fleet.failed(A, "500", now=1.0)
    assert fleet.servers[A].failures == 1  # in a row


def test_between_batches_a_server_may_have_become_another():
    fleet = ready(A)
    fleet.suspect_idle(5.0)
    assert fleet.choose(1) is None and fleet.to_probe(5.0) == [A] and fleet.current()
    fleet.answered(A)
    fleet.died(A, "it has other weights", 6.0)
    assert fleet.servers[A].state == "dead" and not fleet.current()
    assert "http://a is dead; last error: it has other weights" in fleet.describe()


def test_an_idle_server_may_have_become_another_when_it_inherits_work():
    for die in (lambda fleet: fleet.failed(A, "500", 1.0), lambda fleet: fleet.died(A, "no answer", 1.0)):
        fleet = ready(A, B, C)
        fleet.servers[A].outstanding.add(Job(1))
        fleet.servers[B].outstanding.add(Job(1))
        die(fleet)
        assert fleet.choose(1) == B  # its connection holds
        assert fleet.servers[C].state == "suspect" and C in fleet.to_probe(1.0)


def test_a_server_that_is_gone_is_dead_at_once_and_probes_do_not_make_it_healthy():
    fleet = ready(A, B)
    fleet.servers[B].outstanding.add(Job(1))
    fleet.failed(A, "connection refused", now=0.0, gone=True)
    assert fleet.servers[A].state == "dead" and fleet.choose(1) == B
    fleet.answered(A)
    assert fleet.servers[A].state == "refitting" and fleet.choose(1) == B
    fleet.refitted(A, 0, now=99.0)  # the weights before the last ones
    assert fleet.servers[A].state == "dead"


def test_the_fewest_outstanding_tokens_and_not_where_it_failed_before():
    fleet = ready(A, B)
    fleet.servers[A].outstanding.add(Job(100, 4))
    fleet.servers[B].outstanding.add(Job(99, 4))
    assert fleet.choose(1) == B
    assert fleet.choose(1, avoid=[B]) == A
    assert fleet.choose(1, avoid=[A, B]) == B  # better than nobody
    fleet.servers[B].outstanding.add(Job(1, 64))
    assert fleet.choose(1, avoid=[A]) is None  # it waits for B, which has no room
    assert fleet.choose(1) == A
