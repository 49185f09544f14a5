"""Simulates the gain of sampling k windows ahead (`async_level`) on fleets of servers.

    python benchmarks/simulate_async.py --json simulate_async.json --plot docs/async.png         # a minute, on one core

The simulation uses the library's own state machines: `RunAhead` decides which windows are submitted, and `Backlog` and
`Fleet` decide which job goes to which server. Only the trainer, the servers and time are simulated, by events:

- A window has 64 groups of 8 responses; a group is one request. Lengths in tokens are lognormal with median 500 and
  σ 0.8, cut at 4,096. Half of the variance lies between prompts. The lengths are the same for every k.
- A server writes one token of each running response per decoding step. A step takes 10 ms × (1 + running / 128):
  Qwen2.5-7B reads 15 GB of weights in a step, and for each response 57 kB × 2,000 tokens of KV cache, so 132 responses
  double the time. A server has a number of *seats*: it runs that many responses at once, and is given that many. If a
  group has more responses than the server has seats, the remaining responses wait on the server.
- A *stage* is the mean time in which the servers generate a window with k = 0 and without training. Training a window
  takes one stage or half a stage. New weights are sent before each window. This takes a share of a stage, in which
  trainer and servers wait.

The tables show the time per window in stages, over the middle 20 of 32 windows, and the bound: the longer of generation
and training, plus the sending of weights. The JSON file has seconds, and these shares: of the time in which the trainer
does not train (`trainer_idle`), of the time in which a server has no running response (`servers_idle`), and of the
seats that are taken (`seats_filled`). Differences up to 0.02 mean nothing; they also occur between different sets of 20
windows.

1. 1 to 64 servers with 1 to 1,024 seats.
2. The cost of sending weights.
3. Windows by completion: a window consists of the groups that are finished first, even if they were submitted for
   another window. This favours short groups. The table shows the mean length in the first 1, 8, 32 windows relative to
   all groups, and the share of groups that are older than k permits (mean of 8 seeds). Such a run submits new groups
   until its end, and loses the groups that are then unfinished.
4. More responses on a server than it has seats. All responses of a group count until its longest response ends, so a
   server that is given only as many responses as it has seats has free seats.
5. The number of servers. Training a window takes T seconds. With one server of 64 seats and k = 1, a window takes P
   seconds. By the rule, P / T servers keep up with the trainer. The table shows the seconds per window with this number
   of servers and with twice as many, for k = 1 and 2.
"""

import heapq
import math
import random
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, product
from pathlib import Path
from typing import Any

from dash_trl.rollout.ahead import RunAhead
from dash_trl.sampling.backlog import Backlog, Job
from dash_trl.sampling.health import Fleet

GROUPS, GROUP = 64, 8
MEDIAN, SIGMA, LONGEST = 500, 0.8, 4096
STEP, DOUBLED_BY = 0.010, 128  # seconds of a decoding step with few responses; number of responses that double it
WINDOWS, WARM = 32, 6
LEVELS = range(5)
SERVERS, SEATS = (1, 4, 16, 64), (1, 8, 64, 1024)
TRAINING = (1.0, 0.5)  # stages
SYNCS = (0.0, 0.05, 0.1, 0.2)  # stages
IN_FLIGHT = (1, 1.5, 2, 4)
TRAIN_SECONDS = (20.0, 40.0, 80.0)
FEW, SOME, MANY = (1, 8), (4, 64), (16, 64)  # (servers, seats of each) for the 512 responses of a window
EARLY, SEEDS = (1, 8, WINDOWS), 8
NUMBERS = count()  # order entries of a heap that are due at the same time


@lru_cache(maxsize=1024)
def lengths_of(window: int, groups: int, seed: int, sigma: float) -> list[list[int]]:
    """Returns the number of tokens of each response, for each group of a window."""
    draw, half = random.Random(f"{seed} {window}"), sigma * math.sqrt(0.5)
    lengths = []
    for _ in range(groups):
        prompt = draw.gauss(0.0, half)
        lengths.append([round(MEDIAN * math.exp(draw.gauss(prompt, half))) for _ in range(GROUP)])
    return [[min(max(length, 1), LONGEST) for length in group] for group in lengths]


