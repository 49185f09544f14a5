"""Entropy bonus, router loss and TRL's per-pass metrics: once per optimizer step, however the survivors are packed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeForCausalLM
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.update.losses import ScaledCoefficient, regularizer_weight
from dash_trl.update.schedule import Segment
from tests.test_isolation import BLIND
from tests.tiny import parameters, run, save_tiny_model

BUDGETS = [None, 30, 4000]  # as TRL's micro-batches, a pass per row or two, everything in one


class Recorder(DASHCallback):
    """The rollouts of the last window."""

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.rollouts = rollouts


def kept_all(budget: int | None) -> dict[str, Any]:
    return {"gradient_filter_threshold": None, "max_tokens_per_microbatch": budget}


def update_of(trainer, start) -> torch.Tensor:
    end = parameters(trainer.model)
    return torch.cat([(end[name] - start[name]).flatten() for name in start])


def test_the_weights_of_a_segment_add_up():
    segment = Segment(micro_steps=4, passes=8, all_rows=32, all_tokens=100.0, kept_rows=5, kept_tokens=60)
    tokens = [10, 0, 25, 25]  # of the passes of both ranks; one is a dummy
    assert sum(regularizer_weight(count, segment) for count in tokens) == pytest.approx(segment.passes)
    assert regularizer_weight(0, segment) == 0.0
    silent = Segment(micro_steps=4, passes=8, all_rows=32, all_tokens=100.0, kept_rows=0, kept_tokens=0)
    assert regularizer_weight(0, silent) == 0.0


def test_a_scaled_coefficient_is_scaled_as_a_factor_only():
    coefficient = ScaledCoefficient(0.5, scale=4.0)
    assert (coefficient * torch.tensor(3.0)).item() == 6.0
    assert coefficient == 0.5 and coefficient + 0.25 == 0.75 and min(coefficient - 1.0, 2.0) == -0.5
    assert type(coefficient + 0.25) is float and str(sum([coefficient]) / 1) == "0.5"


@pytest.mark.parametrize(("loss_type", "budget"), [("dapo", None), ("grpo", 30), ("bnpo", 4000)])
def test_the_entropy_bonus(tiny_model, tmp_path, loss_type, budget):
    """It adds c · ∇H to the update (learning rate 1), −c · H to the loss; H is the survivors' mean entropy."""
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    runs, recorder = {}, Recorder()
    for coefficient in (0.0, 0.5):
        runs[coefficient] = run(
            DASHTrainer,
            tiny_model,
            tmp_path,
            loss_type=loss_type,
            entropy_coef=coefficient,
            max_tokens_per_microbatch=budget,
            callbacks=[recorder],
        )
    added = update_of(runs[0.5], start) - update_of(runs[0.0], start)

    model, rollouts = AutoModelForCausalLM.from_pretrained(tiny_model), recorder.rollouts
    entropies = []
    for row in torch.nonzero(rollouts.advantages)[:, 0].tolist():
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()]
        completion = rollouts.completion_ids[row][rollouts.completion_mask[row].bool()]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    assert 0 < len(entropies) < len(rollouts)
    entropy = torch.cat(entropies).mean()
    entropy.backward()
    expected = torch.cat([0.5 * value.grad.flatten() for value in model.parameters()])
    assert (added - expected).abs().max() <= 1e-4 * expected.abs().max()
    logged = [runs[coefficient].state.log_history[0] for coefficient in (0.0, 0.5)]
    assert logged[1]["loss"] - logged[0]["loss"] == pytest.approx(-0.5 * entropy.item(), abs=1e-4)
    assert logged[1]["entropy"] == pytest.approx(entropy.item(), abs=1e-4)
    assert logged[1]["entropy_coef"] == 0.5 and type(runs[0.5].entropy_coef) is float


def test_the_entropy_controller_is_trls(tiny_model, tmp_path):
    settings = {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.1, "max_steps": 4}
    settings |= {"entropy_coef": 0.2, "entropy_coef_max": 0.5, "learning_rate": 0.2, "constant": 0.0}
    trl = run(GRPOTrainer, tiny_model, tmp_path, **settings)
    logged = [log["entropy_coef"] for log in trl.state.log_history[:-1]]
    assert len(set(logged)) > 1
    for budget in BUDGETS[1:]:
        dash = run(DASHTrainer, tiny_model, tmp_path, **kept_all(budget), **settings)
        assert [log["entropy_coef"] for log in dash.state.log_history[:-1]] == pytest.approx(logged)
        assert type(dash.entropy_coef) is float and dash.entropy_coef == trl.entropy_coef


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("moe"), Qwen2MoeForCausalLM, BLIND["qwen2 moe"](0.2).config)


