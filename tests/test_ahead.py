"""How many windows are sampled ahead, as a table and as formulas, and which job is next."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from dash_trl.rollout import RunAhead, StaleRollouts
from dash_trl.sampling import Fleet, Job

# ---------------------------------------------------------------------------------------------------- the semantics


@dataclass
class Window:
    """A window of rollouts.

    Attributes:
        submitted: the number of the window at whose beginning this window was submitted.
        weights: the optimizer step of the weights that sample it.
        behind: for each optimizer step on the window, how many steps older these weights are than the current ones.
    """

    submitted: int
    weights: int
    behind: list[int] = field(default_factory=list)


def windows_of(k: int, per_generation: int, accumulation: int, iterations: int, steps: int) -> list[Window]:
    """Simulates TRL's loop over micro-steps with `RunAhead`; returns the windows."""
    ahead, windows, step = RunAhead(k), list[Window](), 0
    every = per_generation * iterations
    last = -(-steps * accumulation // every) - 1
    for micro_step in range(steps * accumulation):
        now, begins = divmod(micro_step, every)
        if not begins:
            numbers = ahead.begin(step, known=last - now)
            assert list(numbers) == [len(windows) - now + number for number in range(len(numbers))]
            windows += [Window(now, step) for _ in numbers]
            ahead.check(windows[now].weights)
        if not begins or not micro_step % accumulation:
            windows[now].behind.append(step - windows[now].weights)
        step += not (micro_step + 1) % accumulation
    assert len(windows) == last + 1
    return windows


# k, steps_per_generation, accumulation, num_iterations; then of windows 0, 1, 2, …: submitted when that window begins;
# sampled by the weights of that step; steps behind
TABLE = [
    # steps_per_generation = accumulation: a window for each optimizer step, n sampled by π_max(0, n−k)
    (0, 4, 4, 1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [[0], [0], [0], [0], [0]]),
    (1, 4, 4, 1, [0, 0, 1, 2, 3], [0, 0, 1, 2, 3], [[0], [1], [1], [1], [1]]),
    (2, 4, 4, 1, [0, 0, 0, 1, 2], [0, 0, 0, 1, 2], [[0], [1], [2], [2], [2]]),
    (9, 4, 4, 1, [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [[0], [1], [2], [3], [4]]),
    # = 2 × accumulation: two optimizer steps between versions, the last of them up to (k+1)·2 − 1 behind
    (0, 8, 4, 1, [0, 1, 2], [0, 2, 4], [[0, 1], [0, 1], [0, 1]]),
    (1, 8, 4, 1, [0, 0, 1], [0, 0, 2], [[0, 1], [2, 3], [2, 3]]),
    (2, 8, 4, 1, [0, 0, 0, 1], [0, 0, 0, 2], [[0, 1], [2, 3], [4, 5], [4, 5]]),
    # = accumulation / 2: two windows for each version, and for each optimizer step
    (0, 2, 4, 1, [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], [[0], [0], [0], [0], [0], [0]]),
    (1, 2, 4, 1, [0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2], [[0], [0], [1], [0], [1], [0]]),
    (2, 2, 4, 1, [0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1], [[0], [0], [1], [1], [1], [1]]),
    # num_iterations = 3: three optimizer steps between versions
    (0, 4, 4, 3, [0, 1, 2], [0, 3, 6], [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    (1, 4, 4, 3, [0, 0, 1], [0, 0, 3], [[0, 1, 2], [3, 4, 5], [3, 4, 5]]),
    # = 3/2 × accumulation: every other window begins within an optimizer step, with the weights before it
    (1, 6, 4, 1, [0, 0, 1, 2], [0, 0, 1, 3], [[0, 1], [1, 2], [2, 3], [1, 2]]),
]


def test_which_weights_sample_a_window():
    for *setup, submitted, weights, behind in TABLE:
        k, per_generation, accumulation, iterations = setup
        steps = -(-len(weights) * per_generation * iterations // accumulation)
        windows = windows_of(k, per_generation, accumulation, iterations, steps)[: len(weights)]
        assert [window.submitted for window in windows] == submitted, setup
        assert [window.weights for window in windows] == weights, setup
        assert [window.behind for window in windows] == behind, setup


def test_no_window_is_submitted_that_is_not_known_and_none_twice():
    ahead = RunAhead(2)
    assert [list(ahead.begin(step, known)) for step, known in enumerate([0, 0, 5, 0, 1, 0])] == [
        *([0], [0], [0, 1, 2], [], [1], [])
    ]


def test_rollouts_that_are_too_old_are_an_error_with_every_number():
    ahead = RunAhead(2)
    for step in (100, 104, 108, 112):
        ahead.begin(step, known=9)
    ahead.check(104)
    with pytest.raises(StaleRollouts) as error:
        ahead.check(103)
    window, now, oldest, level, permitted, *begun = map(int, re.findall(r"\d+", str(error.value)))
    assert (window, now, oldest, level, permitted, begun) == (3, 112, 103, 2, 104, [104, 108, 112])


# ------------------------------------------------------------------------------------------------- whose job is next


def fleet(*urls: str, ranks: int = 1, **most: int) -> Fleet:
    """Servers that have the current weights."""
    servers = Fleet(urls, ranks, **{"sequences": 64, **most})
    for url in urls:
        servers.answered(url)
        servers.refitted(url, 0, 0.0)
    return servers


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
    """The first to come does not take it all: 64 sequences of 4 ranks are 2 jobs of 8 for each."""
    for one in [fleet("a", "b", ranks=4) for _ in range(4)]:
        given = assign(one, (Job(100, 8, number=number) for number in range(50)))
        assert Counter(url for _, url in given) == {"a": 2, "b": 2}


def test_servers_share_the_connections():
    for jobs, each in ((5, 2), (1, 1)):
        given = assign(fleet("a", "b", jobs=jobs), (Job(1, number=number) for number in range(9)))
        assert Counter(url for _, url in given) == {"a": each, "b": each}, jobs


def test_a_job_is_in_one_place_until_nobody_needs_it():
    one, jobs = fleet("a", "b", sequences=4), [Job(1, 2, number=number) for number in range(5)]
    assert [url for _, url in assign(one, jobs)] == ["a", "b", "a", "b"]
    fail(one, jobs[0])
    fail(one, jobs[1], gone=True)
    assert one.waiting == [jobs[0], jobs[1], jobs[4]] and one.running() == 2
    assert [server.outstanding for server in one.servers.values()] == [{jobs[2]}, {jobs[3]}]
    for job in jobs:
        one.drop(job)
    assert not one.waiting and not one.running()


def test_a_job_that_failed_does_not_go_back_but_others_go():
    one = fleet("a", "b", sequences=4)
    first, second, third = (Job(1, 4, number=number) for number in range(3))
    assign(one, [first, second, third])
    fail(one, first)
    one.answered("a")
    one.refitted("a", 0, 1.0)
    assert assign(one) == [(2, "a")]
    one.drop(second)
    assert assign(one) == [(0, "b")]


def test_who_is_next_waits_for_room_and_nobody_overtakes():
    one = fleet("a", sequences=4)
    jobs = [Job(1, size, number=number) for number, size in enumerate((3, 2, 1))]
    assert assign(one, jobs) == [(0, "a")] and assign(one) == []
    one.new_version(1)
    one.refitted("a", 1, 0.0)
    one.drop(jobs[0])
    assert assign(one) == [(1, "a"), (2, "a")] and [job.version for job in jobs] == [0, 1, 1]


def test_what_the_trainer_waits_for_goes_first():
    one = fleet("a", "b", sequences=4)
    jobs = [Job(1, 4, order=order, number=number) for order in (2, 1) for number in (0, 1)]
    assert assign(one, jobs) == [(0, "a"), (1, "b")] and not any(job.tried for job in jobs[:2])
    fail(one, jobs[3])
    one.add(urgent := Job(1, 4))
    assert one.waiting == [urgent, jobs[3], jobs[0], jobs[1]]