class Server:
    """A simulated server.

    `running` is a heap with an entry for each running response: the number of the decoding step in which it ends.
    """

    def __init__(self, seats: int):
        self.seats = seats
        self.steps = self.now = self.busy = self.filled = 0.0  # busy: seconds; filled: seconds × responses
        self.running: list[tuple[float, int, Job]] = []
        self.queue: deque[tuple[int, Job]] = deque()

    @property
    def pace(self) -> float:
        return STEP * (1 + len(self.running) / DOUBLED_BY)

    def go_on(self, now: float) -> None:
        """Decodes until `now`, which is not later than the next end of a response."""
        if self.running:
            self.steps += (now - self.now) / self.pace
            self.busy += now - self.now
            self.filled += (now - self.now) * len(self.running)
        self.now = now

    def ended(self) -> list[Job]:
        """Returns the job of each response that has ended; waiting responses take the free seats."""
        jobs = []
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            jobs.append(heapq.heappop(self.running)[2])
        self._seat()
        return jobs

    def take(self, job: Job) -> None:
        self.queue.extend((length, job) for length in job.ask)
        self._seat()

    def _seat(self) -> None:
        while self.queue and len(self.running) < self.seats:
            length, job = self.queue.popleft()
            heapq.heappush(self.running, (self.steps + length, next(NUMBERS), job))

    def next_end(self) -> float:
        return self.now + (self.running[0][0] - self.steps) * self.pace if self.running else math.inf


@dataclass(frozen=True)
class Setup:
    """Settings of a simulation.

    Args:
        k: number of windows that are sampled ahead.
        servers: number of servers.
        seats: number of seats of each server.
        train: seconds for training a window.
        sync: seconds for sending weights.
        groups: number of groups of a window.
        sigma: standard deviation of the logarithm of lengths.
        in_flight: number of responses that a server may be given, relative to its seats.
        by_completion: True = a window consists of the groups that are finished first; False = of its own groups.
        seed: seed of the lengths.
    """

    k: int
    servers: int
    seats: int
    train: float = 0.0
    sync: float = 0.0
    groups: int = GROUPS
    sigma: float = SIGMA
    in_flight: float = 1.0
    by_completion: bool = False
    seed: int = 0


@dataclass
class Run:
    """The record of a simulation. Each list has one value per window.

    Attributes:
        begins: time in seconds at which the window begins.
        busy: until then, the seconds in which a server had a running response, summed over servers.
        filled: until then, the seconds × running responses, summed over servers.
        lengths: mean length of the responses that are trained on.
        too_old: number of groups whose weights are older than k permits.
    """

    begins: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    too_old: list[int] = field(default_factory=list)


class Simulation:
    """An event simulation of the trainer and the servers."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.now = 0.0
        self.servers = {f"server {number}": Server(setup.seats) for number in range(setup.servers)}
        self.fleet = Fleet(self.servers, sequences=round(setup.seats * setup.in_flight))
        self.backlog = Backlog(self.fleet)
        self.ahead = RunAhead(setup.k)
        self.left: dict[Job, int] = {}  # number of unfinished responses of each job
        self.finished: defaultdict[int, list[Job]] = defaultdict(list)  # not trained on yet; by `_shelf`
        self._ends: list[tuple[float, int, str]] = []
        self._last: dict[str, int] = {}  # for each server, the number of its valid entry in `_ends`

    def run(self) -> Run:
        run = Run()
        for window in range(WINDOWS):
            run.begins.append(self.now)
            run.busy.append(sum(server.busy for server in self.servers.values()))
            run.filled.append(sum(server.filled for server in self.servers.values()))
            self.send_weights()
            # A run by completion submits windows until its end; it loses the groups that are then unfinished.
            left = self.setup.k if self.setup.by_completion else WINDOWS - 1 - window
            for number in self.ahead.begin(window, known=left):
                self.submit(number)
            jobs = self.collect(window)
            run.too_old.append(sum(job.versions[0] - 1 < window - self.setup.k for job in jobs))  # 1: window 0
            run.lengths.append(statistics.fmean(length for job in jobs for length in job.ask))
            self.advance(self.now + self.setup.train)
        return run

    def send_weights(self) -> None:
        """Sends new weights. Trainer and servers wait; then running requests continue with the new weights."""
        self.fleet.new_version(self.fleet.version + 1, self.now)
        self.now += self.setup.sync
        for url, server in self.servers.items():
            server.now = self.now
            self.fleet.answered(url)
            self.fleet.refitted(url, self.fleet.version, self.now)
            self._expect_end(url)

    def submit(self, window: int) -> None:
        groups = lengths_of(window, self.setup.groups, self.setup.seed, self.setup.sigma)
        most = GROUP * LONGEST  # upper bound of tokens, since the backlog does not know the lengths
        jobs = [Job(most, GROUP, ask=one, order=window, number=number) for number, one in enumerate(groups)]
        self.left |= dict.fromkeys(jobs, GROUP)
        self.backlog.add(jobs)
        self.hand_out()

    def collect(self, window: int) -> list[Job]:
        size, finished = self.setup.groups, self.finished[self._shelf(window)]
        while len(finished) < size:
            self.next_event()
        jobs, finished[:] = finished[:size], finished[size:]
        return jobs

    def _shelf(self, window: int) -> int:
        """Returns the key of a window's groups in `finished`: the window, or the same key for all by completion."""
        return 0 if self.setup.by_completion else window

    # ---- events

    def hand_out(self) -> None:
        for job, url in self.backlog.assign():
            self.servers[url].go_on(self.now)
            self.servers[url].take(job)
            self._expect_end(url)

    def _expect_end(self, url: str) -> None:
        self._last[url] = number = next(NUMBERS)
        heapq.heappush(self._ends, (self.servers[url].next_end(), number, url))

    def next_event(self) -> None:
        """Advances to the end of the next response and hands out jobs."""
        end, number, url = heapq.heappop(self._ends)
        if number != self._last[url]:
            return
        assert end < math.inf, "the trainer waits, and no server has work"
        self.now = end
        self.servers[url].go_on(end)
        ended = self.servers[url].ended()
        for job in ended:
            self.left[job] -= 1
        done = [job for job in dict.fromkeys(ended) if not self.left[job]]
        for job in done:
            self.backlog.served(job)
            self.finished[self._shelf(job.order)].append(job)
        self._expect_end(url)
        if done:
            self.hand_out()

    def advance(self, until: float) -> None:
        while self._ends[0][0] <= until:
            self.next_event()
        self.now = until
        for server in self.servers.values():
            server.go_on(until)


