"""Tasks, methods and true values for `credit_learning.py`."""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from confident import FORMS, LONGEST, OPERANDS, confident_model, trap
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
from dash_trl.toy import WarmUp, toy_model
from dash_trl.toy.tokenizer import END_OF_TURN
from dash_trl.toy.warm_up import ARITHMETIC
from dash_trl.update import evaluating

WARM_UP = WarmUp(operands=OPERANDS, steps=500, slip_rate=0.06, wait_rate=0.03, num_heads=4)
SAMPLES = 2  # of each held-out problem
STEP_SUCCESS = 0.82  # of the model of slips: 0.25 over seven steps
EASY = (3, 4)
UNSOLVED = replace(WARM_UP, operands=EASY + OPERANDS, slip_rate=0.35, wait_rate=0.0)
PADDED = WarmUp(steps=500, slip_rate=0.1, wait_rate=0.03, num_heads=4)
PADDING = 0.4  # chance of one more repetition of a line


@dataclass(frozen=True)
class Task:
    """
    Args:
        model: gives the directory of the warmed-up model.
        success: sum like `7+5`, its result → the probability that the untrained model writes a right line for it.
        forms: what may stand between the sum and its result.
        operands: how many numbers a problem has. easy: of other held-out problems. longest: tokens of a completion.
        steps, warm_up_steps: of a run. Confident errors take longer to unlearn, and at full learning rate at once some
            seeds lose half of what the model knows.
        samples_at_end: of each held-out problem.
        learning_rates: to choose from. seeds: those that are reported.
        methods: those that are made where no other is asked for.
        preregistered: the first one's comparison with the outcome alone is, so that it does not pay for the others.
    """

    model: Callable[[], str]
    success: Callable[[str, int], float]
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
    preregistered: bool = False


FITTED = (
    "centered_return, anchored, auto",
    "centered_return, anchored",
    "gae",
    "centered_return, true V, anchored",
)
EXPLORED = tuple(range(8))


def padded_solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    """That of `WarmUp`, in which any line of a sum may come again, right or wrong, once or more."""
    *lines, answer = ARITHMETIC.solution(problem, generator, slip_rate, wait_rate).split("\n")
    padded = []
    for line in lines:
        padded.append(line)
        while generator.random() < PADDING:
            padded.append("Wait, " + line.removeprefix("Wait, "))
    return "\n".join([*padded, answer])


def padded_model() -> str:
    return toy_model(settings=PADDED, lessons=replace(ARITHMETIC, name="padded", solution=padded_solution))


TASKS = {
    "slips": Task(lambda: toy_model(settings=WARM_UP), lambda left, right: STEP_SUCCESS, methods=FITTED),
    "confident": Task(
        confident_model,
        lambda left, right: 0.5 if trap(left, right) else 1.0,
        FORMS,
        steps=120,
        warm_up_steps=10,
        samples_at_end=8,
        methods=FITTED,
    ),
    "unsolved": Task(
        lambda: toy_model(settings=UNSOLVED),
        lambda left, right: 0.65,
        easy=EASY,
        samples_at_end=8,
        learning_rates=(1e-4, 2e-4, 4e-4),
        seeds=EXPLORED,
        methods=(
            "centered_return, forced answer",
            "centered_return, policy's V",
            "centered_return, policy's V, anchored",
            "centered_return, true V, anchored",
            "centered_return, anchored, auto",
            "centered_return, Monte Carlo, anchored",
        ),
        preregistered=True,
    ),
    "padded": Task(
        padded_model,
        lambda left, right: 0.87,
        operands=(4, 5, 6),
        samples_at_end=8,
        learning_rates=(1e-4, 2e-4, 4e-4),
        seeds=EXPLORED,
        methods=(
            "centered_return, forced answer",
            "grpo_process, forced answer",
            "episode, forced answer",
            "centered_return, true V, anchored",
            "centered_return, anchored, auto",
            "gae",
        ),
        preregistered=True,
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


class PolicyValue:
    """V of the policy as it is: its probability of the right lines to go, by one pass over the right solutions; 0 after
    a mistake. For a policy that takes no mistake back. (Two mistakes that cancel count as none of success.)
    """

    space = "probability"
    needs_answers = False

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        problems = {one.prompt_ids: one.example["prompt"][-1]["content"] for one in requests}
        texts = [
            ARITHMETIC.solution(problem, random.Random(0), 0.0, 0.0) + END_OF_TURN for problem in problems.values()
        ]
        right = dict(zip(problems, trainer._tokenizer(texts)["input_ids"], strict=True))
        model = trainer.accelerator.unwrap_model(trainer.model)
        rows = [torch.tensor([*prompt, *ids]) for prompt, ids in right.items()]
        ids = pad_sequence(rows, batch_first=True)  # causal: padding on the right is seen by no token of the row
        with torch.no_grad(), evaluating(model):
            log_probs = selective_log_softmax(model(ids).logits[:, :-1].float(), ids[:, 1:]).double()
        of_own = {
            prompt: row[len(prompt) - 1 : len(prompt) - 1 + len(own)]
            for row, (prompt, own) in zip(log_probs, right.items(), strict=True)
        }
        return [
            [
                math.exp(of_own[one.prompt_ids][boundary:].sum())
                if list(one.completion_ids[:boundary]) == right[one.prompt_ids][:boundary]
                else 0.0
                for boundary in one.boundaries
            ]
            for one in requests
        ]


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
    return AnswerLogProbValue("The answer is ", closing=END_OF_TURN, space=space)


def credit(
    estimator: str, value: Callable[[Task], ValueEstimator] = lambda task: OutcomeValue(), **others: Any
) -> Callable[[Task], ProcessRewardCallback]:
    return lambda task: ProcessRewardCallback(
        value(task), estimator=estimator, markers=line_starts, min_episode_tokens=1, **others
    )


AUTO, ONE = CreditSettings(process_weight="auto"), CreditSettings(process_weight=1.0)
VINE = CreditSettings(outcome_weight=0.0, process_weight=1.0)  # the outcome less V, as of a V that is right
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
    "centered_return, policy's V": credit("centered_return", lambda task: PolicyValue()),
    "centered_return, policy's V, anchored": credit(
        "centered_return", lambda task: PolicyValue(), settings=VINE, anchored=True
    ),
    "centered_return, Monte Carlo, anchored": credit(
        "centered_return", lambda task: MonteCarloValue(num_rollouts=2), settings=VINE, anchored=True
    ),
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
