"""`reward_pipeline`: training begins on the groups that are scored, and the update is the one that waits for all."""

import threading
from collections.abc import Sequence

import pytest
import torch

from dash_trl import DASHCallback, DASHConfig, DASHTrainer, RewardRunner
from dash_trl.process_rewards import AnswerLogProbValue, ProcessRewardCallback
from tests.doubles import Delayed, SavesBetween
from tests.tiny import ScriptedRollouts, Snapshots, assert_same_update, refused

ROUNDING = {"tolerance": 5e-6}  # of the update, in other passes


class Short(Delayed):
    """Another score, by the same name."""

    def compute_score(self, completion_ids, prompt):
        return 0.5 if prompt.startswith("1") else float(len(completion_ids) < 8)


class Logs(DASHCallback):
    per_group = True

    def on_rewards(self, args, state, control, rollouts, log_extra, **kwargs):
        log_extra("first", rollouts.completion_ids[:, 0].tolist())


def trained(train, seed, *, fails=False, **settings):
    settings = {"callbacks": [Logs()], **settings}
    rewards = [Delayed(seed, fails), *(Short() for _ in settings.get("reward_weights", [])[1:])]
    return train(reward=RewardRunner(rewards), **settings)


SETTINGS = [  # pairs of the options that have a part in it
    {"fails": True, "reward_weights": [1.0, 0.5], "loss_type": "grpo"},  # of two functions with the same name
    {"scale_rewards": "none", "loss_type": "dr_grpo", "fails": True, "beta": 0.04},
    {"loss_type": "bnpo", "advantage_estimator": "rloo", "max_tokens_per_microbatch": 64},
    {"steps_per_generation": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_update_is_the_one_without_it(start, train, settings, caplog):
    caplog.set_level("INFO", "dash_trl")
    plain = trained(train, 0, **settings)
    piped = trained(train, 1, reward_pipeline=True, **settings)
    assert_same_update(start, plain, piped, **ROUNDING)
    assert caplog.text.count("reward_pipeline: training on a window begins when all of it is sampled") == 1
    for before, now in zip(plain.state.log_history[:-1], piped.state.log_history[:-1], strict=True):
        timed = {name for name in {**before, **now} if "time" in name or name.startswith("packing/")}
        assert {*now} - timed == {*before} - timed
        for name in {*before} - timed:
            assert now[name] == pytest.approx(before[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    extras = [{name: list(rows) for name, rows in one._logs["extra"].items()} for one in (plain, piped)]
    assert extras[0] == extras[1]
    assert piped.reward_func_names == ["delayed", "delayed#2"][: len(piped.reward_funcs)]
    for name in piped.reward_func_names:
        before, now = (list(one._logs["rewards"][name]) for one in (plain, piped))
        assert now == pytest.approx(before, nan_ok=True)
        assert f"rewards/{name}/mean" in piped.state.log_history[0]
    assert list(piped._logs["advantages"]) == pytest.approx(list(plain._logs["advantages"]), abs=1e-5)


def test_a_checkpoint_between_micro_steps_loses_no_row(start, train, tmp_path):
    saves = SavesBetween()
    settings = {"max_tokens_per_microbatch": 60, "reward_pipeline": True}
    expected = trained(train, 0, **settings)
    settings |= {"callbacks": [saves], "prepare": lambda trainer: setattr(saves, "trainer", trainer)}
    found = trained(train, 1, **settings)
    assert_same_update(start, expected, found, **ROUNDING)
    assert (tmp_path / "checkpoint-0").exists()


class NumberedRollouts(ScriptedRollouts):
    """Reward functions see each row's number."""

    def __call__(self, prompts, trainer):
        return {**super().__call__(prompts, trainer), "row": list(range(len(prompts)))}


class PerGroup(DASHTrainer):
    def compute_advantages(self, rewards):
        return super().compute_advantages(rewards)

    compute_advantages.per_group = True


class Looks(DASHCallback):
    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.rows = [*getattr(self, "rows", []), len(rollouts)]


class LooksAtGroups(Looks):
    per_group = True


class InOrder:
    """Scores groups one after the other; the next one begins when `turn` lets it. Rows are known by their column."""

    __name__ = "in_order"

    def __init__(self, order: Sequence[int], turn=lambda group: None):
        self.order = order
        self.turn = turn
        self.changed = threading.Condition()
        self.scored = 0

    def compute_score(self, completion_ids, row):
        place = self.order.index(row % 16 // 4)
        with self.changed:
            assert self.changed.wait_for(lambda: self.scored % 16 >= 4 * place, 60)
        if row % 4 == 0:
            self.turn(place)
        with self.changed:
            self.scored += 1
            self.changed.notify_all()
        return float(sum(completion_ids) % 2)


ORDER = [2, 0, 3, 1]  # in which the groups of a window are scored
MINI = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 8, "learning_rate": 0.5}


def mini(train, reward=None, trainer_class=DASHTrainer, **settings):
    reward = RewardRunner(reward or InOrder(ORDER), timeout=120)
    rollouts = NumberedRollouts(noise=0.1 if settings.pop("logprobs", False) else None)
    settings = {**MINI, "reward_pipeline": True, **settings}
    return train(trainer_class, reward=reward, rollouts=rollouts, **settings)


@pytest.mark.parametrize(
    ("event", "settings"),
    [("backward", {"gradient_accumulation_steps": 4, "max_steps": 1}), ("step", {"max_steps": 4})],
)
def test_training_begins_before_the_last_reward(train, event, settings):
    """The last group's rewards wait for the first backward pass or optimizer step: without the pipeline for ever.

    What says that it may see groups gets whole ones.
    """
    events = {"backward": threading.Event(), "step": threading.Event()}
    waited = []
    looks = LooksAtGroups()
    looks.on_step_end = lambda *args, **kwargs: events["step"].set()

    class Watched(PerGroup):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            loss.register_hook(lambda grad: events["backward"].set())
            return loss

    reward = InOrder(ORDER, turn=lambda place: waited.append(events[event].wait(60)) if place == 3 else None)
    trainer = mini(train, reward, Watched, callbacks=[looks], **settings)
    assert waited == [True]
    assert sum(looks.rows) == 16 and all(rows % 4 == 0 for rows in looks.rows)
    known = any(name.startswith("reward") for name in trainer.state.log_history[0])
    assert known == (event == "backward"), "not after the first of several steps"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_steps": 4, "logprobs": True},
        {"mask_truncated_completions": True, "beta": 0.04},
    ],
)
def test_mini_fills_optimizer_steps_in_the_order_of_arrival(settings, start, train, monkeypatch):
    """As one that waits for all rewards, if its shuffle had the order in which they came."""
    if settings.get("logprobs"):
        settings |= {"vllm_importance_sampling_mode": "token_truncate"}
    arrived: list[int] = []

    class Sees(DASHCallback):
        per_group = True

        def on_rewards(self, args, state, control, rollouts, **kwargs):
            arrived.extend(row["row"] % 16 for row in rollouts.examples)

    ends = Snapshots(), Snapshots()
    piped = mini(train, callbacks=[Sees(), ends[0]], **settings)
    orders = iter(torch.tensor(arrived).split(16))
    drawn = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **more: drawn(n, **more) if more or n != 16 else next(orders))
    plain = mini(train, reward_pipeline=False, callbacks=[ends[1]], **settings)
    steps = 8 // settings.get("gradient_accumulation_steps", 1)
    assert len(ends[0].steps) == len(ends[1].steps) == steps
    for found, expected in zip(ends[0].steps, ends[1].steps, strict=True):
        assert_same_update(start, expected, found, **ROUNDING)
    logged = {"reward", "reward_std", "rewards/in_order/mean", "frac_reward_zero_std", "filter/kept_rows"}
    for name in logged:  # with the window's first step there, with its last one here
        values = [[line[name] for line in one.state.log_history if name in line] for one in (plain, piped)]
        assert values[0] == pytest.approx(values[1]) and len(values[0]) == 2
    assert list(piped._logs["rewards"]["in_order"]) == list(plain._logs["rewards"]["in_order"])


SHAPES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
REFUSED = [
    ({"filter_denominator": "kept"}, "filter_denominator='kept' does not .*: it divides by all rows that are kept"),
    ({"scale_rewards": "batch"}, "reward_pipeline=True with scale_rewards='batch', which divides by the deviation"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "'normalize_then_sum' .*: it divides by the deviation"),
    ({"advantage_estimator": "single_path"}, "which uses the rewards of all rows of the window"),
    ({"entropy_coef": 0.1}, "entropy_coef=0.1 .*: it is distributed over all rows that are kept"),
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 .*: it keeps the tokens of highest entropy"),
    ({"num_iterations": 2}, "num_iterations=2 does not go with reward_pipeline=True: it uses the window in several"),
    ({"steps_per_generation": 6}, "gradient_accumulation_steps=4, which begins a window within an optimizer step"),
    (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4},
        "leaves an optimizer step 2 completions of a process, which do not split into groups of num_generations=4",
    ),
]