# ------------------------------------------------------------------------------------------------------- the figures


def simulate(setup: Setup) -> Run:
    return Simulation(setup).run()


def figures(run: Run, setup: Setup) -> dict[str, float]:
    """Returns seconds per window, the shares of idle time, and the share of taken seats."""
    first, last = WARM, WINDOWS - WARM
    seconds = run.begins[last] - run.begins[first]
    busy = (run.busy[last] - run.busy[first]) / setup.servers
    filled = (run.filled[last] - run.filled[first]) / setup.servers / setup.seats
    return {
        "seconds": seconds / (last - first),
        "trainer_idle": max(0.0, 1 - setup.train * (last - first) / seconds),
        "servers_idle": max(0.0, 1 - busy / seconds),
        "seats_filled": filled / seconds,
    }


def stage_of(setup: Setup) -> float:
    """Returns the seconds of a stage: the servers generate a window with k = 0 and without training."""
    alone = replace(setup, k=0, train=0.0, sync=0.0, by_completion=False)
    return figures(simulate(alone), alone)["seconds"]


def by_levels(setup: Setup, training: float, sync: float = 0.0) -> dict[str, Any]:
    """Returns the figures for each k; `training` and `sync` are in stages."""
    stage = stage_of(setup)
    setup = replace(setup, train=training * stage, sync=sync * stage)
    rows = {f"k{k}": figures(simulate(one), one) for k in LEVELS for one in [replace(setup, k=k)]}
    return {"stage": stage, "bound": max(stage, setup.train) + setup.sync, **rows}


def by_fleet(seed: int) -> dict[str, Any]:
    """1. Servers × seats"""
    return {
        f"{servers} × {seats}, training {share:g}": by_levels(Setup(0, servers, seats, seed=seed), share)
        for share, servers, seats in product(TRAINING, SERVERS, SEATS)
    }


def by_sync(seed: int) -> dict[str, Any]:
    """2. Sending weights to 4 servers × 64 seats"""
    return {
        f"training {share:g}, sending {sync:g}": by_levels(Setup(0, *SOME, seed=seed), share, sync)
        for share, sync in product(TRAINING, SYNCS)
    }


