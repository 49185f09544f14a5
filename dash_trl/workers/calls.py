"""A `Call` is one call of a function, and the future of its outcome. A `Request` collects outcomes for many rows."""

import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Reversible, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any


class Overdue(TimeoutError):
    """A call in this process took longer than its timeout. If it runs on a thread, the thread still runs."""


class GivenUp(RuntimeError):
    """A call was given up: it was cancelled, its backend was closed, or too many earlier calls hang."""


class Call(Future[Any]):
    """One call of a function with keyword arguments, and the future of its outcome. It gets exactly one outcome.

    Args:
        function: the function; a coroutine function for a backend that awaits it.
        arguments: name → value.
        timeout: seconds from the start of the call, not from its submission. Then the call ends with a
            `TimeoutError`, which is `Overdue` on threads and event loops.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout: float):
        super().__init__()
        self.function, self.arguments, self.timeout = function, arguments, timeout

    @property
    def error(self) -> BaseException | None:
        """Exception that the function raised or that ended the call; None if the ended call has a value."""
        return GivenUp("it was cancelled") if self.cancelled() else self.exception()

    @property
    def value(self) -> Any:
        """Return value of the function; None if the ended call has an error."""
        return self.result() if self.error is None else None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome. A second outcome, for example from an abandoned thread, is ignored."""
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)


class Request:
    """Collects the outcomes of F functions for N rows, and returns groups of rows as soon as they are complete.

    A group of `group_size` adjacent rows is complete when all functions are done with it; the last group may be
    smaller. The outcomes may come in any order.

    Attributes:
        outcomes: F lists of N outcomes; None = this outcome has not come.
        cancelled: whether nobody waits for the outcomes any more.
        uid: an id that no other request of any process has.
    """

    def __init__(self, functions: int, rows: int, group_size: int):
        self.outcomes: list[list[Any]] = [[None] * rows for _ in range(functions)]
        self.cancelled, self.group_size, self.uid = False, group_size, uuid.uuid4()
        self._functions_left = [functions] * len(range(0, rows, group_size))
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._handed_out = 0

    def rows_of(self, group: int) -> range:
        return range(len(self.outcomes[0]))[group * self.group_size : (group + 1) * self.group_size]

    def add(self, call: Call, done: Callable[[Call], None]) -> Call:
        """Add a call that is not submitted yet, and return it; `cancel` cancels it.

        `done` gets the ended call, on any thread, and passes the outcome to `put`.
        """
        self._calls.append(call)
        call.add_done_callback(done)  # type: ignore[arg-type]  # typed for any future
        return call

    def put(self, function: int, row: int, outcome: Any) -> bool:
        """Store a function's outcome, which is not None, for a row. Any thread may call this, once for each row.

        Returns:
            Whether the function now has all outcomes of the row's group. Then the caller must call `complete` for the
            group, now or later.
        """
        outcomes = self.outcomes[function]
        with self._lock:
            outcomes[row] = outcome
            return all(outcomes[other] is not None for other in self.rows_of(row // self.group_size))

    def complete(self, group: int) -> None:
        """Record that one more function is done with a group, which is complete after the last function."""
        with self._lock:
            self._functions_left[group] -= 1
            if not self._functions_left[group]:
                self._complete.put(group)

    def next_groups(self, *, wait: bool = True) -> list[int]:
        """Return the numbers of complete groups that were not returned before.

        With `wait=True`, wait for one if there is none yet. Pass it only while groups are left.
        """
        found: list[int] = []
        while not self._complete.empty() or wait and not found:
            found.append(self._complete.get())
            self._handed_out += 1
        return found

    def wait(self) -> None:
        """Wait until all groups are complete. An interrupt cancels the calls."""
        try:
            while self._handed_out < len(self._functions_left):
                self.next_groups()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self.cancelled = True
        cancel_all(self._calls)


def cancel_all(calls: Reversible[Call]) -> None:
    for call in reversed(calls):  # the last first: a call that ends would make room for a later one
        call.cancel()


def call_all(
    submit: Callable[[Sequence[Call]], None],
    function: Callable[..., Any],
    arguments: Sequence[Mapping[str, Any]],
    *,
    timeout: float,
) -> list[Call]:
    """Call one function with several arguments in parallel; return the ended calls in order.

    An interrupt cancels the calls.
    """
    calls = [Call(function, one, timeout=timeout) for one in arguments]
    submit(calls)
    try:
        wait(calls)
    except BaseException:
        cancel_all(calls)
        raise
    return calls
