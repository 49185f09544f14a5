"""A completion with its credit, as HTML for a notebook or a page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence


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
