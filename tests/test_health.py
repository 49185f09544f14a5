"""The state machine of the servers, and which job is next, in the situations that they were made for."""

from collections import Counter
from collections.abc import Iterable

from dash_trl.sampling import Fleet, Job

A = "http://a"
B = "http://b"
C = "http://c"


def fleet_of(*urls: str, sequences: int = 64) -> Fleet:
    """Servers that have the current weights."""
    servers = Fleet(urls)
    servers.most_sequences = sequences
    servers.new_version(1)
    for url in urls:
        servers.answered(url)
        servers.refitted(url, 1, 0.0)
    return servers


def test_a_failure_makes_a_server_unchecked_and_three_in_a_row_dead():
    fleet = fleet_of(A)
    for failures in (1, 2):
        fleet.failed(A, "500", now=10.0 * failures)
        assert fleet.servers[A].state == "unchecked"
        fleet.answered(A)
        fleet.refitted(A, 1, now=10.0 * failures + 5.0)  # well again, but nothing served
    fleet.failed(A, "500", now=100.0)
    assert fleet.servers[A].state == "dead"
    assert fleet.to_probe(100.5) == [] and fleet.to_probe(101.0) == [A]


def test_an_unchecked_server_rests_and_is_looked_at_before_it_gets_a_prompt():
    fleet = fleet_of(A)
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


def test_an_idle_server_may_have_become_another_when_it_inherits_work():
    for die in (lambda fleet: fleet.failed(A, "500", 1.0), lambda fleet: fleet.died(A, "no answer", 1.0)):
        fleet = fleet_of(A, B, C)
        fleet.servers[A].outstanding.add(Job(1))
        fleet.servers[B].outstanding.add(Job(1))
        die(fleet)
        assert fleet.choose(1) == B  # its connection holds
        assert fleet.servers[C].state == "unchecked" and C in fleet.to_probe(1.0)


def test_a_server_that_is_gone_is_dead_at_once_and_probes_do_not_make_it_healthy():
    fleet = fleet_of(A, B)
    fleet.servers[B].outstanding.add(Job(1))
    fleet.failed(A, "connection refused", now=0.0, gone=True)
    assert fleet.servers[A].state == "dead" and fleet.choose(1) == B
    fleet.answered(A)
    assert fleet.servers[A].state == "refitting" and fleet.choose(1) == B
    fleet.refitted(A, 0, now=99.0)  # the weights before the last ones
    assert fleet.servers[A].state == "dead"


def test_the_fewest_outstanding_tokens():
    fleet = fleet_of(A, B)
    fleet.servers[A].outstanding.add(Job(100, 4))
    fleet.servers[B].outstanding.add(Job(99, 4))
    assert fleet.choose(1) == B
    assert fleet.choose(1, avoid=[A, B]) == B  # better than nobody


# ------------------------------------------------------------------------------------------------- whose job is next


def assign(servers: Fleet, jobs: Iterable[Job] = ()) -> list[tuple[int, str]]:
    """(number, URL) of each job that is given to a server, in that order."""
    for job in jobs:
        servers.add(job)
    before = list(servers.waiting)
    servers.assign(0.0)
    return [(job.number, job.tried[-1]) for job in before if job.assigned.is_set()]


def fail(servers: Fleet, job: Job, **kind: bool) -> None:
    """As the pool does when a request fails."""
    servers.failed(job.tried[-1], "broken", 0.0, **kind)
    servers.drop(job)
    servers.add(job)


def test_ranks_share_what_a_server_holds():
    """The first to come does not take it all: 1024 sequences of 4 ranks are 2 jobs of 128 for each."""
    share = Fleet(["a", "b"], 4).most_sequences
    for fleet in [fleet_of("a", "b", sequences=share) for _ in range(4)]:
        given = assign(fleet, (Job(100, 128, number=number) for number in range(50)))
        assert Counter(url for _, url in given) == {"a": 2, "b": 2}


def test_servers_share_the_connections():
    given = assign(fleet_of("a", "b", sequences=1024), (Job(1, number=number) for number in range(600)))
    assert Counter(url for _, url in given) == {"a": 256, "b": 256}


def test_a_job_is_in_one_place_until_nobody_needs_it():
    fleet = fleet_of("a", "b", sequences=4)
    jobs = [Job(1, 2, order=0, number=number) for number in range(5)]
    assert [url for _, url in assign(fleet, jobs)] == ["a", "b", "a", "b"]
    fail(fleet, jobs[0])
    fail(fleet, jobs[1], gone=True)
    assert fleet.waiting == [jobs[0], jobs[1], jobs[4]] and len(fleet.jobs()) == 5
    assert [server.outstanding for server in fleet.servers.values()] == [{jobs[2]}, {jobs[3]}]
    fleet.add(urgent := Job(1))
    assert fleet.waiting[0] is urgent
    for job in [urgent, *jobs]:
        fleet.drop(job)
    assert not fleet.jobs()


def test_a_job_that_failed_does_not_go_back_but_others_go():
    fleet = fleet_of("a", "b", sequences=4)
    first, second, third = (Job(1, 4, number=number) for number in range(3))
    assign(fleet, [first, second, third])
    fail(fleet, first)
    fleet.answered("a")
    fleet.refitted("a", 1, 1.0)
    assert assign(fleet) == [(2, "a")]
    fleet.drop(second)
    assert assign(fleet) == [(0, "b")]


def test_who_is_next_waits_for_room_and_nobody_overtakes():
    fleet = fleet_of("a", sequences=4)
    jobs = [Job(1, size, number=number) for number, size in enumerate((3, 2, 1))]
    assert assign(fleet, jobs) == [(0, "a")] and assign(fleet) == []
    fleet.new_version(2)
    fleet.refitted("a", 2, 0.0)
    fleet.drop(jobs[0])
    assert assign(fleet) == [(1, "a"), (2, "a")] and [job.version for job in jobs] == [1, 2, 2]
