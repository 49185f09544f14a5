"""`ProcessRewardCallback` in real training runs, its two estimators of V, its diagnostics and pictures."""

import math
import re
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import (
    ESTIMATORS,
    AnswerLogProbValue,
    CreditSettings,
    MonteCarloValue,
    OutcomeValue,
    Segmenter,
    ServerValue,
    ValueRequest,
    accepted_answers,
    checked_values,
    credit_html,
    line_starts,
)
from dash_trl.process_rewards.diagnostics import Diagnostics
from dash_trl.update import weighted_rewards
from tests.test_credit import as_rewards, make_rows
from tests.tiny import ScriptedReward, ScriptedRollouts, parameters, relative_difference, run, tiny_tokenizer

PROBLEMS = Dataset.from_dict(
    {"prompt": [f"{i} + {i} = " for i in range(16)], "answer": [str(2 * i) for i in range(16)]}
)


def every_third(text: str) -> range:
    return range(0, len(text), 3)


def callback(**arguments) -> ProcessRewardCallback:
    value = arguments.pop("value", None) or AnswerLogProbValue(" = ")
    return ProcessRewardCallback(value, markers=every_third, min_episode_tokens=2, max_episode_tokens=8, **arguments)


class Seen(DASHCallback):
    """Callback after the process rewards that keeps the rollouts with their credit."""

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.rollouts = rollouts


def train(model, output, *callbacks, reward=lambda **kwargs: [0.0] * len(kwargs["prompts"]), **settings):
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    seen = Seen()
    settings = {"dataset": PROBLEMS, "reward": reward, "callbacks": [*callbacks, seen], **settings}
    trainer = run(DASHTrainer, model, output, **settings)
    end = parameters(trainer.model)
    return trainer, seen.rollouts, relative_difference(start, end, end)[1]


@pytest.fixture(scope="module")
def silent(tiny_model, tmp_path_factory):
    """A step of which no completion has a reward: callback, trainer, rollouts, update, dtypes that ranks exchanged."""
    sent = []

    def watched(exchange):
        def call(self, tensor, *args, **kwargs):
            sent.append(tensor.dtype)
            return exchange(self, tensor, *args, **kwargs)

        return call

    process = callback()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "reduce", "pad_across_processes"):
            patch.setattr(Accelerator, name, watched(getattr(Accelerator, name)))
        trained = train(tiny_model, tmp_path_factory.mktemp("silent"), process)
    return process, *trained, sent


def test_a_problem_that_no_completion_solves_still_teaches(silent):
    _, trainer, rollouts, update, _ = silent
    assert update > 1e-3
    assert rollouts.advantages.shape == rollouts.completion_ids.shape
    log = trainer.state.log_history[0]
    assert log["filter/kept_rows"] > 0.8 and log["frac_reward_zero_std"] == 1.0
    assert log["process/structured_rows"] > 0.5 and log["process/episodes"] > 1 and log["time/values"] > 0


def test_no_float64_is_sent_to_the_device(silent):
    """MPS refuses it. What ranks exchange goes through the device."""
    sent = silent[-1]
    assert {torch.float32, torch.int64} <= set(sent) and torch.float64 not in sent


def test_progress_is_followed(silent):
    """A row's first token is credited with its progress, against that of the others in its group."""
    process, _, rollouts, _, _ = silent
    totals = torch.tensor([values[-1] - values[0] for _, values in process.last]).view(-1, 4)
    others = (totals.sum(dim=1, keepdim=True) - totals) / 3
    expected = (totals - others) / totals.std(dim=1, keepdim=True).clamp(min=0.1)
    several = torch.tensor([len(boundaries) > 1 for boundaries, _ in process.last])
    started = (rollouts.completion_mask.sum(dim=1) > 0) & several
    assert rollouts.advantages[started, 0].tolist() == pytest.approx(expected.flatten()[started].tolist(), abs=1e-5)


