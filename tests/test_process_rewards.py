"""`ProcessRewardCallback` in real training runs, its two estimators of V, its diagnostics and pictures."""

from __future__ import annotations

import math
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import (
    ESTIMATORS,
    AnswerLogProbValue,
    CreditSettings,
    MonteCarloValue,
    OutcomeValue,
    ServerValue,
    ValueRequest,
    line_starts,
)
from dash_trl.process_rewards.callback import accepted_answers
from dash_trl.process_rewards.picture import credit_html
from tests.tiny import parameters, relative_difference, run

PROBLEMS = Dataset.from_dict(
    {"prompt": [f"{i} + {i} = " for i in range(16)], "answer": [str(2 * i) for i in range(16)]}
)


def every_third(text: str) -> range:
    return range(0, len(text), 3)


def callback(**arguments) -> ProcessRewardCallback:
    value = arguments.pop("value", None) or AnswerLogProbValue(" = ")
    return ProcessRewardCallback(value, markers=every_third, min_episode_tokens=2, max_episode_tokens=8, **arguments)


class Seen(DASHCallback):
    """Comes after the process rewards and keeps what they made."""

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.rollouts = rollouts


def train(model, output, *callbacks, reward=lambda **kwargs: [0.0] * len(kwargs["prompts"]), **settings):
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    seen = Seen()
    settings = {"dataset": PROBLEMS, "reward": reward, "callbacks": [*callbacks, seen], **settings}
    trainer = run(DASHTrainer, model, output, **settings)
    end = parameters(trainer.model)
    return trainer, seen.rollouts, relative_difference(start, end, end)[1]


def test_a_problem_that_no_completion_solves_still_teaches(tiny_model, tmp_path):
    _, rollouts, update = train(tiny_model, tmp_path)
    assert update == 0.0 and not rollouts.advantages.any()
    trainer, rollouts, update = train(tiny_model, tmp_path, callback())
    assert update > 1e-3
    assert rollouts.advantages.shape == rollouts.completion_ids.shape
    log = trainer.state.log_history[0]
    assert log["filter/kept_rows"] > 0.8 and log["frac_reward_zero_std"] == 1.0
    assert log["process/structured_rows"] > 0.5 and log["process/episodes"] > 1 and log["time/values"] > 0


def test_no_float64_is_sent_to_the_device(tiny_model, tmp_path, monkeypatch):
    """MPS refuses it. What ranks exchange goes through the device."""
    from accelerate import Accelerator

    sent = []

    def watched(exchange):
        def call(self, tensor, *args, **kwargs):
            sent.append(tensor.dtype)
            return exchange(self, tensor, *args, **kwargs)

        return call

    for name in ("gather", "reduce", "pad_across_processes"):
        monkeypatch.setattr(Accelerator, name, watched(getattr(Accelerator, name)))
    train(tiny_model, tmp_path, callback())
    assert {torch.float32, torch.int64} <= set(sent) and torch.float64 not in sent


def test_progress_is_followed(tiny_model, tmp_path):
    """A row's first token is credited with its progress, against that of the others in its group."""
    process = callback()
    _, rollouts, _ = train(tiny_model, tmp_path, process)
    totals = torch.tensor([values[-1] - values[0] for _, values in process.last]).view(-1, 4)
    others = (totals.sum(dim=1, keepdim=True) - totals) / 3
    expected = (totals - others) / totals.std(dim=1, keepdim=True).clamp(min=0.1)
    started = (rollouts.completion_mask.sum(dim=1) > 0) & torch.tensor([len(e.boundaries) > 1 for e, _ in process.last])
    assert rollouts.advantages[started, 0].tolist() == pytest.approx(expected.flatten()[started].tolist(), abs=1e-5)


@pytest.mark.parametrize("arguments", [{"estimator": "grpo"}, {"settings": CreditSettings(process_weight=0.0)}])
def test_without_process_rewards_the_update_is_grpo_s(tiny_model, tmp_path, arguments):
    from tests.tiny import ScriptedReward

    plain, _, update = train(tiny_model, tmp_path, reward=ScriptedReward())
    weighted, _, _ = train(tiny_model, tmp_path, callback(**arguments), reward=ScriptedReward())
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    difference, update = relative_difference(start, parameters(plain.model), parameters(weighted.model))
    assert update > 1e-3 and difference <= 1e-5


