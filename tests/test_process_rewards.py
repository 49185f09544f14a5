"""`ProcessRewardCallback` in real training runs: values, credit, figures, checks, mistakes."""

import inspect
import math
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from dash_trl import DASHCallback, ProcessRewardCallback
from dash_trl.process_rewards import (
    ESTIMATORS,
    AnswerLogProbValue,
    CreditSettings,
    Estimator,
    MonteCarloValue,
    Segmenter,
    ValueRequest,
    accepted_answers,
    checked_values,
)
from tests.doubles import WIDER, SaveEarly
from tests.tiny import (
    ScriptedReward,
    ScriptedRollouts,
    assert_same_update,
    noting,
    prompts,
    refusal,
    refused,
    said,
    tiny_tokenizer,
)

NAN = math.nan


def every_third(text: str) -> range:
    return range(0, len(text), 3)


def callback(**arguments) -> ProcessRewardCallback:
    given = {"value": AnswerLogProbValue(" = "), "skip_silent": False, **arguments}
    return ProcessRewardCallback(markers=every_third, max_episode_tokens=8, **given)


@pytest.fixture
def train(train):
    def with_callbacks(*callbacks, reward=lambda **kwargs: [0.0] * len(kwargs["prompts"]), **settings):
        seen = noting("on_advantages")  # after the process rewards
        settings = {"dataset": prompts(16), "reward": reward, "callbacks": [*callbacks, seen], **settings}
        return train(**settings), seen.noted[-1]

    return with_callbacks


def test_a_problem_that_no_completion_solves_still_teaches(tiny_model, train, monkeypatch):
    """And no float64 is sent to the device, which MPS refuses: what ranks exchange goes through the device."""
    sent = []

    def watched(exchange):
        def call(self, tensor, *args, **kwargs):
            sent.append(tensor.dtype)
            return exchange(self, tensor, *args, **kwargs)

        return call

    for name in ("gather", "reduce", "pad_across_processes"):
        monkeypatch.setattr(Accelerator, name, watched(getattr(Accelerator, name)))
    trainer, rollouts = train(callback())
    assert_same_update(tiny_model, trainer, trainer)
    assert rollouts.advantages.shape == rollouts.completion_ids.shape
    log = trainer.state.log_history[0]
    assert log["filter/kept_rows"] > 0.8 and log["frac_reward_zero_std"] == 1.0
    assert log["process/structured_rows"] > 0.5 and log["process/episodes"] > 1 and log["time/values"] > 0
    assert {torch.float32, torch.int64} <= set(sent) and torch.float64 not in sent


class InTurns(ScriptedRollouts):
    """Turns of three tokens, and a tool's three between them; of each group's first row all are the tool's."""

    def __call__(self, prompts, trainer):
        sampled = super().__call__(prompts, trainer)
        rows = enumerate(sampled["completion_ids"])
        return {**sampled, "env_mask": [[int(row % 4 > 0 and i % 6 < 3) for i in range(len(ids))] for row, ids in rows]}


class Boundaries:
    """V is the boundary."""

    space = "reward"
    needs_answers = False

    def __call__(self, requests, trainer):
        self.requests = requests
        return [[float(boundary) for boundary in request.boundaries] for request in requests]


def test_credit_knows_the_policy_s_tokens_alone(train, monkeypatch):
    seen = []

    def counted(rewards, settings):
        seen.append(rewards)
        return (torch.arange(rewards.mask.shape[1]) + 1.0).expand(rewards.mask.shape) * rewards.mask

    monkeypatch.setitem(ESTIMATORS, "counted", Estimator(credit=counted))
    process = ProcessRewardCallback(Boundaries(), estimator="counted")
    trainer, rollouts = train(process, rollouts=InTurns(), reward=ScriptedReward(constant=0.0))
    (rewards,) = seen
    own = rollouts.loss_mask.bool()
    lengths = own.sum(dim=1).tolist()
    assert lengths[::4] == [0] * 4 and not rewards.valued[::4].any() and max(lengths) > 6
    for row, length in enumerate(lengths):
        assert rollouts.advantages[row][own[row]].tolist() == list(range(1, length + 1))
        ends = rewards.ends[row].nonzero().flatten().tolist()
        turns = list(range(2, length - 1, 3))  # the last tokens of those that a tool has answered
        assert ends[: len(turns)] == turns and len(ends) <= len(turns) + 1
        assert rewards.process[row, turns].tolist() == [6.0] * len(turns)
        request = process.value.requests[row]
        tokens = rollouts.completion_mask[row].bool()
        assert request.own == tuple(own[row][tokens].long().tolist())
        assert request.completion_ids == tuple(rollouts.completion_ids[row][tokens].tolist())
        assert request.prompt_ids == tuple(rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()].tolist())
    assert not rollouts.advantages[~own].any() and rewards.mask.sum(dim=1).tolist() == lengths


