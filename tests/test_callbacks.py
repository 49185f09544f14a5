"""The three events: their order, what they see, what they may change, and what happens if they break it."""

import torch
from IPython.core.interactiveshell import InteractiveShell
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils.notebook import NotebookProgressCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, ProcessRewardCallback, RewardRunner
from dash_trl.monitoring import MetricsFileCallback, TimeLimitCallback, monitor
from tests.doubles import Evaluates, rollouts
from tests.tiny import prompts, read_rows, refused


class Recorder(DASHCallback):
    """It notes what the events may change, before they do."""

    def __init__(self):
        self.seen = []

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        assert rollouts.rewards is None and len(rollouts.completions) == len(rollouts) == 16
        assert rollouts.group.tolist() == [i // 4 for i in range(16)]
        self.seen.append(rollouts.policy_version.tolist())
        for example in rollouts.examples:
            example["answer"] = "changed"

    def on_rewards(self, args, state, control, rollouts, model, **kwargs):
        assert rollouts.advantages is None
        self.seen.append(rollouts.rewards.tolist())

    def on_advantages(self, args, state, control, rollouts, processing_class, **kwargs):
        self.seen.append(rollouts.advantages.tolist())


def test_events_come_in_order_and_what_a_callback_leaves_is_looked_at(train):
    """A reward that begins after the callback gets the columns that the callback has changed."""
    recorder = Recorder()
    reward = RewardRunner(lambda completion, answer: float(answer == "changed"))
    settings = {"callbacks": [TrainerCallback(), recorder], "max_steps": 2, "reward": reward}
    trainer = train(**settings)
    scored = [[[1.0]] * 16, [0.0] * 16]
    assert recorder.seen == [[[0, 0]] * 16, *scored, [[1, 1]] * 16, *scored]
    plain = type("Plain", (TrainerCallback,), {"on_advantage": print})
    said = "Plain.on_advantage would .* only DASHCallbacks receive on_advantages. Derive Plain .* instead of TrainerC"
    for late in (plain, plain()):
        refused(said, trainer.add_callback, late)

    def broken(self, args, state, control, rollouts, **kwargs):
        rollouts.completion_mask[:, 0] = 0

    trainer.add_callback(type("Careless", (DASHCallback,), {"on_rollouts_sampled": broken}))
    refused("Careless.on_rollouts_sampled left `completion_mask` unusable: it is no mask", trainer.train)


class Changes(Recorder):
    """Changes rewards in the first window, sets rewards to ±inf in the second, and changes advantages in the third."""

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        super().on_rewards(args, state, control, rollouts, **kwargs)
        if state.global_step == 0:
            rollouts.rewards[0] = 1.0
        elif state.global_step == 1:
            rollouts.rewards[:4, 0] = torch.tensor([torch.inf, -torch.inf, 1.0, 0.0])

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        super().on_advantages(args, state, control, rollouts, **kwargs)
        if state.global_step == 2:
            rollouts.advantages = torch.zeros(rollouts.completion_ids.shape)
            rollouts.advantages[3, 0] = 2.0


def test_changes_reach_advantages_filter_log_and_loss(train):
    """An infinite reward is a failed one, whatever the other function says; the rest of the group has its baseline."""

    def zero(completion_ids, **kwargs):
        completion_ids[0].clear()  # as a reward may that strips end tokens
        return [0.0] * len(completion_ids)

    callback = Changes()
    settings = {"callbacks": [callback], "scale_rewards": "none", "max_steps": 3}
    trainer = train(reward=[zero, zero], **settings)
    logs = trainer.state.log_history[:3]
    assert logs[0]["rewards/zero/mean"] == 0, "the log has rewards as functions gave them"
    first_group = [advantages[:4] for advantages in callback.seen[2::3]]
    assert first_group == [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.5, -0.5], [0.0] * 4]
    assert [log["filter/kept_rows"] for log in logs] == [4 / 16, 2 / 16, 1 / 16]
    assert logs[1]["filter/dropped_unscored"] == 2 / 16
    assert all(0.0 < log["grad_norm"] < torch.inf for log in logs)
    assert [i for i, value in enumerate(trainer._logs["advantages"]) if value] == [3]


def test_a_broken_field_names_the_callback():
    rewards = torch.zeros(3, 2)
    mask = torch.ones(3, 5, dtype=torch.long)
    for field, value, said in (
        ("rewards", rewards[:2], r"float32 and shape \(2, 2\); it needs .*float32 and \(3, 2\)"),
        ("rewards", rewards.double(), "has dtype torch.float64 .* it needs torch.float32 and"),
        ("advantages", rewards[:, 0].clone().requires_grad_(), r"True\); rollouts are tensors on the CPU without grad"),
        ("rewards", None, "is None; rollouts are tensors on the CPU"),
        ("rewards", rewards.to("meta"), "device='meta'.*; rollouts are tensors on the CPU"),
        ("advantages", torch.zeros(3, 4), r"shape \(3, 4\); it needs .* \(3,\) or \(3, 5\)"),
        ("advantages", torch.tensor([0, 0, torch.nan]), "is not finite"),
        ("completion_mask", 2 * mask, "is no mask of 0 and 1"),
        *(("completion_mask", changed, "is no mask") for changed in (mask, 0 * mask)),
        ("completion_ids", mask, "has changed after on_rollouts_sampled"),
        ("prompt_mask", mask[:, :4], "is no mask"),
        ("tool_mask", mask.float(), "was None"),
    ):
        batch = rollouts()
        setattr(batch, field, value)
        refused(f"Careless left .*{said}", batch.validate, like=rollouts().tensors(), caller="Careless")


