"""Pictures of a run. matplotlib is imported when one is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The phases of a step in the order in which they happen, bottom to top in the plot.
PHASES = ("generate", "reward", "logprobs", "train")

RESPONSES_DRAWN = 4  # along which truth and V are drawn: those whose truth moves most, of different problems


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The training logs of a file that `MetricsFileCallback` wrote, by step.

    Raises:
        ValueError: if the file has no training log.
    """
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    logs = [line for line in lines if line.get("reward") is not None]
    if not logs:
        raise ValueError(
            f"{path} has {len(lines)} lines, but none with a reward, so there is nothing to draw. Was it written by "
            "dash_trl.callbacks.MetricsFileCallback, and did the run reach its first logging step?"
        )
    return logs


def plot_run(metrics: str | Path, picture: str | Path, *, title: str = "") -> Path:
    """Draw reward, kept share and the time of each phase against the step, as a PNG (or what the suffix says).

    Args:
        metrics: the JSON lines of `MetricsFileCallback`.
        picture: the file to write.
    Returns:
        The path of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logs = read_metrics(metrics)
    steps = [log["step"] for log in logs]
    figure = Figure(figsize=(10, 3), layout="constrained")
    FigureCanvasAgg(figure)
    reward, kept, seconds = figure.subplots(1, 3)

    values = [log["reward"] for log in logs]
    reward.plot(steps, values, color="tab:blue", alpha=0.3)
    reward.plot(steps, smooth(values), color="tab:blue")
    reward.set_title("reward")
    for name, color in (("rows", "tab:green"), ("tokens", "tab:olive")):
        shares = [100 * log.get(f"filter/kept_{name}", float("nan")) for log in logs]
        kept.plot(steps, shares, color=color, label=name)
    kept.set(title="kept by the filter (%)", ylim=(0, 105))
    kept.legend(loc="lower left", frameon=False)
    phases = [[log.get(f"time/{phase}", 0.0) for log in logs] for phase in PHASES]
    seconds.stackplot(steps, phases, labels=PHASES)
    seconds.set_title("seconds per step")
    seconds.margins(y=0.3)  # room above for the legend
    seconds.legend(loc="upper right", ncols=2, frameon=False)
    for axis in (reward, kept, seconds):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def plot_pass_at_k(models: Mapping[str, Mapping[str, Any]], picture: str | Path, *, title: str = "") -> Path:
    """Draw pass@k over k, a line per model in its 95 % interval, as in Figure 5 of the paper.

    Args:
        models: name → what `python -m dash_trl.evaluation` writes as figures: `pass_at`, k → [value, low, high].
        picture: the file to write.
    Returns:
        The path of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    ks: set[int] = set()
    for name, figures in models.items():
        points = sorted((int(k), *interval) for k, interval in figures["pass_at"].items() if None not in interval)
        if not points:
            continue
        own, value, low, high = zip(*points, strict=True)
        ks.update(own)
        (line,) = axis.plot(own, [100 * one for one in value], marker="o", markersize=3, label=_marked(name, figures))
        axis.fill_between(
            own, [100 * one for one in low], [100 * one for one in high], color=line.get_color(), alpha=0.15, lw=0
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ks))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set(xlabel="k", title=f"pass@k (%){title and f', {title}'}")
    axis.spines[["top", "right"]].set_visible(False)
    if ks:
        axis.legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def plot_value_quality(found: Mapping[str, Any], picture: str | Path, *, title: str = "") -> Path:
    """Draw how reliable values are that are probabilities, and one of them beside the truth along a few responses.

    Args:
        found: what `python -m dash_trl.value_quality` writes: `estimators`, name → figures, with `reliability`;
            `values`, per response its boundaries, truth and values by name.
        picture: the file to write.
    Returns:
        The path of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    reliable, along = figure.subplots(1, 2)
    probabilities = {name: one for name, one in found["estimators"].items() if one["reliability"]}
    reliable.plot([0, 1], [0, 1], color="lightgray", lw=1)
    for name, figures in probabilities.items():
        value, truth, _ = zip(*figures["reliability"], strict=True)
        reliable.plot(value, truth, marker="o", markersize=3, label=name)
    reliable.set(title="reliability", xlabel="V", ylabel="truth", xlim=(0, 1), ylim=(0, 1))
    if probabilities:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    best = max(probabilities, key=lambda name: probabilities[name]["spearman_within"] or -1.0, default=None)
    moved = sorted(found["values"], key=_range_of_truth, reverse=True)
    for number, one in enumerate(_of_different_problems(moved)[:RESPONSES_DRAWN]):
        color = f"C{number}"
        along.plot(one["boundaries"], [_nan(y) for y in one["truth"]], color=color, marker="o", markersize=3)
        if best is not None:
            along.plot(one["boundaries"], [_nan(v) for v in one[best]], color=color, ls="--")
    along.set(title="truth (line) and V (dashed)" if best else "truth", xlabel=f"token; V: {best}" if best else "token")
    for axis in (reliable, along):
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def _range_of_truth(response: Mapping[str, Any]) -> float:
    known = [one for one in response["truth"] if one is not None]
    return max(known) - min(known) if known else 0.0


def _of_different_problems(responses: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({one["problem"]: one for one in reversed(responses)}.values())[::-1]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _marked(name: str, figures: Mapping[str, Any]) -> str:
    return f"{name}* ({figures['failed']:.1%} unscored)" if figures.get("marked") else name


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, without the bias of the first values: s_t = Σ w^(t−i) x_i / Σ w^(t−i)."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        smoothed.append(total / norm)
    return smoothed
