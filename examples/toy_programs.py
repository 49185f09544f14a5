"""Toy programming problems in the form of MBPP: the prompt gives two values of a one-line function to write.

    problem f(0) == 37   ──► the model writes   def f(x): return x + 37   ──► reward 1 if all five tests pass
            f(1) == 38

The two values are also tests; the other three tests are hidden.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from datasets import Dataset

from dash_trl.toy import Lessons, WarmUp, arithmetic_tokenizer, toy_model
from dash_trl.toy.problems import SIZES, split_of

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
CONSTANTS = range(2, 100)
SHOWN = (0, 1)
HIDDEN = (2, 7, 50)
PROGRAM = "def f(x): return x {operator} {constant}"
PROGRAM_WARM_UP = WarmUp(steps=400, clean_share=0.8, slip_rate=0.2, wait_rate=0.0)


def _tests(operator: str, constant: int, arguments: Sequence[int], template: str) -> list[str]:
    return [template.format(x, OPERATORS[operator](x, constant)) for x in arguments]


# The text of each problem → its function.
FUNCTIONS = {
    "\n".join(_tests(operator, constant, SHOWN, "f({}) == {}")): (operator, constant)
    for operator in OPERATORS
    for constant in CONSTANTS
}


def _functions(split: str, generator: random.Random) -> Iterator[str]:
    """Yields random problems of a split, without end."""
    problems = [problem for problem in FUNCTIONS if split_of(problem) == split]
    while True:
        yield generator.choice(problems)


def program_dataset(
    split: str = "train", size: int | None = None, seed: int = 0, *, completion: bool = False
) -> Dataset:
    """Return problems with `prompt` (one user message), and with `tests` (asserts) and `entry_point` for `CodeReward`.

    Args:
        split: "train" or "test". A problem's text decides its split, so the two are disjoint for all seeds.
        size: number of problems, which may repeat; by default 4,096 for training and 256 for the test.
        seed: another seed draws other problems of the same split.
        completion: add a column `completion` (one message by the assistant), with a program that passes the tests.
    """
    size = SIZES[split] if size is None else size
    problems = list(islice(_functions(split, random.Random(f"{split}{seed}")), size))
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": problem}] for problem in problems],
        "tests": [_tests(*FUNCTIONS[problem], (*SHOWN, *HIDDEN), "assert f({}) == {}") for problem in problems],
        "entry_point": ["f"] * size,
    }
    if completion:
        programs = [_program(*FUNCTIONS[problem]) for problem in problems]
        columns["completion"] = [[{"role": "assistant", "content": program}] for program in programs]
    return Dataset.from_dict(columns)


def _program(operator: str, constant: int) -> str:
    return PROGRAM.format(operator=operator, constant=constant)


def _solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    """Return a program that solves the problem, or with probability `slip_rate` another program."""
    function = FUNCTIONS[problem]
    if generator.random() < slip_rate:
        function = generator.choice([other for other in FUNCTIONS.values() if other != function])
    return _program(*function)


PROGRAM_LESSONS = Lessons(
    "programs",
    lambda: arithmetic_tokenizer([PROGRAM, "f() =="]),
    partial(_functions, "train"),
    _solution,
)

program_model = partial(toy_model, settings=PROGRAM_WARM_UP, lessons=PROGRAM_LESSONS)