# Rewards of the two rows of a group by three functions with the weights 1, 0.1 and -0.5; None = the function does not
# apply. And whether the group is silent, so by default not valued; and solved, so not with skip_silent=False either.
GROUPS = [
    ([[1.0, 1.0, 0.0]] * 2, True, True),
    ([[1.0, None, None]] * 2, True, True),  # as in a run on mathematics and programs,
    ([[None, 1.0, None]] * 2, True, True),  # each with a function of its own
    ([[1.0, 1.0, 0.0], [1.0, NAN, 0.0]], True, False),  # the second row is unscored
    ([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]], False, True),
    ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], False, True),
    ([[0.0, 1.0, 0.0]] * 2, True, True),
    ([[0.0, 0.0, 1.0]] * 2, True, False),
]


@pytest.mark.parametrize("arguments", [{}, {"skip_silent": False}])
def test_rows_that_are_not_valued(arguments, train):
    def rewarded(number):
        return lambda prompts, **_: [row[number] for group, *_ in GROUPS for row in group]

    functions = [rewarded(number) for number in range(3)]
    for function, name in zip(functions, "abc", strict=True):
        function.__name__ = name
    process = ProcessRewardCallback(Boundaries(), **arguments)
    settings = {"reward": functions, "reward_weights": [1.0, 0.1, -0.5], "num_generations": 2}
    trainer, rollouts = train(process, **settings)
    skipped = [not request.boundaries for request in process.value.requests]
    assert skipped == [
        silent and (solved or not arguments) or NAN in row for group, silent, solved in GROUPS for row in group
    ]
    assert not rollouts.advantages[torch.tensor(skipped)].any() and rollouts.advantages.any()
    assert trainer.state.log_history[0]["filter/dropped_unscored"] == 1 / 16


def test_equal_outcomes_of_a_group_may_count(train):
    """Against other groups; or with V alone, if it is asked for."""
    for estimator, skips, valued in (("rloo", True, False), ("single_path", True, True), ("rloo", False, True)):
        process = ProcessRewardCallback(Boundaries(), skip_silent=skips, markers=every_third)
        settings = {"reward": lambda prompts, **_: 8 * [1.0] + 8 * [0.0], "advantage_estimator": estimator}
        _, rollouts = train(process, **settings)
        assert any(request.boundaries for request in process.value.requests) == valued, estimator
        assert rollouts.advantages.any() == valued


def test_the_defaults_are_those_of_the_post():
    expected = {
        "estimator": "grpo_process",
        "skip_silent": True,
        "markers": ("Wait,", "Alternatively,", "Actually,", "Hmm,", "Let me ", "I need to ", "So ", "But "),
        "max_episode_tokens": 256,
    }
    defaults = {**inspect.signature(Segmenter).parameters, **inspect.signature(ProcessRewardCallback).parameters}
    assert {name: defaults[name].default for name in expected} == expected


# ---------------------------------------------------------------------------------------------------------- mistakes


def an_estimator(rewards, settings):
    return rewards.outcome_advantages


MISTAKES = [
    # the value
    (dict(value="text"), "value='text' cannot estimate V.* a force prompt into AnswerLogProbValue"),
    (dict(value=MonteCarloValue), "MonteCarloValue'> cannot estimate V.* another instance"),
    # the estimator
    (dict(estimator="ppo"), r"'ppo' is unknown. Use one of 'grpo', .*ESTIMATORS\['mine'\] = Estimator\(credit="),
    (dict(estimator="grpo_passk"), "'grpo_passk' is unknown"),  # for outcomes only
    (dict(estimator=an_estimator), r"estimator=<function an_estimator .* is unknown"),
    *(
        (dict(estimator=name), rf"'{name}' compares .* pass value=AnswerLogProbValue\(space='probability'\)")
        for name in ("gae", "vineppo")
    ),
    (dict(estimator="gae", value=lambda requests, trainer: []), "needs the attribute space = 'probability'"),
]
OF_PARTS = [
    (AnswerLogProbValue, dict(force_prompt="The answer is \boxed{"), "holds a control character.* raw string"),
    (AnswerLogProbValue, dict(space="logarithm"), "space='logarithm' is unknown"),
    *((MonteCarloValue, dict(num_rollouts=count), f"num_rollouts={count}: the mean") for count in (0, 1.5)),
    *(
        (CreditSettings, {name: value}, f"{name}={value}.* is out of range")
        for name, value in [
            ("scale_floor", 0),
            ("process_weight", -1.0),
            ("process_weight", NAN),
            ("lam", 1.5),
            ("lam", -0.5),
        ]
    ),
]


