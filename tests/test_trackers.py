"""What arrives in Trackio, W&B (offline) and TensorBoard, read back from what they wrote."""

import importlib.util
import json
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import train_math
from huggingface_hub import constants
from transformers import TrainerState
from trl import ModelConfig

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.monitoring import MetricsFileCallback, RunPictureCallback, log_traces, tracker_defaults
from tests.test_process_rewards import PROBLEMS, callback
from tests.tiny import ScriptedReward, run, write_rows

INSTALLED = [name for name in ("trackio", "wandb", "tensorboard") if find_spec(name)]
STEPS = 3


def needs(name):
    return pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed")


class Heard(ScriptedReward):
    """Keeps the rows of each call as a tracker should show them."""

    def __init__(self):
        super().__init__()
        self.tables = []

    def __call__(self, prompts, completions, **kwargs):
        rewards = super().__call__(prompts, **kwargs)
        columns = {"prompt": prompts, "completion": completions, "scripted": rewards}
        self.tables.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        return rewards


@pytest.fixture(scope="module")
def tracked(tiny_model, tmp_path_factory):
    """A run with process rewards, and an evaluation, that report to all of them; their user has a token.

    Its folder, the scalars and the tables of its steps, and the hosts that it looked up.
    """
    folder, hosts, reward = tmp_path_factory.mktemp("tracked"), [], Heard()
    look_up = socket.getaddrinfo

    def watched(host, *args, **kwargs):
        hosts.append(host)
        return look_up("127.0.0.1", *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", watched)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # TRL's, with or without a tracker
        here = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
        here |= {"TENSORBOARD_LOGGING_DIR": str(folder / "runs"), "HF_TOKEN": "hf_of_a_user"}  # not ./runs
        for name, value in here.items():
            patch.setenv(name, value)
        metrics = folder / "metrics.jsonl"
        settings = {**tracker_defaults(INSTALLED), "project": "tracked", "max_steps": STEPS}
        settings |= {"dataset": PROBLEMS, "eval_dataset": PROBLEMS.select([0]), "reward": reward}
        callbacks = [MetricsFileCallback(metrics), RunPictureCallback(metrics), callback()]
        trainer = run(DASHTrainer, tiny_model, folder, callbacks=callbacks, **settings)
        trainer.evaluate()
        for name in {"trackio", "wandb"}.intersection(INSTALLED):
            import_module(name).finish()  # as when the program ends
    logs = [log for log in trainer.state.log_history if "reward" in log]
    scalars = [{f"train/{name}": value for name, value in log.items() if name != "step"} for log in logs]
    assert len(scalars) == STEPS == len(reward.tables) - 1
    return folder, scalars, reward.tables[:-1], hosts


def check_tables(found: Sequence[Sequence[dict]], expected: Sequence[Sequence[dict]]) -> None:
    """Of the steps; after them the last one once more, and the evaluation's."""
    for step, (table, rows) in enumerate(zip(found[:-2], expected, strict=True), start=1):
        assert [{name: row[name] for name in rows[0]} for row in table] == rows
        assert {row["step"] for row in table} == {step}
        assert all(row["credit"].startswith("[") and isinstance(row["advantage"], float) for row in table)


@needs("trackio")
def test_trackio_has_the_scalars_the_tables_the_picture_and_the_conversations(tracked):
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import MEDIA_DIR

    folder, scalars, tables, _ = tracked
    (name,) = SQLiteStorage.get_runs("tracked")
    logs = SQLiteStorage.get_logs("tracked", name)
    found = [log for log in logs if "train/reward" in log]
    assert [{name: log[name] for name in one} for log, one in zip(found, scalars, strict=True)] == scalars
    assert "eval/reward" in logs[-2]  # the evaluation came after the end of training, and is in the same run
    logged = [log["completions"].values() for log in logs if "completions" in log]
    check_tables([next(one for one in values if isinstance(one, list)) for values in logged], tables)
    (picture,) = [log["picture"] for log in logs if "picture" in log]
    assert (MEDIA_DIR / picture["file_path"]).read_bytes() == (folder / "run.png").read_bytes()
    # and each completion as a conversation
    traces = SQLiteStorage.get_traces("tracked", name)
    for step, rows in enumerate(tables, start=1):
        of_step = sorted((one for one in traces if one["step"] == step), key=lambda one: one["index"])
        said = [[message["content"] for message in one["messages"]] for one in of_step]
        assert said == [[row["prompt"], row["completion"]] for row in rows]
        assert [one["metadata"]["scripted"] for one in of_step] == [row["scripted"] for row in rows]
        assert {"scripted", "credit", "advantage"} == of_step[0]["metadata"].keys()


@needs("trackio")
def test_messages_stay_messages(monkeypatch):
    import trackio

    logged = []
    monkeypatch.setattr(trackio, "log", lambda traces, step: logged.extend(traces["traces"]))
    prompt, completion = [{"role": "user", "content": "7+5"}], [{"role": "assistant", "content": "12"}]
    log_traces(
        {"prompt": [prompt], "completion": [completion], "rewards": {"sum": [1.0]}, "extra": {}, "advantages": [0.5]}, 2
    )
    assert logged[0].messages == prompt + completion and logged[0].metadata == {"sum": 1.0, "advantage": 0.5}


def end_of_run(folder: Path, report_to: list[str]) -> RunPictureCallback:
    """Calls the callback as when a run of one step ends."""
    callback = RunPictureCallback(folder / "metrics.jsonl")
    args = DASHConfig(str(folder), report_to=report_to, use_cpu=True, bf16=False)
    callback.on_log(args, TrainerState(is_world_process_zero=True), None, {"train_runtime": 1.0})
    return callback


def test_the_picture_waits_for_a_run_and_for_logs(monkeypatch, tmp_path, caplog):
    """There may be no tracker, W&B may be disabled, and training may end before its first log."""
    rows = [(True, True, 1), (True, False, 1), (True, True, 0), (False, True, 1)]
    for i, (reports, begun, logged) in enumerate(rows):
        folder, pictures = tmp_path / str(i), []
        wandb = SimpleNamespace(__name__="wandb", run=begun or None, Image=str, log=pictures.append)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        write_rows(folder / "metrics.jsonl", [{"step": 1, "reward": 1.0}] * logged or [{"step": 1}])
        callback = end_of_run(folder, ["wandb"] if reports else [])
        assert pictures == [{"picture": str(folder / "run.png")}] * (begun and reports and logged)
        assert callback.picture == (folder / "run.png" if logged else None)
        assert (folder / "run.png").is_file() == bool(logged)
    assert end_of_run(tmp_path / "none", []).picture is None  # which does not end the run
    assert "There is no picture of the run" in caplog.text


def test_nothing_leaves_the_machine_and_no_server_is_left(tracked):
    """Trackio would ask the Hub for the user's name."""
    assert tracked[-1] == [] and constants.HF_HUB_OFFLINE
    assert [one for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN] == []


@needs("wandb")
def test_wandb_has_the_tables_and_the_picture(tracked):
    folder, _, tables, _ = tracked
    (media,) = folder.glob("wandb/offline-run-*/files/media")
    files = sorted(media.glob("table/completions_*.table.json"), key=lambda file: int(file.name.split("_")[1]))
    written = [json.loads(file.read_text()) for file in files]
    check_tables([[dict(zip(one["columns"], row, strict=True)) for row in one["data"]] for one in written], tables)
    (picture,) = media.glob("images/picture_*.png")
    assert picture.read_bytes() == (folder / "run.png").read_bytes()


@needs("tensorboard")
def test_tensorboard_has_the_scalars(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked[0] / "runs")).Reload()
    for scalar in set().union(*tracked[1]) - {"train/epoch"}:  # of evaluations, too
        found = {event.step: event.value for event in events.Scalars(scalar)}
        expected = {step: one[scalar] for step, one in enumerate(tracked[1], start=1) if scalar in one}
        assert found == pytest.approx(expected, rel=1e-6), scalar  # float32


def test_the_examples_report_to_trackio_if_it_is_installed(monkeypatch, tmp_path):
    rows = [
        (True, [], (["trackio"], True, False)),
        (False, [], ([], False, None)),
        (True, ["--report_to", "none"], ([], False, None)),
        (True, ["--report_to", "wandb", "--log_completions", "False"], (["wandb"], False, False)),
    ]
    real, has_trackio = importlib.util.find_spec, []

    def find_spec(name, *rest):
        return (has_trackio[-1] or None) if name == "trackio" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    for installed, flags, expected in rows:
        has_trackio.append(installed)
        flags = [*flags, "--use_cpu", "--bf16=False", "--output_dir", str(tmp_path)]
        types = train_math.MathArguments, DASHConfig, ModelConfig
        _, args, _ = train_math.parse(flags, types, train_math.Mathematics.toy_defaults())
        assert (args.report_to, args.log_completions, args.trackio_static_space_id) == expected, (installed, flags)
        assert args.max_steps == 80
