"""A step with a gradient that is not finite changes nothing and is counted; too many in succession end the run."""

import math

import pytest
import torch

from dash_trl import DASHTrainer
from dash_trl.update import SkippedSteps
from tests.doubles import grad_scaler
from tests.tiny import ScriptedReward, Snapshots, refused


def spoiled(value, steps):
    """A trainer whose loss is multiplied by `value` in the given optimizer steps (from 1)."""

    class Spoiled(DASHTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * value if self.state.global_step + 1 in steps else loss

    return Spoiled


class Watch(Snapshots):
    """Parameters, optimizer state and learning rate after every step."""

    def __init__(self):
        super().__init__()
        self.momenta = []
        self.learning_rates = []

    def on_step_end(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
        super().on_step_end(args, state, control, model)
        states = optimizer.state_dict()["state"]
        self.momenta.append({(i, name): value.clone() for i, one in states.items() for name, value in one.items()})
        self.learning_rates.append(lr_scheduler.get_last_lr()[0])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    "value, max_grad_norm, prepare",
    [
        (math.inf, 0.0, None),
        (1e30, 1.0, None),  # only the norm overflows
        (math.nan, 1.0, grad_scaler),
        (1e30, 0.0, grad_scaler),  # which the scaler does not see
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(train, value, max_grad_norm, prepare):
    seen = Watch()
    settings = {
        "lr_scheduler_type": "linear",
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1,
        "max_steps": 4,
        "optimizer": "adamw_torch",
        "callbacks": [seen],
        "prepare": prepare,
    }
    trainer = train(spoiled(value, steps={2}), **settings)
    assert same(seen.steps[0], seen.steps[1]) and same(seen.momenta[0], seen.momenta[1])
    assert not same(seen.steps[1], seen.steps[2]) and not same(seen.steps[2], seen.steps[3])
    assert all(value.isfinite().all() for value in seen.steps[3].values())
    assert trainer.state.global_step == 4
    held = prepare is not None and math.isnan(value * 0)  # Transformers' rule where a scaler has skipped
    assert seen.learning_rates == pytest.approx([75e-5, 75e-5, 5e-4, 25e-5] if held else [75e-5, 5e-4, 25e-5, 0.0])
    logged = [(log["skipped_steps"], math.isfinite(log["loss"])) for log in trainer.state.log_history[:4]]
    assert logged == [(0, True), (1, True), (1, True), (1, True)]
    if held:
        assert trainer.accelerator.scaler.get_scale() == 512.0


def test_what_counts_as_a_row():
    for loss_scaling, skipped, said in (
        (False, [True] * 4 + [False] + [True] * 4, "step 10 is not finite, as in the 4 steps before it"),
        # From 2^16 down to 1 by halves, and then no further than a run without a scaler.
        (True, [True] * (16 + 4), "fp16"),
    ):
        steps = SkippedSteps(loss_scaling=loss_scaling)
        for step, one in enumerate(skipped, 1):
            steps.count(math.nan if one else 1.0, step)
        assert steps.total == sum(skipped)
        refused(said, steps.count, math.inf, len(skipped) + 1, error=RuntimeError)


def test_deepspeed_must_not_apply_it():
    for norm in (math.nan, math.inf, -1.0):
        refused(
            r"step 3: the parameters are lost.*check_grad_overflow",
            SkippedSteps(loss_scaling=False).count,
            norm,
            3,
            error=RuntimeError,
            by_deepspeed=False,
        )
        SkippedSteps(loss_scaling=False).count(norm, 3, by_deepspeed=True)
    for usable in (0.0, 1.5, None):
        SkippedSteps(loss_scaling=False).count(usable, 3, by_deepspeed=False)


def test_a_resumed_run_goes_on_counting(train, tmp_path):
    trainer_class = spoiled(math.nan, steps={1})
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(trainer_class, **settings)
    resumed = train(trainer_class, resume=tmp_path / "checkpoint-1", **settings)
    assert resumed.state.log_history[1]["skipped_steps"] == 1


def test_a_step_without_a_pass_has_its_own_step_time(train):
    """In the log of this step, not added to that of the next one."""
    trainer = train(reward=ScriptedReward(constant=0.0, silent=[1, 2]), max_steps=4)
    steps = trainer.state.log_history[:4]
    assert [log["filter/kept_rows"] > 0 for log in steps] == [True, False, False, True]
    assert all(log["step_time"] > 0 for log in steps) and trainer._current_train_step_time == 0


def test_a_step_without_signal_after_a_skipped_one_moves_the_schedule(train):
    """As with fp16, whose loss scaler accelerate offers on GPUs only."""

    settings = {"lr_scheduler_type": "linear", "max_steps": 4, "max_grad_norm": 1.0, "prepare": grad_scaler}
    trainer = train(spoiled(math.inf, steps={1}), reward=ScriptedReward(constant=0.3, silent=[1]), **settings)
    rates = [log["learning_rate"] for log in trainer.state.log_history[:4]]
    assert rates[0] == rates[1] > rates[2] > rates[3]