@pytest.mark.parametrize("estimator", ["gae", "episode", "grpo_process", "prime_rloo"])
def test_every_kind_of_estimator_trains(tiny_model, tmp_path, estimator):
    value = AnswerLogProbValue(" = ", space="probability")
    # A random model's probabilities, and with them gae's advantages, are far below the filter's 0.1.
    process = callback(value=value, estimator=estimator)
    _, rollouts, update = train(tiny_model, tmp_path, process, gradient_filter_threshold=0.0)
    assert update > 0 and torch.isfinite(rollouts.advantages).all()


def test_monte_carlo_needs_nothing_of_solved_groups(tiny_model, tmp_path):
    process = callback(value=MonteCarloValue(num_rollouts=2), estimator="gae")
    _, _, update = train(tiny_model, tmp_path, process, reward=lambda prompts, **kwargs: [1.0] * len(prompts))
    assert update == 0.0


def test_the_credit_is_drawn_beside_the_completions(tiny_model, tmp_path):
    train(tiny_model, tmp_path, callback(), log_completions=True)
    page = (tmp_path / "completions" / "credit_00000.html").read_text()
    assert page.count("<hr>") == 3 and "V(prefix)" in page


def test_failed_rewards_leave_the_credit_of_the_others(tiny_model, tmp_path):
    def reward(completion_ids, **kwargs):
        return [math.nan if i % 4 == 0 else 0.0 for i in range(len(completion_ids))]

    trainer, rollouts, update = train(tiny_model, tmp_path, callback(), reward=reward)
    assert not rollouts.advantages[::4].any() and rollouts.advantages[1::4].any() and update > 0
    assert trainer.state.log_history[0]["filter/dropped_unscored"] == 0.25


def test_solved_groups_are_not_valued(tiny_model, tmp_path):
    asked = []

    class Counting(AnswerLogProbValue):
        def __call__(self, requests, trainer):
            asked.append(sum(bool(request.boundaries) for request in requests))
            return super().__call__(requests, trainer)

    def solved(completion_ids, **kwargs):
        return [1.0] * 8 + [0.0] * 8

    train(tiny_model, tmp_path, callback(value=Counting(" = ")), reward=solved)
    train(tiny_model, tmp_path, callback(value=Counting(" = "), skip_solved=False), reward=solved)
    assert asked == [8, 16]


def test_values_that_are_missing_leave_the_outcome(tiny_model, tmp_path):
    class Missing:
        space = "log"

        def __call__(self, requests, trainer):
            return [[math.nan] * len(request.boundaries) for request in requests]

    trainer, rollouts, update = train(tiny_model, tmp_path, callback(value=Missing()))
    assert update == 0.0 and not rollouts.advantages.any()
    assert trainer.state.log_history[0]["process/missing_values"] == 1.0


def test_an_anchored_value_leaves_the_last_episode_the_outcome(tiny_model, tmp_path):
    def constant(requests, trainer):
        return [[0.25] * len(request.boundaries) for request in requests]

    constant.space = "probability"
    process = callback(value=constant, estimator="episode", anchored=True)
    reward = lambda completion_ids, **kwargs: [float(sum(ids) % 2) for ids in completion_ids]  # noqa: E731
    trainer, rollouts, _ = train(tiny_model, tmp_path, process, reward=reward)
    outcomes, several = rollouts.rewards.flatten(), 0
    assert 0 < outcomes.mean() < 1
    for group in torch.arange(len(rollouts)).view(-1, trainer.num_generations).tolist():
        ends = {row: process.last[row][0].boundaries for row in group}
        last = {row: float(outcomes[row]) - 0.25 for row in group if len(ends[row]) > 1}  # else there is no episode
        if (outcomes[group] == 1).all():
            continue  # solved: not valued
        rms = math.sqrt(sum(u * u for u in last.values()) / sum(len(ends[row]) - 1 for row in last))
        for row, paid in last.items():
            *_, start, end = ends[row]
            if start > 0:  # its first token has the outcome's advantage alone
                added = rollouts.advantages[row] - rollouts.advantages[row, 0]
                assert not added[:start].any()
                assert added[start:end].tolist() == pytest.approx([paid / max(rms, 0.1)] * (end - start), abs=1e-5)
                several += 1
    assert several > 8


