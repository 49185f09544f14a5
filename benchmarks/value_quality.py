"""Measures how well V(prefix) predicts success, against Monte Carlo estimates on the toy tasks, where truth is cheap.

    python benchmarks/value_quality.py --json value_quality.json                       # 2 to 4 minutes on one core
    python benchmarks/value_quality.py --task confident --json confident.json        # a model sure of its errors

It measures the same as `python examples/value_quality`, for more values. 4 responses of each of 64 problems (32 longer
problems in the task "confident") are cut at their lines. From every boundary the model samples K = 32 completions, and
their share of right answers is the truth. The figures are those of the inner boundaries. The rows of the table:

- the number of the boundary, as a baseline;
- `AnswerLogProbValue` with different force prompts;
- `OutcomeValue` fitted to different numbers of rollouts of other problems;
- `OutcomeValue` fitted to all these rollouts, with other features;
- the sum of log-probs, which is not fitted;
- the ceiling, which a perfect V would reach.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from confident import LONGEST as CONFIDENT_LONGEST
from confident import confident_dataset, confident_model

from dash_trl.evaluation import Checkpoint, Reward, open_sampler
from dash_trl.process_rewards import (
    FEATURES,
    AnswerLogProbValue,
    OutcomeValue,
    Segmenter,
    ValueEstimator,
    ValueRequest,
    line_starts,
)
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_model
from examples.value_quality import figures
from examples.value_quality.candidates import Candidate, measure
from examples.value_quality.study import Plan, choose, collect

BATCH, END = 256, "<|im_end|>"
SIZES = (128, 256, 512, 1024, 2048)
# Name in the table → (force prompt, text after the answer, spaces of V).
FORCE_PROMPTS = {
    "The answer is N<|im_end|>": ("The answer is ", END, ("log", "probability")),
    "The answer is N": ("The answer is ", "", ("log",)),
    "Wait, the answer is N": ("Wait, The answer is ", END, ("log",)),
    "=N": ("=", "", ("log",)),
}
# Name in the table → the features that `OutcomeValue` keeps.
SUBSETS = {
    "without entropies": [name for name in FEATURES if "entropies" not in name],
    "without the last episode's": [name for name in FEATURES if "last episode" not in name],
    "confidence only": [name for name in FEATURES if name != "position"],
    "position only": ["position"],
}


def task_of(name: str) -> tuple[str, Any, Any, Plan]:
    """Returns the model, the problems for fitting, the measured problems, and a plan with about 1,100 boundaries."""
    if name == "confident":
        plan = Plan(32, fit_rollouts=SIZES, max_completion_length=CONFIDENT_LONGEST, shortest=1)
        return confident_model(), confident_dataset("train"), confident_dataset("test"), plan
    plan = Plan(64, fit_rollouts=SIZES, max_completion_length=64, shortest=1)
    return toy_model(), arithmetic_dataset("train", 1024), arithmetic_dataset("test"), plan


class Varied(OutcomeValue):
    """`OutcomeValue` with only some of its features, or with one more.

    Args:
        names: the features that are kept.
        more: a value estimator; its value at each boundary is one more feature. None = no more feature.
    """

    def __init__(self, names: Sequence[str] = FEATURES, more: ValueEstimator | None = None):
        super().__init__(num_windows=1)
        self.kept, self.more = [FEATURES.index(name) for name in names], more

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        self._know(requests, trainer)
        return super().__call__(requests, trainer)

    def learn(self, requests: Sequence[ValueRequest], outcomes: Sequence[float], trainer: Any) -> None:
        self._know(requests, trainer)
        super().learn(requests, outcomes, trainer)

    def _know(self, requests: Sequence[ValueRequest], trainer: Any) -> None:
        if self.more:
            self.known = dict(zip(map(id, requests), self.more(requests, trainer), strict=True))

    def _features(self, request: ValueRequest) -> list[list[float]]:
        rows = [[row[column] for column in self.kept] for row in super()._features(request)]
        if not self.more:
            return rows
        return [[*row, number] for row, number in zip(rows, self.known[id(request)][1:], strict=True)]

    def _columns(self, requests: Sequence[ValueRequest]) -> int:
        return len(self.kept) + bool(self.more)


def waits(requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
    """Returns the number of times that "Wait" occurs in each prefix."""
    (wait,) = trainer._tokenizer("Wait")["input_ids"]
    return [[float(one.completion_ids[:boundary].count(wait)) for boundary in one.boundaries] for one in requests]


def siblings(requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
    """Returns Σ log p of each prefix, minus its mean over the problem's other responses at the same boundary.

    If no other response has this boundary, the value is 0.
    """
    sums, found = SumOfLogProbs()(requests, trainer), []
    for request, own in zip(requests, sums, strict=True):
        others = [
            of
            for other, of in zip(requests, sums, strict=True)
            if other is not request and other.prompt_ids == request.prompt_ids
        ]
        at = [[of[k] for of in others if len(of) > k] for k in range(len(own))]
        found.append([mine - sum(of) / len(of) if of else 0.0 for mine, of in zip(own, at, strict=True)])
    return found


class SumOfLogProbs:
    """Value estimator that returns Σ log p of the tokens up to the boundary. It is not fitted."""

    space = "log"
    needs_answers = False
    needs_log_probs = True

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return [[sum(one.log_probs[:boundary]) for boundary in one.boundaries] for one in requests]


def candidates() -> list[Candidate]:
    forced = {
        f"{name}, {space}": AnswerLogProbValue(prompt, closing=closing, space=space)
        for name, (prompt, closing, spaces) in FORCE_PROMPTS.items()
        for space in spaces
    }
    more = {
        "the forced answer": AnswerLogProbValue("The answer is ", closing=END),
        '"Wait"': waits,
        "siblings": siblings,
    }
    varied = {name: Varied(names) for name, names in SUBSETS.items()}
    varied |= {f"with {name}": Varied(more=one) for name, one in more.items()}
    return [
        *(Candidate(name, value) for name, value in forced.items()),
        Candidate("outcome", OutcomeValue(num_windows=1), SIZES),
        *(Candidate(f"outcome, {name}", value, SIZES[-1:]) for name, value in varied.items()),
        Candidate("sum of log-probs, not fitted", SumOfLogProbs()),
    ]


def main(task: str, plot: Path | None) -> dict[str, Any]:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    started = time.perf_counter()
    model, train, test, plan = task_of(task)
    checkpoint = Checkpoint(model)
    segmenter = Segmenter(checkpoint.tokenizer, markers=line_starts, min_episode_tokens=1)
    measured, to_fit = choose(test, train, plan)
    settings = {"model": model, "segmentation": "lines"}
    with (
        tempfile.TemporaryDirectory() as folder,
        Reward(arithmetic_reward) as reward,
        open_sampler(checkpoint, batch_size=BATCH) as sampler,
    ):
        study = collect(sampler, reward, measured, to_fit, plan, segmenter, Path(folder), settings)
        sampled = time.perf_counter() - started
        found = {"task": task, **measure(candidates(), study, plan, sampler.model, checkpoint.tokenizer)}
    harness.say("all", {"seconds": time.perf_counter() - started, "of the samples": sampled, **found})
    print(figures.table(found))
    if plot:
        figures.plot(found, plot, title=task)
    return found


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        task={"choices": ("toy", "confident"), "default": "toy"},
        plot={"type": Path, "help": "draw the figures to this file"},
    )
