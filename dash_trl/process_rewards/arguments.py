"""A check of users' arguments that several modules use, and the name by which an error calls a function."""

import re
from typing import Any

# In a plain Python string, "\boxed" holds a backspace and "\frac" a form feed. No model writes these two characters.
_ESCAPED = re.compile("[\a\b\v\f]")


def check_escapes(name: str, text: str) -> None:
    """Raise a `ValueError` if the text holds a control character, because Python has read a backslash as an escape.

    Args:
        name: the name of the argument, for the error.
        text: the value of the argument.
    """
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character: Python reads a backslash and a letter as an escape, as in "
            f"'\\boxed'. Write it as a raw string, r'\\boxed{{', or with two backslashes."
        )


def named(function: Any) -> str:
    """The name that an error message gives to a user's function or object."""
    return getattr(function, "__name__", None) or type(function).__name__
