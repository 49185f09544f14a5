"""Shows the credit of a completion: as HTML for a notebook or a web page, and as text for a table."""

import html
import math
from collections.abc import Iterable, Sequence


def credit_html(
    tokens: Sequence[str],
    advantages: Sequence[float],
    boundaries: Sequence[int] = (),
    values: Sequence[float] = (),
    *,
    title: str = "",
) -> str:
    """Returns HTML that shades each token by its advantage and shows V at the boundaries.

    Tokens with a positive advantage are green, tokens with a negative advantage are red. In a notebook,
    `IPython.display.HTML(credit_html(...))` shows the result.

    Args:
        tokens: the text of each token.
        advantages: the advantage of each token. The token with the largest absolute advantage gets the darkest color.
        boundaries: token positions of the episode boundaries.
        values: V at each boundary; NaN = missing.
        title: heading above the completion; empty = no heading.
    """
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
    style = "font-family:monospace;white-space:pre-wrap;line-height:1.7"
    return f'<div>{head}<div style="{style}">{"".join(body)}</div></div>'


def credit_lines(episodes: Iterable[tuple[float, str]]) -> str:
    """Returns a text with one line per episode, such as `[+0.52] 7+5=12`, for TRL's table of completions.

    Args:
        episodes: the mean advantage and the text of each episode.
    """
    return "\n".join(f"[{advantage:+.2f}] {text.strip()}" for advantage, text in episodes)


def _number(value: float) -> str:
    return "missing" if math.isnan(value) else f"{value:.2f}"
