"""Tests whether sampling more groups with signal saves time: the costs to a target for plain DASH, refill, skip, both.

    python benchmarks/signal_sampling.py --runs benchmarks/signal_runs.jsonl --json signal.json
    python benchmarks/signal_sampling.py --simulate --json simulation.json          # no model; 2 minutes

The toy model works on three kinds of problems. *learned*: chains of 3 to 5 numbers in which the model slips, as in the
demo; their first number is above 4. *solved*: chains with another first number, for which the warm-up had no slips, so
the model solves nearly all of them from the beginning. *unsolved*: sums of numbers above 30, of which the model knows
none. The tasks:

    mixed     32 problems of each kind: two thirds of the groups are constant at the beginning
    even      96 learned problems: a sixth of the groups are constant at the beginning

A step has 16 groups of 4. An epoch has 6 steps of plain DASH, so that a run has several epochs: only prompts that were
sampled in an earlier epoch can be skipped.

The variants are plain DASH, refill (`max_num_gen_batches=4`), skip (`max_skipped_epochs=3`), and both. Each variant
gets the one of `LEARNING_RATES` that needs the fewest CPU seconds to the target. For this choice it runs with
`TUNING_SEEDS`, on other problems than those that are reported. The learning rate of a run is constant, since a schedule
would depend on the run's end. Then all variants run with the same `SEEDS`, and so with the same problems in the same
order. Every `EVERY` optimizer steps, the sampled accuracy is measured on held-out problems of the kinds that can be
solved, always with the same random numbers. A run ends when it reaches the task's target, or after `MAX_STEPS`.

There are four costs of reaching the target: CPU seconds of the process on one thread (`cpu_seconds`, without other
processes), seconds on the clock, optimizer steps, and sampled completions. They are interpolated between the two
measurements around the target, and do not include the measuring. The gain of skip is judged by samples and seconds, and
the gain of refill by optimizer steps and seconds. The figures are medians of each cost, and ratios to plain DASH (of
sums over seeds) with 95 % intervals of a bootstrap over pairs of runs.

The constants below were chosen by about 18 pilot runs with `TUNING_SEEDS`, and committed before the first reported run
with `SEEDS`. Groups of 4 were chosen after pilots of all variants: with groups of 8, plain DASH needs fewer than 3
epochs, and skip has hardly any effect. So a gain of skip holds only for runs of several epochs.

With `--runs`, each run is written to the file when it ends, and runs in the file are not repeated. So a study may be
interrupted at any time, or split over processes with different `--seeds`.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from datasets import Dataset

from benchmarks.signal_figures import COSTS, Curve, best_rate, simulation, summary
from dash_trl import DASHCallback
from dash_trl.toy import WarmUp, arithmetic_dataset, toy_model
from dash_trl.toy.problems import split_of
from dash_trl.toy.warm_up import ARITHMETIC

WARM_UP = WarmUp(steps=800, clean_share=0.4, slip_rate=0.13)
CLEAN = ("1", "2", "3", "4")  # the first numbers of problems in which the model does not slip
LONGEST = 56  # largest number of tokens of a completion
GROUPS, GROUP = 16, 4  # groups of an optimizer step, rows of a group
LEARNING_RATES, TUNING_SEEDS = (1e-4, 2e-4, 4e-4), (100, 101)
SEEDS = tuple(range(10))
EVERY, MAX_STEPS = 2, 96
HELD_OUT, SAMPLES = 128, 2  # number of measured problems of each kind, and of completions of each problem
UNSOLVED = (31, 99)  # range of the numbers in unsolved problems, which the warm-up did not contain


@dataclass(frozen=True)
class Task:
    """A task of the study.

    Args:
        problems: number of problems to train on, by kind.
        target: accuracy on `held_out` problems at which a run ends.
    """

    problems: dict[str, int]
    target: float


TASKS = {
    "mixed": Task({"solved": 32, "learned": 32, "unsolved": 32}, target=0.92),
    "even": Task({"learned": 96}, target=0.92),
}
VARIANTS: dict[str, dict[str, int]] = {
    "plain": {},
    "refill": {"max_num_gen_batches": 4},
    "skip": {"max_skipped_epochs": 3},
    "both": {"max_num_gen_batches": 4, "max_skipped_epochs": 3},
}
FIGURES = {  # name of a figure → the logged metric whose mean over the steps it is
    "constant": "frac_reward_zero_std",
    "kept": "filter/kept_rows",
    "rounds": "dynamic_sampling/rounds",
    "sampled": "dynamic_sampling/sampled",
    "filled": "dynamic_sampling/filled",
    "surplus": "dynamic_sampling/surplus",
}


# ------------------------------------------------------------------------------------------------ model and problems


def model() -> str:
    """Returns the directory of the warmed-up model, which is made on the first call."""
    return toy_model(settings=WARM_UP, lessons=replace(ARITHMETIC, name="habit", solution=_solution))


def _solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> Any:
    rates = (0.0, 0.0) if problem.startswith(CLEAN) else (slip_rate, wait_rate)
    return ARITHMETIC.solution(problem, generator, *rates)


def problems_of(kind: str, count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Returns distinct problems of a kind, in the form of `arithmetic_dataset`."""
    rows = _unsolved(split, seed) if kind == "unsolved" else iter(arithmetic_dataset(split, 4 * count, seed))
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        problem = row["prompt"][-1]["content"]
        if kind == "unsolved" or problem.startswith(CLEAN) == (kind == "solved"):
            found[problem] = row
        if len(found) == count:
            break
    return list(found.values())


