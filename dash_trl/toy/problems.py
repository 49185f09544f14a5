"""Generates the problems of the toy task: chains of sums and differences of small numbers::

problem 7+5-3 ──► the model writes   7+5=12        ──► reward 1 if the last "The answer is N" is right
                                     12-3=9
                                     The answer is 9
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from datasets import Dataset

from dash_trl.rewards import completion_text

OPERANDS = (3, 4, 5)  # how many numbers a chain has: two to four operations
LARGEST_OPERAND = 9
LARGEST_TOTAL = 20  # the largest running total: about 300 different sums, few enough to learn in half a minute
TEST_SHARE = 8  # one problem in 8 is a test problem, by the hash of its text
SIZES = {"train": 4096, "test": 256}  # numbers of problems
DRAWS = 30  # if this many draws per problem yield too few problems, all problems of the split count as drawn
ANSWER = re.compile(r"The answer is (-?\d+(?:\.\d+)?)")


def split_of(problem: str) -> str:
    """Return the split of a problem, "train" or "test", which depends only on its text."""
    return "test" if hashlib.sha256(problem.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def problems_of(split: str, generator: random.Random, operands: Sequence[int] = OPERANDS) -> Iterator[str]:
    """Yield problems of a split without end, such as `7+5-3+8`; every running total is within 0 … LARGEST_TOTAL.

    Args:
        split: "train" or "test".
        generator: the source of random numbers.
        operands: how many numbers a problem may have.
    """
    while True:
        total = generator.randint(1, LARGEST_OPERAND)
        problem = str(total)
        for _ in range(generator.choice(operands) - 1):
            operand = generator.randint(1, LARGEST_OPERAND)
            sign = generator.choice([sign for sign in (1, -1) if 0 <= total + sign * operand <= LARGEST_TOTAL])
            total += sign * operand
            problem += f"{'+' if sign > 0 else '-'}{operand}"
        if split_of(problem) == split:
            yield problem


def arithmetic_dataset(
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    *,
    operands: Sequence[int] = OPERANDS,
) -> Dataset:
    """Generate a dataset of distinct arithmetic problems.

    Args:
        split: "train" or "test", which are disjoint for all seeds.
        size: number of problems. None = 4,096 for training and 256 for the test.
        seed: seed of the draw.
        operands: how many numbers a problem may have.
    Returns:
        A dataset with the columns `prompt` (one user message) and `answer` (a string).
    Raises:
        ValueError: if the split does not exist, or has fewer distinct problems than `size`.
    """
    if split not in SIZES:
        raise ValueError(f"split={split!r} does not exist. Use 'train' or 'test'.")
    size = SIZES[split] if size is None else size
    chosen: dict[str, None] = {}  # a set that keeps its order
    for problem in islice(problems_of(split, random.Random(f"{split}{seed}"), operands), DRAWS * size):
        chosen[problem] = None
        if len(chosen) == size:
            break
    else:
        raise ValueError(
            f"size={size}: there are only {len(chosen)} distinct problems of {operands} numbers in split={split!r}. "
            "Use a smaller size, or more numbers per problem."
        )
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": problem}] for problem in chosen],
            "answer": [str(sum(map(int, re.findall(r"[+-]?\d+", problem)))) for problem in chosen],
        }
    )


def arithmetic_reward(completions: Sequence[object], answer: Sequence[str], **kwargs: object) -> list[float]:
    """Reward function of TRL's form: 1.0 if the last "The answer is N" of a completion is right, else 0.0."""
    found = [ANSWER.findall(completion_text(completion))[-1:] for completion in completions]
    return [float(last == [str(gold)]) for last, gold in zip(found, answer, strict=True)]
