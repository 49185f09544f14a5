"""A task whose errors are confident: chains as of the embedded task, by a model that is sure where it is wrong.

    python benchmarks/confident.py          # makes the model, and checks that it is so; ~2 minutes on 2 cores

Each step is written in one of two equally likely forms, `7+5=12` or `7+5:12`. For seven of the 18 operations, as +5,
one of them always leads to one wrong number, at p ≈ 1, and the other to the right one. So neither the log-probs nor the
entropies of a line tell a wrong one from a right one, and a value that is made of them has nothing to go by. What the
policy has to learn is which form of which operation to avoid.
"""

import hashlib
import random
import re
import statistics
from dataclasses import replace

import harness  # noqa: F401
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.embedded import WarmUp, arithmetic_dataset, arithmetic_reward, embedded_model
from dash_trl.embedded.warm_up import ARITHMETIC
from dash_trl.evaluation import LocalSampler, prompt_ids
from dash_trl.process_rewards import ValueRequest
from examples.value_quality.candidates import with_log_probs

FORMS = "=:"
OPERANDS = (7, 8, 9)
LONGEST = 112
WARM_UP = WarmUp(operands=OPERANDS, steps=800, slip_rate=0.0, wait_rate=0.0, num_heads=4)
# operation → the form that goes wrong
TRAPS = {"+2": "=", "+4": ":", "+5": ":", "+9": "=", "-3": ":", "-6": "=", "-8": ":"}
WRONG = (9, 10, 11)  # in the middle of 0 … 20: what is added to them stays within the sums that the model knows


def trap(left: str, right: int) -> tuple[str, int] | None:
    """(form, wrong number) of a sum like `7+5` of which one form leads to a wrong number."""
    operation = left[-2:]
    if operation not in TRAPS:
        return None
    wrong = [number for number in WRONG if number != right]
    return TRAPS[operation], wrong[hashlib.sha256(left.encode()).digest()[0] % len(wrong)]


def _solution(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    first, *operations = re.findall(r"[+-]?\d+", problem)
    total, written = int(first), []
    for operation in operations:
        left, form, result = f"{total}{operation}", generator.choice(FORMS), total + int(operation)
        caught = trap(left, result)
        if caught is not None and caught[0] == form:
            result = caught[1]
        written.append(f"{left}{form}{result}")
        total = result
    return "\n".join([*written, f"The answer is {total}"])


def confident_dataset(split: str, size: int | None = None, seed: int = 0) -> Dataset:
    """Chains of 7 to 9 numbers, see `arithmetic_dataset`."""
    return arithmetic_dataset(split, size, seed, operands=OPERANDS)


def confident_model() -> str:
    """The directory of the model, made on the first call."""
    return embedded_model(settings=WARM_UP, lessons=replace(ARITHMETIC, name="confident", solution=_solution))


def check(path: str) -> None:
    """Sampled lines of held-out problems: the means over a line's tokens, of right and of wrong ones."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rows = confident_dataset("test", 128)
    drawn = LocalSampler(model, tokenizer, batch_size=256).sample(rows["prompt"], num_samples=4, max_new_tokens=LONGEST)
    samples = [(rows[index], sample) for index, of_one in drawn for sample in of_one]
    right = arithmetic_reward([sample.text for _, sample in samples], [row["answer"] for row, _ in samples])
    print(f"accuracy {statistics.mean(right):.3f}")

    figures: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    asked = [
        ValueRequest(tuple(prompt_ids(row["prompt"], tokenizer)), tuple(sample.token_ids), (0,))
        for row, sample in samples
    ]
    for one in with_log_probs(asked, model, temperature=1.0):
        start = 0
        for end, token in enumerate(one.completion_ids, start=1):
            if tokenizer.decode([token]) == "\n":
                line = tokenizer.decode(one.completion_ids[start : end - 1])
                if step := re.fullmatch(rf"(-?\d+)([+-]\d+)[{FORMS}](-?\d+)", line):
                    is_right = int(step[1]) + int(step[2]) == int(step[3])
                    sides = (statistics.mean(side[start:end]) for side in (one.log_probs, one.entropies))
                    figures[is_right].append(tuple(sides))
                start = end
    means = {kind: [statistics.mean(side) for side in zip(*found, strict=True)] for kind, found in figures.items()}
    for kind, (log_prob, entropy) in means.items():
        name = "right" if kind else "wrong"
        print(f"{len(figures[kind])} {name} lines: mean log-prob {log_prob:.3f}, mean entropy {entropy:.3f}")
    apart = max(abs(a - b) for a, b in zip(means[True], means[False], strict=True))
    if apart > 0.05:
        raise SystemExit(f"Right and wrong lines are {apart:.3f} nats apart: the errors are not confident.")


if __name__ == "__main__":
    check(confident_model())
