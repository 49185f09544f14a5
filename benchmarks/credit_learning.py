"""Does credit per episode learn faster? Outcome only against estimators and values on long chains of small sums.

    python benchmarks/credit_learning.py --runs slips.jsonl --json slips.json                          # ~60 minutes
    python benchmarks/credit_learning.py --runs confident.jsonl --json confident.json --task confident  # ~150 minutes
    python benchmarks/credit_learning.py --runs forced.jsonl --methods "centered_return, forced answer"

Chains of 7 to 9 numbers, a model warmed up on them, 128 rows in groups of 8 per step. Two tasks: *slips*, errors that
are unlikely tokens, and *confident* ones (`confident.py`). Each method has a learning rate of its own, of three the one
with the best mean final accuracy with two other seeds, on problems that are not reported. Then every method runs with
the same 5 seeds (the same problems in the same order); at six points the sampled accuracy on 256 held-out problems is
measured. Mean and 95 % interval (Student's t over seeds) against samples and seconds, those of the process's CPU, in
which other processes do not count; they include V, not the measuring. The intervals of the gains hold together, for
all methods (Bonferroni).

`paired_gain`, `paired_gain_of_curve`: accuracy at the end, and its mean over the curve, minus outcome-only's of the
same seed. `samples_ratio`: samples until the mean curve reaches outcome-only's final accuracy, relative to the whole
run; null if it never does; with the 95 % interval of a bootstrap over seeds, in which "never" is infinite. Entropy (per
token) and the share of responses with "Wait" are those of the windows that are trained on.

Values: `OutcomeValue` unless the name says otherwise; "true V" puts the truth of the *untrained* model in its place,
which the model leaves as it learns. Controls: "shuffled" permutes the outcomes within their groups before the fit, so
that a gain comes from something else than what V knows; "Σ log p" is no fit at all; "without own tokens" values a
prefix by what came before its last episode, so that no token is paid for its own log-prob.

With `--runs`, each run is written there as it ends, and one that is there is not made again: a study may be
interrupted, or shared by processes with other `--seeds`.
"""

import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import harness
from confident import FORMS, LONGEST, OPERANDS, confident_dataset, confident_model, trap
from value_quality import SumOfLogProbs

from dash_trl import DASHCallback, ProcessRewardCallback
from dash_trl.embedded import WarmUp, embedded_model
from dash_trl.process_rewards import (
    AnswerLogProbValue,
    CreditSettings,
    OutcomeValue,
    ValueEstimator,
    ValueRequest,
    line_starts,
)

WARM_UP = WarmUp(operands=OPERANDS, steps=500, slip_rate=0.06, wait_rate=0.03, num_heads=4)
POINTS = 6  # at which a run is measured, besides its beginning
SAMPLES = 2  # of each held-out problem
LEARNING_RATES, TUNING_SEEDS = (2e-4, 4e-4, 8e-4), (100, 101)
STEP_SUCCESS = 0.82  # of the model of slips: 0.25 over seven steps
RESAMPLES = 2000


@dataclass(frozen=True)
class Task:
    """
    Args:
        model: gives the directory of the warmed-up model.
        success: sum like `7+5`, its result → the probability that the untrained model writes a right line for it.
        forms: what may stand between the sum and its result.
        steps, warm_up_steps: of a run. Confident errors take longer to unlearn, and at full learning rate at once some
            seeds lose half of what the model knows.
        samples_at_end: of each held-out problem.
    """

    model: Callable[[], str]
    success: Callable[[str, int], float]
    forms: str
    steps: int = 60
    warm_up_steps: int = 0
    samples_at_end: int = SAMPLES


TASKS = {
    "slips": Task(lambda: embedded_model(settings=WARM_UP), lambda left, right: STEP_SUCCESS, "="),
    "confident": Task(
        confident_model,
        lambda left, right: 0.5 if trap(left, right) else 1.0,
        FORMS,
        steps=120,
        warm_up_steps=10,
        samples_at_end=8,
    ),
}