def test_the_table_of_completions_has_the_credit_of_each_episode(tiny_model, tmp_path):
    """The mean over the episode's loss tokens. An evaluation's rows have no credit: its table has no such column."""
    process, settings = callback(), {"log_completions": True, "num_completions_to_print": 0}
    trainer, rollouts, _ = train(tiny_model, tmp_path, process, eval_dataset=PROBLEMS.select(range(4)), **settings)
    file = tmp_path / "completions" / "completions_00001.parquet"
    cells = pyarrow.parquet.read_table(file)["credit"].to_pylist()
    assert len(cells) == 16 and any(cell.count("] ") > 1 for cell in cells)
    for row, (boundaries, _) in enumerate(process.last):
        ids = rollouts.completion_ids[row][rollouts.completion_mask[row].bool()].tolist()
        numbers, texts = [], []
        for start, end in zip(boundaries, [*boundaries[1:], len(ids)], strict=True):
            if end > start:
                numbers.append(sum(rollouts.advantages[row, start:end].tolist()) / (end - start))
                texts.append(trainer.processing_class.decode(ids[start:end], skip_special_tokens=True).strip())
        written = r"\[([+-]\d+\.\d\d)\] "
        assert re.sub(written, "", cells[row]) == "\n".join(texts)
        assert list(map(float, re.findall(written, cells[row]))) == pytest.approx(numbers, abs=0.00501)
    trainer.evaluate()
    assert "credit" not in pyarrow.parquet.read_table(file).column_names


def test_the_values_are_those_of_the_sampling_policy(silent, tiny_model):
    process, trainer, rollouts, _, _ = silent
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), trainer.processing_class
    boundaries, values = process.last[0]
    request = ValueRequest(
        tuple(rollouts.prompt_ids[0][rollouts.prompt_mask[0].bool()].tolist()),
        tuple(rollouts.completion_ids[0][rollouts.completion_mask[0].bool()].tolist()),
        boundaries,
        accepted_answers(rollouts.examples[0], "answer"),
    )
    assert values == pytest.approx(AnswerLogProbValue(" = ").score([request], model, tokenizer)[0], abs=1e-5)


def test_without_process_rewards_the_update_is_grpo_s(tiny_model, tmp_path):
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    process = callback(settings=CreditSettings(process_weight=0.0))
    plain, weighted = (train(tiny_model, tmp_path, *own, reward=ScriptedReward())[0] for own in ((), (process,)))
    difference, update = relative_difference(start, parameters(plain.model), parameters(weighted.model))
    assert update > 1e-3 and difference <= 1e-5


def test_solved_groups_and_failed_rewards_are_not_valued(tiny_model, tmp_path):
    """By an estimator that is made of values."""
    asked = []

    class Counting(AnswerLogProbValue):
        def __call__(self, requests, trainer):
            asked.append(sum(bool(request.boundaries) for request in requests))
            return super().__call__(requests, trainer)

    def reward(completion_ids, **kwargs):
        return [1.0] * 8 + [math.nan, 0.0, 0.0, 0.0] * 2

    process = callback(value=Counting(" = ", space="probability"), estimator="gae", skip_solved=True)
    trainer, rollouts, update = train(tiny_model, tmp_path, process, reward=reward)
    assert asked == [6] and update > 0 and trainer.state.log_history[0]["filter/dropped_unscored"] == 0.125
    assert not rollouts.advantages[:8].any() and not rollouts.advantages[8::4].any()
    assert all(rollouts.advantages[row].any() for row in (9, 13))


class InTurns(ScriptedRollouts):
    """Turns of three tokens, and a tool's three between them; of each group's first row all are the tool's."""

    def __call__(self, prompts, trainer):
        sampled = super().__call__(prompts, trainer)
        rows = enumerate(sampled["completion_ids"])
        return {**sampled, "env_mask": [[int(row % 4 > 0 and i % 6 < 3) for i in range(len(ids))] for row, ids in rows]}


class Boundaries:
    """V is the boundary."""

    space, needs_answers = "reward", False

    def __call__(self, requests, trainer):
        self.requests = requests
        return [[float(boundary) for boundary in request.boundaries] for request in requests]


def test_credit_knows_the_policy_s_tokens_alone(tiny_model, tmp_path, monkeypatch):
    seen = []

    def counted(rewards, settings):
        seen.append(rewards)
        return (torch.arange(rewards.mask.shape[1]) + 1.0).expand(rewards.mask.shape) * rewards.mask

    monkeypatch.setitem(ESTIMATORS, "counted", counted)
    process = ProcessRewardCallback(Boundaries(), estimator="counted")
    trainer, rollouts, _ = train(tiny_model, tmp_path, process, rollouts=InTurns(), reward=ScriptedReward(constant=0.0))
    (rewards,), own = seen, rollouts.loss_mask.bool()
    lengths = own.sum(dim=1).tolist()
    assert lengths[::4] == [0] * 4 and not rewards.valued[::4].any() and max(lengths) > 6
    for row, length in enumerate(lengths):
        assert rollouts.advantages[row][own[row]].tolist() == list(range(1, length + 1))
        ends = rewards.ends[row].nonzero().flatten().tolist()
        turns = list(range(2, length - 1, 3))  # the last tokens of those that a tool has answered
        assert ends[: len(turns)] == turns and len(ends) <= len(turns) + 1
        assert rewards.process[row, turns].tolist() == [6.0] * len(turns)
        request, tokens = process.value.requests[row], rollouts.completion_mask[row].bool()
        assert request.own == tuple(own[row][tokens].long().tolist())
    assert not rollouts.advantages[~own].any() and rewards.mask.sum(dim=1).tolist() == lengths
    logged = trainer.state.log_history[0]
    assert logged["advantage/mean"] == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / sum(lengths))


