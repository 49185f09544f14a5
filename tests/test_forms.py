"""The forms of reward functions, and what they may return."""

import functools
import math

import torch

from dash_trl.rewards import RewardRunner, Score, form_of, read_score, unpack
from tests.tiny import assistant, refusal, refused

ROW = {"prompt": "1 + 2 = ", "completion": assistant("3"), "completion_ids": [7], "answer": 3}


class Judge:
    def compute_score(self, completion, answer):
        return len(completion) + answer


class Everything:
    def compute_score(self, **row):
        return row


class Verl:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return data_source, solution_str, ground_truth, extra_info


class NoMethod:
    def score(self, completion):
        return 1.0


class Named:
    __name__ = "unit_tests"

    async def __call__(self, completion):
        return 1.0


async def coroutine(completion):
    return 1.0


BATCH = [
    lambda completions, **kwargs: [],
    lambda prompts, completions, answer: [],
    lambda completion_ids, **kwargs: [],  # TRL's own documentation has this one
    lambda **kwargs: [],
    functools.partial(lambda completions, scale, **kwargs: [], scale=2),
]


def test_trls_form():
    assert [form_of(function).batch for function in BATCH] == [True] * len(BATCH)


def test_what_a_per_sample_function_is_called_with():
    """Columns of verl win over what stands for them."""
    one = {"completion": ROW["completion"]}
    verls = {"data_source": None, "solution_str": "3", "ground_truth": 3}
    columns = {"extra_info": {"prompt": "1 + 2 = ", "answer": 3}}
    for function, arguments in (
        (lambda completion: 0, one),
        (lambda answer, completion, completion_ids: 0, {**one, "answer": 3, "completion_ids": [7]}),
        (lambda completion, level=1: 0, one),
        (lambda completion_ids: 0, {"completion_ids": [7]}),
        (lambda prompt, **columns: 0, ROW),
        (Judge(), {**one, "answer": 3}),
        (Everything, ROW),
        (Verl, {**verls, **columns}),
    ):
        form = form_of(function)
        assert not form.batch and form.arguments(ROW) == arguments, function
        form.check_columns(["prompt", "answer"])
    row = {**ROW, "data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}}
    for known, gold, info in (
        (row, "4", {"index": 1}),
        ({**row, "ground_truth": "5", "extra_info": None}, "5", {}),
        ({**row, "extra_info": "text"}, "4", "text"),
    ):
        arguments = form_of(Verl).arguments(known)
        assert arguments == {**verls, "data_source": "gsm8k", "ground_truth": gold, "extra_info": info}


def test_names_and_coroutine_functions():
    forms = [form_of(function) for function in (Judge, Named(), coroutine)]
    assert [form.name for form in forms] == ["Judge", "unit_tests", "coroutine"]
    assert [form.asynchronous for form in forms] == [False, True, True]
    assert form_of(functools.partial(coroutine)).asynchronous


def test_what_has_no_form():
    for function, message in (
        (lambda text, answer: 0, "none of the forms. A reward function has one of"),
        (lambda completion, completions: 0, "none of the forms"),
        (lambda completion, /, answer: 0, "none of the forms"),
        (max, "none of the forms|no signature found"),
        (3, "3 is not a reward function"),
        (NoMethod(), "is not a reward function"),
        (type("Blind", (), {"compute_score": lambda self, answer: 0}), r"Blind\(answer\) has none of the forms"),
    ):
        refused(message, form_of, function)


class AsksLater:
    async def __call__(self, prompts, anwser, **columns):
        return [0.0]


def every(completions, completion_ids, trainer_state, log_extra, log_metric, environments, answer, own=1, **columns):
    return [0.0]


def test_a_column_that_is_not_there():
    """Of TRL's form, own arguments and defaults are none."""
    columns = ["prompt", "answer"]
    said = "asks for 'anwser', but it can get only ['answer', "
    misspelt = lambda completions, anwser, **columns: [0.0]  # noqa: E731
    row = form_of(lambda completion, anwser: 0)
    for form in (form_of(misspelt), form_of(AsksLater()), form_of(functools.partial(misspelt)), row):
        assert said in refusal(form.check_columns, columns), form
    refused("asks for 'anwser'", row.arguments, ROW)
    batch = form_of(lambda completions, prompt, **columns: [0.0])
    refused("asks for 'prompt'", batch.check_columns, columns)
    refused("asks for 'ground_truth' or 'answer', but", form_of(Verl).check_columns, ["prompt"])
    for function in (every, functools.partial(misspelt, anwser=1), lambda prompts, **columns: [0.0]):
        form_of(function).check_columns(columns)


def test_what_a_function_may_return():
    for returned, score in (
        (True, Score(1.0)),
        (None, Score(None)),
        (torch.tensor(0.5), Score(0.5)),
        ((0.5, {"length": 3}), Score(0.5, {"length": 3.0})),
        ((None, {"text": "so"}), Score(None, {"text": "so"})),
        ({"score": 0.25, "accuracy": True, "found": "4"}, Score(0.25, {"accuracy": 1.0, "found": "4"})),
    ):
        assert read_score(returned) == score, returned


def test_what_it_may_not_return():
    odd = ["1.0", b"1", [1.0], (1.0, 2.0), (1.0, "a", "b"), {"value": 1}, torch.ones(2), (1.0, {"a": [1]}), object()]
    assert [one for one in odd if "returned" not in refusal(read_score, one)] == []


def test_trl_gets_a_flat_list():
    batch = BATCH[0]
    model = torch.nn.Linear(2, 2)
    runner = RewardRunner([Judge, model])
    flat = unpack([batch, runner, "owner/model", coroutine, Judge])
    assert flat[0] is batch and flat[1:3] == runner.rewards and flat[2] is model and flat[3] == "owner/model"
    assert [one.__name__ for one in flat[4:]] == ["coroutine", "Judge"]
    assert unpack(None) is None and unpack(batch) == [batch]


def test_runners_that_cannot_be():
    for functions, settings, message in (
        (Judge, {"backend": "threads"}, r"backend='threads' does not exist: choose one of \(None, 'thread', 'asyncio'"),
        (Judge, {"timeout": 0}, "timeout=0 would let no call finish"),
        (Judge, {"timeout": math.nan}, "timeout=nan would let no call"),
        (Judge, {"max_concurrency": 0}, "max_concurrency=0 would let no call"),
        (Judge, {"rate_limit": -1}, "rate_limit=-1 would let no call"),
        (Judge, {"backend": "asyncio"}, "backend='asyncio' cannot run 'Judge': 'asyncio' runs coroutine functions"),
        (coroutine, {"backend": "thread"}, "backend='thread' cannot run 'coroutine': 'asyncio' runs coroutine"),
        (BATCH[0], {}, "has TRL's form and gets the whole batch, .* Pass it beside the runner"),
    ):
        refused(message, RewardRunner, functions, **settings)


def test_ray_that_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"Ray is not installed: pip install 'dash_trl\[ray\]'", RewardRunner, [Judge], backend="ray")
