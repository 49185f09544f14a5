"""`reward_pipeline`: training begins on the groups that are scored, and the update is the one that waits for all."""

from __future__ import annotations

import random
import threading

import pytest
from transformers import AutoModelForCausalLM

from dash_trl import DASHCallback, DASHConfig, DASHTrainer, RewardAgent
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
        assert size > 1e-2 and difference < 5e-6  # of the update: rounding, in other passes
        for before, now in zip(plain.state.log_history[:-1], piped.state.log_history[:-1], strict=True):
            timed = {name for name in {**before, **now} if "time" in name or name.startswith("packing/")}
            assert {*now} - timed == {*before} - timed
            for name in {*before} - timed:
                expected_value = (
                    None if before[name] is None else pytest.approx(before[name], rel=1e-4, abs=1e-5, nan_ok=True)
                )
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


REFUSED = [
    ({"filter_denominator": "kept"}, "filter_denominator='kept', which divides by all rows that are kept"),
    ({"scale_rewards": "batch"}, "scale_rewards='batch', which divides by the deviation of all rewards"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "'normalize_then_sum', which divides by the deviation"),
    ({"advantage_estimator": "reinforce_plus_plus"}, "which divides by the deviation of all advantages"),
    ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "which divides by the deviation of all advantages"),
    ({"entropy_coef": 0.1}, "entropy_coef=0.1, which is shared out over all rows that are kept"),
    ({"num_iterations": 2}, "num_iterations=2, which uses the window in several steps"),
    ({"steps_per_generation": 8}, "gradient_accumulation_steps=4, which uses the window in several steps"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_needs_all_rewards_is_refused(settings, message):
    shapes = {**SHAPES, "use_cpu": True, "bf16": False, "reward_pipeline": True, **settings}
    with pytest.raises(ValueError, match=f"reward_pipeline=True with .*{message}"):
        DASHConfig("out", **shapes)
    DASHConfig("out", **{**shapes, "reward_pipeline": False})


class OwnAdvantages(DASHTrainer):
    def compute_advantages(self, rewards):
        return rewards[:, 0]


class PerGroup(DASHTrainer):
    def compute_advantages(self, rewards):
        return super().compute_advantages(rewards)

    compute_advantages.per_group = True


class Looks(DASHCallback):
    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.rows = [*getattr(self, "rows", []), len(rollouts)]


class LooksAtGroups(Looks):
    per_group = True


@pytest.mark.parametrize(
    ("trainer_class", "settings", "message"),
    [
        (OwnAdvantages, {}, "OwnAdvantages does not say that its compute_advantages treat each group by itself"),
        (DASHTrainer, {"callbacks": [Looks()]}, "Looks does not say that its on_rewards and on_advantages"),
        (DASHTrainer, {"reward": lambda completions, **kwargs: [1.0] * len(completions)}, "scores a whole batch at"),
    ],
)
def test_what_sees_a_few_groups_must_say_that_it_may(tiny_model, tmp_path, trainer_class, settings, message):
    settings = {"reward": RewardAgent(Delayed()), **SHAPES, **settings}
    with pytest.raises(ValueError, match=message):
        run(trainer_class, tiny_model, tmp_path, reward_pipeline=True, **settings)


def test_what_says_that_it_may_gets_whole_groups(tiny_model, tmp_path):
    looks = LooksAtGroups()
    run(
        PerGroup, tiny_model, tmp_path, reward=RewardAgent(Delayed()), callbacks=[looks], reward_pipeline=True, **SHAPES
    )
    assert sum(looks.rows) == 16 and all(rows % 4 == 0 for rows in looks.rows)