def test_a_trainer_that_sends_no_rollouts(train):
    said = "ProcessRewardCallback is a DASHCallback, but this trainer sends no on_rollouts.* Train with dash_trl.DASHTr"
    callbacks = [ProcessRewardCallback(lambda requests, trainer: [])]
    refused(said, train, GRPOTrainer, callbacks=callbacks)


def test_a_misspelt_event():
    for slip, event in (("on_advantage", "on_advantages"), ("on_step_ends", "on_step_end")):
        said = f"Careless.{slip} is no event.* Rename it to {event}"
        refused(said, type, "Careless", (DASHCallback,), {slip: lambda self, *args, **kwargs: None})
    own = ("on_something_else", "on_train_epoch_end", "_on_rewards", "only_advantages")
    type("Helpful", (DASHCallback,), {name: lambda self: None for name in own} | {"on_advantage": True})


class Slow(torch.nn.Module):
    """A model, and a clock that advances by some seconds with each optimizer step."""

    def __init__(self, *seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.now = 100.0
        self.seconds = iter(seconds)

    def forward(self, x):
        self.now += next(self.seconds)
        return {"loss": (self.weight * x).sum()}


def timed(monkeypatch, folder, *seconds, resume=None, **settings):
    """Trains; returns the trainer, and `time/elapsed` of each line of the metrics file."""
    model = Slow(*seconds)
    path = folder / "logs" / "metrics.jsonl"
    monkeypatch.setattr("time.monotonic", lambda: model.now)
    callbacks = [TimeLimitCallback(10.0), MetricsFileCallback(path)]
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    args = TrainingArguments(str(folder), use_cpu=True, **{**defaults, **settings})
    trainer = Trainer(model, args, train_dataset=[{"x": 1.0}] * 99, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    lines = read_rows(path)
    assert [line["step"] for line in lines][-2:] == [trainer.state.global_step] * 2 and "grad_norm" in lines[0]
    return trainer, [line["time/elapsed"] for line in lines]


def test_a_run_stops_at_the_first_step_past_its_time_and_a_resumed_one_counts_what_was_before(tmp_path, monkeypatch):
    trainer, elapsed = timed(monkeypatch, tmp_path, 4, 3, 3, 5)
    assert (trainer.state.global_step, elapsed) == (3, [4, 7, 10, 10])
    assert (tmp_path / "checkpoint-3").is_dir()
    # the 3 s after the checkpoint of step 2 do not count
    again, elapsed = timed(monkeypatch, tmp_path, 2, 1, 5, resume=str(tmp_path / "checkpoint-2"))
    assert (again.state.global_step, elapsed) == (4, [4, 7, 9, 10, 10])  # nor are they in the file
    unsaved, _ = timed(monkeypatch, tmp_path / "unsaved", 6, 6, save_strategy="no")
    assert unsaved.state.global_step == 2 and not (tmp_path / "unsaved" / "checkpoint-2").exists()


def test_each_log_is_in_the_file_once(train, tmp_path, monkeypatch):
    """Those of a callback that evaluates as soon as training logs, too, and after a reward has changed the folder."""

    def reward(completions, **_):
        monkeypatch.chdir("/")
        return [1.0] * len(completions)

    monkeypatch.chdir(tmp_path)
    callbacks = [Evaluates("on_log"), MetricsFileCallback("new/metrics.jsonl")]
    trainer = train(reward=reward, callbacks=callbacks, prepare=callbacks[0].prepare, eval_dataset=prompts(1))
    steps = [[{*log} for log in logs] for logs in (read_rows(callbacks[1].path), trainer.state.log_history)]
    assert len(steps[0]) == 3 and all(log in steps[0] for log in steps[1])
    trainer.state.log_history.clear()  # as of a run that is resumed before its first log
    callbacks[1].on_train_begin(None, trainer.state, None)
    assert not [*tmp_path.rglob("*.old")]


class Stops(TrainerCallback):
    """Ends the run as the stop button of a notebook does."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_notebook_shows_the_rewards_and_the_curves_also_after_an_interrupt(train, tmp_path, capsys, request):
    shell = InteractiveShell.instance()
    request.addfinalizer(InteractiveShell.clear_instance)

    def prepare(trainer):
        trainer.add_callback(NotebookProgressCallback)
        monitor(trainer)
        monitor(trainer)  # the cell runs again

    shell.user_ns["begin"] = lambda: train(prepare=prepare, max_steps=2, logging_steps=10, callbacks=[Stops()])
    shell.run_cell("trainer = begin()").raise_error()
    trainer = shell.user_ns["trainer"]
    (table,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, NotebookProgressCallback)]
    assert capsys.readouterr().out.count("IPython.core.display.Image") == 1
    trainer.args.max_steps = 4
    trainer.state.logging_steps = trainer.args.logging_steps = 1
    stopped = shell.run_cell("trainer.train()").error_in_exec
    assert "stopped after step 3 of 4" in str(stopped) and stopped.__suppress_context__
    titles, *lines = table.training_tracker.inner_table
    names = ("step", "reward", "filter/kept_rows", "completions/mean_length", "step_time")
    assert titles == ["Step", "Reward", "Kept", "Mean length", "Seconds per step"]
    assert lines == [[log[name] for name in names] for log in trainer.state.log_history] and len(lines) == 3
    assert "<td>3</td>" in table.training_tracker.html_code  # with its step, not with the next
    assert capsys.readouterr().out.count("IPython.core.display.Image") == 1
    assert len(read_rows(tmp_path / "metrics.jsonl.old")) == 1  # no line twice