class TrueValue:
    """The truth in place of V(prefix): the untrained model's chance of the steps to go, 0 after a mistake that was not
    taken back.

    What an estimator could gain at best on this task: it separates the credit from the quality of V.
    """

    space = "probability"

    def __init__(self, task: Task):
        self.task = task

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return [
            [
                self._value(request.example["prompt"][-1]["content"], trainer._tokenizer.decode(ids))
                for ids in (request.completion_ids[:boundary] for boundary in request.boundaries)
            ]
            for request in requests
        ]

    def _value(self, problem: str, prefix: str) -> float:
        first, *operations = re.findall(r"[+-]?\d+", problem)
        totals = [*accumulate(map(int, [first, *operations]))]
        done, right = 0, True
        for line in prefix.split("\n"):
            again = line.startswith("Wait, ")
            line, done = line.removeprefix("Wait, "), done - again
            if not line or line.startswith("The answer"):
                continue
            if done == len(operations) or (again and done < 0) or not (right or again):
                return 0.0
            left = f"{totals[done]}{operations[done]}"
            done += 1
            right = line in [f"{left}{form}{totals[done]}" for form in self.task.forms]
        to_go = zip(totals[done:], operations[done:], totals[done + 1 :], strict=False)
        chances = [self.task.success(f"{total}{operation}", result) for total, operation, result in to_go]
        return math.prod(chances) if right else 0.0


class Shuffled(OutcomeValue):
    """Fitted to outcomes that were permuted within their groups: it knows how hard a problem is, and nothing else."""

    def learn(self, requests: Sequence[ValueRequest], outcomes: Sequence[float], trainer: Any) -> None:
        generator = random.Random(trainer.state.global_step)
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(request.prompt_ids, []).append(row)
        shuffled = list(outcomes)
        for rows in groups.values():
            for row, source in zip(rows, generator.sample(rows, len(rows)), strict=True):
                shuffled[row] = outcomes[source]
        super().learn(requests, shuffled, trainer)


class WithoutOwnTokens(OutcomeValue):
    """V(b_k) from the tokens before b_{k−1}; V(b_1) is missing."""

    def _features(self, request: ValueRequest) -> list[list[float]]:
        rows = super()._features(request)
        return [[math.nan] * len(rows[0]), *rows[:-1]] if rows else []


def by_log_prob(task: Task, space: str = "log") -> AnswerLogProbValue:
    return AnswerLogProbValue("The answer is ", closing="<|im_end|>", space=space)


def credit(
    estimator: str, value: Callable[[Task], ValueEstimator] = lambda task: OutcomeValue(), **others: Any
) -> Callable[[Task], ProcessRewardCallback]:
    return lambda task: ProcessRewardCallback(
        value(task), estimator=estimator, markers=line_starts, min_episode_tokens=1, **others
    )


AUTO, ONE = CreditSettings(process_weight="auto"), CreditSettings(process_weight=1.0)
VINE = CreditSettings(outcome_weight=0.0, process_weight=1.0)  # the outcome less V, as of a V that is right
# The first ones are made where no other is asked for.
METHODS: dict[str, Callable[[Task], ProcessRewardCallback] | None] = {
    "outcome only": None,
    "centered_return, anchored, auto": credit("centered_return", settings=AUTO),
    "centered_return, anchored": credit("centered_return", settings=ONE, anchored=True),
    "gae": credit("gae"),
    "centered_return, true V, anchored": credit("centered_return", TrueValue, settings=VINE, anchored=True),
}
STUDY = list(METHODS)
METHODS |= {
    "centered_return": credit("centered_return", settings=ONE, anchored=False),
    "episode": credit("episode", settings=ONE, anchored=False),
    "episode, anchored": credit("episode", settings=ONE, anchored=True),
    "centered_return, true V": credit("centered_return", TrueValue),
    "centered_return, shuffled": credit("centered_return", lambda task: Shuffled()),
    "centered_return, Σ log p": credit("centered_return", lambda task: SumOfLogProbs()),
    "centered_return, without own tokens": credit("centered_return", lambda task: WithoutOwnTokens()),
    "episode, true V": credit("episode", TrueValue),
    "episode, anchored, true V": credit("episode", TrueValue, anchored=True),
    "gae, true V": credit("gae", TrueValue),
    "gae, λ = 1": credit("gae", settings=CreditSettings(lam=1.0)),
    "centered_return, forced answer": credit("centered_return", by_log_prob),
    "grpo_process, forced answer": credit("grpo_process", by_log_prob),
    "episode, forced answer": credit("episode", by_log_prob),
    "centered_return, forced answer, weight 0.3": credit(
        "centered_return", by_log_prob, settings=CreditSettings(process_weight=0.3)
    ),
    "centered_return, forced answer, probability": credit(
        "centered_return", lambda task: by_log_prob(task, "probability")
    ),
    "episode, forced answer, probability": credit("episode", lambda task: by_log_prob(task, "probability")),
}