def test_the_router_loss(moe, tmp_path):
    """Not linear in the batch, so no equality; but its weight is TRL's for every packing (it was 4 or 1/4 of it)."""
    start = parameters(AutoModelForCausalLM.from_pretrained(moe))
    settings = {"router_aux_loss_coef": 10.0, "learning_rate": 0.01, "constant": 0.0}
    trl = run(GRPOTrainer, moe, tmp_path, **settings)
    expected = update_of(trl, start)
    for budget in BUDGETS[1:]:
        dash = run(DASHTrainer, moe, tmp_path, max_tokens_per_microbatch=budget, **settings)
        update = update_of(dash, start)
        assert dash._passes.padding_free
        assert (update @ expected / (expected @ expected)).item() == pytest.approx(1.0, abs=0.12), budget
        for name in ("loss", "aux_loss"):
            logged = [one.state.log_history[0][name] for one in (trl, dash)]
            assert logged[1] == pytest.approx(logged[0], rel=0.1), (budget, name)
        assert type(dash.router_aux_loss_coef) is float


class PerMicroStep(GRPOTrainer):
    """TRL's figures of every micro-step of the last optimizer step, with the loss tokens and rows of each."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self._step % self.args.gradient_accumulation_steps == 0:
            self.seen = []
        figures = {name: values[-1] for name, values in self._metrics["train"].items()}
        self.seen.append((inputs["completion_mask"].sum().item(), len(inputs["completion_mask"]), figures))
        return loss


@pytest.mark.parametrize(
    ("name", "budget", "settings"),
    [
        ("clip_ratio/region_mean", None, {}),
        ("clip_ratio/high_mean", 30, {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
        ("cispo_clip_ratio", 4000, {"loss_type": "cispo", "epsilon_high": 1.0}),
    ],
)
def test_the_share_of_clipped_tokens_is_trls(tiny_model, tmp_path, name, budget, settings):
    """On the second use of a window, with half of the groups dropped; TRL's micro-steps weighed by what they count."""
    settings = {"num_iterations": 2, "max_steps": 2, "epsilon": 0.02, "learning_rate": 0.05, **settings}
    trl = run(PerMicroStep, tiny_model, tmp_path, **settings)
    column = 1 if "importance_sampling_level" in settings else 0
    clipped = sum(one[column] * one[2][name] for one in trl.seen) / sum(one[column] for one in trl.seen)
    logs = run(DASHTrainer, tiny_model, tmp_path, max_tokens_per_microbatch=budget, **settings).state.log_history
    assert logs[0]["filter/kept_rows"] < 0.8 and clipped > 0.02
    assert logs[1][name] == pytest.approx(clipped, abs=1e-6)


def test_means_over_survivors_weigh_passes_by_tokens(tiny_model, tmp_path):
    """All rows kept: TRL's KL and entropy, its micro-steps weighed by tokens."""
    settings = {"beta": 0.1, "max_steps": 2, "learning_rate": 0.3}
    trl = run(PerMicroStep, tiny_model, tmp_path, **settings)
    dash = run(DASHTrainer, tiny_model, tmp_path, **kept_all(30), **settings)
    for name in ("kl", "entropy"):
        expected = sum(one[0] * one[2][name] for one in trl.seen) / sum(one[0] for one in trl.seen)
        assert dash.state.log_history[1][name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("loss_type", "budget"), [("dapo", 30), ("grpo", 4000)])
def test_the_policy_loss_is_trls(tiny_model, tmp_path, loss_type, budget):
    """TRL logs it if the coefficient is not 0."""
    settings = {"entropy_coef": 1e-9, "loss_type": loss_type, "num_iterations": 2, "max_steps": 2}
    settings |= {"learning_rate": 0.05}
    trl = run(GRPOTrainer, tiny_model, tmp_path, **settings)
    dash = run(DASHTrainer, tiny_model, tmp_path, max_tokens_per_microbatch=budget, **settings)
    for one, other in zip(trl.state.log_history[:2], dash.state.log_history[:2], strict=True):
        assert other["policy_loss"] == pytest.approx(one["policy_loss"], abs=1e-5)


def test_a_step_without_signal_clips_nothing(tiny_model, tmp_path):
    """It counts in the mean over logged steps, as in TRL, where all of its advantages are 0."""

    class Reward:
        __name__ = "reward"
        calls = 0

        def __call__(self, prompts, **kwargs):
            self.calls += 1
            return [float(i % 2) for i in range(len(prompts))] if self.calls == 1 else [1.0] * len(prompts)

    settings = {"num_iterations": 2, "max_steps": 4, "epsilon": 0.02, "learning_rate": 0.05, "logging_steps": 4}
    logged = [
        run(trainer_class, tiny_model, tmp_path, reward=Reward(), **settings).state.log_history[0]
        for trainer_class in (GRPOTrainer, DASHTrainer)
    ]
    assert logged[1]["clip_ratio/region_mean"] == pytest.approx(logged[0]["clip_ratio/region_mean"], rel=0.1)
    assert math.isfinite(logged[1]["entropy"])
