"""Converts functions, arguments and outcomes to bytes and back, to send them between processes.

The path of a call::

    pack(function) ──► bytes ──► pickle.loads ──┐
    dump(arguments) ─► bytes ──► outcome_of(function, arguments) ──► Outcome ──► finish(call, Outcome)

A function that the other process can import is sent by name. Other functions are sent by value (cloudpickle): functions
of the main script, of a notebook, or of a file that was loaded by its path. All objects to which such a function refers
are sent with it, in the state that they have when the function is first sent.
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

TEXT_CHARS = 1_000  # longest message of an error
TRACEBACK_CHARS = 8_000  # longest traceback

# Outcome of a call: the pickled value or error, the error's text ("" for a value), its traceback, the call's seconds.
Outcome = tuple[bytes, str, str, float]


def pack(function: Callable[..., Any]) -> bytes:
    """Pickle a function for another process.

    Args:
        function: the function.

    Raises:
        ValueError: if it cannot be pickled.
    """
    try:
        _send_by_value_where_needed(function)
        return cloudpickle.dumps(function)
    except Exception as error:
        if isinstance(function, functools.partial) and function.args:
            function = function.args[0]
        name = getattr(function, "__qualname__", None) or type(function).__name__
        raise ValueError(
            f"The function '{name}' cannot be sent to another process ({type(error).__name__}: {error}). It refers to "
            "an object that exists in this process only, such as a lock, a connection or an open file. Create this "
            "object within the function, or call the function on threads of this process (backend='thread', or no "
            "ProcessTool)."
        ) from error


def _send_by_value_where_needed(function: Any) -> None:
    """Make cloudpickle pickle the function's module by value, if the other process could not import the module by name.

    The other process cannot import the module if this process has loaded it by the path of its file, without `import`.
    """

    if isinstance(function, functools.partial):
        for one in (function.func, *function.args):
            _send_by_value_where_needed(one)
        return
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is not None and file is not None and _file_of(module.__name__) != file:
        cloudpickle.register_pickle_by_value(module)


def _file_of(name: str) -> str | None:
    """Return the file that `import name` would run in a new process.

    `importlib.util.find_spec` is not used, because it first searches the modules that this process has imported.
    """
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec.origin for spec in found if spec is not None), None)


def dump(value: Any) -> bytes:
    """Pickle a value for another process.

    Plain pickle is used if possible, because it is ten times as fast as cloudpickle. Cloudpickle is used if plain
    pickle fails, or if the value refers to the main script (`__main__`), which is another script in the other process.

    Args:
        value: any object.

    Raises:
        Exception: if the value cannot be pickled.
    """

    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(value)
    return cloudpickle.dumps(value) if b"__main__" in data else data


def outcome_of(function: Callable[..., Any], arguments: bytes) -> Outcome:
    """Call a function in a worker, and return its outcome. Never raises, whatever the function raises or returns.

    If the function raises an error, or returns a value that cannot be sent, the outcome contains the error.

    Args:
        function: the function.
        arguments: its arguments, pickled by `dump`.
    """
    started = time.perf_counter()
    try:
        value = function(**pickle.loads(arguments))
        try:
            return _readable(value), "", "", time.perf_counter() - started
        except BaseException as error:
            raise TypeError(f"returned a {type(value).__name__}, which cannot be sent back: {error}") from error
    except BaseException as error:  # a user's function may also raise SystemExit
        return failure(error, time.perf_counter() - started)


def _readable(value: Any) -> bytes:
    """Pickle a value as `dump` does, and unpickle it once as a test.

    If unpickling fails or blocks, this must happen in the worker, not in the process that receives all outcomes.
    """
    data = dump(value)
    if type(value) is not float and value is not None:
        pickle.loads(data)
    return data


def failure(error: BaseException, seconds: float = 0.0) -> Outcome:
    """Create the outcome of a call that has no value.

    Args:
        error: exception that the function raised or that ended the call.
        seconds: seconds that the call took.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    # Leave out the frame of `outcome_of`.
    frames = error.__traceback__ and error.__traceback__.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
    try:
        # Other exceptions, such as SystemExit, are sent as text: raising them would end the thread that reads them.
        payload = _readable(error) if isinstance(error, Exception) else b""
    except BaseException:
        payload = b""
    return payload, text[:TEXT_CHARS], trace[-TRACEBACK_CHARS:], seconds


def finish(call: Call, outcome: Outcome) -> None:
    """Finish a call with its outcome, in the process that submitted it.

    An error that cannot be unpickled here becomes a `RuntimeError` with its text.

    Args:
        call: the call.
        outcome: its outcome, as `outcome_of` or `failure` returns it.
    """
    payload, text, trace, _ = outcome
    try:
        value = pickle.loads(payload)
    except BaseException as unreadable:  # also SystemExit, which would end the thread that finishes all calls
        text = text or f"its value cannot be read: {type(unreadable).__name__}: {unreadable}"
        value = None
    if text:
        error = value if isinstance(value, Exception) else RuntimeError(text)
        with suppress(Exception):  # some errors accept no notes
            if trace:
                error.add_note(f"In its worker:\n{trace}")
        call.finish(error=error)
    else:
        call.finish(value)