def measure(model: Any, tokenizer: Any, problems: Any, num_samples: int = SAMPLES) -> float:
    sampling = {"num_samples": num_samples, "max_new_tokens": LONGEST, "batch_size": 256}
    return harness.accuracy(model, tokenizer, problems, **sampling)


@dataclass
class Curve:
    """At each point: sampled accuracy, CPU seconds of training; of that step's window: entropy, share of "Wait"."""

    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0])
    entropy: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class Watch(DASHCallback):
    """Fills a curve by held-out problems; its own time does not count."""

    def __init__(self, task: Task, problems: Any):
        self.task, self.problems, self.every = task, problems, task.steps // POINTS
        self.curve, self.total = Curve(), 0.0

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.curve.accuracy.append(measure(model, processing_class, self.problems))
        self.started = time.process_time()

    def on_advantages(self, args, state, control, rollouts, trainer=None, **kwargs):
        if state.global_step % self.every == 0:
            self.total += time.process_time() - self.started
            everything = rollouts.completion_mask.any(dim=1)
            entropies = trainer.log_probs_and_entropies(rollouts, everything)[1]
            self.curve.entropy.append(float(entropies.sum() / rollouts.loss_mask.sum()))
            texts = trainer.processing_class.batch_decode(rollouts.completion_ids)
            self.curve.waits.append(statistics.mean("Wait" in text for text in texts))
            self.started = time.process_time()

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self.every == 0:
            self.total += time.process_time() - self.started
            samples = self.task.samples_at_end if state.global_step == self.task.steps else SAMPLES
            self.curve.accuracy.append(measure(model, processing_class, self.problems, samples))
            self.curve.seconds.append(self.total)
            self.started = time.process_time()


def run(task: Task, method: str, seed: int, learning_rate: float) -> Curve:
    # Those that are reported, or, to tune on, others.
    problems = confident_dataset("test") if seed not in TUNING_SEEDS else confident_dataset("train", 256, seed=1000)
    watch, process = Watch(task, problems), METHODS[method]
    settings = {
        "seed": seed,
        "max_steps": task.steps,
        "learning_rate": learning_rate,
        "warmup_steps": task.warm_up_steps,
        "max_completion_length": LONGEST,
        "logging_strategy": "no",
    }
    callbacks = [watch] if process is None else [watch, process(task)]
    train = confident_dataset("train", seed=seed)
    harness.embedded_trainer(settings, path=task.model(), train=train, callbacks=callbacks).train()
    return watch.curve


class Runs:
    """Those made so far, by method, seed and learning rate; kept in a file of JSON lines, if there is one."""

    def __init__(self, path: Path | None, task: str):
        self.path, self.task = path, task
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.done = {tuple(key): Curve(**curve) for key, curve in map(json.loads, lines)}

    def __call__(self, method: str, seed: int, rate: float) -> Curve:
        key = (self.task, method, seed, rate)
        if key not in self.done:
            self.done[key] = curve = run(TASKS[self.task], method, seed, rate)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, asdict(curve)]) + "\n")
            points = " ".join(f"{value:.3f}" for value in curve.accuracy)
            print(f"seed {seed} {method:36} {points}   {curve.seconds[-1]:6.1f} s", flush=True)
        return self.done[key]


