"""Does credit per episode learn faster? Outcome only against estimators and values on long chains of the embedded task.

    python benchmarks/credit_learning.py --json credit_learning.json          # ~70 minutes on 2 cores
    python benchmarks/credit_learning.py --methods centered_return grpo_process episode       # ~35 minutes

Chains of 7 to 9 numbers, a model warmed up on them, 128 rows in groups of 8 per step. The learning rate is tuned for
outcome only, by its final accuracy with one seed, and shared. Then every method runs with the same 5 seeds (the same
problems in the same order); every 10 steps the sampled accuracy on 256 held-out problems is measured, two samples each.
Mean and 95 % interval (Student's t over seeds) against samples and seconds; the seconds count V, not the measuring.
`samples_ratio`: samples until the mean curve reaches outcome-only's final accuracy, relative to outcome-only's; null if
it never does. "true V" puts the truth in the place of V(prefix): what is left to gain by better values.
`paired_gain`: final accuracy minus outcome-only's, per seed, mean and interval.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from dash_trl import DASHConfig, DASHTrainer, ProcessRewardCallback
from dash_trl.embedded import WarmUp, arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model
from dash_trl.evaluation import accuracy
from dash_trl.process_rewards import AnswerLogProbValue, CreditSettings, ValueEstimator, ValueRequest, line_starts

OPERANDS = (7, 8, 9)
WARM_UP = WarmUp(operands=OPERANDS, steps=500, slip_rate=0.06, wait_rate=0.03, num_heads=4)
LONGEST, STEPS, EVERY = 112, 60, 10
SEEDS, LEARNING_RATES = (0, 1, 2, 3, 4), (1e-4, 2e-4, 4e-4)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by the number of seeds
STEP_SUCCESS = 0.82  # of the warmed-up model: 0.25 over seven steps


class TrueValue:
    """The truth in place of V(prefix): `STEP_SUCCESS` ** steps to go, 0 after a mistake that was not taken back.

    What an estimator could gain at best on this task: it separates the credit from the quality of V.
    """

    space = "probability"

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
        total, done, right = int(first), 0, True
        for line in prefix.split("\n"):
            again = line.startswith("Wait, ")
            line, done = line.removeprefix("Wait, "), done - again
            if not line or line.startswith("The answer"):
                continue
            if done == len(operations) or (again and done < 0) or not (right or again):
                return 0.0
            if again:
                total -= int(operations[done])
            total += int(operations[done])
            right = line == f"{total - int(operations[done])}{operations[done]}={total}"
            done += 1
        return STEP_SUCCESS ** (len(operations) - done) if right else 0.0


def by_log_prob(space: str = "log") -> AnswerLogProbValue:
    return AnswerLogProbValue("The answer is ", closing="<|im_end|>", space=space)


@dataclass(frozen=True)
class Method:
    estimator: str
    value: Callable[[], ValueEstimator] = by_log_prob
    process_weight: float = 1.0


METHODS: dict[str, Method | None] = {
    "outcome only": None,
    "centered_return": Method("centered_return"),
    "grpo_process": Method("grpo_process"),
    "episode": Method("episode"),
    "centered_return, weight 0.3": Method("centered_return", process_weight=0.3),
    "centered_return, probability": Method("centered_return", lambda: by_log_prob("probability")),
    "episode, probability": Method("episode", lambda: by_log_prob("probability")),
    "centered_return, true V": Method("centered_return", TrueValue),
    "episode, true V": Method("episode", TrueValue),
}


def measure(model: Any, tokenizer: Any) -> float:
    held_out = arithmetic_dataset("test", operands=OPERANDS)
    return accuracy(
        model, tokenizer, held_out, arithmetic_reward, num_samples=2, max_new_tokens=LONGEST, batch_size=256
    )


class Curve(TrainerCallback):
    """Sampled accuracy and training seconds every few steps."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.accuracy, self.seconds, self.total = tokenizer, [], [0.0], 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.accuracy.append(measure(model, self.tokenizer))
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % EVERY == 0:
            self.total += time.perf_counter() - self.started
            self.accuracy.append(measure(model, self.tokenizer))
            self.seconds.append(self.total)
            self.started = time.perf_counter()


