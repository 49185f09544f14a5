"""The three events: their order, what they see, what they may change, and what happens if they break it."""

import json

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHConfig, DASHTrainer, ProcessRewardCallback, RolloutBatch
from dash_trl.callbacks import restore_states, states_of
from dash_trl.monitoring import MetricsFileCallback, TimeLimitCallback
from dash_trl.rollout import ScoredRollouts
from tests.tiny import ScriptedReward, prompts, run


class Recorder(DASHCallback):
    def __init__(self):
        self.events, self.versions = [], []

    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        self.events.append(("sampled", type(rollouts), None, kwargs["trainer"]))
        assert rollouts.examples[0]["prompt"] and len(rollouts.completions) == len(rollouts) == 16
        assert rollouts.group.tolist() == [i // 4 for i in range(16)]
        self.versions.append(rollouts.policy_version.tolist())

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        self.events.append(("rewards", rollouts.rewards.clone(), type(rollouts), kwargs["model"]))

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.events.append(("advantages", rollouts.rewards, rollouts.advantages.clone(), kwargs["processing_class"]))


def test_events_come_in_order_and_only_to_dash_callbacks(tiny_model, tmp_path):
    class Plain(TrainerCallback):  # lacks the events
        pass

    recorder = Recorder()
    run(DASHTrainer, tiny_model, tmp_path, callbacks=[Plain(), recorder], max_steps=2)
    names = [event[0] for event in recorder.events]
    assert names == ["sampled", "rewards", "advantages"] * 2
    assert recorder.versions == [[[0, 0]] * 16, [[1, 1]] * 16]
    assert recorder.events[0][1] is RolloutBatch and recorder.events[1][2] is ScoredRollouts
    assert recorder.events[1][1].shape == (16, 1) and recorder.events[2][2].shape == (16,)
    assert all(event[3] is not None for event in recorder.events)


def test_a_changed_reward_changes_the_advantages(tiny_model, tmp_path):
    class AllEqual(Recorder):
        def on_rewards(self, args, state, control, rollouts, **kwargs):
            rollouts.rewards[:] = 0.5

    callback = AllEqual()
    trainer = run(DASHTrainer, tiny_model, tmp_path, callbacks=[callback])
    assert (callback.events[-1][2] == 0).all()
    assert trainer.state.log_history[0]["filter/dropped_constant"] == 1.0


def test_an_infinite_reward_is_a_failed_one(tiny_model, tmp_path):
    """Whatever the other function says; the rest of the group keeps its baseline."""

    class Infinite(Recorder):
        def on_rewards(self, args, state, control, rollouts, **kwargs):
            rollouts.rewards[:4, 0] = torch.tensor([torch.inf, -torch.inf, 1.0, 0.0])

    def zero(completion_ids, **kwargs):
        return [0.0] * len(completion_ids)

    callback = Infinite()
    trainer = run(DASHTrainer, tiny_model, tmp_path, reward=[zero, zero], callbacks=[callback], scale_rewards="none")
    assert callback.events[-1][2].tolist() == [0.0, 0.0, 0.5, -0.5, *[0.0] * 12]
    log = trainer.state.log_history[0]
    assert (log["filter/dropped_unscored"], log["filter/kept_rows"]) == (2 / 16, 2 / 16)
    assert 0.0 < log["grad_norm"] < torch.inf


def test_changed_advantages_reach_filter_log_and_loss(tiny_model, tmp_path):
    class OneRow(DASHCallback):
        def on_advantages(self, args, state, control, rollouts, **kwargs):
            rollouts.advantages = torch.zeros(rollouts.completion_ids.shape)
            rollouts.advantages[3, 0] = 2.0

    trainer = run(DASHTrainer, tiny_model, tmp_path, callbacks=[OneRow()])
    log = trainer.state.log_history[0]
    assert log["filter/kept_rows"] == 1 / 16 and log["grad_norm"] > 0
    logged = list(trainer._logs["advantages"])
    assert [i for i, value in enumerate(logged) if value] == [3]


@pytest.mark.parametrize(
    "event, change, said",
    [
        ("on_rewards", lambda r: setattr(r, "rewards", r.rewards[:3]), "has shape|changed its shape"),
        (
            "on_rewards",
            lambda r: setattr(r, "rewards", r.rewards.double()),
            "dtype from torch.float32 to torch.float64",
        ),
        ("on_rewards", lambda r: setattr(r, "rewards", None), "was removed"),
        ("on_advantages", lambda r: setattr(r, "advantages", torch.zeros(16, 3)), r"shape \(16, 3\)"),
        ("on_advantages", lambda r: r.advantages.fill_(torch.nan), "is not finite"),
        ("on_rollouts_sampled", lambda r: setattr(r, "completion_mask", r.completion_mask[:, :1]), "changed its shape"),
        ("on_rollouts_sampled", lambda r: setattr(r, "tool_mask", torch.ones(3, 2)), "3 rows instead of 16"),
    ],
)
def test_a_broken_field_names_the_callback(tiny_model, tmp_path, event, change, said):
    def broken(self, args, state, control, rollouts, **kwargs):
        change(rollouts)

    culprit = type("Careless", (DASHCallback,), {event: broken})()
    with pytest.raises(ValueError, match=said) as caught:
        run(DASHTrainer, tiny_model, tmp_path, callbacks=[culprit])
    assert f"Careless.{event}" in str(caught.value)


class OwnBeginning(DASHCallback):
    def on_train_begin(self, args, state, control, **kwargs):  # without super()
        self.begun = True


class Mixin:
    def on_train_begin(self, args, state, control, **kwargs):
        """Stands before DASHCallback's in the order of the bases."""


class Mixed(Mixin, DASHCallback):
    pass


@pytest.mark.parametrize("kind", [Recorder, OwnBeginning, Mixed, ProcessRewardCallback])
def test_a_trainer_that_sends_no_rollouts(tiny_model, tmp_path, kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} is a DASHCallback, but this trainer sends no on_rollouts"):
        run(GRPOTrainer, tiny_model, tmp_path, callbacks=[kind()])
    with pytest.raises(ValueError, match="Train with dash_trl.DASHTrainer"):
        run(GRPOTrainer, tiny_model, tmp_path, prepare=lambda trainer: trainer.add_callback(kind))


def test_a_callback_that_has_seen_a_dash_trainer(tiny_model, tmp_path):
    callback = OwnBeginning()
    run(DASHTrainer, tiny_model, tmp_path, callbacks=[callback])
    assert callback.begun
    with pytest.raises(ValueError, match="sends no on_rollouts_sampled"):
        run(GRPOTrainer, tiny_model, tmp_path, callbacks=[callback])


@pytest.mark.parametrize("name", ["on_rollouts_sampled", "on_rewards", "on_advantages", "on_advantage"])
def test_rollout_events_of_a_plain_callback(tiny_model, tmp_path, unloadable, name):
    kind = type("Plain", (TrainerCallback,), {name: lambda self, *args, **kwargs: None})
    said = f"Plain.{name} would never be called: .* Derive Plain from dash_trl.DASHCallback instead of TrainerCallback"
    for callback in (kind, kind()):
        with pytest.raises(ValueError, match=said):
            DASHTrainer(
                tiny_model,
                ScriptedReward(),
                DASHConfig(str(tmp_path), bf16=False, use_cpu=True),
                prompts(8),
                callbacks=[callback],
            )
    with pytest.raises(ValueError, match=said):
        run(DASHTrainer, tiny_model, tmp_path, prepare=lambda trainer: trainer.add_callback(kind))


@pytest.mark.parametrize(
    "slip, event",
    [
        ("on_advantage", "on_advantages"),
        ("on_reward", "on_rewards"),
        ("on_rollout_sampled", "on_rollouts_sampled"),
        ("on_step_ends", "on_step_end"),
    ],
)
def test_a_misspelt_event(slip, event):
    with pytest.raises(ValueError, match=f"Careless.{slip} is no event.* Rename it to {event}"):
        type("Careless", (DASHCallback,), {slip: lambda self, *args, **kwargs: None})


def test_a_method_of_the_callbacks_own(caplog):
    methods = ("on_something_else", "on_rollouts", "on_train_epoch_end", "_on_rewards", "only_advantages")
    type("Helpful", (DASHCallback,), {name: lambda self: None for name in methods} | {"on_gpu": True})
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"Helpful.{name} is no event: no trainer calls it." for name in methods[:3]]


