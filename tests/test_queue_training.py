"""Runs whose prompts come from a queue (`max_num_gen_batches`): what is sampled, and resume."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from transformers import TrainerCallback

from dash_trl import DASHTrainer, RewardRunner
from tests.by_prompt import ByPrompt
from tests.doubles import EndsTheEpoch, SaveEarly, recorded, same
from tests.tiny import ScriptedReward, prompts, refused, run

trained = partial(recorded, reward=ScriptedReward(constant=0.6), max_num_gen_batches=3, max_steps=6)


class EndsItWithinAStep(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


# name → (settings, the steps that are gone on from)
RUNS: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
    "a window of two optimizer steps": ({"steps_per_generation": 8, "dataset": prompts(21)}, (2, 3)),
    "a window takes several epochs": ({"dataset": prompts(5), "max_num_gen_batches": 6}, (4,)),
    "two windows of a step, not shuffled": (
        {"steps_per_generation": 2, "dataset": prompts(9), "shuffle_dataset": False},
        (4,),
    ),
    "a stream": ({"dataset": prompts(13).to_iterable_dataset()}, (4,)),
    "an epoch is cut": (
        {"dataset": prompts(21), "callbacks": [EndsTheEpoch()], "steps_per_generation": 8, "max_steps": 9},
        (6,),
    ),
    # the window is sampled again, with its rounds; random numbers were drawn meanwhile
    "within a step": (
        {"dataset": prompts(13), "callbacks": [SaveEarly()], "rollouts": ByPrompt(), "max_steps": 7},
        (5,),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_equals_uninterrupted(train, tmp_path, name):
    settings, steps = RUNS[name]
    rounds, whole = trained(train, save_strategy="steps", save_steps=1, **settings)
    assert max(log.get("prompts/epoch", 0) for log in whole.state.log_history) > 0
    for step in steps:
        checkpoint = tmp_path / f"checkpoint-{step}"
        seen, resumed = trained(train, resume=checkpoint, **settings)
        assert seen == rounds[len(rounds) - len(seen) :], step
        same(whole, resumed)


@pytest.mark.parametrize("most", [1, 2])
def test_windows_ahead_go_on_after_an_epoch_was_cut(train, tmp_path, most):
    """Transformers no longer knows which prompts were used. With dynamic sampling, a first round expects no signal."""
    settings = {
        "dataset": prompts(24),
        "max_num_gen_batches": most,
        "async_level": 1,
        "max_steps": 7,
        "rollouts": None,
        "in_process": True,
        "reward": RewardRunner(lambda completion: len(completion) if most == 1 else 1.0),
        "callbacks": [EndsTheEpoch()],
    }
    rounds, _ = trained(train, save_strategy="steps", save_steps=4, **settings)
    seen, _ = trained(train, resume=tmp_path / "checkpoint-4", **settings)
    assert seen == rounds[-len(seen) :] and len(seen) > 2


def test_an_epoch_that_is_cut_within_a_step_is_refused(train):
    settings = {"callbacks": [EndsItWithinAStep()], "dataset": prompts(4)}
    refused("within an optimizer step.*on_step_end only", trained, train, **settings)


# ---------------------------------------------------------------------------------------------- with other settings


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """The folder of checkpoint 3 of a run, in the middle of its second window."""
    output = tmp_path_factory.mktemp("saved")
    settings = {"steps_per_generation": 8, "dataset": prompts(21), "max_steps": 3}
    trained(partial(run, DASHTrainer, tiny_model, output), save_strategy="steps", save_steps=3, **settings)
    return output / "checkpoint-3"


def test_what_a_checkpoint_has_other_prompts_for_is_refused(train, saved):
    for change in ({"max_num_gen_batches": 1}, {"per_device_train_batch_size": 8}, {"dataset": prompts(22)}):
        settings = {"steps_per_generation": 8, "dataset": prompts(21), "max_steps": 5, "resume": saved, **change}
        refused(r"was saved with .*\(now .*Resume with the values of the checkpoint, or", trained, train, **settings)