def test_idle_episodes_can_be_charged(tiny_model, tmp_path):
    _, free, _ = train(tiny_model, tmp_path, callback())
    penalty = {"unproductive_penalty": 0.25, "unproductive_below": 1e9}
    process = callback(**penalty)
    _, charged, _ = train(tiny_model, tmp_path, process)
    difference = free.advantages - charged.advantages
    for row, (episodes, _) in enumerate(process.last):
        end = episodes.boundaries[-1]
        assert torch.allclose(difference[row, :end], torch.tensor(0.25)) and not difference[row, end:].any()


def test_the_values_are_those_of_the_sampling_policy(tiny_model, tmp_path):
    process = callback()
    trainer, rollouts, _ = train(tiny_model, tmp_path, process, max_steps=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), trainer.processing_class
    episodes, values = process.last[0]
    request = ValueRequest(
        tuple(rollouts.prompt_ids[0][rollouts.prompt_mask[0].bool()].tolist()),
        tuple(rollouts.completion_ids[0][rollouts.completion_mask[0].bool()].tolist()),
        episodes.boundaries,
        accepted_answers(rollouts.examples[0], "answer"),
    )
    assert values == pytest.approx(AnswerLogProbValue(" = ").score([request], model, tokenizer)[0], abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- mistakes


def no_positions(text: str):
    """Forgot to return."""


def only_with_a_marker(text: str):
    return [0] if "Wait" in text else None


def an_estimator(rewards, settings):
    return rewards.outcome_advantages


MISTAKES = [
    # the value
    (dict(value="text"), "value='text' cannot estimate V.* words before an answer are AnswerLogProbValue"),
    (dict(value="episode"), "A name of an estimator is estimator='...'"),
    (dict(value=MonteCarloValue), "MonteCarloValue'> cannot estimate V.* another instance"),
    (dict(value=0.5), "value=0.5 cannot estimate V"),
    # the estimator
    (dict(estimator="ppo"), "estimator='ppo' is unknown: use one of centered_return, grpo, "),
    (dict(estimator="centred_return"), "estimator='centred_return' is unknown"),
    (dict(estimator=None), "estimator=None is unknown"),
    (dict(estimator=["grpo"]), r"estimator=\['grpo'\] is unknown"),
    (dict(estimator=an_estimator), r"estimator=<function an_estimator .*ESTIMATORS\['mine'\] = function"),
    (dict(estimator="gae"), r"gae.* pass value=AnswerLogProbValue\(space='probability'\)"),
    (dict(estimator="gae", value=lambda requests, trainer: []), "says so by an attribute, space = 'probability'"),
    (dict(anchored=True), r"anchored=True puts the outcome .* pass value=OutcomeValue\(\)"),
    (dict(anchored=True, estimator="gae", value=OutcomeValue()), "anchored=True does nothing with estimator='gae'"),
    (dict(anchored=1), "anchored=1 is a int. Use True or False"),
    # the settings
    (dict(settings={"process_weight": 0.5}), r"settings=\{'process_weight': 0.5\} is a dict. Pass .*CreditSettings"),
    (dict(settings=CreditSettings), "settings=<class .*CreditSettings'> is a type"),
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
    # the episodes
    (dict(markers="Wait"), "markers='Wait' cannot begin an episode: pass a list"),
    (dict(markers=None), "markers=None cannot begin an episode"),
    (dict(markers=[]), r"markers=\[\] cannot begin an episode"),
    (dict(markers=["Wait", ""]), "cannot begin an episode"),
    (dict(markers=(word for word in ["Wait"])), "markers=<generator .* pass a list"),
    (dict(markers=["Wait", 3]), r"a text of markers=3 is no text \(but of type int"),
    (dict(markers=no_positions), "markers=no_positions gave None for the text .* an empty one for none"),
    (dict(markers=lambda text: 3), "gave 3 for the text"),
    (dict(markers=lambda text: text.split()), "gave 'First,' for the text .* positions at which episodes begin"),
    (dict(markers=lambda text: re.finditer("Wait", text)), r"gave <re.Match .*\[match.start\(\) for match in"),
    (dict(markers=lambda text: [1.0]), "gave 1.0 for the text"),
    (dict(markers=lambda text: [character == "W" for character in text]), "gave False for the text"),
    (dict(max_episode_tokens="256"), "max_episode_tokens='256' is no number of tokens"),
    (dict(max_episode_tokens=None), "max_episode_tokens=None is no number of tokens"),
    (dict(max_episode_tokens=256.0), "max_episode_tokens=256.0 is no number of tokens"),
    (dict(min_episode_tokens=True), "min_episode_tokens=True is no number of tokens"),
    (dict(min_episode_tokens=0), "min_episode_tokens=0 and max_episode_tokens=256 cannot both hold"),
    (dict(min_episode_tokens=200), "1 <= min <= max / 2"),
    # the final answer
    (dict(final_answer="("), r"final_answer='\(' is no regular expression \(missing \)"),
    (dict(final_answer="####["), "unterminated character set.* re.escape"),
    (dict(final_answer=None), r"final_answer=None is no text \(but of type NoneType"),
    (dict(final_answer=["####"]), r"is no text \(but of type list"),
    (dict(final_answer=""), "final_answer='' matches an empty text"),
    (dict(final_answer="(answer: )?"), "matches an empty text"),
    (dict(final_answer="\boxed"), r"final_answer='\\x08oxed' holds a control character.* raw text"),
    (dict(final_answer=r"\boxed\{"), r"looks for 'oxed' at the beginning of a word.* Write \\\\boxed"),
    # the rest
    (dict(answer_column=None), r"answer_column=None is no text \(but of type NoneType"),
    (dict(answer_column=["answer"]), r"answer_column=\['answer'\] is no text"),
    (dict(skip_solved="no"), "skip_solved='no' is a str. Use True or False"),
    (dict(unproductive_penalty=-0.1), "unproductive_penalty=-0.1 cannot charge"),
    (dict(unproductive_penalty="0.1"), "unproductive_penalty='0.1' cannot charge"),
    (dict(unproductive_penalty=math.nan), "unproductive_penalty=nan cannot charge"),
    (dict(unproductive_below=-1), "unproductive_below=-1 cannot charge"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[said[:50] for _, said in MISTAKES])
def test_mistakes_are_said_at_once(arguments, said):
    with pytest.raises(ValueError, match=said):
        ProcessRewardCallback(**arguments)


@pytest.mark.parametrize(
    ("value", "arguments", "said"),
    [
        (AnswerLogProbValue, dict(force_prompt=""), "force_prompt='' asks for nothing"),
        (AnswerLogProbValue, dict(force_prompt=["The answer is "]), r"is no text \(but of type list"),
        (AnswerLogProbValue, dict(force_prompt="The answer is \boxed{"), "holds a control character"),
        (AnswerLogProbValue, dict(closing=None), r"closing=None is no text \(but of type NoneType.* leave it out"),
        (AnswerLogProbValue, dict(space="logarithm"), "space='logarithm' is unknown"),
        (AnswerLogProbValue, dict(space=None), "space=None is unknown"),
        (AnswerLogProbValue, dict(floor=0), "floor=0 would make every answer certain"),
        (AnswerLogProbValue, dict(floor="-10"), "floor='-10' would make"),
        (AnswerLogProbValue, dict(floor=None), "floor=None would make"),
        (AnswerLogProbValue, dict(floor=math.nan), "floor=nan would make"),
        (AnswerLogProbValue, dict(max_tokens_per_pass=0), "max_tokens_per_pass=0 leaves no room"),
        (AnswerLogProbValue, dict(max_tokens_per_pass="8192"), "max_tokens_per_pass='8192' leaves no room"),
        (AnswerLogProbValue, dict(max_tokens_per_pass=None), "max_tokens_per_pass=None leaves no room"),
        (ServerValue, dict(floor=1.0), "floor=1.0 would make"),
        (MonteCarloValue, dict(num_rollouts=0), "num_rollouts=0 gives no rollout"),
        (MonteCarloValue, dict(num_rollouts="9"), "num_rollouts='9' gives no rollout"),
        (MonteCarloValue, dict(num_rollouts=2.5), "num_rollouts=2.5 gives no rollout"),
        (MonteCarloValue, dict(num_rollouts=None), "num_rollouts=None gives no rollout"),
        (CreditSettings, dict(scale_floor=-1), "scale_floor=-1 cannot be divided by"),
        (CreditSettings, dict(scale_floor=0), "scale_floor=0 cannot be divided by"),
        (CreditSettings, dict(scale_floor="0.1"), "scale_floor='0.1' cannot be divided by"),
        (CreditSettings, dict(process_weight=-1.0), "process_weight=-1.0 cannot weigh"),
        (CreditSettings, dict(process_weight=True), "process_weight=True cannot weigh"),
        (CreditSettings, dict(outcome_weight=None), "outcome_weight=None cannot weigh"),
        (CreditSettings, dict(outcome_weight=math.inf), "outcome_weight=inf cannot weigh"),
        (CreditSettings, dict(gamma=1.5), "gamma=1.5 is no share"),
        (CreditSettings, dict(lam="0.95"), "lam='0.95' is no share"),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else None,
)
def test_mistakes_in_its_parts_are_said_at_once(value, arguments, said):
    with pytest.raises(ValueError, match=said):
        value(**arguments)


def test_what_is_right_is_taken():
    ProcessRewardCallback(lambda requests, trainer: [], settings=CreditSettings(process_weight=0, scale_floor=1))
    ProcessRewardCallback(markers={"Wait", "So"}, final_answer=r"\\boxed\{|####", unproductive_penalty=0)
    ProcessRewardCallback(markers=lambda text: iter([]), final_answer="(?!)")
    AnswerLogProbValue("\\boxed{", closing="}", floor=-math.inf)


def returning(rows):
    """A value function that returns what `rows` makes of the right answer."""

    def mine(requests, trainer):
        return rows([[0.0] * len(request.boundaries) for request in requests])

    return mine


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda rows: None, "mine returned a NoneType"),
        (lambda rows: rows[1:], "mine returned 15 lists of values for 16 requests"),
        (lambda rows: torch.zeros(16, 3), "mine returned a Tensor. Return a list with one list of numbers per request"),
        (lambda rows: [0.5] * 16, "mine returned a float for request 0"),
        (lambda rows: [*rows[:15], torch.zeros(3)], "mine returned a Tensor for request 15"),
        (lambda rows: [rows[0][1:], *rows[1:]], r"mine returned \d+ values for request 0, which has \d+ boundaries"),
        (lambda rows: [[*rows[0], 1.0], *rows[1:]], r"mine returned \d+ values for request 0"),
        (lambda rows: [[None] * len(row) for row in rows], "mine returned None among .* not known is math.nan"),
        (lambda rows: [["0.5"] * len(row) for row in rows], "mine returned '0.5' among the values of request 0"),
    ],
    ids=["nothing", "rows", "tensor", "floats", "tensors", "too few", "too many", "none", "texts"],
)
def test_values_of_the_wrong_shape_name_the_function(tiny_model, tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        train(tiny_model, tmp_path, callback(value=returning(rows)))


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (lambda rewards, settings: None, "What estimator='mine' returned is a NoneType"),
        (lambda rewards, settings: rewards.outcome_advantages, r"has the shape \[16\], which is not \[N=16, T=\d+\]"),
        (lambda rewards, settings: rewards.mask, "has the dtype torch.bool. Pass floats"),
    ],
    ids=["nothing", "rows", "mask"],
)
def test_an_estimator_that_returns_something_else_is_named(tiny_model, tmp_path, monkeypatch, estimator, said):
    monkeypatch.setitem(ESTIMATORS, "mine", estimator)
    with pytest.raises(ValueError, match=said):
        train(tiny_model, tmp_path, callback(estimator="mine"))


