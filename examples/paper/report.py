"""Makes tables and figures from the metrics.jsonl files of trainings and the JSON files of evaluations.

The way of the values::

    values of the seeds ──► Cell: mean, 95 % interval ──► rows of text ──► Markdown, beside the paper's figures
    logs of the seeds ──► curves
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import TABLES, Column, Figure, Row, rows_of

from dash_trl.monitoring import read_metrics, smooth

# 0.975 quantiles of Student's t with 1, 2, … degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
MOST_SEEDS = len(T_QUANTILES) + 1
PHASES = ("generate", "reward", "logprobs", "train")  # the phases of a step, in order
COLORS = ("tab:blue", "tab:orange", "tab:green")
MARK = "*"
MARKED_ABOVE = 0.01  # numbers are marked if more than this share of the rewards failed


@dataclass(frozen=True)
class Cell:
    """A number in a table, with its 95 % interval if there is one.

    Attributes:
        value: the number.
        low: lower end of the interval.
        high: upper end of the interval.
        runs: number of runs of which it is the mean.
        marked: True = more than 1 % of the rewards behind it failed.
    """

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1
    marked: bool = False

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.1f}, {self.high:.1f}]"
        return f"{self.value:.1f}{interval}{MARK if self.marked else ''}"


def over_seeds(values: Sequence[float]) -> Cell:
    """Return the mean over seeds with its interval: x̄ ± t s / √n with n − 1 degrees of freedom; none for one run."""
    mean = statistics.fmean(values)
    n = len(values)
    if n == 1:
        return Cell(mean)
    half = T_QUANTILES[n - 2] * statistics.stdev(values) / math.sqrt(n)
    return Cell(mean, mean - half, mean + half, n)


def measured(figures: Sequence[Mapping[str, Any]], what: str) -> Cell:
    """Return accuracy or pass@k in per cent.

    For one model, the interval is that of its evaluation, over problems. For several seeds, it is over the seeds.

    Args:
        figures: JSON of `dash_trl eval`, one per seed.
        what: "accuracy", or the k of pass@k.
    """
    found = [
        [one["accuracy"], *one["accuracy_interval"]] if what == "accuracy" else one["pass_at"][what] for one in figures
    ]
    percent = [[100 * value for value in one] for one in found]
    cell = Cell(*percent[0]) if len(percent) == 1 else over_seeds([value for value, _, _ in percent])
    return replace(cell, marked=any(one["failed"] > MARKED_ABOVE for one in figures))


def seconds_of(metrics: Path) -> float:
    """Return the training time of a run in seconds: `time/elapsed` of its last log."""
    return read_metrics(metrics)[-1]["time/elapsed"]


# ----------------------------------------------------------------------------------------------------------- tables


Find = Callable[[Row, Column], Cell | None]


def markdown(name: str, find: Find, *, toy: bool, notes: Sequence[str] = ()) -> str:
    """Return a table as Markdown, with the paper's numbers beside ours.

    Args:
        name: name of the table.
        find: returns our number for a row and a column; None = there is none.
        toy: True = show only the rows of the smallest size, since there is one toy model.
        notes: sentences below the table.
    """
    table = TABLES[name]
    marked = False
    head = ["Method", *([] if toy else ["Size (B)"])]
    for column in table.columns:
        head += [column.toy if toy else column.title, f"paper: {column.title}"]
    lines = [head, ["---"] * len(head)]
    for row in rows_of(name, toy=toy):
        line = [row.label, *([] if toy else [row.size])]
        for column, paper in zip(table.columns, row.paper, strict=True):
            cell = find(row, column)
            marked |= cell is not None and cell.marked
            line += ["–" if cell is None else str(cell), "–" if paper is None else f"{paper:g}"]
        lines.append(line)
    said = [*notes, *([f"{MARK} More than 1 % of the rewards failed, and count neither way."] if marked else [])]
    of = "the toy model; the paper's figures are of Qwen2.5-0.5B" if toy else "Qwen2.5"
    title = f"### {name.replace('table', 'Table ')}. {table.title} ({of})\n"
    return "\n".join([title, *(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}" for note in said), ""])


# ---------------------------------------------------------------------------------------------------------- figures


def draw(figure: Figure, logs: Mapping[tuple[str, str], Sequence[Path]], picture: Path, *, toy: bool) -> Path:
    """Draws a figure: a thin curve per seed and, over steps, a thick one for their mean; or the split of time.

    Args:
        figure: what to draw.
        logs: for each (method, size), metrics.jsonl of its seeds.
        picture: the file to write.
        toy: draw only the first size.
    """
    from matplotlib.figure import Figure as Canvas

    sizes = figure.sizes[:1] if toy else figure.sizes
    panels = figure.panels or {"": ()}
    canvas = Canvas(figsize=(0.5 + 3.5 * len(panels), 0.5 + 2.8 * len(sizes)), layout="constrained")
    axes = canvas.subplots(len(sizes), len(panels), squeeze=False)
    for size, line in zip(sizes, axes, strict=True):
        of = {label: [read_metrics(path) for path in logs[method, size]] for label, method in figure.methods.items()}
        for (title, names), axis in zip(panels.items(), line, strict=True):
            if figure.panels is None:
                split_of_time(axis, of)
            else:
                curves(axis, of, names, figure.over)
            axis.set_title(title if toy else f"{title} {size}B".strip())
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False)
    canvas.suptitle(figure.title)
    canvas.savefig(picture, dpi=120)
    return picture


def curves(axis: Any, of: Mapping[str, Sequence[list[dict[str, Any]]]], names: Sequence[str], over: str) -> None:
    for (label, seeds), color in zip(of.items(), COLORS, strict=False):
        values = [smooth([sum(log.get(name, 0.0) for name in names) for log in logs]) for logs in seeds]
        several = len(seeds) > 1 and over == "step"
        for number, (logs, one) in enumerate(zip(seeds, values, strict=True)):
            label_once = label if number == 0 and not several else None
            axis.plot(
                [log[over] for log in logs], one, color=color, alpha=0.4 if several else 0.9, lw=0.8, label=label_once
            )
        if several:
            mean = [sum(step) / len(step) for step in zip(*values, strict=False)]  # over the steps that all seeds have
            axis.plot([log[over] for log in seeds[0]][: len(mean)], mean, color=color, label=label)
    axis.set_xlabel("step" if over == "step" else "seconds of training")


def split_of_time(axis: Any, of: Mapping[str, Sequence[list[dict[str, Any]]]]) -> None:
    """Draws the seconds of a run by phase, as the mean over seeds."""
    below = [0.0] * len(of)
    for phase in PHASES:
        heights = [
            sum(log.get(f"time/{phase}", 0.0) for logs in seeds for log in logs) / len(seeds) for seeds in of.values()
        ]
        axis.bar(list(of), heights, bottom=below, label=phase, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set_ylabel("seconds of training")
    axis.margins(y=0.3)  # room above for the legend
