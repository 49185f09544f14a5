"""A resumed run equals an uninterrupted one: parameters, window, order of the prompts."""

import pytest
import torch
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from tests.tiny import ScriptedReward, parameters, prompts, run


class SeededRollouts:
    """Completions that depend on torch's random state, as sampling does: a resumed run has to restore it."""

    def __call__(self, prompts, trainer):
        ids = [torch.randint(4, 260, (int(torch.randint(1, 20, ())),)).tolist() for _ in prompts]
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": ids,
            "logprobs": None,
        }


def seeded(trainer):
    trainer.rollout_func = SeededRollouts()


@pytest.mark.parametrize(
    "settings, at",
    [
        ({"max_steps": 6}, 3),
        ({"max_steps": 6, "steps_per_generation": 16}, 3),  # in the middle of a window of 4 steps
        ({"max_steps": 6, "num_iterations": 2}, 3),  # between two uses of a window
        ({"max_steps": 6, "steps_per_generation": 2}, 3),
        ({"max_steps": 7}, 5),  # in the second epoch (4 steps each): TRL would repeat the first epoch's order
    ],
    ids=str,
)
def test_resumed_equals_uninterrupted(tiny_model, tmp_path, settings, at):
    dataset = prompts(16)
    settings = {
        "optimizer": "adamw_torch",
        "dataset": dataset,
        "save_strategy": "steps",
        "save_steps": at,
        "prepare": seeded,
        "reward": ScriptedReward(constant=0.4),
        **settings,
    }
    whole = run(DASHTrainer, tiny_model, tmp_path / "whole", **settings)
    seen = [log["reward"] for log in whole.state.log_history if "reward" in log]
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{at}")
    resumed = run(DASHTrainer, tiny_model, tmp_path / "resumed", resume=checkpoint, **settings)
    assert resumed.state.global_step == whole.state.global_step == settings["max_steps"]
    for (name, one), other in zip(parameters(whole.model).items(), parameters(resumed.model).values(), strict=True):
        assert torch.equal(one, other), name
    assert [log["reward"] for log in resumed.state.log_history if "reward" in log] == seen


def test_the_order_of_the_prompts_is_trls(tiny_model, tmp_path):
    """Over three epochs of an uninterrupted run."""
    orders = {}
    for trainer_class in (GRPOTrainer, DASHTrainer):
        seen = orders[trainer_class] = []

        def reward(prompts, completion_ids, seen=seen, **kwargs):
            seen.extend(prompts)
            return [float(len(ids) % 2) for ids in completion_ids]

        run(trainer_class, tiny_model, tmp_path, reward=reward, max_steps=12, dataset=prompts(16))
    assert len(orders[DASHTrainer]) == 12 * 16
    assert orders[DASHTrainer] == orders[GRPOTrainer]


@pytest.mark.parametrize("why", ["missing", "of another number of processes"])
def test_a_checkpoint_without_a_window_is_said(tiny_model, tmp_path, caplog, why):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run(DASHTrainer, tiny_model, tmp_path, **settings)
    checkpoint = tmp_path / "checkpoint-1"
    path = checkpoint / "generation_window_0.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    if why != "missing":
        torch.save({**state, "processes": 2}, path)
    with caplog.at_level("WARNING", logger="dash_trl.trainer"):
        run(DASHTrainer, tiny_model, tmp_path, resume=str(checkpoint), **settings)
    assert "has no generation window" in caplog.text