def reached(curve: Sequence[float], target: float) -> float:
    """Points, interpolated, until a mean curve reaches the target; infinite if it never does."""
    for i, value in enumerate(curve):
        if value >= target:
            return 0.0 if i == 0 else i - 1 + (target - curve[i - 1]) / (value - curve[i - 1])
    return math.inf


def samples_ratios(curves: Sequence[Curve], baseline: Sequence[Curve]) -> list[float | None]:
    """Samples to outcome-only's mean final accuracy as a share of the run; the 95 % interval of a paired bootstrap.

    None where it is not reached.
    """

    def ratio(rows: Sequence[int]) -> float:
        target = statistics.mean(baseline[row].accuracy[-1] for row in rows)
        return reached(means(curves[row].accuracy for row in rows), target) / POINTS

    generator, seeds = random.Random(0), range(len(curves))
    resampled = sorted(ratio(generator.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    found = ratio(seeds), resampled[round(0.025 * RESAMPLES)], resampled[round(0.975 * RESAMPLES) - 1]
    return [one if math.isfinite(one) else None for one in found]


def means(rows: Iterable[Sequence[float]]) -> list[float]:
    """At each point, over the curves."""
    return [statistics.mean(values) for values in zip(*rows, strict=True)]


def summary(curves: Sequence[Curve], baseline: Sequence[Curve], comparisons: int) -> dict[str, Any]:
    pairs = list(zip(curves, baseline, strict=True))
    ratio, *interval_of_ratio = samples_ratios(curves, baseline)
    of_curve = [statistics.mean(curve.accuracy[1:]) - statistics.mean(base.accuracy[1:]) for curve, base in pairs]
    of_points = [harness.interval(values) for values in zip(*(curve.accuracy for curve in curves), strict=True)]
    return {
        "accuracy": [mean for mean, _ in of_points],
        "interval": [half for _, half in of_points],
        "seconds": means(curve.seconds for curve in curves),
        "entropy": means(curve.entropy for curve in curves),
        "waits": means(curve.waits for curve in curves),
        "samples_ratio": ratio,
        "samples_ratio_interval": interval_of_ratio,
        "paired_gain": harness.interval([curve.accuracy[-1] - base.accuracy[-1] for curve, base in pairs], comparisons),
        "paired_gain_of_curve": harness.interval(of_curve, comparisons),
    }


def main(
    runs: Path | None, task: str, seeds: Sequence[int], learning_rate: float | None, methods: Sequence[str]
) -> dict[str, Any]:
    run_of, methods = Runs(runs, task), list(dict.fromkeys(["outcome only", *methods]))
    tuning: dict[str, dict[str, float]] = {method: {} for method in methods}
    for method in () if learning_rate else methods:
        for rate in LEARNING_RATES:
            accuracies = [run_of(method, seed, rate).accuracy[-1] for seed in TUNING_SEEDS]
            tuning[method][f"{rate:g}"] = statistics.mean(accuracies)
        harness.say(f"{method}, by learning rate", tuning[method])
    rates = {name: learning_rate or float(max(found, key=lambda rate: found[rate])) for name, found in tuning.items()}
    made = [[run_of(method, seed, rates[method]) for method in methods] for seed in seeds]
    curves = dict(zip(methods, zip(*made, strict=True), strict=True))
    results: dict[str, Any] = {"task": task, "learning_rates": rates, "tuning": tuning}
    results |= {"samples_per_step": 128, "steps": TASKS[task].steps, "seeds": list(seeds)}
    for method in methods if len(seeds) > 1 else ():
        found = results[method] = summary(curves[method], curves["outcome only"], len(methods) - 1)
        harness.say(method, {"final": (found["accuracy"][-1], found["interval"][-1]), **found})
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        runs={"type": Path, "help": "keep each run in this file"},
        task={"choices": TASKS, "default": "slips"},
        seeds={"type": int, "nargs": "+", "default": (0, 1, 2, 3, 4), "help": "2 to 10 of them"},
        learning_rate={"type": float, "help": "leave the tuning out"},
        methods={"nargs": "+", "choices": METHODS, "default": STUDY, "metavar": "METHOD"},
    )
