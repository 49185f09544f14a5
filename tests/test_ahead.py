"""How far sampling runs ahead, and whose job goes next: what it means, as a table, and its laws under any events."""

import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.simulate_async import Setup, simulate
from dash_trl.rollout.ahead import RunAhead, StaleRollouts
from dash_trl.sampling.backlog import Backlog, Job
from dash_trl.sampling.health import Fleet, State

# ---------------------------------------------------------------------------------------------------- the semantics


@dataclass
class Window:
    """
    submitted: the window with whose beginning it was. weights: the optimizer step of those that sampled it.
    behind: of the weights that each optimizer step on it updates, how many steps newer they are.
    """

    submitted: int
    weights: int
    behind: list[int] = field(default_factory=list)


def windows_of(k: int, per_generation: int, accumulation: int, iterations: int, steps: int) -> list[Window]:
    """TRL's loop over micro-steps, with `RunAhead` in it."""
    ahead, windows, step = RunAhead(k), list[Window](), 0
    every = per_generation * iterations
    last = -(-steps * accumulation // every) - 1
    for micro_step in range(steps * accumulation):
        now, begins = divmod(micro_step, every)
        if not begins:
            numbers = ahead.begin(step, known=last - now)
            assert list(numbers) == list(range(len(windows), len(windows) + len(numbers)))
            windows += [Window(now, step) for _ in numbers]
            ahead.check(windows[now].weights)
        if not begins or not micro_step % accumulation:
            windows[now].behind.append(step - windows[now].weights)
        step += not (micro_step + 1) % accumulation
    assert len(windows) == last + 1
    return windows


@pytest.mark.parametrize(
    ("k", "per_generation", "accumulation", "iterations", "submitted", "weights", "behind"),
    [  # of windows 0, 1, 2, …: submitted when that window begins; sampled by the weights of that step; steps behind
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
    ],
)
def test_which_weights_sample_a_window(k, per_generation, accumulation, iterations, submitted, weights, behind):
    steps = -(-len(weights) * per_generation * iterations // accumulation)
    windows = windows_of(k, per_generation, accumulation, iterations, steps)
    assert [window.submitted for window in windows[: len(weights)]] == submitted
    assert [window.weights for window in windows[: len(weights)]] == weights
    assert [window.behind for window in windows[: len(weights)]] == behind


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 20))
def test_the_table_as_formulas(k, per_generation, accumulation, iterations, steps):
    every = per_generation * iterations
    for n, window in enumerate(windows_of(k, per_generation, accumulation, iterations, steps)):
        assert window.submitted == max(0, n - k)
        assert window.weights == max(0, n - k) * every // accumulation
        first, end = n * every // accumulation, min(steps, -(-(n + 1) * every // accumulation))
        assert window.behind == [step - window.weights for step in range(first, end)]
        if every % accumulation == 0:
            assert max(window.behind) <= (k + 1) * (every // accumulation) - 1


def test_a_step_without_signal_counts_though_it_leaves_the_weights():
    """Staleness compares steps: that two of them have the same weights makes nothing younger, nor a bound looser."""
    ahead, weights = RunAhead(2), ["π0", "π1", "π1", "π1", "π2"]  # after 0, 1, 2, 3, 4 steps; 2 and 3 had no signal
    sampled_by = {number: 0 for number in ahead.begin(0, known=4)}
    for step in range(1, 5):
        sampled_by |= {number: step for number in ahead.begin(step, known=4 - step)}
        ahead.check(sampled_by[step])
    assert sampled_by == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    assert [weights[step] for step in sampled_by.values()] == ["π0", "π0", "π0", "π1", "π1"]
    with pytest.raises(StaleRollouts):
        ahead.check(1)  # of the very weights that are permitted


def test_no_window_is_submitted_that_is_not_known_and_none_twice():
    ahead = RunAhead(2)
    assert [list(ahead.begin(step, known)) for step, known in enumerate([0, 0, 5, 0, 1, 0])] == [
        *([0], [1], [2, 3, 4], [], [5], [])
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


def backlog(*urls: str, ranks: int = 1, sequences: int = 64) -> Backlog:
    """Over servers that have the current weights."""
    fleet = Fleet(urls, ranks, sequences=sequences)
    for url in urls:
        fleet.answered(url)
        fleet.refitted(url, 0, 0.0)
    return Backlog(fleet)


def test_ranks_share_what_a_server_holds():
    """The first to come does not take it all: 64 sequences of 4 ranks are 2 jobs of 8 for each."""
    ranks = [backlog("a", "b", ranks=4) for _ in range(4)]
    for one in ranks:
        one.add(Job(100, 8, number=number) for number in range(50))
    assert [Counter(url for _, url in one.assign()) for one in ranks] == [{"a": 2, "b": 2}] * 4


def test_what_the_trainer_waits_for_goes_first():
    one = backlog("a", "b", sequences=4)
    one.add(Job(1, 4, order=order, number=number) for order in (2, 1) for number in (0, 1))
    given = [job for job, _ in one.assign()]
    one.failed(given[1], "broken", now=0.0)
    one.add([Job(1, 4, order=-1)])
    assert [(job.order, job.number) for job in given] == [(1, 0), (1, 1)]
    assert [(job.order, job.number) for job in one.waiting] == [(-1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_job_that_failed_waits_for_room_elsewhere_while_smaller_ones_do_not_take_it():
    one = backlog("a", "b", sequences=4)
    one.add(Job(1, size, number=number) for number, size in enumerate((4, 1, 3, 1, 1, 1)))
    (large, _), (first, url), (second, _) = one.assign()
    one.failed(large, "broken", now=0.0)
    for job in (first, second):
        assert url == "b" and one.assign() == []  # a rests, and what b has left is kept
        one.served(job)
    assert [job for job, _ in one.assign()] == [large]


# ------------------------------------------------------------------------------------------ under any order of events


@dataclass
class Process:
    """What answers at a URL.

    weights: their version; 0: those of its start-up. jobs: → the weights that wrote it so far.
    dropped: jobs whose connection ended with an earlier process, which nobody has noticed.
    """

    alive: bool = True
    weights: int = 0
    jobs: dict[Job, set[int]] = field(default_factory=dict)
    dropped: list[Job] = field(default_factory=list)


class Run(RuleBasedStateMachine):
    """A run of `last` + 1 windows: a trainer, a pool without I/O, and servers that fail, die, and say nothing of it.

    The trainer's thread is "free", or it waits: until the "weights" are sent, or for a batch ("window", "urgent"). What
    is asserted is counted here: what each server was given (`held`), where a job failed (`failed_on`), the step with
    which each window began (`begun`), and which weights wrote a job: the processes note it, as dates beyond doubt.
    """

    @initialize(
        k=st.integers(0, 4),
        steps=st.integers(0, 3),
        last=st.integers(0, 6),
        servers=st.integers(1, 3),
        ranks=st.integers(1, 2),
        sequences=st.integers(2, 12),
        jobs=st.integers(1, 9),
        nccl=st.booleans(),
        rounds=st.integers(0, 20),
    )
    def start(self, k, steps, last, servers, ranks, sequences, jobs, nccl, rounds):
        """nccl: a server that came back waits for the next broadcast; else it is given the weights by itself."""
        self.k, self.steps, self.last, self.nccl = k, steps, last, nccl
        self.most, self.most_jobs = sequences // ranks, max(1, jobs // servers)
        self.processes = {f"http://{letter}": Process() for letter in "abc"[:servers]}
        self.fleet = Fleet(self.processes, ranks, sequences=sequences, jobs=jobs)
        self.backlog, self.ahead = Backlog(self.fleet), RunAhead(k)
        self.now, self.thread = 0.0, "free"
        self.step = self.left = self.submitted = self.known = 0
        self.window = -1
        self.begun: list[int] = []
        self.step_of = {0: -1}  # version of the weights → optimizer step
        self.batches: dict[int, list[Job]] = {}  # of windows, and the urgent one
        self.waiting: list[Job] = []
        self.held: dict[str, list[Job]] = {url: [] for url in self.processes}
        self.failed_on: dict[Job, list[str]] = {}
        self.wrote: dict[Job, set[int]] = {}
        self.done: Counter[Job] = Counter()
        self.looking: list[str] = []  # at servers that answered a probe
        self.receivers: dict[str, bool] = {}  # of the weights that are being sent → whether they came
        self.look()
        while self.looking:
            self.recognised(fails=False)
        self.goes_on(rounds)

    # ---- the trainer

    @rule(rounds=st.integers(1, 12))
    def goes_on(self, rounds):
        """What the trainer waits for happens, and it does what is next."""
        for _ in range(rounds):
            if self.thread == "weights":
                self.weights_sent(refuse=set())
            elif self.thread in ("window", "urgent"):
                self.now += 10.0
                self.look()
                while self.looking:
                    self.recognised(fails=False)
                jobs = self.at_work()
                for job in [job for job in jobs if job in self.batch()] or jobs:
                    self.serve(job)
                self.tick()
            elif self.left:
                self.optimizer_step()
            elif self.may_begin():
                self.window_begins(known=6, sizes=[[4, 3, 4]] * 5, steps=self.steps)
            elif self.window < self.last and not self.looking:
                self.weights_go()

    @precondition(lambda self: self.thread == "free" and not self.looking)
    @rule()
    def weights_go(self):
        """Before a window, and before an evaluation at any step."""
        self.thread = "weights"
        self.fleet.new_version(self.fleet.version + 1, self.now)
        self.step_of[self.fleet.version] = self.step
        self.receivers = dict.fromkeys(self.fleet.waiting(), False)
        self.tick()

    @precondition(lambda self: self.thread == "weights" and self.receivers)
    @rule(data=st.data())
    def weights_come(self, data):
        """To one server earlier than to others; what it has in flight goes on with them."""
        self.take(data.draw(st.sampled_from(list(self.receivers))))

    def take(self, url):
        process = self.processes[url]
        if process.alive:
            self.receivers[url], process.weights = True, self.fleet.version
            for wrote in process.jobs.values():
                wrote.add(process.weights)

    @precondition(lambda self: self.thread == "weights")
    @rule(refuse=st.sets(st.sampled_from("abc"), max_size=2))
    def weights_sent(self, refuse):
        for url, came in self.receivers.items():
            if not came and url[-1] not in refuse:
                self.take(url)
            if self.receivers[url]:
                self.fleet.refitted(url, self.fleet.version, self.now)
            else:
                self.fleet.refit_failed(url, "no", self.now)
        self.fleet.look_around(self.now)
        self.thread = "free"
        self.tick()

    def may_begin(self):
        return (
            self.thread == "free"
            and not self.left
            and self.window < self.last
            and self.step_of[self.fleet.version] == self.step
        )

    @precondition(may_begin)
    @rule(
        known=st.integers(0, 6),
        sizes=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=5),
        steps=st.integers(0, 3),
    )
    def window_begins(self, known, sizes, steps):
        """known: windows after it. sizes: sequences of each job of those that are submitted. steps: that end in it."""
        self.window += 1
        self.steps = max(self.steps, steps)
        self.begun.append(self.step)
        self.known = max(self.known, min(self.window + known, self.last))
        numbers = list(range(self.submitted, max(self.submitted, min(self.window + self.k, self.known) + 1)))
        self.submitted += len(numbers)
        assert list(self.ahead.begin(self.step, self.known - self.window)) == numbers
        assert self.window < self.submitted <= self.window + self.k + 1
        for number, own in zip(numbers, sizes, strict=False):
            self.submit(number, own)
        self.left, self.thread = steps, "window"
        self.tick()

    @precondition(lambda self: self.thread == "free" and self.fleet.version)
    @rule(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4))
    def urgent(self, sizes):
        """An evaluation, or values that a callback asks for."""
        self.submit(-1, sizes)
        self.thread = "urgent"
        self.tick()

    def submit(self, order, sizes):
        self.fleet.look_around(self.now)
        jobs = [Job(10 * size, size, order=order, number=number) for number, size in enumerate(sizes)]
        self.batches[order] = jobs
        self.failed_on |= {job: [] for job in jobs}
        self.waiting += jobs
        self.backlog.add(jobs)

    @precondition(lambda self: self.thread == "urgent")
    @rule()
    def given_up(self):
        """By an interrupt, for example."""
        jobs = [job for job in self.batches[-1] if not self.done[job]]
        self.backlog.drop(jobs)
        for job in jobs:
            self.take_back(job)
        self.thread = "free"
        self.tick()

    def collected(self):
        jobs, permitted = self.batches[self.window], self.begun[max(0, self.window - self.k)]
        for job in jobs:
            assert job.versions[0] == min(self.wrote[job]) and max(self.wrote[job]) <= job.versions[1]
        self.oldest = min(self.step_of[min(self.wrote[job])] for job in jobs)
        assert permitted <= self.oldest
        self.ahead.check(min(self.step_of[job.versions[0]] for job in jobs))
        with pytest.raises(StaleRollouts):
            self.ahead.check(permitted - 1)

    @precondition(lambda self: self.thread == "free" and self.left)
    @rule()
    def optimizer_step(self):
        assert self.step - self.oldest <= (self.k + 1) * self.steps - 1
        self.step += 1
        self.left -= 1

    # ---- the servers

    def at_work(self):
        return [job for process in self.processes.values() for job in process.jobs]

    @precondition(at_work)
    @rule(data=st.data())
    def served(self, data):
        jobs = self.at_work()
        for number in data.draw(st.sets(st.integers(0, len(jobs) - 1), min_size=1)):
            self.serve(jobs[number])
        self.tick()

    def serve(self, job):
        (process,) = [process for process in self.processes.values() if job in process.jobs]
        self.wrote[job] = process.jobs[job]
        self.take_back(job)
        self.backlog.served(job)
        self.done[job] += 1

    @precondition(at_work)
    @rule(data=st.data())
    def failed(self, data):
        job = data.draw(st.sampled_from(self.at_work()))
        self.take_back(job, failed=True)
        self.backlog.failed(job, "broken", self.now)
        self.tick()

    @precondition(lambda self: any(process.alive for process in self.processes.values()))
    @rule(data=st.data(), restarts=st.booleans())
    def dies(self, data, restarts):
        url = data.draw(st.sampled_from([url for url, process in self.processes.items() if process.alive]))
        process = self.processes[url]
        process.dropped += process.jobs
        process.jobs, process.alive = {}, False
        if restarts:
            self.come_back()

    @precondition(lambda self: any(process.dropped for process in self.processes.values()))
    @rule(data=st.data())
    def connections_drop(self, data):
        urls = [url for url, process in self.processes.items() if process.dropped]
        self.notice(data.draw(st.sampled_from(urls)))

    def notice(self, url):
        for job in tuple(self.processes[url].dropped):
            self.take_back(job, failed=True)
            self.backlog.failed(job, "gone", self.now, gone=True)
        self.tick()

    @precondition(lambda self: not all(process.alive for process in self.processes.values()))
    @rule()
    def come_back(self):
        """With other weights, and a while after the connections of those before ended."""
        for url, process in self.processes.items():
            if not process.alive:
                self.notice(url)
                self.processes[url] = Process()

    @precondition(lambda self: self.thread != "weights")
    @rule()
    def look(self):
        for url in self.fleet.to_probe(self.now):
            if url in self.looking:
                continue
            if self.processes[url].alive:
                self.fleet.answered(url)
                self.looking.append(url)
            else:
                self.fleet.refit_failed(url, "no answer", self.now)
        self.tick()

    @precondition(lambda self: self.looking)
    @rule(fails=st.booleans())
    def recognised(self, fails):
        url = self.looking.pop(0)
        process = self.processes[url]
        if fails or not process.alive:
            self.fleet.refit_failed(url, "no", self.now)
        elif not self.nccl or process.weights == self.fleet.version:
            process.weights = self.fleet.version
            self.fleet.refitted(url, process.weights, self.now)
        else:
            self.fleet.waits(url, self.now)
        self.tick()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds

    # ---- the pool

    def batch(self):
        """That the trainer waits for."""
        return self.batches[self.window if self.thread == "window" else -1]

    def take_back(self, job, failed=False):
        """The job from the server that has it, if any."""
        for url, held in self.held.items():
            if job in held:
                held.remove(job)
                self.processes[url].jobs.pop(job, None)
                if job in self.processes[url].dropped:
                    self.processes[url].dropped.remove(job)
                if failed:
                    self.failed_on[job].append(url)
                    self.waiting.append(job)
                return
        self.waiting.remove(job)

    def place(self, job):
        return job.order, not self.failed_on[job], job.number

    def may_have(self, url, job):
        servers = self.fleet.servers
        others = [one for one in servers if servers[one].version == self.fleet.version]
        others = [one for one in others if one not in self.failed_on[job]]
        return servers[url].state == State.HEALTHY and (url in others or not others)

    def fits(self, job, url):
        held = self.held[url]
        load = sum(one.sequences for one in held)
        return not held or (len(held) < self.most_jobs and load + job.sequences <= self.most)

    def tick(self):
        """What the pool does after every event, and its thread after the last of a batch."""
        dead = [job for url, jobs in self.held.items() if self.fleet.servers[url].state == State.DEAD for job in jobs]
        lost = self.backlog.lost()
        assert Counter(lost) == Counter(dead)
        for job in dead:
            self.take_back(job, failed=True)
        for job, url in self.backlog.assign():
            assert self.may_have(url, job) and self.fits(job, url) and self.thread != "weights"
            assert not [one for one in self.waiting if self.may_have(url, one) and self.place(one) < self.place(job)]
            self.waiting.remove(job)
            self.held[url].append(job)
            process = self.processes[url]
            if process.alive:
                assert process.weights == self.fleet.version
                process.jobs[job] = {process.weights}
            else:
                process.dropped.append(job)
        for url in self.held:  # a server with room is kept for nobody but the first who may go there
            first = min((job for job in self.waiting if self.may_have(url, job)), key=self.place, default=None)
            assert first is None or not self.fits(first, url)
        if self.thread in ("window", "urgent"):
            if all(self.done[job] for job in self.batch()):
                if self.thread == "window":
                    self.collected()
                self.thread = "free"

    @invariant()
    def no_job_is_lost_or_done_twice(self):
        for url, server in self.fleet.servers.items():
            assert list(server.outstanding) == self.held[url]
            assert len(self.held[url]) <= max(1, self.most_jobs)
            assert len(self.held[url]) == 1 or sum(job.sequences for job in self.held[url]) <= self.most
        assert Counter(self.backlog.waiting) == Counter(self.waiting)
        assert self.backlog.running == {job: url for url, jobs in self.held.items() for job in jobs}
        assert set(self.done.values()) <= {1}

    def teardown(self):
        """From any state the run ends, if all servers come back; where nobody may be given weights, with an error."""
        self.come_back()
        for _ in range((4 + self.steps) * (self.last + 2)):
            self.now += 100.0
            while self.looking:
                self.recognised(fails=False)
            self.goes_on(rounds=4)
        if self.thread == "free":
            assert self.window == self.last and not self.waiting and not self.at_work()
            assert all(self.done[job] == 1 for number in range(self.last + 1) for job in self.batches[number])
        else:
            assert self.nccl and self.fleet.lost(0.0, self.now, 100.0)


TestAnyOrderOfEvents = Run.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=100, stateful_step_count=50)


# --------------------------------------------------------------------------------------------------- the simulation


@pytest.mark.parametrize(
    ("k", "train", "window"),
    [  # seconds: sending takes 10, generation 64 groups × 500 tokens × 0.01 × (1 + 8 / 128) = 340, one group at a time
        (0, 100.0, 340.0 + 100.0 + 10.0),
        (0, 400.0, 340.0 + 400.0 + 10.0),
        (1, 100.0, 340.0 + 10.0),
        (1, 400.0, 400.0 + 10.0),
        (4, 100.0, 340.0 + 10.0),
        (4, 400.0, 400.0 + 10.0),
    ],
)
def test_simulated_windows_without_variance_take_the_sum_of_the_stages_or_the_longer_one(k, train, window):
    begins = simulate(Setup(k, servers=1, seats=8, train=train, sync=10.0, sigma=0.0)).begins
    assert begins[20] - begins[10] == pytest.approx(10 * window)