def test_values_may_be_any_numbers(tiny_model, tmp_path):
    train(tiny_model, tmp_path, callback(value=returning(lambda rows: [tuple(map(np.float32, row)) for row in rows])))


def test_a_function_of_markers_is_checked_at_every_text(tiny_model, tmp_path):
    process = ProcessRewardCallback(AnswerLogProbValue(" = "), markers=only_with_a_marker)
    with pytest.raises(ValueError, match="markers=only_with_a_marker gave None for the text"):
        train(tiny_model, tmp_path, process)


def test_servers_that_are_missing_are_said_before_anything_is_sampled(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(DASHTrainer, "_generate", None)
    with pytest.raises(ValueError, match="this run has none: name them with vllm_server_urls"):
        train(tiny_model, tmp_path, callback(value=ServerValue(" = ")))


def test_only_one_callback_gives_each_token_its_credit(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="another callback has given each token its credit already"):
        train(tiny_model, tmp_path, callback(), callback())


def test_a_missing_answer_column_is_said_before_anything_is_sampled(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"\['prompt', 'answer'\].*'solution'"):
        train(tiny_model, tmp_path, callback(answer_column="solution"))


def test_accepted_answers():
    assert accepted_answers({"answer": "so 3\n#### 1,200"}, "answer") == ("1,200",)
    assert accepted_answers({"answer": ["a", " b", "", None]}, "answer") == ("a", "b")
    assert accepted_answers({"answer": 7}, "answer") == ("7",)
    assert accepted_answers({"answer": None}, "answer") == accepted_answers({"answer": math.nan}, "answer") == ()
    assert accepted_answers({"answer": Decimal("1.50")}, "answer") == ("1.50",)
    for answer in ({"value": "7"}, ["7", {"alias": "seven"}], b"7"):
        with pytest.raises(ValueError, match="column 'answer' has .* An answer is a text or a number"):
            accepted_answers({"answer": answer}, "answer")


# ------------------------------------------------------------------------------------------- diagnostics and pictures


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"estimator": "rloo"}, "one advantage"),
        ({"settings": CreditSettings(process_weight=1e-6)}, "drowned"),
        ({}, "V(prefix) takes"),
        ({"value": lambda requests, trainer: [[math.nan] * len(r.boundaries) for r in requests]}, "No row has a value"),
    ],
)
def test_lost_signals_are_said_once(tiny_model, tmp_path, caplog, monkeypatch, arguments, said):
    from tests.tiny import ScriptedReward

    if not arguments:
        monkeypatch.setattr("dash_trl.process_rewards.diagnostics.DEAR", 0.0)
    train(tiny_model, tmp_path, callback(**arguments), reward=ScriptedReward(constant=0.0), max_steps=6)
    assert caplog.text.count(said) == 1


def test_healthy_runs_are_not_warned(tiny_model, tmp_path, caplog, monkeypatch):
    from tests.tiny import ScriptedReward

    monkeypatch.setattr("dash_trl.process_rewards.diagnostics.DEAR", 10.0)
    train(tiny_model, tmp_path, callback(), reward=ScriptedReward(constant=0.0), max_steps=6)
    assert "advantage" not in caplog.text


def test_the_picture_shows_tokens_shades_and_values():
    picture = credit_html(["a<b", "\n", "c"], [1.0, 0.0, -0.5], [0, 2, 3], [-1.0, math.nan, -0.25], title="7 < 8")
    assert "7 &lt; 8" in picture and "a&lt;b" in picture and "⏎" in picture
    assert "rgba(0,150,0,0.60)" in picture and "rgba(200,0,0,0.30)" in picture
    assert "-1.00" in picture and "missing" in picture and "<svg" in picture
    assert credit_html([], []).startswith("<div>")
    with pytest.raises(ValueError, match="one per token"):
        credit_html(["a"], [])


def test_line_starts():
    assert line_starts("a\n\nb\n") == [3, 5]