def test_metrics_file(tiny_model, tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    run(DASHTrainer, tiny_model, tmp_path, callbacks=[MetricsFileCallback(path)], max_steps=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert {"reward", "filter/kept_rows", "time/train", "packing/padding_share"} <= lines[0].keys()


class Clock:
    """Goes on by so many seconds with each optimizer step."""

    def __init__(self, *seconds):
        self.now, self.seconds = 100.0, iter(seconds)

    def __call__(self):
        return self.now

    def reward(self, completion_ids, **kwargs):
        self.now += next(self.seconds)
        return [float(len(ids) % 2) for ids in completion_ids]


def timed(tiny_model, folder, limit, *seconds, **settings):
    clock = Clock(*seconds)
    path, timer = folder / "metrics.jsonl", TimeLimitCallback(limit, clock=clock)
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "reward": clock.reward, **settings}
    trainer = run(DASHTrainer, tiny_model, folder, callbacks=[timer, MetricsFileCallback(path)], **settings)
    elapsed = [json.loads(line)["time/elapsed"] for line in path.read_text().splitlines()]
    return trainer, elapsed


def test_a_run_stops_at_the_first_step_past_its_time_and_a_resumed_one_counts_what_was_before(tiny_model, tmp_path):
    trainer, elapsed = timed(tiny_model, tmp_path, 10.0, 4, 3, 3, 5)
    assert (trainer.state.global_step, elapsed) == (3, [4, 7, 10, 10])
    assert (tmp_path / "checkpoint-3").is_dir()
    # the 3 s after the checkpoint of step 2 do not count
    again, elapsed = timed(tiny_model, tmp_path, 10.0, 2, 1, 5, resume=str(tmp_path / "checkpoint-2"))
    assert (again.state.global_step, elapsed[4:]) == (4, [9, 10, 10])


def test_training_once_more_begins_at_0(tiny_model, tmp_path):
    trainer, _ = timed(tiny_model, tmp_path, 10.0, *[6] * 4, save_strategy="no")
    assert trainer.state.global_step == 2
    trainer.train()
    assert trainer.state.global_step == 2 and not (tmp_path / "checkpoint-2").exists()


def test_a_checkpoint_of_a_run_that_did_not_count(tiny_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    run(DASHTrainer, tiny_model, tmp_path, max_steps=2, **settings)
    trainer, elapsed = timed(tiny_model, tmp_path, None, *[1] * 4, resume=str(tmp_path / "checkpoint-2"))
    assert (trainer.state.global_step, elapsed) == (6, [1, 2, 3, 4, 4])


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_no_time_is_a_mistake(limit):
    with pytest.raises(ValueError, match="leaves no time to train in"):
        TimeLimitCallback(limit)


def test_two_callbacks_of_one_class_keep_a_state_each():
    class Counts(DASHCallback):
        def __init__(self, count=None):
            self.count = count

        def state_dict(self):
            return None if self.count is None else {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    states = states_of([Counts(1), Recorder(), Counts(2)])
    again = [Counts(0), Counts(0), Counts(0)]
    assert restore_states(again, states) == ["Counts-3"] and [one.count for one in again] == [1, 2, 0]
    assert states_of([Counts(), Counts(2)]).keys() == {"Counts-2"}, "the place among them is what counts"
