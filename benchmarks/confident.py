"""A task whose errors are confident: chains as of the embedded task, by a model that is sure where it is wrong.

    python benchmarks/confident.py          # makes the model, and checks that it is so; ~2 minutes on 2 cores

Each step is written in one of two equally likely forms, `7+5=12` or `7+5:12`. For some sums one of them always leads to
one wrong number: right after the other sign, at p ≈ 1. So neither the log-probs nor the entropies of a line tell a
wrong one from a right one; a value that is made of them has nothing to go by. What the policy has to learn is which
form of which sum to avoid.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")


from dash_trl.embedded import WarmUp, embedded_model
from dash_trl.embedded.warm_up import ARITHMETIC

FORMS = "=:"
OPERANDS = (7, 8, 9)
LONGEST = 112
# `slip_rate` is the share of wrong steps: of twice as many sums, one form of two is wrong.
WARM_UP = WarmUp(operands=OPERANDS, steps=1000, slip_rate=0.18, wait_rate=0.0, num_heads=4, clean_share=0.0)
WRONG = (9, 10, 11)  # in the middle of 0 … 20: what is added to them stays within the sums that the model knows


def trap(left: str, right: int, share: float = 2 * WARM_UP.slip_rate) -> tuple[str, int] | None:
    """(form, wrong number) of a sum like `7+5` that has a form which leads to a wrong number."""
    digest = hashlib.sha256(left.encode()).digest()
    if digest[0] >= 256 * share:
        return None
    wrong = [number for number in WRONG if number != right]
    return FORMS[digest[1] % 2], wrong[digest[2] % len(wrong)]


def lines(text: str, problem: str) -> Iterator[tuple[str, bool]]:
    """(line, whether its sum is right) of each step of a solution."""
    for line in text.split("\n"):
        if step := re.fullmatch(rf"(-?\d+)([+-]\d+)[{FORMS}](-?\d+)", line):
            yield line, int(step[1]) + int(step[2]) == int(step[3])


def _solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    first, *operations = re.findall(r"[+-]?\d+", problem)
    total, written = int(first), []
    for operation in operations:
        left, form, result = f"{total}{operation}", generator.choice(FORMS), total + int(operation)
        caught = trap(left, result, 2 * slip_rate)
        if caught is not None and caught[0] == form:
            result = caught[1]
        written.append(f"{left}{form}{result}")
        total = result
    return "\n".join([*written, f"The answer is {total}"])


def confident_model() -> str:
    """The directory of the model, made on the first call."""
    return embedded_model(settings=WARM_UP, lessons=replace(ARITHMETIC, name="confident", solution=_solution))
