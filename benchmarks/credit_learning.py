"""Tests whether credit per episode learns faster than the outcome alone, on long chains of small sums.

    python benchmarks/credit_learning.py --runs benchmarks/credit_runs.jsonl --json slips.json    # 2 hours
    python benchmarks/credit_learning.py --runs benchmarks/credit_runs.jsonl --task confident      # 6 hours
    python benchmarks/credit_learning.py --runs benchmarks/credit_runs.jsonl --task unsolved       # 9 hours
    python benchmarks/credit_learning.py --runs benchmarks/credit_runs.jsonl --task padded         # 4 hours
    python benchmarks/credit_learning.py --runs benchmarks/credit_runs.jsonl --methods "centered_return, forced answer"

A problem is a chain of 7 to 9 numbers (*padded*: 4 to 6). The model is warmed up on such chains; an optimizer step has
128 rows in groups of 8, and a run 60 steps (*confident*: 120). There are four tasks (`credit_tasks.py`):

- *slips*: errors are unlikely tokens.
- *confident*: errors are likely tokens (`confident.py`).
- *unsolved*: as *confident*, but with 11 operations of 18 that may go wrong instead of 7, and only a solution without a
  wrong line is rewarded. In the first windows, all samples fail in 0.69 of the groups. The easy problems, which are
  only measured, have 3 or 4 numbers; the warm-up has these, too.
- *padded*: the model writes "Wait, " and the last line again with probability 0.4, whether the line is right or wrong.

Each method gets the learning rate of the task with the best final accuracy. For this choice it runs with two other
seeds and on other problems than those that are reported. Then every method runs with the seeds of the task, and so with
the same problems in the same order. All runs of a task begin with the same model. At six points, the sampled accuracy
on 256 held-out problems is measured. The figures are means with 95 % intervals (Student's t over seeds) against samples
and seconds. Seconds are CPU seconds of the process; a process on another core still slows them. They include the
computation of V, but not the measuring.

The intervals of a measure's gains, at the end and over the curve, hold for all methods together (Bonferroni). Two
comparisons were fixed after pilots with seed 100, before the first reported run, and are not corrected:

- "unsolved", seeds 0 to 7: the gain of "episode, policy's V, anchored" in accuracy at the end.
- "padded", seeds 0 to 15: the gain of "episode, forced answer, solved groups too" in tokens at the end. Shorter
  completions count only if the interval of its gain in accuracy at the end, not corrected either, excludes a loss of
  0.05. All methods have the same learning rate, because the length depends on it.

- `paired_gain`: accuracy at the end, minus the accuracy of "outcome only" with the same seed.
- `paired_gain_of_curve`: the same for the mean accuracy over the curve.
- `samples_ratio`: share of the run's samples after which the mean curve reaches the final accuracy of "outcome only";
  null if it never does. Its 95 % interval, not corrected, is a bootstrap over seeds; "never" counts as infinite.
  Continuations by `MonteCarloValue` do not count as samples, but their time counts.
- `entropy`, `waits`: entropy per token and share of responses with "Wait", in the windows that are trained on.

The value is `OutcomeValue` unless the method's name contains another value. "true V" is the true value for the
*untrained* model, which becomes wrong as the model learns. "policy's V" is that of the model as it is. Three values
are controls. "shuffled" permutes the outcomes within their groups before the fit, so V contains no information on the
rows of a group. "Σ log p" is not fitted. "without own tokens" values a prefix without its last episode, so a token's
credit does not depend on its own log-prob.

With `--runs`, each run is written to the file when it ends, with the settings of its task. Runs in the file are not
repeated; runs of other settings or another model are refused. So a study may be interrupted. Once the learning rates
are chosen, it may be split over processes with different `--seeds`. `benchmarks/credit_runs.jsonl` has the published
runs, from which the figures are computed at once. The times above are those of a new file. Use one thread
(`OMP_NUM_THREADS=1`): more do not help so small a model.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
from credit_tasks import METHODS, SAMPLES, TASKS, Task

from dash_trl import DASHCallback
from dash_trl.evaluation import evaluate
from dash_trl.toy import arithmetic_dataset

POINTS = 6  # number of measurements of a run, without the one at its beginning
TUNING_SEEDS = (100, 101)
RESAMPLES = 2000
ALONE = "outcome only"
MEASURES = ("accuracy", "easy", "tokens")  # the fields of `Curve` in which methods are compared


@dataclass
class Curve:
    """The measurements of a run, one per point. What is measured in a window has no figure at the end.

    Attributes:
        accuracy: sampled accuracy on held-out problems.
        seconds: CPU seconds of training so far.
        entropy: entropy per token in the window of this step.
        waits: share of responses with "Wait" in this window.
        tokens: mean number of tokens of a completion, on held-out problems.
        easy: sampled accuracy on easy held-out problems.
        unsolved: share of groups without a right answer in this window.
        truncated: share of truncated completions, on held-out problems.
    """

    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0])
    entropy: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    easy: list[float] = field(default_factory=list)
    unsolved: list[float] = field(default_factory=list)
    truncated: list[float] = field(default_factory=list)


class Watch(DASHCallback):
    """Measures the curve of a run; the time of measuring does not count."""

    def __init__(self, task: Task, seed: int):
        self.task, self.every = task, task.steps // POINTS
        # Learning rates are chosen on other problems than those that are reported.
        which = ("train", 256, 1000) if seed in TUNING_SEEDS else ("test",)
        self.problems = arithmetic_dataset(*which, operands=task.operands)
        self.easy = arithmetic_dataset(*which, operands=task.easy) if task.easy else None
        self.curve, self.total = Curve(), 0.0

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.measure(model, processing_class, SAMPLES)
        self.started = time.process_time()

    def measure(self, model: Any, tokenizer: Any, num_samples: int) -> None:
        sampling = {"num_samples": num_samples, "max_completion_length": self.task.longest, "batch_size": 256}
        found = evaluate(model, tokenizer, self.problems, self.task.reward, **sampling)
        self.curve.accuracy.append(found["accuracy"])
        self.curve.tokens.append(found["mean_length"])
        self.curve.truncated.append(found["truncated"])
        if self.easy is not None:
            self.curve.easy.append(evaluate(model, tokenizer, self.easy, self.task.reward, **sampling)["accuracy"])

    def on_advantages(self, args, state, control, rollouts, trainer=None, **kwargs):
        if state.global_step % self.every == 0:
            self.total += time.process_time() - self.started
            everything = rollouts.completion_mask.any(dim=1)
            entropies = trainer.log_probs_and_entropies(rollouts, everything)[1]
            self.curve.entropy.append(float(entropies.sum() / rollouts.loss_mask.sum()))
            texts = trainer.processing_class.batch_decode(rollouts.completion_ids)
            self.curve.waits.append(statistics.mean("Wait" in text for text in texts))
            outcomes = rollouts.rewards.nansum(dim=1).view(-1, trainer.num_generations)
            self.curve.unsolved.append(float((outcomes == 0).all(dim=1).float().mean()))
            self.started = time.process_time()

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self.every == 0:
            self.total += time.process_time() - self.started
            samples = self.task.samples_at_end if state.global_step == self.task.steps else SAMPLES
            self.measure(model, processing_class, samples)
            self.curve.seconds.append(self.total)
            self.started = time.process_time()


def run(task: Task, method: str, seed: int, learning_rate: float) -> Curve:
    watch, process = Watch(task, seed), METHODS[method]
    settings = {
        "seed": seed,
        "max_steps": task.steps,
        "learning_rate": learning_rate,
        "warmup_steps": task.warm_up_steps,
        "max_completion_length": task.longest,
        "logging_strategy": "no",
    }
    callbacks = [watch] if process is None else [watch, process(task)]
    train = arithmetic_dataset("train", seed=seed, operands=task.operands)
    harness.toy_trainer(settings, path=task.model(), train=train, callbacks=callbacks, reward_funcs=task.reward).train()
    return watch.curve


def settings_of(task: Task) -> dict[str, Any]:
    """Returns the numbers of a task on which its curves depend, in JSON's types."""
    names = ("success", "operands", "easy", "longest", "steps", "warm_up_steps", "samples_at_end")
    found = {name: getattr(task, name) for name in names} | {"reward": task.reward.__name__}
    return json.loads(json.dumps(found | {"warm_up": asdict(task.warm_up)}))


