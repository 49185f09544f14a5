"""Ends a script after Ctrl-C (SIGINT) or SIGTERM with one line, and 130 or 143, as shells do.

An error of this package, too, is one line: it says what to do. `dash_trl train` starts a script by this file, because
its imports take seconds: `python signals.py SCRIPT FLAGS`.
"""

import dis
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def end(number: int, _: object) -> None:
    """End this process at once, with a line from the first rank. For times at which no training can be lost."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"\nStopped, but not during training, so no step is lost. To start again, repeat the command.\n")
    os._exit(128 + number)


def set_handlers(*handlers: Any) -> list[Any]:
    """Set the handlers of SIGINT and SIGTERM; return those before."""
    return [signal.signal(*one) for one in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True)]


def say(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error (as `sys.excepthook`): an interrupt, or a user's mistake, without its traceback.

    A mistake is raised by a statement of this package, and no line of the user's own code has caused it.
    """
    last = trace
    while last.tb_next is not None:
        last = last.tb_next
    package = os.path.dirname(__file__)
    code = last.tb_frame.f_code
    raised = code.co_filename.startswith(package) and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    cause = traceback.extract_tb(getattr(error.__cause__, "__traceback__", None))
    known = all(one.filename.startswith((package, sys.prefix, sys.base_prefix, "<")) for one in cause)
    if kind is KeyboardInterrupt or issubclass(kind, ValueError) and raised and known:
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def interrupts(*numbers: int) -> Iterator[list[int]]:
    """Let the first of these signals raise a `KeyboardInterrupt` within the block; yield the list of those that came.

    The second one has no effect: the launcher may have passed on the same Ctrl-C. The third one ends the process.
    """
    come: list[int] = []

    def handler(number: int, _: object) -> None:
        come.append(number)
        if len(come) == 1:
            raise KeyboardInterrupt
        if len(come) > 2:
            os._exit(128 + number)

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield come
    finally:
        for number, one in before.items():
            signal.signal(number, one)


if __name__ == "__main__":
    set_handlers(end, end)
    sys.excepthook = say
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
