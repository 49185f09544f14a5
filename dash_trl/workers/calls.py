"""`Call`: one call of a function on its way through a backend, to exactly one outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Call:
    """One call of `function`, by keyword.

    Args:
        function: what is called; a coroutine function where the backend awaits it.
        arguments: by name.
        timeout: seconds from its start, not from its submission, after which it is given up with a `TimeoutError`.
        done: gets the call as soon as it has its outcome, once, on any thread. It must not raise, nor take long.
    Attributes:
        value: what the function returned. error: what it raised, or why it has no value. One of them, once it is done.
        cancelled: nobody waits for it; a backend does not start it any more, and need not finish it. Set from outside.
    """

    __slots__ = ("_done", "arguments", "cancelled", "error", "function", "timeout", "value")
    _lock = threading.Lock()

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        timeout: float,
        done: Callable[[Call], None],
    ):
        self.function, self.arguments, self.timeout = function, arguments, timeout
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self._done: Callable[[Call], None] | None = done

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Its outcome. The first one counts: a thread that was given up may still bring a second one."""
        with self._lock:
            done, self._done = self._done, None  # once; and whoever waits does not live on in a circle of references
        if done is not None:
            self.value, self.error = value, error
            done(self)


class GivenUp(RuntimeError):
    """A call was not made: too many before it hang."""


class Backend(Protocol):
    """Where calls run. Every call that was submitted, and not cancelled, is finished in bounded time."""

    def submit(self, calls: Sequence[Call]) -> None:
        """Hands the calls in, without waiting for any; from any thread."""

    def close(self) -> None:
        """Ends what it has started, without waiting for calls that hang."""
