"""What a user may pass for a number, a text, values: each wrong one is a `ValueError` that names it."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

# "\boxed" and "\frac" in a plain Python text hold a backspace and a form feed: no model writes either.
_ESCAPED = re.compile("[\a\b\v\f]")


def is_number(value: Any) -> bool:
    """A finite number; `True` and "0.1" are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_text(name: str, text: Any, *, example: str) -> None:
    """Refuse what is no text, or one in which a backslash was read as Python's."""
    if not isinstance(text, str):
        raise ValueError(f"{name}={text!r} is no text (but of type {type(text).__name__}). Pass one, e.g. {example}.")
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character, which Python makes of a backslash and a letter, as in "
            f"'\\boxed'. Write it as a raw text, r'\\boxed{{', or with two backslashes."
        )


def check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}. Use True or False.")


def named(function: Any) -> str:
    """How an error calls a user's function or object."""
    return getattr(function, "__name__", None) or type(function).__name__
