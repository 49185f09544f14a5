"""Checks arguments of users for escaped backslashes."""

import re

# In a plain Python string, "\boxed" begins with a backspace and "\frac" with a form feed. No model writes these control
# characters, so an argument that contains one is a mistake.
_ESCAPED = re.compile("[\a\b\v\f]")


def check_escapes(name: str, text: str) -> None:
    """Raise a `ValueError` if a text holds a control character that Python made from a backslash and a letter."""
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character: Python reads a backslash and a letter as an escape, as in "
            f"'\\boxed'. Write it as a raw string, r'\\boxed{{', or with two backslashes."
        )
