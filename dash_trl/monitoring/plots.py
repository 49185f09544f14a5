"""Pictures of a run. matplotlib is imported when one is drawn."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The phases of a step in the order in which they happen, bottom to top in the plot.
PHASES = ("generate", "reward", "logprobs", "train")


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


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, without the bias of the first values: s_t = Σ w^(t−i) x_i / Σ w^(t−i)."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        smoothed.append(total / norm)
    return smoothed


def credit_html(
    tokens: Sequence[str],
    advantages: Sequence[float],
    boundaries: Sequence[int] = (),
    values: Sequence[float] = (),
    *,
    title: str = "",
) -> str:
    """A completion, each token shaded by its advantage (green > 0 > red), with V drawn over the boundaries; as HTML.

    In a notebook: `IPython.display.HTML(credit_html(...))`.

    Args:
        tokens: their texts. advantages: one per token; the largest absolute one has the full color.
        boundaries: token positions at which V is known. values: V at each; NaN = missing.
    """
    if len(tokens) != len(advantages):
        raise ValueError(
            f"{len(tokens)} tokens and {len(advantages)} advantages do not go together: pass one per token."
        )
    strongest = max((abs(advantage) for advantage in advantages), default=0.0) or 1.0
    marks = dict(zip(boundaries, values, strict=True))
    body = []
    for position in range(len(tokens) + 1):
        if position in marks:
            body.append(f'<sub style="color:#36c">▏{_number(marks[position])}</sub>')
        if position < len(tokens):
            strength = advantages[position] / strongest
            color = f"rgba({'0,150,0' if strength > 0 else '200,0,0'},{0.6 * abs(strength):.2f})"
            text = html.escape(tokens[position]).replace("\n", "⏎\n")
            body.append(f'<span style="background:{color}" title="A = {advantages[position]:+.3f}">{text}</span>')
    head = f"<b>{html.escape(title)}</b>" if title else ""
    curve = _value_curve(boundaries, values, len(tokens))
    style = "font-family:monospace;white-space:pre-wrap;line-height:1.7"
    return f'<div>{head}{curve}<div style="{style}">{"".join(body)}</div></div>'


def _number(value: float) -> str:
    return "missing" if math.isnan(value) else f"{value:.2f}"


def _value_curve(boundaries: Sequence[int], values: Sequence[float], length: int) -> str:
    """V over the token positions, as a small SVG; empty without two known values."""
    known = [(b, v) for b, v in zip(boundaries, values, strict=True) if math.isfinite(v)]
    if len(known) < 2:
        return ""
    low, high = min(v for _, v in known), max(v for _, v in known)
    x = [5 + 590 * b / max(length, 1) for b, _ in known]
    y = [55 - 50 * (v - low) / ((high - low) or 1.0) for _, v in known]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#36c"/>' for a, b in zip(x, y, strict=True))
    line = f'<polyline points="{points}" fill="none" stroke="#36c" stroke-width="1.5"/>'
    scale = f'<text x="600" y="12" font-size="10">{high:.2f}</text><text x="600" y="58" font-size="10">{low:.2f}</text>'
    return f'<div>V(prefix)<br><svg width="640" height="62">{line}{dots}{scale}</svg></div>'
