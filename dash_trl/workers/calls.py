"""`Call`: one call of a function on its way through a backend, to exactly one outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Call:
    """One call of `function`, by keyword.

    Args:
        function: what is called; a coroutine function where the backend awaits it.
        arguments: by name.
        timeout: seconds from its start, not from its submission, after which it is given up with a `TimeoutError`.
        done: gets the call as soon as it has its outcome, once, on any thread. It must not raise, nor take long.
        stop: once it is set, nobody waits for the call: a backend does not start it any more, and need not finish it.
    Attributes:
        value: what the function returned. error: what it raised, or why it has no value. One of them, once it is done.
    """

    __slots__ = ("_done", "arguments", "error", "function", "stop", "timeout", "value")
    _lock = threading.Lock()

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        timeout: float,
        done: Callable[[Call], None],
        stop: threading.Event | None = None,
    ):
        self.function, self.arguments, self.timeout, self.stop = function, arguments, timeout, stop
        self.value: Any = None
        self.error: BaseException | None = None
        self._done: Callable[[Call], None] | None = done

    @property
    def cancelled(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Its outcome. The first one counts: a thread that was given up may still bring a second one."""
        with self._lock:
            done, self._done = self._done, None  # once; and whoever waits does not live on in a circle of references
        if done is not None:
            self.value, self.error = value, error
            done(self)


class GivenUp(RuntimeError):
    """A call was not made: too many before it hang, or nobody waits for it."""


class Backend(Protocol):
    """Where calls run. Every call that was submitted, and not cancelled, is finished in bounded time."""

    def submit(self, calls: Sequence[Call]) -> None:
        """Hands the calls in, without waiting for any; from any thread."""

    def close(self) -> None:
        """Ends what it has started, without waiting for calls that hang."""


def call_all(
    submit: Callable[[Sequence[Call]], None],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    timeout: float,
) -> list[Call]:
    """Calls of one function, side by side; waits until all of them are done. An interrupt cancels them."""
    done, stop = threading.Semaphore(0), threading.Event()
    calls = [Call(function, one, timeout=timeout, done=lambda _: done.release(), stop=stop) for one in arguments]
    try:
        submit(calls)
        for _ in calls:
            done.acquire()
    except BaseException:
        stop.set()
        raise
    return calls


class Pace:
    """Starts of calls spaced evenly, at most `rate` per second over all threads."""

    def __init__(self, rate: float):
        self._between = 1 / rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait_seconds(self) -> float:
        """How long the caller has to wait before its start, for which the time is kept free."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._between
        return start - now
