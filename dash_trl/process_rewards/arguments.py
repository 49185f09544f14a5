"""What several parts check of users' arguments, and how an error calls them."""

import re
from typing import Any

# "\boxed" and "\frac" in a plain Python text hold a backspace and a form feed: no model writes either.
_ESCAPED = re.compile("[\a\b\v\f]")


def check_escapes(name: str, text: str) -> None:
    """Refuse a text in which a backslash was read as Python's."""
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character, which Python makes of a backslash and a letter, as in "
            f"'\\boxed'. Write it as a raw text, r'\\boxed{{', or with two backslashes."
        )


def named(function: Any) -> str:
    """How an error calls a user's function or object."""
    return getattr(function, "__name__", None) or type(function).__name__
