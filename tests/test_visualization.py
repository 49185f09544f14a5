"""The plot of a run."""

import json

import pytest

from dash_trl.monitoring.plots import plot_run, read_metrics, smooth


def write(path, logs):
    path.write_text("".join(json.dumps(log) + "\n" for log in logs))
    return path


def test_plot_is_a_png(tmp_path):
    logs = [
        {"step": step, "reward": step / 10, "filter/kept_rows": 0.5, "filter/kept_tokens": 0.4, "time/train": 1.0}
        for step in range(1, 6)
    ]
    picture = plot_run(write(tmp_path / "metrics.jsonl", [*logs, {"step": 5, "train_runtime": 3}]), tmp_path / "a.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_only_training_logs_are_drawn(tmp_path):
    path = write(tmp_path / "m.jsonl", [{"step": 1, "eval_reward": 1.0}, {"step": 2, "reward": 0.5}])
    assert [log["step"] for log in read_metrics(path)] == [2]


def test_a_file_without_rewards_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has 1 lines, but none with a reward"):
        plot_run(write(tmp_path / "m.jsonl", [{"step": 1}]), tmp_path / "a.png")


def test_smooth_is_a_weighted_mean():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 1 / 1.5])
