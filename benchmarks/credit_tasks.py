"""Tasks, methods and true values for `credit_learning.py`."""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from confident import FORMS, LESSONS, LONGEST, MORE_TRAPS, OPERANDS, solution, trap
from confident import WARM_UP as CONFIDENT
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import selective_log_softmax
from value_quality import SumOfLogProbs

from dash_trl import ProcessRewardCallback
from dash_trl.process_rewards import (
    AnswerLogProbValue,
    CreditSettings,
    MonteCarloValue,
    OutcomeValue,
    ValueEstimator,
    ValueRequest,
    line_starts,
)
from dash_trl.toy import WarmUp, arithmetic_reward, toy_model
from dash_trl.toy.tokenizer import END_OF_TURN
from dash_trl.toy.warm_up import ARITHMETIC, Lessons
from dash_trl.update import evaluating

WARM_UP = WarmUp(operands=OPERANDS, steps=500, slip_rate=0.06, wait_rate=0.03, num_heads=4)
SAMPLES = 2  # samples of each held-out problem
EASY = (3, 4)
UNSOLVED = replace(CONFIDENT, operands=EASY + OPERANDS)
PADDED_OPERANDS = (4, 5, 6)
PADDED = WarmUp(operands=PADDED_OPERANDS, steps=500, slip_rate=0.1, wait_rate=0.03, num_heads=4)
PADDING = 0.4  # probability of one more repetition of a line


@dataclass(frozen=True)
class Task:
    """A task of the study.

    Args:
        warm_up: settings of the model's warm-up.
        success: probability that the untrained model writes a right line where it may fail.
        fallible: takes a sum such as `7+5` and its result; returns a false value if the untrained model always gets it
            right.
        lessons: what the model learns in the warm-up.
        reward: the reward function of training and of all measurements.
        forms: characters that may stand between a sum and its result.
        operands: how many numbers a problem may have.
        easy: the same for the easy held-out problems; empty = there are none.
        longest: largest number of tokens of a completion.
        steps: number of optimizer steps of a run. Confident errors take longer to unlearn.
        warm_up_steps: number of steps in which the learning rate rises. Without them, some seeds of the tasks that have
            them lose half of what the model has learned before.
        samples_at_end: samples of each held-out problem in the last measurement.
        learning_rates: the learning rates to choose from. At 8e-4, 19 of 20 runs on "slips" and "confident"
            end below an accuracy of 0.1.
        seeds: the seeds that are reported.
        methods: the default methods.
        preregistered: the pairs (measure, gain) of the first method over "outcome only" that were fixed beforehand, so
            these intervals are not corrected for the other comparisons.
    """

    warm_up: WarmUp
    success: float
    fallible: Callable[[str, int], object] = lambda left, right: True
    lessons: Lessons = ARITHMETIC
    reward: Callable[..., list[float]] = arithmetic_reward
    forms: str = "="
    operands: tuple[int, ...] = OPERANDS
    easy: tuple[int, ...] = ()
    longest: int = LONGEST
    steps: int = 60
    warm_up_steps: int = 0
    samples_at_end: int = SAMPLES
    learning_rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    methods: tuple[str, ...] = ()
    preregistered: tuple[tuple[str, str], ...] = ()

    def model(self) -> str:
        """Returns the directory of the warmed-up model, which is made on the first call."""
        return toy_model(settings=self.warm_up, lessons=self.lessons)


FITTED = (
    "centered_return, anchored, auto",
    "centered_return, anchored",
    "gae",
    "centered_return, true V, anchored",
)


def right_solution(problem: str, form: str = "=") -> str:
    return str(ARITHMETIC.solution(problem, random.Random(0), 0.0, 0.0)).replace("=", form)


def whole_solution_reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    """A reward function: 1.0 if every line of a completion is right, else 0.0. So a lucky number earns nothing."""
    pairs = zip(prompts, completions, strict=True)
    return [
        float(one[-1]["content"].replace(":", "=") == right_solution(prompt[-1]["content"])) for prompt, one in pairs
    ]


