"""Is V(prefix) worth anything? Against Monte Carlo success on the embedded tasks, where truth is cheap.

    python benchmarks/value_quality.py --json value_quality.json                       # ~2 minutes on one core
    python benchmarks/value_quality.py --task confident --json confident.json        # a model sure of its errors

What `python examples/value_quality` measures, for more values: 4 responses of each of 64 problems (of 32 longer ones
of the second task), cut at their lines; from every boundary K = 32 completions are sampled with the model itself, and
their share of right answers is the truth.
The rows: the boundary's number (the rival); force prompts; `OutcomeValue` by the number of rollouts, of other problems,
that it is fitted to; and, with all of these, by the numbers that it is fitted with.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from confident import LONGEST as CONFIDENT_LONGEST
from confident import confident_dataset, confident_model

from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_model
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
from examples.value_quality.candidates import Candidate, measure
from examples.value_quality.figures import plot, table
from examples.value_quality.study import Plan, choose, collect

BATCH, END = 256, "<|im_end|>"
SIZES = (128, 256, 512, 1024, 2048)
FORCE_PROMPTS = {
    "The answer is N<|im_end|>": ("The answer is ", END),
    "The answer is N": ("The answer is ", ""),
    "Wait, the answer is N": ("Wait, The answer is ", END),
    "=N": ("=", ""),
}
# The numbers that `OutcomeValue` is fitted with, by what is left of them.
SUBSETS = {
    "without entropies": [name for name in FEATURES if "entropies" not in name],
    "without the last episode's": [name for name in FEATURES if "last episode" not in name],
    "confidence only": [name for name in FEATURES if name != "position"],
    "position only": ["position"],
}


@dataclass(frozen=True)
class Task:
    """What is measured: a model, problems to fit values to, and others to measure them on.

    Args:
        measured: how many of the others, for some 1,100 boundaries. longest: tokens of a response.
    """

    model: str
    train: Any
    test: Any
    measured: int
    longest: int


def embedded() -> Task:
    return Task(embedded_model(), arithmetic_dataset("train", 1024), arithmetic_dataset("test"), 64, 64)


def confident() -> Task:
    return Task(confident_model(), confident_dataset("train"), confident_dataset("test"), 32, CONFIDENT_LONGEST)


TASKS = {"embedded": embedded, "confident": confident}


class PartOfOutcomeValue(OutcomeValue):
    """Fitted with some of the numbers only."""

    def __init__(self, names: Sequence[str], **settings: Any):
        super().__init__(**settings)
        self.kept = [FEATURES.index(name) for name in names]

    def _features(self, request: ValueRequest) -> list[list[float]]:
        return [[row[column] for column in self.kept] for row in super()._features(request)]

    def _columns(self, requests: Sequence[ValueRequest]) -> int:
        return len(self.kept)


class WithMore(OutcomeValue):
    """Fitted with one number more per boundary.

    Args:
        more: as a value estimator, (requests, trainer) → that number at each boundary.
    """

    def __init__(self, more: ValueEstimator, **settings: Any):
        super().__init__(**settings)
        self.more = more

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        self._know(requests, trainer)
        return super().__call__(requests, trainer)

    def learn(self, requests: Sequence[ValueRequest], outcomes: Sequence[float], trainer: Any) -> None:
        self._know(requests, trainer)
        super().learn(requests, outcomes, trainer)

    def _know(self, requests: Sequence[ValueRequest], trainer: Any) -> None:
        self.known = dict(zip(map(id, requests), self.more(requests, trainer), strict=True))

    def _features(self, request: ValueRequest) -> list[list[float]]:
        more = self.known[id(request)][1:]
        return [[*row, number] for row, number in zip(super()._features(request), more, strict=True)]

    def _columns(self, requests: Sequence[ValueRequest]) -> int:
        return len(FEATURES) + 1


def waits(requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
    """How often the prefix says "Wait"."""
    (wait,) = trainer._tokenizer("Wait")["input_ids"]
    return [[float(one.completion_ids[:boundary].count(wait)) for boundary in one.boundaries] for one in requests]


def siblings(requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
    """Σ log p of the prefix less that of the other responses to the problem, as far as the same boundary; else 0."""
    sums = SumOfLogProbs()(requests, trainer)
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault(request.prompt_ids, []).append(row)
    found = []
    for row, request in enumerate(requests):
        others = [sums[other] for other in rows[request.prompt_ids] if other != row]
        at = [[one[k] for one in others if len(one) > k] for k in range(len(sums[row]))]
        found.append([own - sum(of) / len(of) if of else 0.0 for own, of in zip(sums[row], at, strict=True)])
    return found


class SumOfLogProbs:
    """Σ log p of the tokens up to the boundary: nothing is fitted."""

    space = "log"
    needs_answers = False
    needs_log_probs = True

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return [[sum(one.log_probs[:boundary]) for boundary in one.boundaries] for one in requests]


def candidates() -> list[Candidate]:
    found = [
        Candidate(f"{name}, log", AnswerLogProbValue(prompt, closing=closing))
        for name, (prompt, closing) in FORCE_PROMPTS.items()
    ]
    name, (prompt, closing) = next(iter(FORCE_PROMPTS.items()))
    by_answer = AnswerLogProbValue(prompt, closing=closing)
    as_probability = AnswerLogProbValue(prompt, closing=closing, space="probability")
    found.insert(1, Candidate(f"{name}, probability", as_probability))
    found.append(Candidate("outcome", OutcomeValue(num_windows=1), SIZES))
    for name, names in SUBSETS.items():
        found.append(Candidate(f"outcome, {name}", PartOfOutcomeValue(names, num_windows=1), SIZES[-1:]))
    for name, more in {"the forced answer": by_answer, '"Wait"': waits, "siblings": siblings}.items():
        found.append(Candidate(f"outcome, with {name}", WithMore(more, num_windows=1), SIZES[-1:]))
    return [*found, Candidate("sum of log-probs, not fitted", SumOfLogProbs())]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--task", choices=TASKS, default="embedded")
    parser.add_argument("--plot", type=Path, help="draw the figures to this file")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    started = time.perf_counter()
    task = TASKS[arguments.task]()
    checkpoint = Checkpoint(task.model)
    segmenter = Segmenter(checkpoint.tokenizer, markers=line_starts, min_episode_tokens=1)
    plan = Plan(task.measured, fit_rollouts=SIZES, max_completion_length=task.longest, shortest=1)
    measured, to_fit = choose(task.test, task.train, plan)
    settings = {"model": task.model, "segmentation": "lines"}
    with (
        tempfile.TemporaryDirectory() as folder,
        Reward(arithmetic_reward) as reward,
        open_sampler(checkpoint, batch_size=BATCH) as sampler,
    ):
        study = collect(sampler, reward, measured, to_fit, plan, segmenter, Path(folder), settings)
        sampled = time.perf_counter() - started
        found = {"task": arguments.task, **measure(candidates(), study, plan, sampler.model, checkpoint.tokenizer)}
    print(f"\n{found['responses']} responses, {found['boundaries']} boundaries, mean success {found['mean_truth']:.3f}")
    print(table(found["estimators"]))
    print(f"{sampled:.0f} s for the samples, {time.perf_counter() - started:.0f} s in all")
    harness.write(arguments.json, found)
    if arguments.plot:
        plot(found, arguments.plot, title=arguments.task)


if __name__ == "__main__":
    main()
