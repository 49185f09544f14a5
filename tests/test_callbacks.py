"""The three events: their order, what they see, what they may change, and what happens if they break it."""

import json
import re

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback, RewardRunner, RolloutBatch
from dash_trl.checks import check_callbacks
from dash_trl.monitoring import MetricsFileCallback, TimeLimitCallback
from dash_trl.rollout import ScoredRollouts
from tests.test_rollouts import rollouts
from tests.tiny import refusal, refused, run


class Recorder(DASHCallback):
    def __init__(self):
        self.events, self.versions = [], []

    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        self.events.append(("sampled", type(rollouts), None, kwargs["trainer"]))
        assert rollouts.examples[0]["prompt"] and len(rollouts.completions) == len(rollouts) == 16
        assert rollouts.group.tolist() == [i // 4 for i in range(16)]
        self.versions.append(rollouts.policy_version.tolist())
        for example in rollouts.examples:
            example["answer"] = "changed"

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        self.events.append(("rewards", rollouts.rewards.clone(), type(rollouts), kwargs["model"]))

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.events.append(("advantages", rollouts.rewards, rollouts.advantages.clone(), kwargs["processing_class"]))


def test_events_come_in_order_and_what_a_callback_leaves_is_looked_at(tiny_model, tmp_path):
    """A reward that begins after the callback gets the columns that the callback has changed."""
    recorder, reward = Recorder(), RewardRunner(lambda completion, answer: float(answer == "changed"))
    settings = {"callbacks": [TrainerCallback(), recorder], "max_steps": 2, "reward": reward}
    trainer = run(DASHTrainer, tiny_model, tmp_path, **settings)
    assert [event[0] for event in recorder.events] == ["sampled", "rewards", "advantages"] * 2
    assert recorder.versions == [[[0, 0]] * 16, [[1, 1]] * 16]
    assert recorder.events[0][1] is RolloutBatch and recorder.events[1][2] is ScoredRollouts
    assert recorder.events[1][1].tolist() == [[1.0]] * 16 and recorder.events[2][2].shape == (16,)
    assert all(event[3] is not None for event in recorder.events)
    late = type("Late", (TrainerCallback,), {"on_rewards": print})
    assert "Late.on_rewards would never be called" in refusal(trainer.add_callback, late)

    def broken(self, args, state, control, rollouts, **kwargs):
        rollouts.tool_mask = rollouts.completion_mask[:, :1]

    trainer.add_callback(type("Careless", (DASHCallback,), {"on_rollouts_sampled": broken}))
    assert "Careless.on_rollouts_sampled left `tool_mask` unusable: it has dtype" in refusal(trainer.train)


class Changes(Recorder):
    """Changes rewards in the first window, sets rewards to ±inf in the second, and changes advantages in the third."""

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        if state.global_step == 0:
            rollouts.rewards[0] = 1.0
        elif state.global_step == 1:
            rollouts.rewards[:4, 0] = torch.tensor([torch.inf, -torch.inf, 1.0, 0.0])

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        super().on_advantages(args, state, control, rollouts, **kwargs)
        if state.global_step == 2:
            rollouts.advantages = torch.zeros(rollouts.completion_ids.shape)
            rollouts.advantages[3, 0] = 2.0


def test_changes_reach_advantages_filter_log_and_loss(tiny_model, tmp_path):
    """An infinite reward is a failed one, whatever the other function says; the rest of the group has its baseline."""

    def zero(completion_ids, **kwargs):
        return [0.0] * len(completion_ids)

    callback = Changes()
    settings = {"callbacks": [callback], "scale_rewards": "none", "max_steps": 3}
    trainer = run(DASHTrainer, tiny_model, tmp_path, reward=[zero, zero], **settings)
    first, second, third = (
        [log, credit[2].tolist()] for log, credit in zip(trainer.state.log_history, callback.events[1::2], strict=False)
    )
    assert first[0]["rewards/zero/mean"] == 0, "the log has rewards as functions gave them"
    assert first[1] == [1.5, -0.5, -0.5, -0.5, *[0.0] * 12] and first[0]["filter/kept_rows"] == 4 / 16
    assert second[1] == [0.0, 0.0, 0.5, -0.5, *[0.0] * 12]
    assert (second[0]["filter/dropped_unscored"], second[0]["filter/kept_rows"]) == (2 / 16, 2 / 16)
    assert third[1] == [0.0] * 16 and third[0]["filter/kept_rows"] == 1 / 16
    assert all(0.0 < log["grad_norm"] < torch.inf for log, _ in (first, second, third))
    assert [i for i, value in enumerate(trainer._logs["advantages"]) if value] == [3]


def test_a_broken_field_names_the_callback():
    for change, said in (
        (
            lambda r: setattr(r, "rewards", r.rewards[:2]),
            r"float32 and shape \(2, 2\); it needs .*float32 and \(3, 2\)",
        ),
        (lambda r: setattr(r, "rewards", r.rewards.double()), "has dtype torch.float64 .* it needs torch.float32 and"),
        (lambda r: setattr(r, "rewards", None), "is None; rollouts are tensors on the CPU"),
        (lambda r: setattr(r, "rewards", r.rewards.to("meta")), "device='meta'.*; rollouts are tensors on the CPU"),
        (lambda r: setattr(r, "advantages", torch.zeros(3, 4)), r"shape \(3, 4\); it needs .* \(3,\) or \(3, 5\)"),
        (lambda r: r.advantages.fill_(torch.nan), "is not finite"),
        (lambda r: setattr(r, "completion_mask", r.completion_mask[:, :1]), r"shape \(3, 1\); it needs"),
        (lambda r: setattr(r, "tool_mask", torch.ones(3, 5)), "was None"),
        (lambda r: r.completion_mask.mul_(2), "holds 2; a mask is 1 where a token counts, else 0"),
    ):
        batch = rollouts()
        before = {name: value.clone() for name, value in batch.tensors().items()}
        change(batch)
        refused(f"Careless left .*{said}", batch.validate, like=before, culprit="Careless")


def test_a_trainer_that_sends_no_rollouts(tiny_model, tmp_path):
    said = "ProcessRewardCallback is a DASHCallback, but this trainer sends no on_rollouts.* Train with dash_trl.DASHTr"
    callbacks = [ProcessRewardCallback(lambda requests, trainer: [])]
    refused(said, run, GRPOTrainer, tiny_model, tmp_path, callbacks=callbacks)


def test_rollout_events_of_a_plain_callback():
    for name in ("on_rollouts_sampled", "on_rewards", "on_advantages", "on_advantage"):
        kind = type("Plain", (TrainerCallback,), {name: lambda self, *args, **kwargs: None})
        said = f"Plain.{name} would never be called: .* Derive Plain from dash_trl.DASHCallback instead of Trainer"
        for callback in (kind, kind()):
            refused(said, check_callbacks, [TrainerCallback(), Recorder, callback])


def test_a_misspelt_event():
    for slip, event in (
        ("on_advantage", "on_advantages"),
        ("on_reward", "on_rewards"),
        ("on_rollout_sampled", "on_rollouts_sampled"),
        ("on_step_ends", "on_step_end"),
    ):
        found = refusal(type, "Careless", (DASHCallback,), {slip: lambda self, *args, **kwargs: None})
        assert re.search(f"Careless.{slip} is no event.* Rename it to {event}", found)


def test_a_method_of_the_callbacks_own():
    methods = ("on_something_else", "on_train_epoch_end", "_on_rewards", "only_advantages")
    type("Helpful", (DASHCallback,), {name: lambda self: None for name in methods} | {"on_advantage": True})


class Slow(torch.nn.Module):
    """A model, and a clock that advances by some seconds with each optimizer step."""

    def __init__(self, *seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.now, self.seconds = 100.0, iter(seconds)

    def forward(self, x):
        self.now += next(self.seconds)
        return {"loss": (self.weight * x).sum()}


def timed(folder, limit, *seconds, resume=None, **settings):
    """Trains; returns the trainer, and `time/elapsed` of each line of the metrics file."""
    model, path = Slow(*seconds), folder / "logs" / "metrics.jsonl"
    callbacks = [TimeLimitCallback(limit, clock=lambda: model.now), MetricsFileCallback(path)]
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", **{**defaults, **settings})
    trainer = Trainer(model, args, train_dataset=[{"x": 1.0}] * 99, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines][-2:] == [trainer.state.global_step] * 2 and "grad_norm" in lines[0]
    return trainer, [line["time/elapsed"] for line in lines]


def test_a_run_stops_at_the_first_step_past_its_time_and_a_resumed_one_counts_what_was_before(tmp_path):
    trainer, elapsed = timed(tmp_path, 10.0, 4, 3, 3, 5)
    assert (trainer.state.global_step, elapsed) == (3, [4, 7, 10, 10])
    assert (tmp_path / "checkpoint-3").is_dir()
    # the 3 s after the checkpoint of step 2 do not count
    again, elapsed = timed(tmp_path, 10.0, 2, 1, 5, resume=str(tmp_path / "checkpoint-2"))
    assert (again.state.global_step, elapsed) == (4, [4, 7, 9, 10, 10])  # nor are they in the file


def test_training_once_more_begins_at_0(tmp_path):
    trainer, _ = timed(tmp_path, 10.0, *[6] * 4, save_strategy="no")
    assert trainer.state.global_step == 2
    trainer.train()
    assert trainer.state.global_step == 2 and not (tmp_path / "checkpoint-2").exists()


def test_a_checkpoint_of_a_run_that_did_not_count():
    state, timer = TrainerState(global_step=1), TimeLimitCallback(clock=lambda: 5.0)
    timer.on_train_begin(None, state, None)
    saved = state.stateful_callbacks["TimeLimitCallback"]  # without which Transformers would fail at the next one
    assert timer.seconds == 0.0 and saved["attributes"].keys() == {"seconds"}
