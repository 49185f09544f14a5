"""`reward_pipeline`: training begins on the groups that are scored, and the update is the one that waits for all."""

from __future__ import annotations

import random
import threading

import pytest
from transformers import AutoModelForCausalLM

from dash_trl import DASHTrainer, RewardAgent
from tests.tiny import parameters, prompts, relative_difference, run

SHAPES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4, "max_steps": 1}


class Delayed:
    """Half of the groups have signal; their scores come in another order with each seed."""

    __name__ = "delayed"

    def __init__(self, seed: int = 0, fails: bool = False):
        self.random, self.fails = random.Random(seed), fails

    def compute_score(self, completion_ids, prompt):
        threading.Event().wait(self.random.random() / 20)
        if self.fails and sum(completion_ids) % 7 == 3:
            raise ConnectionError("away")
        if prompt.startswith("1"):
            return 1.0
        return float(sum(completion_ids) % 2), {"length": len(completion_ids), "end": str(completion_ids[-1])}


def trained(model, tmp_path, seed, **settings):
    fails = settings.pop("fails", False)
    trainer = run(DASHTrainer, model, tmp_path, reward=RewardAgent(Delayed(seed, fails)), **{**SHAPES, **settings})
    return parameters(trainer.model), trainer


SETTINGS = [
    {},
    {"fails": True},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"scale_rewards": "none", "loss_type": "dr_grpo"},
    {"advantage_estimator": "rloo"},
    {"beta": 0.04},
    {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    {"max_tokens_per_microbatch": 64},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_update_is_the_one_without_it(tiny_model, tmp_path, settings):
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    expected, plain = trained(tiny_model, tmp_path, 0, **settings)
    for seed in (1, 2):
        found, piped = trained(tiny_model, tmp_path, seed, reward_pipeline=True, **settings)
        difference, size = relative_difference(start, expected, found)
        assert size > 1e-2 and difference < 5e-6  # of the update; rounding, since other rows share a pass
        for before, now in zip(plain.state.log_history[:-1], piped.state.log_history[:-1], strict=True):
            timed = {name for name in {**before, **now} if "time" in name or name.startswith("packing/")}
            assert {*now} - timed == {*before} - timed
            for name in {*before} - timed:
                expected_value = None if before[name] is None else pytest.approx(before[name], rel=1e-4, abs=1e-5, nan_ok=True)
                assert now[name] == expected_value, name
        assert {name: list(rows) for name, rows in piped._logs["extra"].items()} == {
            name: list(rows) for name, rows in plain._logs["extra"].items()
        }
        assert list(piped._logs["rewards"]["delayed"]) == pytest.approx(
            list(plain._logs["rewards"]["delayed"]), nan_ok=True
        )
        assert list(piped._logs["advantages"]) == pytest.approx(list(plain._logs["advantages"]), abs=1e-5)


def test_training_begins_before_the_last_reward(tiny_model, tmp_path):
    """The last group's rewards wait for the first backward pass: without the pipeline for ever."""
    backward, waited = threading.Event(), []

    class Gated:
        def compute_score(self, completion_ids, prompt, row):
            if row == 0:
                waited.append(backward.wait(60))
            return float(row % 2)

    class Watched(DASHTrainer):
        def _calculate_rewards(self, inputs, *args):
            inputs = [{**example, "row": row} for row, example in enumerate(inputs)]
            return super()._calculate_rewards(inputs, *args)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            loss.register_hook(lambda grad: backward.set())
            return loss

    data = prompts(64).add_column("row", [0] * 64)
    settings = {**SHAPES, "max_steps": 1, "reward_pipeline": True}
    run(Watched, tiny_model, tmp_path, reward=RewardAgent(Gated(), timeout=120), dataset=data, **settings)
    assert waited == [True]
