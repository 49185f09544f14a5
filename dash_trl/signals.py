"""Ends a script after Ctrl-C (SIGINT) or SIGTERM: with one line, and 130 or 143, as a shell reports these signals.

`dash_trl train` starts a script by this file, because its imports take seconds: `python signals.py SCRIPT FLAGS`.
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def end(number: int, _: Any = None) -> None:
    """End this process at once. The first rank says so. Used before training, and after the model is saved."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"\nStopped, but not during training, so no step is lost. To start again, repeat the command.\n")
    os._exit(128 + number)


def set_handlers(handler: Any) -> None:
    """Call `handler` for each of the signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


@contextmanager
def interrupts(*numbers: int) -> Iterator[list[int]]:
    """Within the block, let the first of these signals raise a `KeyboardInterrupt`.

    The second one has no effect: the launcher may have passed on the same Ctrl-C. The third one ends the process.

    Args:
        numbers: numbers of signals.
    Yields:
        The list of the signals that have come.
    """
    come: list[int] = []

    def handler(number: int, _: Any) -> None:
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
    set_handlers(end)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