class Runs:
    """Makes runs and remembers them by task, method, seed and learning rate; with a path, in a file of JSON lines."""

    def __init__(self, path: Path | None, task: str):
        self.path, self.task, self.settings = path, task, settings_of(TASKS[task])
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.done: dict[tuple[Any, ...], Curve] = {}
        for key, settings, curve in map(json.loads, lines):
            if key[0] == task and settings != self.settings:
                raise ValueError(
                    f"{path} has a run {key} with the settings {settings}, but task {task!r} has {self.settings}. "
                    "Remove the run from the file, or choose another file."
                )
            self._keep(tuple(key), Curve(**curve))

    def _keep(self, key: tuple[Any, ...], curve: Curve) -> None:
        task, _, seed, _ = key
        for other, known in self.done.items():
            if (other[0], other[2]) == (task, seed) and known.accuracy[0] != curve.accuracy[0]:
                raise ValueError(
                    f"The runs {other} and {key} begin with accuracies of {known.accuracy[0]} and {curve.accuracy[0]}, "
                    "so with different models: each machine warms up its own. Use another file on this machine, or "
                    "remove all runs of this seed."
                )
        self.done[key] = curve

    def __call__(self, method: str, seed: int, rate: float) -> Curve:
        key = (self.task, method, seed, rate)
        if key not in self.done:
            curve = run(TASKS[self.task], method, seed, rate)
            self._keep(key, curve)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, self.settings, asdict(curve)]) + "\n")
            points = " ".join(f"{value:.3f}" for value in curve.accuracy)
            print(f"seed {seed} {method:36} {points}   {curve.seconds[-1]:6.1f} s", flush=True)
        return self.done[key]


