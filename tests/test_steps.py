"""`StepValue`: scores of episodes become values."""

import math
import re

import pytest

from dash_trl import DASHTrainer
from dash_trl.process_rewards import StepValue, ValueRequest
from tests.test_tensor_arguments import refusal
from tests.tiny import run


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return run(DASHTrainer, tiny_model, tmp_path_factory.mktemp("steps"))


def request(tokenizer, prompt: str, *steps: str, **example) -> ValueRequest:
    """With a boundary behind each step, and an answer behind the last."""
    ids = [tuple(tokenizer(text)["input_ids"]) for text in steps]
    ends = [sum(map(len, ids[:n])) for n in range(len(ids) + 1)]
    answer = tuple(tokenizer("9")["input_ids"])
    return ValueRequest(
        tuple(tokenizer(prompt)["input_ids"]), sum(ids, ()) + answer, tuple(ends), example={"prompt": prompt, **example}
    )


def test_scores_are_rewards_of_episodes(tokenizer, trainer):
    seen = []

    def score(prompts, steps, **columns):
        seen.append((prompts, steps, columns))
        return [[0.5, -1.0, 2.0], None, [math.nan], [0.25]]

    requests = [
        request(tokenizer, "1+1", "a\n", "bb\n", "c\n", level=1),
        request(tokenizer, "2+2", "a\n", "b\n", level=2),
        request(tokenizer, "3+3", "a\n", level=3),
        ValueRequest((5,), (6,), (0,)),  # not an episode
        ValueRequest((5,), (6,), ()),  # not asked for
        request(tokenizer, "4+4", "a\n", level=4),
    ]
    found = StepValue(score)(requests, trainer)
    assert found[0] == [0.0, 0.5, -0.5, 1.5] and found[5] == [0.0, 0.25]
    assert [len(row) for row in found] == [4, 3, 2, 1, 0, 2]
    assert all(map(math.isnan, found[1][1:] + found[2][1:] + found[3]))
    prompts, steps, columns = seen[0]
    assert prompts == ["1+1", "2+2", "3+3", "4+4"] and columns == {"level": [1, 2, 3, 4]}
    assert steps == [["a\n", "bb\n", "c\n"], ["a\n", "b\n"], ["a\n"], ["a\n"]]


def test_a_function_that_scores_other_steps_is_named(tokenizer, trainer):
    asked = [request(tokenizer, "1", "a", "b", "c")]
    for scores in ([[0.5]], [[0.5, 1.0, 2.0, 3.0]], [], [[]], [[0.5] * 3, [0.5] * 3]):

        def mine(prompts, steps, scores=scores, **columns):
            return scores

        found = refusal(StepValue(mine), asked, trainer)
        assert re.search(r"mine.* returned .* scores for completions of \[3\] steps", found), scores
