"""The plot of a run."""

from matplotlib.axes import Axes

from dash_trl.monitoring import plot_pass_at_k, plot_run, read_metrics
from tests.tiny import refused, write_rows


def test_the_plot_of_the_training_logs(tmp_path):
    logs = [
        {"step": step, "reward": step / 10, "filter/kept_rows": 0.5, "entropy": None, "time/train": 1.0}
        for step in range(1, 6)
    ]
    metrics = write_rows(tmp_path / "metrics.jsonl", [*logs, {"step": 5, "train_runtime": 3}])
    metrics.write_text(metrics.read_text() + '{"step": 6, "rew')
    picture = plot_run(metrics, tmp_path / "a.png")
    assert read_metrics(metrics) == logs  # and no other logs
    assert picture.read_bytes().startswith(b"\x89PNG")
    none = write_rows(tmp_path / "m.jsonl", [{"step": 1}])
    refused("has 1 lines, but none with a reward", plot_run, none, tmp_path / "a.png")


def test_pass_at_k_of_several_models(tmp_path, monkeypatch):
    """A line per model through its values; what was not estimated is left out, a mark is named."""
    drawn = {}
    plot = Axes.plot
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda self, x, y, label, **k: drawn.update({label: (list(x), y)}) or plot(self, x, y, label=label, **k),
    )
    models = {
        "good": {"pass_at": {"16": [0.9, 0.8, 1.0], "1": [0.5, 0.4, 0.6]}, "failed": 0.0},
        "failing": {"pass_at": {"1": [0.2, 0.1, 0.3], "16": [None, None, None]}, "failed": 0.05},
        "nothing": {"pass_at": {"1": [None, None, None]}, "failed": 1.0},
    }
    assert plot_pass_at_k(models, tmp_path / "a.png", title="math").read_bytes().startswith(b"\x89PNG")
    assert drawn == {"good": ([1, 16], (0.5, 0.9)), "failing (5.0% unscored)": ([1], (0.2,))}
    plot_pass_at_k({"nothing": models["nothing"]}, tmp_path / "b.png")
