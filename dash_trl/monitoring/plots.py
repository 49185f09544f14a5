"""Draws pictures of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dash_trl.monitoring.recorder import PHASES

SMOOTHING = 0.8  # weight of earlier values in the moving average


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the training logs from a file that `MetricsFileCallback` wrote, except a cut line.

    Raises:
        ValueError: if the file has no training log.
    """
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.endswith("}")]
    logs = [line for line in lines if line.get("reward") is not None]
    if not logs:
        raise ValueError(
            f"{path} has {len(lines)} lines, but none with a reward, so there is nothing to draw. Was it written by "
            "dash_trl.monitoring.MetricsFileCallback, and did the run reach its first logging step?"
        )
    return logs


def plot_run(metrics: str | Path, picture: str | Path, *, title: str = "") -> Path:
    """Draw reward, share of rows and tokens that the filter keeps, length, entropy and time of each phase over steps.

    Args:
        metrics: path of the JSON-lines file of `MetricsFileCallback`.
        picture: path of the file to write, which is returned. Its suffix, such as ".png", decides the format.
        title: title of the picture.
    Raises:
        ValueError: if the file has no training log.
    """
    logs = read_metrics(metrics)
    if len(logs) == 1:  # a line needs two points
        logs = [{**logs[0], "step": 0}, *logs]
    steps = [log["step"] for log in logs]
    figure = Figure(figsize=(15, 3), layout="constrained")
    reward, kept, length, entropy, seconds = figure.subplots(1, 5)

    values = [log["reward"] for log in logs]
    reward.plot(steps, values, color="tab:blue", alpha=0.3)
    reward.plot(steps, smooth(values), color="tab:blue")
    reward.set_title("reward, and its moving average (dark)")
    for axis, name, line in (
        (kept, "filter/kept_rows", "-"),
        (kept, "filter/kept_tokens", "--"),
        (length, "completions/mean_length", "-"),
        (entropy, "entropy", "-"),
    ):
        axis.plot(steps, [log.get(name) for log in logs], line, label=name.removeprefix("filter/kept_"))
    kept.set(title="kept by the filter", ylim=(0, 1.05))
    kept.legend(loc="lower left", frameon=False)
    length.set_title("tokens of a completion")
    entropy.set_title("entropy (nats per token)")
    seconds.stackplot(steps, [[log.get(f"time/{phase}", 0.0) for log in logs] for phase in PHASES], labels=PHASES)
    seconds.set(title="seconds per step", ymargin=0.3)  # room for the legend above the curves
    seconds.legend(loc="upper right", ncols=2, frameon=False)
    for axis in figure.axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def plot_pass_at_k(models: Mapping[str, Mapping[str, Any]], picture: str | Path, *, title: str = "") -> Path:
    """Draw pass@k over k, one line per model with its 95 % interval, as in Figure 5 of the paper.

    Args:
        models: name of a model → its figures from `dash_trl eval`, whose `pass_at` maps k to [value, low, high].
        picture: path of the file to write, which is returned.
        title: title of the picture.
    """
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    ks = set[int]()
    for name, figures in models.items():
        points = sorted((int(k), *interval) for k, interval in figures["pass_at"].items() if None not in interval)
        if not points:
            continue
        own, value, low, high = zip(*points, strict=True)
        ks.update(own)
        label = f"{name} ({figures['failed']:.1%} unscored)" if figures["failed"] else name
        (line,) = axis.plot(own, value, marker="o", markersize=3, label=label)
        axis.fill_between(own, low, high, color=line.get_color(), alpha=0.15, lw=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ks), labels=map(str, sorted(ks)))
    axis.set(xlabel="k", title=f"pass@k{title and f', {title}'}")
    axis.spines[["top", "right"]].set_visible(False)
    if ks:
        axis.legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average: s_t = Σ w^(t−i) x_i / Σ w^(t−i) over i ≤ t, with w = `SMOOTHING`."""
    return pandas.Series(values).ewm(alpha=1 - SMOOTHING).mean().tolist()
