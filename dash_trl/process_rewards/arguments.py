"""Checks of users' arguments that several modules share, and the names of functions in errors."""

import re
from typing import Any

# In a plain Python string, "\boxed" holds a backspace and "\frac" a form feed. No model writes either.
_ESCAPED = re.compile("[\a\b\v\f]")


def check_escapes(name: str, text: str) -> None:
    """Raise a `ValueError` if the text holds a control character: Python has read a backslash as an escape."""
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character: Python reads a backslash and a letter as an escape, as in "
            f"'\\boxed'. Write it as a raw string, r'\\boxed{{', or with two backslashes."
        )


def named(function: Any) -> str:
    """The name that an error message gives to a user's function or object."""
    return getattr(function, "__name__", None) or type(function).__name__