def padded_solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    """Returns a solution of the warm-up in which each line, right or wrong, may be repeated once or more."""
    *lines, answer = ARITHMETIC.solution(problem, generator, slip_rate, wait_rate).split("\n")
    padded = []
    for line in lines:
        padded.append(line)
        while generator.random() < PADDING:
            padded.append("Wait, " + line.removeprefix("Wait, "))
    return "\n".join([*padded, answer])


TASKS = {
    "slips": Task(WARM_UP, 0.82, methods=FITTED),
    "confident": Task(
        CONFIDENT,
        0.5,
        trap,
        LESSONS,
        forms=FORMS,
        steps=120,
        warm_up_steps=10,
        samples_at_end=8,
        methods=FITTED,
    ),
    "unsolved": Task(
        UNSOLVED,
        0.5,
        lambda left, right: trap(left, right, MORE_TRAPS),
        replace(LESSONS, name="unsolved", solution=partial(solution, traps=MORE_TRAPS)),
        reward=whole_solution_reward,
        forms=FORMS,
        easy=EASY,
        warm_up_steps=10,
        samples_at_end=8,
        learning_rates=(2e-4, 4e-4),
        seeds=tuple(range(8)),
        methods=(
            "episode, policy's V, anchored",
            "episode, Monte Carlo (2), anchored",
            "episode, anchored, auto",
            "episode, true V, anchored",
            "episode, forced answer",
        ),
        preregistered=(("accuracy", "paired_gain"),),
    ),
    "padded": Task(
        PADDED,
        0.76,
        lessons=replace(ARITHMETIC, name="padded", solution=padded_solution),
        operands=PADDED_OPERANDS,
        longest=160,  # with 112, 5 % of the warm-up's own solutions would be truncated, and all methods paid to shorten
        warm_up_steps=10,
        samples_at_end=8,
        learning_rates=(1e-4,),
        seeds=tuple(range(16)),
        methods=("episode, forced answer, solved groups too", "centered_return, anchored, auto"),
        preregistered=(("tokens", "paired_gain"), ("accuracy", "paired_gain")),
    ),
}