def skipped(rewards: list, weights: list, lengths: list | None = None, **arguments) -> list[int]:
    """Which rows of groups of two are not valued; NaN = the function does not apply."""
    process, table, weights = callback(**arguments), torch.tensor(rewards), torch.tensor(weights)
    highest = process._highest(SimpleNamespace(rewards=table), weights)
    written = torch.tensor([3] * len(table) if lengths is None else lengths)
    return process._skipped(weighted_rewards(table, weights), highest, written, 2).int().tolist()


@pytest.mark.parametrize(("skip", "expected"), [(True, [1, 1, 0, 1, 0, 0, 0, 1]), (False, [0, 0, 0, 1, 0, 0, 0, 1])])
def test_rows_that_are_not_valued(skip, expected):
    """Groups of equal positive rewards, unscored rows, and rows without a token."""
    rewards = [[1.0], [1.0], [1.0], [math.nan], [0.0], [0.0], [-1.0], [-1.0]]
    assert skipped(rewards, [1.0], [3] * 7 + [0], skip_solved=skip) == expected


def test_solved_groups_are_valued_where_the_baseline_is_not_their_own():
    """With V = 0.5, gae pays 0.5 for a right row whether its group is solved or not, and takes 0.5 for a wrong one."""
    assert {name: callback(estimator=name, value=MonteCarloValue()).skip_solved for name in ESTIMATORS} == {
        name: name not in ("gae", "reinforce_plus_plus") for name in ESTIMATORS
    }
    assert skipped([[1.0], [1.0], [1.0], [0.0]], [1.0], estimator="gae", value=MonteCarloValue()) == [0, 0, 0, 0]


@pytest.mark.parametrize(("space", "floor"), [("log", 0.1), ("probability", 0.01)])
def test_the_floor_of_the_scale_has_the_unit_of_v(space, floor):
    value = AnswerLogProbValue(" = ", space=space)
    assert callback(value=value).settings.scale_floor == floor
    assert callback(value=value, settings=CreditSettings(scale_floor=0.5)).settings.scale_floor == 0.5


def test_solved_groups_are_valued_where_the_outcomes_of_other_groups_are_the_baseline(tiny_model, tmp_path):
    """As the trainer's estimator, too: without V, a solved group would be paid its advantage once more."""
    found = {}
    for estimator in ("rloo", "reinforce_plus_plus"):
        process = callback()
        settings = {"reward": lambda prompts, **_: [1.0] * len(prompts), "advantage_estimator": estimator}
        train(tiny_model, tmp_path / estimator, process, **settings)
        found[estimator] = any(len(values) > 1 for _, values in process.last)
    assert found == {"rloo": False, "reinforce_plus_plus": True}


@pytest.mark.parametrize(("reward", "solved"), [(None, [1, 0, 0]), (1.0, [1, 1, 0]), (2.0, [0, 0, 0])])
def test_a_group_that_shares_a_bonus_is_not_solved(reward, solved):
    """Two functions with the weights 1 and 0.1: all is right, all but the form, the form alone."""
    rewards = [[1.0, 1.0, 0.0]] * 2 + [[1.0, 0.0, 0.0]] * 2 + [[0.0, 1.0, 0.0]] * 2
    assert skipped(rewards, [1.0, 0.1, -0.5], solved_reward=reward)[::2] == solved


def test_a_group_is_solved_by_the_functions_that_apply_to_it():
    """As in a run on mathematics and programs, each with a function of its own."""
    nan = math.nan
    rewards = [[1.0, nan]] * 2 + [[nan, 1.0]] * 2 + [[1.0, 0.0]] * 2 + [[nan, 0.5]] * 2
    assert skipped(rewards, [1.0, 1.0])[::2] == [1, 1, 0, 0]