def reached(curve: Sequence[float], target: float) -> float:
    """Returns the point, interpolated, at which a curve reaches the target; infinite if it never does."""
    for i, value in enumerate(curve):
        if value >= target:
            return 0.0 if i == 0 else i - 1 + (target - curve[i - 1]) / (value - curve[i - 1])
    return math.inf


def samples_ratios(curves: Sequence[Curve], baseline: Sequence[Curve]) -> list[float | None]:
    """Returns `samples_ratio` and its 95 % interval by a paired bootstrap; None = the target is not reached."""

    def ratio(rows: Sequence[int]) -> float:
        target = statistics.mean(baseline[row].accuracy[-1] for row in rows)
        return reached(means(curves[row].accuracy for row in rows), target) / POINTS

    generator, seeds = random.Random(0), range(len(curves))
    resampled = sorted(ratio(generator.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    found = ratio(seeds), resampled[round(0.025 * RESAMPLES)], resampled[round(0.975 * RESAMPLES) - 1]
    return [one if math.isfinite(one) else None for one in found]


def means(rows: Iterable[Sequence[float]]) -> list[float]:
    """Returns the mean over the curves at each point."""
    return [statistics.mean(values) for values in zip(*rows, strict=True)]


def summary(
    curves: Sequence[Curve],
    baseline: Sequence[Curve],
    comparisons: int,
    preregistered: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Returns the figures of a method.

    Args:
        curves: one curve per seed.
        baseline: the curves of "outcome only" with the same seeds.
        comparisons: number of gains of a measure whose intervals should hold together.
        preregistered: the pairs (measure, gain) that are not corrected.
    """
    ratio, *interval_of_ratio = samples_ratios(curves, baseline)
    found: dict[str, Any] = {"samples_ratio": ratio, "samples_ratio_interval": interval_of_ratio}
    for name in ("seconds", "entropy", "waits", "unsolved", "truncated"):
        if all(of := [getattr(curve, name) for curve in curves]):  # else some runs are of a version without it
            found[name] = means(of)
    for name in MEASURES:
        of = [getattr(curve, name) for curve in curves]
        if not all(of):
            continue  # the task does not measure it
        points = [harness.interval(values) for values in zip(*of, strict=True)]
        pairs = [(one, getattr(base, name)) for one, base in zip(of, baseline, strict=True)]
        gains = {
            "paired_gain": [one[-1] - base[-1] for one, base in pairs],
            "paired_gain_of_curve": [statistics.mean(one[1:]) - statistics.mean(base[1:]) for one, base in pairs],
        }
        found[name] = {"mean": [mean for mean, _ in points], "interval": [half for _, half in points]}
        for gain, values in gains.items():
            found[name][gain] = harness.interval(values, 1 if (name, gain) in preregistered else comparisons)
    return found


def main(
    runs: Path | None, task: str, seeds: Sequence[int], learning_rate: float | None, methods: Sequence[str]
) -> dict[str, Any]:
    of = TASKS[task]
    seeds, run_of, methods = seeds or of.seeds, Runs(runs, task), list(dict.fromkeys([ALONE, *(methods or of.methods)]))
    as_planned = tuple(seeds) == of.seeds and learning_rate is None
    learning_rate = of.learning_rates[0] if len(of.learning_rates) == 1 and learning_rate is None else learning_rate
    tuning: dict[str, dict[str, float]] = {method: {} for method in methods}
    for method in () if learning_rate else methods:
        for rate in of.learning_rates:
            accuracies = [run_of(method, seed, rate).accuracy[-1] for seed in TUNING_SEEDS]
            tuning[method][f"{rate:g}"] = statistics.mean(accuracies)
        harness.say(f"{method}, by learning rate", tuning[method])
    rates = {name: learning_rate or float(max(found, key=lambda rate: found[rate])) for name, found in tuning.items()}
    made = [[run_of(method, seed, rates[method]) for method in methods] for seed in seeds]
    curves = dict(zip(methods, zip(*made, strict=True), strict=True))
    results: dict[str, Any] = {"task": task, "learning_rates": rates, "tuning": tuning}
    results |= {"samples_per_step": 128, "steps": of.steps, "seeds": list(seeds)}
    comparisons = 2 * (len(methods) - 1)  # the gains at the end and over the curve
    for method in methods if len(seeds) > 1 else ():
        preregistered = of.preregistered if method == of.methods[0] and as_planned else ()
        found = results[method] = summary(curves[method], curves[ALONE], max(comparisons, 1), preregistered)
        for name in (name for name in MEASURES if name in found):
            of_one = found[name]
            final = {"final": (of_one["mean"][-1], of_one["interval"][-1])}
            harness.say(f"{method}, {name}", final | of_one)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        runs={"type": Path, "help": "keep each run in this file"},
        task={"choices": TASKS, "default": "slips"},
        seeds={"type": int, "nargs": "+", "help": "2 or more seeds; default: those of the task"},
        learning_rate={"type": float, "help": "learning rate of all methods, without tuning"},
        methods={"nargs": "+", "choices": METHODS, "metavar": "METHOD", "help": "default: those of the task"},
    )