class TrueValue:
    """Value estimator with the true V(prefix) of the untrained model. With it, methods differ only in their credit.

    V is the product of the success probabilities of the remaining steps; 0 after a mistake that was not corrected.
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
        fallible = sum(bool(self.task.fallible(f"{total}{operation}", result)) for total, operation, result in to_go)
        return self.task.success**fallible if right else 0.0


class PolicyValue:
    """Value estimator with V(prefix) of the current policy for `whole_solution_reward`.

    V is the policy's probability of the remaining right lines, 0 after a mistake. A line has two right forms; their
    probabilities come from two passes over the right solutions, one per form. This is exact up to the influence of the
    forms of earlier lines. Boundaries are at the ends of lines.
    """

    space = "probability"
    needs_answers = False

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        problems = {one.prompt_ids: one.example["prompt"][-1]["content"] for one in requests}
        by_form = [self._lines(problems, form, trainer) for form in FORMS]
        chances = {}
        for prompt in problems:
            *steps, answer = zip(*(lines[prompt] for lines in by_form), strict=True)
            chances[prompt] = [*map(sum, steps), sum(answer) / len(answer)]  # only steps have a form
        values = []
        for one in requests:
            right = right_solution(problems[one.prompt_ids]) + END_OF_TURN
            so_far = [trainer._tokenizer.decode(one.completion_ids[:end]).replace(":", "=") for end in one.boundaries]
            values.append(
                [
                    math.prod(chances[one.prompt_ids][prefix.count("\n") :]) if right.startswith(prefix) else 0.0
                    for prefix in so_far
                ]
            )
        return values

    def _lines(
        self, problems: dict[tuple[int, ...], str], form: str, trainer: Any
    ) -> dict[tuple[int, ...], list[float]]:
        """Returns the probability of each line of the right solutions in this form, after the lines before it."""
        tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
        texts = [right_solution(problem, form) + END_OF_TURN for problem in problems.values()]
        right = dict(zip(problems, tokenizer(texts)["input_ids"], strict=True))
        rows = [torch.tensor([*prompt, *ids]) for prompt, ids in right.items()]
        ids = pad_sequence(rows, batch_first=True)  # padding is on the right: with causal attention, no token sees it
        with torch.no_grad(), evaluating(model):
            log_probs = selective_log_softmax(model(ids).logits[:, :-1].float(), ids[:, 1:]).double()
        found = {}
        for row, (prompt, own) in zip(log_probs, right.items(), strict=True):
            ends = [end for end, token in enumerate(own, start=1) if tokenizer.decode([token]) == "\n"]
            lines = row[len(prompt) - 1 : len(prompt) - 1 + len(own)].tensor_split(ends)
            found[prompt] = [math.exp(line.sum()) for line in lines]
        return found


class Shuffled(OutcomeValue):
    """`OutcomeValue` fitted to outcomes permuted within their groups, so it learns only how hard a problem is."""

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
    """`OutcomeValue` that computes V(b_k) from the tokens before b_{k−1}; V(b_1) is missing."""

    def _features(self, request: ValueRequest) -> list[list[float]]:
        rows = super()._features(request)
        return [[math.nan] * len(rows[0]), *rows[:-1]] if rows else []


def by_log_prob(task: Task, space: str = "log") -> AnswerLogProbValue:
    return AnswerLogProbValue("The answer is ", closing=END_OF_TURN, space=space)


def credit(
    estimator: str, value: Callable[[Task], ValueEstimator] = lambda task: OutcomeValue(), **others: Any
) -> Callable[[Task], ProcessRewardCallback]:
    return lambda task: ProcessRewardCallback(
        value(task), estimator=estimator, markers=line_starts, min_episode_tokens=1, **others
    )


AUTO, ONE = CreditSettings(process_weight="auto"), CreditSettings(process_weight=1.0)
# For a true V: with "centered_return" the advantage is outcome − V, with "episode" VinePPO's (V_k − V_{k−1}).
VINE = CreditSettings(outcome_weight=0.0, process_weight=1.0)
METHODS: dict[str, Callable[[Task], ProcessRewardCallback] | None] = {
    "outcome only": None,
    "centered_return, anchored, auto": credit("centered_return", settings=AUTO),
    "centered_return, anchored": credit("centered_return", settings=ONE, anchored=True),
    "gae": credit("gae"),
    "centered_return, true V, anchored": credit("centered_return", TrueValue, settings=VINE, anchored=True),
    "centered_return": credit("centered_return", settings=ONE, anchored=False),
    "episode": credit("episode", settings=ONE, anchored=False),
    "episode, anchored": credit("episode", settings=ONE, anchored=True),
    "centered_return, true V": credit("centered_return", TrueValue),
    "episode, policy's V, anchored": credit("episode", lambda task: PolicyValue(), settings=VINE, anchored=True),
    "episode, true V, anchored": credit("episode", TrueValue, settings=VINE, anchored=True),
    "episode, anchored, auto": credit("episode", settings=AUTO),
    "episode, Monte Carlo (2), anchored": credit(
        "episode", lambda task: MonteCarloValue(num_rollouts=2), settings=VINE, anchored=True
    ),
    "centered_return, shuffled": credit("centered_return", lambda task: Shuffled()),
    "centered_return, Σ log p": credit("centered_return", lambda task: SumOfLogProbs()),
    "centered_return, without own tokens": credit("centered_return", lambda task: WithoutOwnTokens()),
    "episode, true V": credit("episode", TrueValue),
    "gae, true V": credit("gae", TrueValue),
    "gae, λ = 1": credit("gae", settings=CreditSettings(lam=1.0)),
    "centered_return, forced answer": credit("centered_return", by_log_prob),
    "grpo_process, forced answer": credit("grpo_process", by_log_prob),
    "episode, forced answer": credit("episode", by_log_prob),
    "episode, forced answer, solved groups too": credit("episode", by_log_prob, skip_solved=False),
    "centered_return, forced answer, weight 0.3": credit(
        "centered_return", by_log_prob, settings=CreditSettings(process_weight=0.3)
    ),
    "centered_return, forced answer, probability": credit(
        "centered_return", lambda task: by_log_prob(task, "probability")
    ),
    "episode, forced answer, probability": credit("episode", lambda task: by_log_prob(task, "probability")),
}