def test_an_anchored_value_leaves_the_last_episode_the_outcome(tiny_model, tmp_path, monkeypatch, caplog):
    """And that its estimator pays all tokens alike is said, once."""
    seen = []

    def constant(requests, trainer):
        return [[0.25] * len(request.boundaries) for request in requests]

    def mine(rewards, settings):
        seen.append(rewards)
        return ESTIMATORS["rloo"](rewards, settings)

    constant.space = "probability"
    monkeypatch.setitem(ESTIMATORS, "mine", mine)
    process = callback(value=constant, estimator="mine", anchored=True)
    train(tiny_model, tmp_path, process, reward=ScriptedReward(constant=0.0), max_steps=4)
    assert caplog.text.count("the same advantage") == 1 and len(seen) == 4
    for rewards in seen:
        valued, ends = rewards.valued, rewards.mask.sum(dim=1) - 1
        assert valued.sum() > 4 and torch.equal(rewards.process.sum(dim=1), valued * (rewards.outcome - 0.25))
        assert torch.equal(rewards.process.nonzero()[:, 1], ends[valued])
    centred = (seen[0].outcome.view(-1, 4) - seen[0].outcome.view(-1, 4).mean(dim=1, keepdim=True)).flatten()
    paid = (seen[0].outcome_advantages * centred).sum() / centred.square().sum()
    assert seen[0].unit == 0 < seen[1].unit == pytest.approx(float(paid)), "of the windows before"


# ---------------------------------------------------------------------------------------------------------- mistakes


def an_estimator(rewards, settings):
    return rewards.outcome_advantages