def _unsolved(split: str, seed: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(f"unsolved {split} {seed}")
    while True:
        numbers = [generator.randint(*UNSOLVED) for _ in range(3)]
        problem = "+".join(map(str, numbers))
        if split_of(problem) == split:
            yield {"prompt": [{"role": "user", "content": problem}], "answer": str(sum(numbers))}


def train_problems(task: Task, seed: int) -> Dataset:
    rows = [row for kind, count in task.problems.items() for row in problems_of(kind, count, "train", seed)]
    return Dataset.from_list(rows)


def held_out(task: Task, seed: int) -> Dataset:
    """Returns the problems that measure accuracy: those that are reported, or other ones for `TUNING_SEEDS`."""
    split, drawn = ("train", 1000) if seed in TUNING_SEEDS else ("test", 0)
    kinds = [kind for kind in task.problems if kind != "unsolved"]
    return Dataset.from_list([row for kind in kinds for row in problems_of(kind, HELD_OUT, split, drawn)])


# ------------------------------------------------------------------------------------------------ runs


class Watch(DASHCallback):
    """Measures the curve of a run, and ends the run at the target. The time of measuring does not count."""

    per_group = True

    def __init__(self, target: float, problems: Dataset):
        self.curve = Curve()
        self._target, self._problems = target, problems
        self._samples, self._cpu_seconds, self._seconds = 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._measure(0, model, processing_class)

    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        self._samples += len(rollouts)

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % EVERY == 0:
            self._cpu_seconds += time.process_time() - self._cpu_start
            self._seconds += time.perf_counter() - self._start
            self._measure(state.global_step, model, processing_class)
            control.should_training_stop |= self.curve.accuracy[-1] >= self._target

    def _measure(self, step: int, model: Any, tokenizer: Any) -> None:
        sampling = {"num_samples": SAMPLES, "max_completion_length": LONGEST, "batch_size": 256}
        self.curve.accuracy.append(harness.accuracy(model, tokenizer, self._problems, **sampling))
        self.curve.cpu_seconds.append(self._cpu_seconds)
        self.curve.seconds.append(self._seconds)
        self.curve.steps.append(step)
        self.curve.samples.append(self._samples)
        self._cpu_start, self._start = time.process_time(), time.perf_counter()


def run(task: Task, variant: str, seed: int, learning_rate: float) -> Curve:
    watch = Watch(task.target, held_out(task, seed))
    settings = {
        "seed": seed,
        "max_steps": MAX_STEPS,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        **VARIANTS[variant],
    }
    trainer = harness.toy_trainer(settings, path=model(), train=train_problems(task, seed), callbacks=[watch])
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    for name, key in FIGURES.items():
        if key in log[0]:
            watch.curve.figures[name] = statistics.mean(entry[key] for entry in log)
    watch.curve.figures["constant_at_start"] = statistics.mean(entry[FIGURES["constant"]] for entry in log[:EVERY])
    watch.curve.figures["skipped"] = log[-1].get("prompts/skipped", 0)
    return watch.curve


class Runs:
    """Makes runs and remembers them by task, variant, seed and learning rate; with a path, in a file of JSON lines."""

    def __init__(self, path: Path | None, task: str):
        self.path, self.task = path, task
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.done = {tuple(key): Curve(**curve) for key, curve in map(json.loads, lines)}

    def __call__(self, variant: str, seed: int, rate: float) -> Curve:
        key = (self.task, variant, seed, rate)
        if key not in self.done:
            self.done[key] = curve = run(TASKS[self.task], variant, seed, rate)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, asdict(curve)]) + "\n")
            ends = {"accuracy": curve.accuracy[-1], **{name: getattr(curve, name)[-1] for name in COSTS}}
            harness.say(f"{self.task} {variant}, seed {seed}, {rate:g}", ends | curve.figures)
        return self.done[key]


def study(runs: Path | None, task: str, seeds: Sequence[int]) -> dict[str, Any]:
    run_of, target = Runs(runs, task), TASKS[task].target
    rates = {}
    for variant in VARIANTS:
        tuning = {rate: [run_of(variant, seed, rate) for seed in TUNING_SEEDS] for rate in LEARNING_RATES}
        rates[variant] = best_rate(tuning, target)
    made = [[run_of(variant, seed, rates[variant]) for variant in VARIANTS] for seed in seeds]
    curves = dict(zip(VARIANTS, zip(*made, strict=True), strict=True))
    results: dict[str, Any] = {"target": target, "learning_rates": rates, "seeds": list(seeds)}
    for variant in VARIANTS if made else ():
        found = results[variant] = summary(curves[variant], curves["plain"], target)
        harness.say(f"{task}, {variant}", found["median"])
        for name, (ratio, low, high) in found["ratio"].items():
            print(f"    {name:12} {ratio:.2f} of plain ({low:.2f} to {high:.2f})", flush=True)
    return results


def main(runs: Path | None, tasks: Sequence[str], seeds: Sequence[int], simulate: bool) -> dict[str, Any]:
    if simulate:
        found = simulation()
        for share, rows in found.items():
            for k, row in rows.items():
                harness.say(f"{share}, {k}: kept by m", {most: one["kept"] for most, one in row.items()})
        return found
    torch.set_num_threads(1)
    return {task: study(runs, task, seeds) for task in tasks}


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        runs={"type": Path, "help": "keep each run in this file"},
        tasks={"nargs": "+", "choices": TASKS, "default": list(TASKS)},
        seeds={"type": int, "nargs": "*", "default": SEEDS, "help": "no seed: only choose the learning rates"},
        simulate={"action": "store_true", "help": "run the simulation instead of the study"},
    )