def test_what_needs_all_rewards_is_refused():
    for settings, message in REFUSED:
        shapes = {**SHAPES, "use_cpu": True, "bf16": False, "reward_pipeline": True, **settings}
        refused(message, DASHConfig, "out", **shapes)
        DASHConfig("out", **{**shapes, "reward_pipeline": False})


class OwnAdvantages(DASHTrainer):
    def compute_advantages(self, rewards):
        return rewards[:, 0]


def test_what_sees_a_few_groups_must_say_that_it_may(train):
    all_at_once = {"reward": lambda completions, **kwargs: [1.0] * len(completions)}
    for trainer_class, changed, message in (
        (
            type("Own", (DASHTrainer,), {"_calculate_rewards": print}),
            {},
            "Own._calculate_rewards would be called after",
        ),
        (
            OwnAdvantages,
            {},
            "^reward_pipeline=True passes on .* OwnAdvantages does not say that its compute_advantages",
        ),
        (
            DASHTrainer,
            {"callbacks": [Looks()]},
            "Looks does not say that its on_rollouts_sampled, on_rewards, on_advantages treat",
        ),
        (DASHTrainer, all_at_once, "'<lambda>' scores a whole batch at"),
        (DASHTrainer, {"callbacks": [ProcessRewardCallback(AnswerLogProbValue())]}, "its figures and checks are of wh"),
    ):
        settings = {"reward": RewardRunner(Delayed()), "reward_pipeline": True, **changed}
        refused(message, train, trainer_class, **settings)
