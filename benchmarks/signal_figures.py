"""The parts of `signal_sampling.py` without a model: costs of reaching a target, their ratios, and the simulation.

The simulation adds the rounds of dynamic sampling to `simulate_async.py` (windows of 64 groups of 8 responses,
lognormal lengths, 4 servers with 64 seats each). `DynamicSampling` decides the size of a round, and `places_in_window`
chooses the groups that are trained on. A group is constant, that is silent, with a fixed probability. Training a full
window takes half of the time in which the servers alone generate a window, and less if fewer groups are kept.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.simulate_async import (
    GROUP,
    GROUPS,
    LONGEST,
    SOME,
    WARM,
    WINDOWS,
    Setup,
    Simulation,
    lengths_of,
    stage_of,
)
from dash_trl.collect.dynamic_sampling import DynamicSampling, places_in_window
from dash_trl.evaluation import bootstrap_interval
from dash_trl.sampling.backlog import Job

COSTS = ("cpu_seconds", "seconds", "steps", "samples")
MOST, LEVELS, CONSTANT = range(1, 9), range(3), (0.2, 0.4, 0.6, 0.8)
TRAINING = 0.5  # duration of training a full window, in stages
URGENT = -1  # `order` of the jobs of a round for which the trainer waits, see `dash_trl.sampling.pool`


# ------------------------------------------------------------------------------------------------ figures of a study


@dataclass
class Curve:
    """The measurements of a run. Each list has one value per measurement.

    Attributes:
        accuracy: sampled accuracy on held-out problems.
        cpu_seconds: CPU seconds of training so far, without measuring.
        seconds: seconds of training so far, without measuring.
        steps: optimizer steps so far.
        samples: sampled completions so far.
        figures: figures of the whole run.
    """

    accuracy: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def to_target(curve: Curve, target: float) -> dict[str, float] | None:
    """Returns the costs of reaching the target, interpolated between two points; None if it was not reached."""
    for i, value in enumerate(curve.accuracy):
        if value >= target:
            before = curve.accuracy[i - 1] if i else value
            part = 1.0 if i == 0 else (target - before) / (value - before)
            costs = {name: getattr(curve, name) for name in COSTS}
            return {name: one[max(i - 1, 0)] * (1 - part) + one[i] * part for name, one in costs.items()}
    return None


def summary(curves: Sequence[Curve], plain: Sequence[Curve], target: float) -> dict[str, Any]:
    """Returns the costs of a variant, and their ratios to the costs of plain DASH with the same seeds.

    If a run does not reach the target, its costs are those of the whole run.

    Returns:
        A dictionary with these entries:

        - `not_reached`: number of runs that do not reach the target.
        - `median`: median of each cost.
        - `ratio`: for each cost, [sum over the seeds / the same for plain DASH, low, high].
        - `figures`: means of the runs' figures.
    """

    def costs(runs: Sequence[Curve], name: str) -> list[float]:
        found = [to_target(one, target) for one in runs]
        return [getattr(run, name)[-1] if one is None else one[name] for run, one in zip(runs, found, strict=True)]

    own, base = ({name: costs(runs, name) for name in COSTS} for runs in (curves, plain))
    return {
        "not_reached": sum(to_target(one, target) is None for one in curves),
        "median": {name: statistics.median(own[name]) for name in COSTS},
        "ratio": {
            name: [sum(own[name]) / sum(base[name]), *bootstrap_interval(own[name], base[name])] for name in COSTS
        },
        "figures": {name: statistics.mean(one.figures[name] for one in curves) for name in curves[0].figures},
    }


def best_rate(found: Mapping[float, Sequence[Curve]], target: float) -> float:
    """Returns the learning rate with the fewest CPU seconds to the target; if none reaches it, the most accurate."""

    def order(rate: float) -> tuple[float, float]:
        costs = [to_target(one, target) for one in found[rate]]
        seconds = sum(math.inf if one is None else one["cpu_seconds"] for one in costs)
        return seconds, -sum(max(one.accuracy) for one in found[rate])

    return min(found, key=order)


# ------------------------------------------------------------------------------------------------ the simulation


class InRounds(Simulation):
    """A simulation in which a window is sampled in rounds.

    Args:
        setup: the setting.
        most: `max_num_gen_batches`.
        constant: probability that a group is constant.
    Attributes:
        kept: for each window, tokens of the groups that are trained on.
        sampled: for each window, tokens of all sampled groups.
        filled_windows: for each window, number of groups that are trained on, over the groups of a full window.
    """

    def __init__(self, setup: Setup, most: int, constant: float):
        super().__init__(setup)
        self.kept: list[int] = []
        self.sampled: list[int] = []
        self.filled_windows: list[float] = []
        self._dynamic = DynamicSampling(setup.groups, 1, most=most, ahead=setup.k > 0)
        self._constant = constant
        self._first: dict[int, list[Job]] = {}  # window → its first round
        self._rounds = count()
        self._verdicts = random.Random(f"verdicts {setup.seed}")

    def run_rounds(self) -> dict[str, float]:
        """Runs the simulation; returns figures of the middle windows.

        Returns:
            A dictionary with these entries:

            - `kept`: share of the servers' seats × time in which tokens of kept rows are written.
            - `filled`: number of kept groups, over the groups of a full window.
            - `sampled`: number of sampled groups, over the groups of a full window.
        """
        begins, seats, groups = list[float](), list[float](), list[int]()
        for window in range(WINDOWS):
            begins.append(self.now)
            seats.append(sum(server.filled for server in self.servers.values()))
            self.send_weights()
            for number in self.ahead.begin(window, known=WINDOWS - 1 - window):
                self._first[number] = self.submit_round(self._dynamic.first(), order=number)
            jobs = [self.wait_for(self._first.pop(window))]
            signal = [self.signal(len(jobs[0]))]
            while more := self._dynamic.next(signal):
                jobs.append(self.wait_for(self.submit_round(more, order=URGENT)))
                signal.append(self.signal(more))
            trained, _ = places_in_window(signal, self._dynamic.room)
            self._dynamic.note(signal)
            self._count([job for one in jobs for job in one], torch.cat(trained, dim=1)[0])
            groups.append(sum(len(one) for one in jobs))
            self.advance(self.now + self.setup.train * self.filled_windows[-1])
        middle = slice(WARM, WINDOWS - WARM)
        time = begins[middle.stop] - begins[middle.start]
        used = (seats[middle.stop] - seats[middle.start]) / (time * self.setup.servers * self.setup.seats)
        return {
            "kept": used * sum(self.kept[middle]) / sum(self.sampled[middle]),
            "filled": statistics.fmean(self.filled_windows[middle]),
            "sampled": statistics.fmean(groups[middle]) / self.setup.groups,
        }

    def submit_round(self, groups: int, order: int) -> list[Job]:
        lengths = lengths_of(next(self._rounds), groups, self.setup.seed, self.setup.sigma)
        jobs = [Job(GROUP * LONGEST, GROUP, ask=one, order=order, number=number) for number, one in enumerate(lengths)]
        self.left |= dict.fromkeys(jobs, GROUP)
        self.backlog.add(jobs)
        self.hand_out()
        return jobs

    def wait_for(self, jobs: list[Job]) -> list[Job]:
        while any(self.left[job] for job in jobs):
            self.next_event()
        return jobs

    def signal(self, groups: int) -> Tensor:
        """Draws which of K groups have signal: [1, K] bool."""
        return torch.tensor([[self._verdicts.random() >= self._constant for _ in range(groups)]])

    def _count(self, jobs: Sequence[Job], trained: Tensor) -> None:
        tokens = [sum(job.ask) for job in jobs]
        self.sampled.append(sum(tokens))
        self.kept.append(sum(one for one, kept in zip(tokens, trained.tolist(), strict=True) if kept))
        self.filled_windows.append(float(trained.sum()) / self.setup.groups)


def simulate_rounds(
    k: int, most: int, constant: float, *, training: float = TRAINING, groups: int = GROUPS, seed: int = 0
) -> dict[str, float]:
    """Returns the figures of `InRounds.run_rounds` for one setting; `training` is in stages."""
    setup = Setup(k, *SOME, groups=groups, seed=seed)
    setup = replace(setup, train=training * stage_of(setup))
    return InRounds(setup, most, constant).run_rounds()


def simulation(seed: int = 0) -> dict[str, Any]:
    """Returns the figures by share of constant groups, k (`async_level`) and m (`max_num_gen_batches`)."""
    return {
        f"constant {constant:g}": {
            f"k = {k}": {f"m = {most}": simulate_rounds(k, most, constant, seed=seed) for most in MOST} for k in LEVELS
        }
        for constant in CONSTANT
    }
