"""What crosses between processes, as bytes: functions, arguments, outcomes.

    pack(function) ──► bytes ──► pickle.loads ──┐
    dump(arguments) ─► bytes ──► outcome_of(function, arguments) ──► Outcome ──► finish(call, Outcome)

A function that the other process can import goes by its name; one of the main script, a notebook, or a file that was
loaded by its path goes by value (cloudpickle), with what it refers to, as it is when it is sent first.
"""

import functools
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle

from dash_trl.workers.calls import Call

TEXT_CHARS = 1_000  # of an error's message
TRACEBACK_CHARS = 8_000

# What became of a call: the pickled value or error, the error's text ("" for a value), its traceback, and its seconds.
Outcome = tuple[bytes, str, str, float]


def pack(function: Callable[..., Any]) -> bytes:
    """A function for another process.

    Raises:
        ValueError: if it cannot be sent.
    """
    try:
        _send_by_value_where_needed(function)
        return cloudpickle.dumps(function)
    except Exception as error:
        if isinstance(function, functools.partial) and function.args:
            function = function.args[0]
        name = getattr(function, "__qualname__", None) or type(function).__name__
        raise ValueError(
            f"The function '{name}' cannot be sent to another process ({type(error).__name__}: {error}): it refers to "
            "something that lives in this process only, such as a lock, a connection or an open file. Make that within "
            "the function, or call it on threads of this process (backend='thread', or no ProcessTool)."
        ) from error


def _send_by_value_where_needed(function: Any) -> None:
    """By name would fail over there for a module that this process has loaded from a path."""

    if isinstance(function, functools.partial):
        for one in (function.func, *function.args):
            _send_by_value_where_needed(one)
        return
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is not None and file is not None and _file_of(module.__name__) != file:
        cloudpickle.register_pickle_by_value(module)


def _file_of(name: str) -> str | None:
    """The file that `import name` would run in a new process. (`importlib.util.find_spec` asks this one's modules.)"""
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec.origin for spec in found if spec is not None), None)


def dump(value: Any) -> bytes:
    """By plain pickle, ten times as fast, where that means the same in another process: its main script is another."""

    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(value)
    return cloudpickle.dumps(value) if b"__main__" in data else data


def outcome_of(function: Callable[..., Any], arguments: bytes) -> Outcome:
    """Calls it, in a worker. Raises nothing, whatever the function raises or returns."""
    started = time.perf_counter()
    try:
        value = function(**pickle.loads(arguments))
        try:
            return _readable(value), "", "", time.perf_counter() - started
        except BaseException as error:
            raise TypeError(f"returned a {type(value).__name__}, which cannot be sent back: {error}") from error
    except BaseException as error:  # of a user's function: SystemExit, too
        return failure(error, time.perf_counter() - started)


def _readable(value: Any) -> bytes:
    """As `dump`, and read once here: reading it may fail or block, which must not happen where all calls end."""
    data = dump(value)
    if type(value) is not float and value is not None:
        pickle.loads(data)
    return data


def failure(error: BaseException, seconds: float = 0.0) -> Outcome:
    """The outcome of a call that has no value."""
    text = "".join(traceback.format_exception_only(error)).strip()
    # Without the frame of `outcome_of`.
    frames = error.__traceback__ and error.__traceback__.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
    try:
        # What is no Exception, such as SystemExit, would end whoever looks at it: it goes as text.
        payload = _readable(error) if isinstance(error, Exception) else b""
    except BaseException:
        payload = b""
    return payload, text[:TEXT_CHARS], trace[-TRACEBACK_CHARS:], seconds


def finish(call: Call, outcome: Outcome) -> None:
    """A call's outcome, back in its own process. An error that cannot be read here is told by a RuntimeError."""
    payload, text, trace, _ = outcome
    try:
        value = pickle.loads(payload)
    except BaseException as unreadable:  # SystemExit, too, which would end all other calls
        text = text or f"its value cannot be read: {type(unreadable).__name__}: {unreadable}"
        value = None
    if text:
        error = value if isinstance(value, Exception) else RuntimeError(text)
        with suppress(Exception):  # an error may refuse notes
            if trace:
                error.add_note(f"In its worker:\n{trace}")
        call.finish(error=error)
    else:
        call.finish(value)
