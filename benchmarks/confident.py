"""The task of confident errors: the chains of the toy task, with a model that gives its errors a high probability.

    python benchmarks/confident.py          # makes the model and checks this property; ~2 minutes on 2 cores

The model writes each step in one of two equally likely forms, `7+5=12` or `7+5:12`. For seven of the 18 operations,
such as +5, it writes a wrong number with p ≈ 1 in one form, and the right number in the other. So log-probs and
entropies are the same on wrong and on right lines, and a value that is computed from them has no information. The
policy has to learn which form to avoid for each of these operations.
"""

import hashlib
import random
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import harness
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.evaluation import LocalSampler, prompt_ids
from dash_trl.process_rewards import ValueRequest
from dash_trl.toy import WarmUp, arithmetic_dataset, arithmetic_reward, toy_model
from dash_trl.toy.warm_up import ARITHMETIC
from examples.value_quality.candidates import with_log_probs

FORMS = "=:"
OPERANDS = (7, 8, 9)
LONGEST = 112
WARM_UP = WarmUp(operands=OPERANDS, steps=800, slip_rate=0.0, wait_rate=0.0, num_heads=4)
# operation → the form that goes wrong
TRAPS = {"+2": "=", "+4": ":", "+5": ":", "+9": "=", "-3": ":", "-6": "=", "-8": ":"}
MORE_TRAPS = TRAPS | {"+1": ":", "+7": "=", "-1": "=", "-5": ":"}  # of "unsolved" in `credit_tasks.py`
WRONG = (9, 10, 11)  # in the middle of 0 … 20, so that the model knows all sums that may follow


def trap(left: str, right: int, traps: Mapping[str, str] = TRAPS) -> tuple[str, int] | None:
    """Returns (form, wrong number) of a sum such as `7+5`; None if both forms lead to the right number."""
    operation = left[-2:]
    if operation not in traps:
        return None
    wrong = [number for number in WRONG if number != right]
    return traps[operation], wrong[hashlib.sha256(left.encode()).digest()[0] % len(wrong)]


def solution(
    problem: str, generator: random.Random, slip_rate: float, wait_rate: float, traps: Mapping[str, str] = TRAPS
) -> str:
    """Returns a solution in which each sum has a form by chance, and so the wrong number in half of the traps."""
    first, *operations = re.findall(r"[+-]?\d+", problem)
    total, written = int(first), []
    for operation in operations:
        left, form, result = f"{total}{operation}", generator.choice(FORMS), total + int(operation)
        wrong_form, wrong = trap(left, result, traps) or (None, None)
        total = wrong if form == wrong_form else result
        written.append(f"{left}{form}{total}")
    return "\n".join([*written, f"The answer is {total}"])


LESSONS = replace(ARITHMETIC, name="confident", solution=solution)


def confident_dataset(split: str, size: int | None = None, seed: int = 0) -> Dataset:
    """Returns chains of 7 to 9 numbers, see `arithmetic_dataset`."""
    return arithmetic_dataset(split, size, seed, operands=OPERANDS)


def confident_model() -> str:
    """Returns the directory of the model, which is made on the first call."""
    return toy_model(settings=WARM_UP, lessons=LESSONS)


def main() -> dict[str, Any]:
    """Measures the log-probs and entropies of right and of wrong sampled lines, as means over a line's tokens."""
    path = confident_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rows = confident_dataset("test", 128)
    drawn = LocalSampler(model, tokenizer, batch_size=256).sample(
        rows["prompt"], num_samples=4, max_completion_length=LONGEST
    )
    samples = [(rows[index], sample) for index, of_one in drawn for sample in of_one]
    right = arithmetic_reward([sample.text for _, sample in samples], [row["answer"] for row, _ in samples])

    asked = [
        ValueRequest(tuple(prompt_ids(row["prompt"], tokenizer)), tuple(sample.token_ids), (0,))
        for row, sample in samples
    ]
    figures: dict[str, list[tuple[float, float]]] = {"right": [], "wrong": []}
    for one in with_log_probs(asked, model, temperature=1.0):
        ends = [end for end, token in enumerate(one.completion_ids, start=1) if tokenizer.decode([token]) == "\n"]
        for start, end in pairwise([0, *ends]):
            line = tokenizer.decode(one.completion_ids[start : end - 1])
            if step := re.fullmatch(rf"(-?\d+)([+-]\d+)[{FORMS}](-?\d+)", line):
                name = "right" if int(step[1]) + int(step[2]) == int(step[3]) else "wrong"
                figures[name].append(
                    (statistics.mean(one.log_probs[start:end]), statistics.mean(one.entropies[start:end]))
                )
    results = {
        name: {
            "lines": len(found),
            "log_prob": statistics.mean(log_prob for log_prob, _ in found),
            "entropy": statistics.mean(entropy for _, entropy in found),
        }
        for name, found in figures.items()
    }
    for name, row in results.items():
        harness.say(f"{name} lines", row)
    apart = max(abs(results["right"][side] - results["wrong"][side]) for side in ("log_prob", "entropy"))
    if apart > 0.05:
        raise SystemExit(f"Right and wrong lines are {apart:.3f} nats apart: the errors are not confident.")
    return {"accuracy": statistics.mean(right), **results}


if __name__ == "__main__":
    harness.run(main, __doc__)
