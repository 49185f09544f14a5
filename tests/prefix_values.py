"""V(prefix) by its definition, and random requests for it."""

import math
import random
from statistics import fmean

import pytest

from dash_trl.process_rewards import ValueRequest
from tests.tiny import log_probs


def random_requests(count: int = 5, longest: int = 40) -> list[ValueRequest]:
    generator = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(4, 260) for _ in range(length))

    requests = []
    for _ in range(count):
        completion = ids(generator.randint(1, longest))
        inner = generator.sample(range(1, len(completion) + 1), min(4, len(completion)))
        answers = (str(generator.randrange(100)), "1 + 2")[: generator.randint(1, 2)]
        requests.append(ValueRequest(ids(generator.randint(1, 9)), completion, (0, *sorted(inner)), answers))
    return requests


def check_values(values, model, tokenizer, requests, force_prompt: str = " = ", near: float = 1e-5) -> None:
    """Asserts that the values of requests are those of `by_prefix`."""
    for request, row in zip(requests, values, strict=True):
        assert row == pytest.approx(by_prefix(model, tokenizer, request, force_prompt, -10.0), abs=near)


def by_prefix(model, tokenizer, request: ValueRequest, force_prompt: str, floor: float) -> list[float]:
    """One plain pass per prefix and answer, by the definition."""
    values = []
    for boundary in request.boundaries:
        prefix = [*request.prompt_ids, *request.completion_ids[:boundary]]
        means = []
        for answer in request.answers:
            branch = tokenizer(force_prompt + answer, return_offsets_mapping=True)
            tokens = zip(log_probs(model, prefix, branch["input_ids"]), branch["offset_mapping"], strict=True)
            means.append(fmean(max(one, floor) for one, (_, end) in tokens if end > len(force_prompt)))
        values.append(min(0.0, math.log(sum(math.exp(mean) for mean in means))))
    return values