def compare_orders(setup: Setup) -> dict[str, float]:
    """Compares windows of their own groups (in the order of prompts) with windows by completion.

    Returns:
        `prompts`, `completion`: time per window in stages. `bias_n`: mean length in the first n windows by completion,
        relative to all, minus 1. `too_old`: share of their groups that are older than k permits.
    """
    stage = stage_of(setup)
    setup = replace(setup, train=setup.train * stage)
    own, first = simulate(setup), simulate(replace(setup, by_completion=True))
    of_all = statistics.fmean(own.lengths)
    return {
        "prompts": figures(own, setup)["seconds"] / stage,
        "completion": figures(first, setup)["seconds"] / stage,
        **{f"bias_{n}": statistics.fmean(first.lengths[:n]) / of_all - 1 for n in EARLY},
        "too_old": sum(first.too_old) / (WINDOWS * GROUPS),
    }


def by_order(seed: int) -> dict[str, Any]:
    """3. Windows in the order of prompts, and by completion with the length of the first ones and the share too old"""
    results: dict[str, Any] = {}
    for (servers, seats), share, k in product((SOME, MANY), TRAINING, (1, 2, 4)):
        runs = [compare_orders(Setup(k, servers, seats, train=share, seed=one)) for one in range(seed, seed + SEEDS)]
        name = f"{servers} × {seats}, training {share:g}, k = {k}"
        results[name] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    return results


def by_in_flight(seed: int) -> dict[str, Any]:
    """4. One server, 4 responses per seat and window, k = 1, training half a stage; by seats and responses in flight"""
    results: dict[str, Any] = {}
    for seats in (64, 256, 1024):
        setup = Setup(1, 1, seats, groups=4 * seats // GROUP, seed=seed)
        stage = stage_of(setup)
        setup = replace(setup, train=stage / 2)
        rows = {f"{share:g}": figures(simulate(replace(setup, in_flight=share)), setup) for share in IN_FLIGHT}
        results[str(seats)] = {**rows, "stage": stage}
    return results


def by_rule(seed: int) -> dict[str, Any]:
    """5. Seconds per window: one server; the number of servers by the rule, k = 1 and 2; twice that number"""
    results: dict[str, Any] = {}
    for train in TRAIN_SECONDS:

        def seconds(k: int, servers: int, train: float = train) -> float:
            setup = Setup(k, servers, 64, train=train, seed=seed)
            return figures(simulate(setup), setup)["seconds"]

        one = seconds(1, 1)
        servers = math.ceil(one / train)
        rows = {f"k{k}, {n} servers": seconds(k, n) for n in (servers, 2 * servers) for k in (1, 2)}
        results[f"training {train:g} s"] = {"one": one, **rows}
    return results


def in_stages(row: dict[str, Any]) -> dict[str, float]:
    stage = row.get("stage", 1.0)
    times = {key: value["seconds"] if isinstance(value, dict) else value for key, value in row.items()}
    return {key: value / stage for key, value in times.items()}


def draw(by_fleet: dict[str, Any], picture: Path) -> None:
    """Draws the time per window against k."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(10, 3.6), layout="constrained")
    for panel, share, title in zip(panels, TRAINING, ("as long as", "half as long as"), strict=True):
        for (servers, seats), color in ((FEW, "tab:orange"), (SOME, "tab:blue"), (MANY, "tab:green")):
            row = by_fleet[f"{servers} × {seats}, training {share:g}"]
            times = [row[f"k{k}"]["seconds"] / row["stage"] for k in LEVELS]
            label = f"{servers} × {seats}: {GROUPS * GROUP / servers / seats:g} responses a seat"
            panel.plot(LEVELS, times, "o-", color=color, label=label)
        panel.axhline(1.0, color="black", linestyle="--", linewidth=1, label="bound: the longer stage")
        panel.axhline(share, color="black", linestyle=":", linewidth=1, label="training alone")
        title = f"training takes {title} generation"
        panel.set(title=title, xlabel="k (async_level)", xticks=list(LEVELS), ylim=(0, 2.1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time per window\n(1 = generating one alone)")
    panels[1].legend(loc="upper right", frameon=False, title="servers × requests at once")
    figure.savefig(picture, dpi=120)


def main(plot: Path | None, seed: int) -> dict[str, Any]:
    tables = {}
    for table in (by_fleet, by_sync, by_order, by_in_flight, by_rule):
        tables[table.__name__] = table(seed)
        print(f"\n{table.__doc__}")
        for name, row in tables[table.__name__].items():
            harness.say(name, in_stages(row))
    if plot:
        draw(tables["by_fleet"], plot)
    return tables


if __name__ == "__main__":
    import harness  # here, since the tests import this file

    harness.run(
        main,
        __doc__,
        plot={"type": Path, "help": "draw seconds per window against k into this file"},
        seed={"type": int, "default": 0, "help": "seed of the lengths of responses"},
    )
