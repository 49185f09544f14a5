"""`ProcessRewardCallback` in real training runs, its two estimators of V, its diagnostics and pictures."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import AnswerLogProbValue, CreditSettings, MonteCarloValue, ValueRequest, line_starts
from dash_trl.process_rewards.callback import accepted_answers
from dash_trl.visualization import credit_html
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


def test_unknown_estimators_are_listed():
    with pytest.raises(ValueError, match="centered_return, grpo"):
        ProcessRewardCallback(estimator="ppo")


def test_gae_needs_probabilities():
    with pytest.raises(ValueError, match="space='probability'"):
        ProcessRewardCallback(estimator="gae")


def test_a_missing_answer_column_is_said_before_anything_is_sampled(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"\['prompt', 'answer'\].*'solution'"):
        train(tiny_model, tmp_path, callback(answer_column="solution"))


def test_episodes_are_checked_at_once():
    with pytest.raises(ValueError, match="min_episode_tokens"):
        ProcessRewardCallback(min_episode_tokens=0)


def test_accepted_answers():
    assert accepted_answers({"answer": "so 3\n#### 1,200"}, "answer") == ("1,200",)
    assert accepted_answers({"answer": ["a", " b", "", None]}, "answer") == ("a", "b")
    assert accepted_answers({"answer": 7}, "answer") == ("7",)
    assert accepted_answers({"answer": None}, "answer") == ()


# ------------------------------------------------------------------------------------------- diagnostics and pictures


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"estimator": "rloo"}, "one advantage"),
        ({"settings": CreditSettings(process_weight=1e-6)}, "drowned"),
        ({}, "V(prefix) takes"),
    ],
)
def test_lost_signals_are_said_once(tiny_model, tmp_path, caplog, monkeypatch, arguments, said):
    from tests.tiny import ScriptedReward

    if not arguments:
        monkeypatch.setattr("dash_trl.diagnostics.DEAR", 0.0)
    train(tiny_model, tmp_path, callback(**arguments), reward=ScriptedReward(constant=0.0), max_steps=6)
    assert caplog.text.count(said) == 1


def test_healthy_runs_are_not_warned(tiny_model, tmp_path, caplog, monkeypatch):
    from tests.tiny import ScriptedReward

    monkeypatch.setattr("dash_trl.diagnostics.DEAR", 10.0)
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
