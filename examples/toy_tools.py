"""Toy problems for a calculator: sums and differences of three-digit numbers, too hard for the tiny model itself.

    problem 512-91+204 ──► the model calls   calculator(expression="512-91")   ──► the tool answers   421
                                             calculator(expression="421+204")                         625
                           and writes        The answer is 625                 ──► reward 1 if that is right

The warm-up also teaches the model two errors: to guess the answer, and to call the calculator with a wrong number.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset
from transformers.utils import get_json_schema

from dash_trl.toy import Lessons, WarmUp, arithmetic_tokenizer
from dash_trl.toy.problems import TEST_PROBLEMS, TRAIN_PROBLEMS, split_of

OPERANDS = (2, 3)  # numbers in a chain: one or two calls
SMALLEST, LARGEST = 100, 999  # range of the numbers and of every running total
LONGEST_EXPRESSION = 100  # characters


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as 3*(512-91).
    """
    # Digits and these operators can do no harm, but powers could take forever.
    if not re.fullmatch(r"[\d\s.+\-*/()]+", expression) or "**" in expression or len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"not an expression: {expression[:LONGEST_EXPRESSION]}")
    return str(eval(expression, {"__builtins__": {}}))


def noisy_calculator() -> Any:
    """Returns a tool with the calculator's name and description that answers with a random number."""

    def noise(expression: str) -> str:
        return str(random.randint(SMALLEST, LARGEST))

    noise.__name__, noise.__doc__ = calculator.__name__, calculator.__doc__
    return noise


def _problems(split: str, generator: random.Random, operands: Sequence[int] = OPERANDS) -> Iterator[str]:
    """Yields random chains of a split, such as `512-91+204`, without end."""
    while True:
        total = generator.randint(SMALLEST, LARGEST)
        problem = str(total)
        for _ in range(generator.choice(operands) - 1):
            following = total
            while abs(following - total) < SMALLEST:
                following = generator.randint(SMALLEST, LARGEST)
            problem += f"{following - total:+d}"
            total = following
        if split_of(problem) == split:
            yield problem


def calculator_dataset(split: str = "train", size: int | None = None, seed: int = 0) -> Dataset:
    """Returns problems with the columns of `arithmetic_dataset`: `prompt` (one user message) and `answer` (a string).

    Args:
        split: "train" or "test". A problem's text decides its split, so the two are disjoint for all seeds.
        size: number of problems; by default 4,096 for training and 256 for the test.
        seed: another seed draws other problems of the same split.
    """
    size = size if size is not None else (TEST_PROBLEMS if split == "test" else TRAIN_PROBLEMS)
    problems = list(islice(_problems(split, random.Random(f"{split}{seed}")), size))
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": problem}] for problem in problems],
            "answer": [calculator(problem) for problem in problems],
        }
    )


def _call(expression: str) -> dict[str, Any]:
    function = {"name": calculator.__name__, "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is {number}"}


def _solution(problem: str, generator: random.Random, guess_rate: float, slip_rate: float) -> list[dict[str, Any]]:
    """Returns the messages of a solution: a call and its result for each operation, then the answer.

    Args:
        problem: a chain of numbers.
        generator: random numbers.
        guess_rate: probability that the solution ends with a random answer in place of a call.
        slip_rate: probability that a call has a random number in place of the problem's number.
    """
    total, *operations = re.findall(r"[+-]?\d+", problem)
    messages: list[dict[str, Any]] = []
    for operation in operations:
        fate = generator.random()
        if fate < guess_rate:
            total = str(generator.randint(SMALLEST, LARGEST))
            break
        if fate < guess_rate + slip_rate:
            operation = operation[0] + str(generator.randint(SMALLEST, LARGEST))
        expression = f"{total}{operation}"
        total = calculator(expression)
        messages += [_call(expression), {"role": "tool", "name": calculator.__name__, "content": total}]
    return [*messages, _answer(total)]


CALCULATOR_WARM_UP = WarmUp(steps=500, clean_share=0.7, slip_rate=0.5, wait_rate=0.05)
CALCULATOR_LESSONS = Lessons(
    "calculator",
    lambda: arithmetic_tokenizer(["The answer is", "calculator(expression)", "calculator\nexpression"], tools=True),
    lambda generator, settings: _problems("train", generator),
    _solution,
    (get_json_schema(calculator),),
)