def test_mistakes_are_said_at_once():
    mistakes = [(ProcessRewardCallback, {"value": AnswerLogProbValue(), **given}, said) for given, said in MISTAKES]
    for part, arguments, message in mistakes + OF_PARTS:
        refused(message, part, **arguments)
    CreditSettings(process_weight=0, scale_floor=1, lam=0)
    AnswerLogProbValue("\\boxed{", closing="}")
    Segmenter(tiny_tokenizer(), markers={"Wait", "So"}, final_answer=r"\\boxed\{|####")


def test_values_are_numbers_one_per_boundary():
    requests = [ValueRequest((1,), (2, 3), (0, 1)), ValueRequest((1,), (2, 3), (0,))]
    said = r"The value estimator 'mine' returned another form: \[2\], for requests that have \[2, 1\] boundaries"
    refused(said, checked_values, [[0.1, 0.2]], requests, "mine")
    refused("another form: 'NoneType' object is not iterable", checked_values, None, requests, "mine")
    assert str(checked_values([[np.float32(0.5), torch.tensor(-math.inf)]], requests[:1], None)) == "[[0.5, nan]]"


def test_an_estimator_of_one_s_own_is_known_when_the_config_or_the_callback_is_made(monkeypatch, train):
    """And not before: the registry may change after the modules have been imported."""

    def half(rewards):
        return rewards / 2

    options = {"reward": ScriptedReward(constant=0.0), "advantage_estimator": "mine", "scale_rewards": "group"}
    options["reward_weights"] = [3.0]
    assert "advantage_estimator='mine' is unknown" in refusal(train, **options)
    monkeypatch.setitem(ESTIMATORS, "mine", Estimator(half, an_estimator))
    _, rollouts = train(**options)
    assert rollouts.advantages.any() and torch.equal(rollouts.advantages, rollouts.rewards[:, 0] * 1.5)
    message = r"What estimator='mine' returned has the shape \[16\], which is not \[N=16, T=\d+\]"
    refused(message, train, callback(estimator="mine"))
    monkeypatch.setitem(ESTIMATORS, "mine", half)  # as before there was one registry
    assert r"Estimator(credit=function)" in refusal(callback, estimator="mine")


def test_accepted_answers():
    for answer, expected in [
        ("so 3\n#### 1,200", ("1,200",)),
        (["a", " b", "", None, "a "], ("a", "b")),
        (7.0, ("7",)),
        (Decimal("1.50"), ("1.50",)),
    ]:
        assert accepted_answers({"answer": answer}, "answer") == expected, answer
    missing = r"\['answer', 'prompt'\], but not 'solution'.*ProcessRewardCallback\(answer_column="
    refused(missing, accepted_answers, {"prompt": "3 + 4", "answer": 7}, "solution")
    refused("The gold answer {'alias': 'seven'}", accepted_answers, {"answer": ["7", {"alias": "seven"}]}, "answer")


def test_missing_values_and_markers_that_match_nothing_are_said_once(train, caplog):
    class Missing(Boundaries):
        def __call__(self, requests, trainer):
            return [[NAN] * len(request.boundaries) for request in requests]

    for process in (callback(value=Missing()), ProcessRewardCallback(Boundaries(), markers=["@@"], skip_silent=False)):
        train(process, max_steps=2)
    assert re.findall(r"so set `markers`\), and (\d+)% of them", said(caplog)) == ["0", "100"]


# ------------------------------------------------------------------------------------- what a callback has learned


class Counts(DASHCallback):
    """It counts the windows."""

    def __init__(self, count=0):
        self.count = count

    def on_advantages(self, *args, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_checkpoint_from_within_a_step_has_the_states_before_what_is_repeated(train, tmp_path, caplog):
    """A run with other shapes goes on with them; that a checkpoint lacks a state is said.

    Two callbacks of one class have a state each.
    """
    counts = Counts()
    second = Counts(10)
    again = Counts()
    third = Counts()
    wider = Counts()
    other = type("Other", (Counts,), {})()
    settings = {"max_steps": 4, "steps_per_generation": 2}
    checkpoint = tmp_path / "checkpoint-2"
    train(counts, second, SaveEarly(at=2), **settings)
    train(again, third, output=tmp_path / "again", resume=checkpoint, **settings)
    assert (counts.count, second.count) == (again.count, third.count) == (8, 18)
    settings |= {**WIDER, "steps_per_generation": 2, "max_steps": 3}
    train(wider, other, output=tmp_path / "wider", resume=checkpoint, **settings)
    assert (wider.count, other.count) == (5, 1)
    assert "holds no state of Other," in said(caplog) and "holds no state of Counts," not in said(caplog)
