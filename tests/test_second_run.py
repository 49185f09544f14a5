"""`train()` again on the same trainer: nothing of an interrupted step, or of the run before, is left."""

from contextlib import suppress

import pytest
import torch
from transformers import TrainerCallback

from dash_trl import DASHConfig, DASHTrainer
from tests.tiny import ScriptedReward, ScriptedRollouts, parameters, prompts


class Reward(ScriptedReward):
    """A reward that logs the number of its call, and is interrupted in call `interrupted_in`."""

    def __init__(self, interrupted_in=None):
        super().__init__(constant=0.3)
        self.interrupted_in = interrupted_in

    def __call__(self, log_metric, log_extra, **kwargs):
        rewards = super().__call__(**kwargs)
        log_metric("calls", self.calls)
        log_extra("call", [self.calls] * len(rewards))
        if self.calls == self.interrupted_in:
            raise KeyboardInterrupt
        return rewards


class InterruptedBetweenMicroSteps(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def set_out(trainer, weights):
    """Resets the trainer: the given weights, and the same completions, rewards and random numbers each time."""
    trainer.model.load_state_dict(weights)
    trainer.rollout_func = ScriptedRollouts(7)
    trainer.reward_funcs[0].func = Reward()
    trainer.remove_callback(InterruptedBetweenMicroSteps)
    torch.manual_seed(3)


def logged(trainer):
    """Return the log without times."""
    return [
        {name: value for name, value in log.items() if "time" not in name and "per_second" not in name}
        for log in trainer.state.log_history
    ]


@pytest.mark.parametrize(
    "interrupted_in, settings, micro_steps",
    [
        (None, {"callbacks": [InterruptedBetweenMicroSteps()]}, 5),
        (4, {"steps_per_generation": 2}, 6),  # while it scores
        (None, {"steps_per_generation": 16}, 8),  # not interrupted, but ended in the middle of a window
        (None, {"use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_coef_delta": 0.1}, 8),
    ],
)
def test_a_second_run_is_that_of_a_new_trainer(train, interrupted_in, settings, micro_steps):
    trainers = []
    settings = {"reward": Reward(interrupted_in), "max_steps": 2, "prepare": trainers.append, **settings}
    with suppress(KeyboardInterrupt):
        train(**settings)
    (trainer,) = trainers
    assert trainer._step == micro_steps
    weights = parameters(trainer)
    trainer._last_loaded_step = 0  # as sampling with vLLM leaves it
    set_out(trainer, weights)
    trainer.train()
    assert trainer._last_loaded_step == -1
    settings |= {"prepare": lambda new: set_out(new, weights)}
    new = train(**settings)
    assert logged(trainer) == logged(new) and len(logged(new)) == 3
    after = parameters(new)
    for name, value in parameters(trainer).items():
        assert torch.equal(value, after[name]) and not torch.equal(value, weights[name]), name


def test_a_trainer_keeps_its_precision_when_another_is_made(train, tiny_model, tmp_path):
    """accelerate has one state, which the settings of another trainer reset. Its precision became that of the first."""
    trainer = train()
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "num_generations": 4}
    args = DASHConfig(**settings, bf16=True)
    trainer.train()
    other = DASHTrainer(tiny_model, ScriptedReward(), args, prompts(16))
    trainer.train()
    assert trainer.accelerator.mixed_precision == "no"
    DASHConfig(**settings)
    other.evaluate(prompts(4))
    assert other.accelerator.mixed_precision == "bf16"