AUTO = CreditSettings(process_weight="auto")
MISTAKES = [
    # the value
    (dict(value="text"), "value='text' cannot estimate V.* a force prompt into AnswerLogProbValue"),
    (dict(value=MonteCarloValue), "MonteCarloValue'> cannot estimate V.* another instance"),
    # the estimator
    (dict(estimator="ppo"), "estimator='ppo' is unknown: use one of centered_return, grpo, "),
    (dict(estimator=None), "estimator=None is unknown"),
    (dict(estimator=an_estimator), r"estimator=<function an_estimator .*ESTIMATORS\['mine'\] = function"),
    (dict(estimator="gae"), r"gae.* pass value=AnswerLogProbValue\(space='probability'\)"),
    (dict(estimator="gae", value=lambda requests, trainer: []), "needs the attribute space = 'probability'"),
    (dict(anchored=True), r"makes the outcome the last value.* a value whose space is 'log'.* pass OutcomeValue\(\)"),
    (dict(settings=AUTO), r"process_weight='auto' is not possible with anchored=None and a value whose space is 'log'"),
    (dict(settings=AUTO, value=MonteCarloValue(), anchored=False), "'auto' is not possible with anchored=False"),
    (
        dict(settings=CreditSettings(scale_floor=0.3), value=OutcomeValue(), anchored=True),
        "scale_floor=0.3 does nothing with anchored values",
    ),
    (dict(anchored=True, estimator="gae", value=OutcomeValue()), r"anchored=True .*estimator='gae'.* \(gae, grpo\)"),
    # the settings
    (
        dict(settings=CreditSettings(lam=0.5)),
        "lam=0.5 does nothing with .*centered_return'.* outcome_weight, process_w",
    ),
    (dict(settings=CreditSettings(gamma=0.9), estimator="rloo"), "gamma=0.9 does nothing with estimator='rloo'"),
    (
        dict(settings=CreditSettings(process_weight=0.5), estimator="gae", value=MonteCarloValue()),
        "process_weight=0.5 does nothing with estimator='gae', whose settings are gamma, lam",
    ),
    (dict(settings=CreditSettings(outcome_weight=2.0), estimator="grpo"), "outcome_weight=2.0 .* settings are none"),
    (dict(settings=AUTO, estimator="grpo"), "process_weight='auto' does nothing with estimator='grpo'"),
    (
        dict(settings=AUTO, estimator="gae", value=OutcomeValue()),
        "process_weight='auto' does nothing with estimator='gae'",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[said[:50] for _, said in MISTAKES])
def test_mistakes_are_said_at_once(arguments, said):
    with pytest.raises(ValueError, match=said):
        ProcessRewardCallback(**arguments)


@pytest.mark.parametrize(
    ("part", "arguments", "said"),
    [
        (AnswerLogProbValue, dict(force_prompt="The answer is \boxed{"), "holds a control character.* raw string"),
        (AnswerLogProbValue, dict(space="logarithm"), "space='logarithm' is unknown"),
        (CreditSettings, dict(scale_floor=0), "scale_floor=0, .* is out of range"),
        (CreditSettings, dict(process_weight=-1.0), "process_weight=-1.0, .* is out of range"),
        (CreditSettings, dict(process_weight=math.nan), "process_weight=nan, .* is out of range"),
        (CreditSettings, dict(outcome_weight=-0.5), "outcome_weight=-0.5, .* is out of range"),
        (CreditSettings, dict(gamma=1.5), "gamma=1.5, .* is out of range"),
        (CreditSettings, dict(gamma=-0.5), "gamma=-0.5, .* is out of range"),
        (CreditSettings, dict(lam=1.5), "lam=1.5.* is out of range"),
        (CreditSettings, dict(lam=-0.5), "lam=-0.5.* is out of range"),
        (CreditSettings, dict(process_weight="Auto"), "process_weight='Auto', .* is out of range"),
        (
            CreditSettings,
            dict(process_weight="auto", outcome_weight=0.5),
            "outcome_weight=0.5 beside process_weight='auto'",
        ),
        (OutcomeValue, dict(space="log"), "space='log' is unknown: use 'probability' or 'reward'"),
        (OutcomeValue, dict(num_windows=0), "num_windows=0, .* give nothing to fit V to"),
        (OutcomeValue, dict(min_rollouts=0), "min_rollouts=0, .* give nothing"),
        (OutcomeValue, dict(min_problems=0), "min_problems=0 and .* give nothing"),
        (OutcomeValue, dict(ridge=0), "ridge=0 give nothing to fit V to, or a fit without bounds"),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else None,
)
def test_mistakes_in_its_parts_are_said_at_once(part, arguments, said):
    with pytest.raises(ValueError, match=said):
        part(**arguments)


def test_what_is_right_is_taken():
    ProcessRewardCallback(lambda requests, trainer: [], settings=CreditSettings(process_weight=0, scale_floor=1))
    CreditSettings(gamma=0, lam=0)
    Segmenter(tiny_tokenizer(), markers={"Wait", "So"}, final_answer=r"\\boxed\{|####")
    Segmenter(tiny_tokenizer(), markers=lambda text: iter([]), final_answer="(?!)")
    AnswerLogProbValue("\\boxed{", closing="}")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (None, "'NoneType' object is not iterable"),
        ([[0.1, 0.2]], r"\[2\] values for requests that have \[2, 1\] boundaries"),
        ([[0.1, 0.2], [0.1, 0.2]], r"\[2, 2\] values for requests"),
        ([0.1, 0.2], "'float' object is not iterable"),
        ([[0.1, None], [0.2]], "not 'NoneType'.* math.nan for a value that is not known"),
    ],
    ids=["nothing", "rows", "too many", "floats", "none"],
)
def test_values_of_the_wrong_shape_name_the_function(values, said):
    def mine(requests, trainer):
        return values

    requests = [ValueRequest((1,), (2, 3), (0, 1)), ValueRequest((1,), (2, 3), (0,))]
    with pytest.raises(ValueError, match=f"What the value estimator mine returned cannot be used: .*{said}"):
        checked_values(mine(requests, None), requests, mine)


def test_values_may_be_any_numbers():
    request = ValueRequest((1,), (2, 3), (0, 1))
    for row in ((np.float32(0.5), math.nan), torch.tensor([0.5, math.nan])):
        (found,) = checked_values([row], [request], None)
        assert found[0] == 0.5 and math.isnan(found[1]) and set(map(type, found)) == {float}


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (lambda rewards, settings: None, "What estimator='mine' returned is a NoneType"),
        (lambda rewards, settings: rewards.outcome_advantages, r"has the shape \[4\], which is not \[N=4, T=\d+\]"),
        (lambda rewards, settings: rewards.mask, "has the dtype torch.bool. Pass floats"),
    ],
    ids=["nothing", "rows", "mask"],
)
def test_an_estimator_that_returns_something_else_is_named(monkeypatch, estimator, said):
    monkeypatch.setitem(ESTIMATORS, "mine", estimator)
    with pytest.raises(ValueError, match=said):
        callback(estimator="mine")._credit(as_rewards(make_rows(0, 4), 4))


