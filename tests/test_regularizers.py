"""Entropy bonus, router loss and TRL's per-pass metrics: once per optimizer step, however the survivors are packed."""

import math

import pytest
import torch
from trl import GRPOTrainer

from dash_trl import DASHTrainer, RewardRunner
from tests import reference
from tests.doubles import Penalised, Replaced
from tests.models import MOE
from tests.tiny import ScriptedReward, load, noting, parameters, prompts, refusal, refused, save_tiny_model


def update_of(trainer, start) -> torch.Tensor:
    end = parameters(trainer)
    return torch.cat([(end[name] - start[name]).flatten() for name in start])


def test_a_loss_without_the_weights_of_passes_is_refused(train):
    assert "Replaced computes the loss without super" in refusal(train, Replaced)
    piped = {"reward": RewardRunner(lambda completion: 1.0), "reward_pipeline": True}
    refused("a term of your own", train, Penalised, **piped)


def survivors_means(model, rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean entropy and the mean log-prob of the survivors' tokens, with gradients."""
    survivors = rollouts.advantages != 0
    assert survivors.any() and not survivors.all()
    own = rollouts.completion_mask.bool() & survivors[:, None]
    found = reference.distributions(model, rollouts)
    return found.entropy()[own].mean(), found.log_prob(rollouts.completion_ids)[own].mean()


@pytest.mark.parametrize(("loss_type", "budget"), [("dapo", None), ("grpo", 30), ("bnpo", 4000)])
def test_terms_are_added_once_per_step(tiny_model, start, train, loss_type, budget):
    """The entropy bonus adds c · ∇H to the update (learning rate 1), −c · H to the loss; H is the survivors' mean.

    A subclass's own term has the same weight.
    """
    recorder = noting("on_advantages")
    settings = {
        "loss_type": loss_type,
        "max_tokens_per_microbatch": budget,
        "callbacks": [recorder],
        "eval_dataset": prompts(4),
        "per_device_eval_batch_size": 4,
    }
    without, bonus = (train(entropy_coef=one, **settings) for one in (0.0, 0.5))
    own = train(Penalised, **settings)
    model = load(tiny_model)
    entropy, log_prob = survivors_means(model, recorder.noted[-1])
    for trainer, term in ((bonus, 0.5 * entropy), (own, log_prob)):
        added = update_of(trainer, start) - update_of(without, start)
        gradients = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        assert (added - expected).abs().max() <= 1e-4 * expected.abs().max(), type(trainer).__name__
    logged = [one.state.log_history[0] for one in (without, bonus)]
    assert logged[1]["loss"] - logged[0]["loss"] == pytest.approx(-0.5 * entropy.item(), abs=1e-4)
    assert logged[1]["entropy"] == pytest.approx(entropy.item(), abs=1e-4)
    assert logged[1]["entropy_coef"] == 0.5
    assert own.evaluate()["eval_loss"] > without.evaluate()["eval_loss"]


def test_the_entropy_controller_is_trls(train):
    settings = {
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.1,
        "max_steps": 4,
        "entropy_coef": 0.2,
        "entropy_coef_max": 0.5,
        "learning_rate": 0.2,
        "constant": 0.0,
    }
    trl = train(GRPOTrainer, **settings)
    logged = [log["entropy_coef"] for log in trl.state.log_history[:-1]]
    assert len(set(logged)) > 1
    ours = {"gradient_filter_threshold": None, "max_tokens_per_microbatch": 30}
    dash = train(**ours, **settings)
    assert [log["entropy_coef"] for log in dash.state.log_history[:-1]] == pytest.approx(logged)
    assert dash.entropy_coef == trl.entropy_coef


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("moe"), config=MOE)


def test_the_router_loss(train, moe):
    """Not linear in the batch, so no equality; but its weight is TRL's for every packing (it was 4 or 1/4 of it)."""
    start = parameters(moe)
    settings = {"router_aux_loss_coef": 10.0, "learning_rate": 0.01, "constant": 0.0}
    trl = train(GRPOTrainer, model=moe, **settings)
    expected = update_of(trl, start)
    for budget in (30, 4000):  # a pass per row or two, everything in one
        dash = train(model=moe, max_tokens_per_microbatch=budget, **settings)
        update = update_of(dash, start)
        assert dash.state.log_history[0]["packing/padding_free"] == 1
        assert (update @ expected / (expected @ expected)).item() == pytest.approx(1.0, abs=0.12), budget
        refused("a router loss", train, model=moe, reward=RewardRunner(lambda completion: 1.0), reward_pipeline=True)
        for name in ("loss", "aux_loss"):
            logged = [one.state.log_history[0][name] for one in (trl, dash)]
            assert logged[1] == pytest.approx(logged[0], rel=0.1), (budget, name)


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
    ("name", "settings", "budget"),
    [
        ("clip_ratio/region_mean", {}, None),
        ("clip_ratio/high_mean", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, 30),
        ("cispo_clip_ratio", {"loss_type": "cispo", "epsilon_high": 1.0}, 4000),
    ],
)
def test_the_figures_of_passes_are_trls(train, name, settings, budget):
    """TRL's micro-steps weighed by what they count: rows with a ratio per sequence, tokens otherwise.

    What is clipped on the second use of a window, with half of the groups dropped.
    """
    settings = {"num_iterations": 2, "max_steps": 2, "epsilon": 0.02, "learning_rate": 0.05, **settings}
    trl = train(PerMicroStep, **settings)
    column = 1 if "importance_sampling_level" in settings else 0
    logs = train(max_tokens_per_microbatch=budget, **settings).state.log_history
    assert logs[0]["filter/kept_rows"] < 0.8
    expected = sum(one[column] * one[2][name] for one in trl.seen) / sum(one[column] for one in trl.seen)
    assert logs[1][name] == pytest.approx(expected, rel=1e-4, abs=1e-6) and expected > 0.01


def test_a_step_without_signal_clips_nothing(train):
    """It counts in the mean over logged steps, as in TRL, where all of its advantages are 0."""
    settings = {"num_iterations": 2, "max_steps": 4, "epsilon": 0.02, "learning_rate": 0.05, "logging_steps": 4}
    trl, dash = (
        train(one, reward=ScriptedReward(constant=0.0, silent=[1]), **settings).state.log_history[0]
        for one in (GRPOTrainer, DASHTrainer)
    )
    assert dash["clip_ratio/region_mean"] == pytest.approx(trl["clip_ratio/region_mean"], rel=0.1)
    assert trl["clip_ratio/region_mean"] > 0 and math.isfinite(dash["entropy"])