def run(path: str, method: str, seed: int, learning_rate: float) -> Curve:
    tokenizer = AutoTokenizer.from_pretrained(path)
    curve = Curve(tokenizer)
    callbacks: list[Any] = [curve]
    process = METHODS[method]
    if process is not None:
        settings = CreditSettings(process_weight=process.process_weight)
        callbacks.append(
            ProcessRewardCallback(
                process.value(),
                estimator=process.estimator,
                settings=settings,
                markers=line_starts,
                min_episode_tokens=1,
            )
        )
    with tempfile.TemporaryDirectory() as output:
        config = {**embedded_defaults(), "output_dir": output, "seed": seed, "max_steps": STEPS}
        config |= {"learning_rate": learning_rate, "max_completion_length": LONGEST}
        config |= {"logging_strategy": "no", "disable_tqdm": True}
        DASHTrainer(
            model=AutoModelForCausalLM.from_pretrained(path),
            processing_class=tokenizer,
            reward_funcs=arithmetic_reward,
            args=DASHConfig(**config),
            train_dataset=arithmetic_dataset("train", seed=seed, operands=OPERANDS),
            callbacks=callbacks,
        ).train()
    return curve


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval)."""
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def reached(curve: list[float], target: float) -> float | None:
    """Steps, interpolated, until a mean curve reaches the target."""
    for i, value in enumerate(curve):
        if value >= target:
            return 0.0 if i == 0 else EVERY * (i - 1 + (target - curve[i - 1]) / (value - curve[i - 1]))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="2 to 8")
    parser.add_argument("--learning_rate", type=float, help="leave the tuning out")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    arguments = parser.parse_args()
    methods = ["outcome only", *(method for method in arguments.methods if method != "outcome only")]
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    path = embedded_model(settings=WARM_UP)

    tuning: dict[str, float] = {}
    for rate in () if arguments.learning_rate else LEARNING_RATES:
        tuning[f"{rate:g}"] = run(path, "outcome only", 100, rate).accuracy[-1]
        print(f"outcome only, learning rate {rate:g}: {tuning[f'{rate:g}']:.3f}", flush=True)
    rate = arguments.learning_rate or float(max(tuning, key=lambda name: tuning[name]))

    curves: dict[str, list[Curve]] = {method: [] for method in methods}
    for seed in range(arguments.seeds):
        for method in methods:
            curves[method].append(run(path, method, seed, rate))
            points = " ".join(f"{value:.3f}" for value in curves[method][-1].accuracy)
            print(f"seed {seed} {method:28} {points}   {curves[method][-1].seconds[-1]:6.1f} s", flush=True)

    baseline = [curve.accuracy[-1] for curve in curves["outcome only"]]
    target = statistics.mean(baseline)
    results: dict[str, Any] = {"learning_rate": rate, "tuning": tuning, "samples_per_step": 128, "every": EVERY}
    for method in methods:
        by_step = list(zip(*(curve.accuracy for curve in curves[method]), strict=True))
        means = [interval(list(values)) for values in by_step]
        steps = reached([mean for mean, _ in means], target)
        gains = [curve.accuracy[-1] - base for curve, base in zip(curves[method], baseline, strict=True)]
        results[method] = {
            "accuracy": [mean for mean, _ in means],
            "interval": [half for _, half in means],
            "seconds": [statistics.mean(s) for s in zip(*(curve.seconds for curve in curves[method]), strict=True)],
            "samples_ratio": None if steps is None else steps / STEPS,
            "paired_gain": interval(gains),
        }
        (gain, half), final = results[method]["paired_gain"], means[-1]
        ratio = "never" if steps is None else f"{steps / STEPS:.2f}"
        print(
            f"{method:28} final {final[0]:.3f} ± {final[1]:.3f}, gain {gain:+.3f} ± {half:.3f}, samples {ratio}, "
            f"{results[method]['seconds'][-1]:.0f} s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