def test_servers_that_are_missing_are_said():
    with pytest.raises(ValueError, match="this run has no servers: name them with vllm_server_urls"):
        ServerValue(" = ")([], SimpleNamespace())


def test_accepted_answers():
    assert accepted_answers({"answer": "so 3\n#### 1,200"}, "answer") == ("1,200",)
    assert accepted_answers({"answer": ["a", " b", "", None]}, "answer") == ("a", "b")
    assert accepted_answers({"answer": 7}, "answer") == accepted_answers({"answer": 7.0}, "answer") == ("7",)
    assert accepted_answers({"answer": 7.5}, "answer") == ("7.5",)
    with pytest.raises(ValueError, match=r"but not 'gold'.*ProcessRewardCallback\(answer_column=.*--value outcome"):
        accepted_answers({"answer": 7}, "gold")
    assert accepted_answers({"answer": None}, "answer") == accepted_answers({"answer": math.nan}, "answer") == ()
    assert accepted_answers({"answer": Decimal("1.50")}, "answer") == ("1.50",)
    with pytest.raises(ValueError, match=r"\['answer', 'prompt'\], but not 'solution'"):
        accepted_answers({"prompt": "3 + 4", "answer": 7}, "solution")
    for answer in ({"value": "7"}, ["7", {"alias": "seven"}], b"7"):
        with pytest.raises(ValueError, match="column 'answer' has .* An answer is a text or a number"):
            accepted_answers({"answer": answer}, "answer")


# ------------------------------------------------------------------------------------------- diagnostics and pictures


# What `batch_figures` finds: name → mean and standard deviation.
HEALTHY = {
    "asked": (1.0, 0.0),
    "process/valued_rows": (1.0, 0.0),
    "structured where several": (0.9, 0.3),
    "advantage/mean": (0.0, 1.0),
    "added": (0.0, 0.5),
    "outcome": (0.0, 1.0),
}
NONE_VALUED = {"process/valued_rows": (0.0, 0.0), "structured where several": (math.nan, math.nan)}


@pytest.mark.parametrize(
    ("figures", "arguments", "said"),
    [
        ({}, {}, ""),
        ({}, {"estimator": "rloo"}, "the same advantage"),
        ({"structured where several": (0.0, 0.0)}, {}, "the same advantage"),
        ({"structured where several": (0.0, 0.0)}, {"pays": False}, ""),
        # Anchored, while no problem has been solved: nothing is paid.
        ({"structured where several": (0.0, 0.0), "advantage/mean": (0.0, 0.0)}, {}, ""),
        ({"added": (0.0, 0.009)}, {}, "almost no effect"),
        ({"added": (0.0, 0.009)}, {"pays": False}, ""),
        ({"added": (0.0, 0.009)}, {"auto": True}, ""),
        ({"added": (0.0, 0.011)}, {}, ""),
        ({}, {"seconds": 1e9}, "V(prefix) takes"),
        (NONE_VALUED, {}, "No row has a value"),
        (NONE_VALUED, {"ready": False}, ""),
        ({**NONE_VALUED, "asked": (0.0, 0.0)}, {}, ""),
    ],
)
def test_lost_signals_are_said_once(figures, arguments, said, caplog):
    diagnostics = Diagnostics()
    for _ in range(6):
        diagnostics.check(HEALTHY | figures, **{"seconds": 0.0, "estimator": "centered_return", **arguments})
    messages = [record.message for record in caplog.records]
    assert len(messages) == bool(said) and all(said in message for message in messages)


def test_an_accident_is_not_said(caplog):
    diagnostics = Diagnostics()
    for added in (0.0, 0.0, 1.0, 0.0, 0.0):
        diagnostics.check({**HEALTHY, "added": (0.0, added)}, seconds=0.0, estimator="episode")
    assert not caplog.records


def test_the_picture_shows_tokens_shades_and_values():
    picture = credit_html(["a<b", "\n", "c"], [1.0, 0.0, -0.5], [0, 2, 3], [-1.0, math.nan, -0.25], title="7 < 8")
    assert "7 &lt; 8" in picture and "a&lt;b" in picture and "⏎" in picture
    assert "rgba(0,150,0,0.60)" in picture and "rgba(200,0,0,0.30)" in picture
    assert picture.index("-1.00") < picture.index("a&lt;b") < picture.index("missing") < picture.index("-0.25")
    assert credit_html([], []).startswith("<div>")


def test_line_starts():
    assert line_starts("a\n\nb\n") == [3, 5]
