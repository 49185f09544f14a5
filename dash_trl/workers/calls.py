"""A `Call` is one call of a function. A backend makes the call, and the call gets exactly one outcome.

A `Request` collects the outcomes of calls for many rows, and returns each group of rows when it is complete.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

# Seconds, to which callers add the timeouts of their calls. If no call of this process ends for so long, missing
# outcomes count as lost. Workers and Ray start in less than `LAST_SECONDS`.
LAST_SECONDS = 1800.0
# Time at which the last call ended, in seconds of the monotonic clock. It is not an attribute of the class `Call`,
# because each assignment to a class attribute empties Python's caches for the class.
_last_end = [0.0]


class Call:
    """One call of a function with keyword arguments.

    Args:
        function: the function; a coroutine function for a backend that awaits it.
        arguments: name → value.
        timeout: seconds from the start of the call, not from its submission. After this time the call ends with a
            `TimeoutError`: with `Overdue` on threads and event loops.
        done: function that is called once with this call when the call has its outcome, on any thread. It must be quick
            and must not raise.
        stop: event that cancels the call. Once it is set, a backend does not start the call and need not give it an
            outcome. None: the call cannot be cancelled.

    Attributes:
        value: return value of the function. None before the call ends, and if it ends with an error.
        error: exception that the function raised or that ended the call. None if the call has a value.
    """

    __slots__ = ("_done", "arguments", "error", "function", "stop", "timeout", "value")

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
        self._done = done

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self.stop is not None and self.stop.is_set()

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome and call `done`. A second outcome, for example from an abandoned thread, is ignored.

        Args:
            value: return value of the function.
            error: exception that the function raised or that ended the call. None if the call has a value.
        """
        try:
            done = self._done
            del self._done  # succeeds on one thread only, without a lock for which up to 256 threads would wait
        except AttributeError:
            return
        self.value, self.error = value, error
        _last_end[0] = time.monotonic()
        done(self)


# Number of forks between the process that imported this module and this process. If the number grows during a call, the
# call has forked, and this process is the child. Reading the number is cheaper than `os.getpid`.
forks = [0]


def _in_child() -> None:
    forks[0] += 1


os.register_at_fork(after_in_child=_in_child)


class Overdue(TimeoutError):
    """A call took longer than its timeout. If it runs on a thread, the thread still runs."""


class GivenUp(RuntimeError):
    """A call was given up, because too many earlier calls hang, nobody waits for it, or its backend was closed."""


class Backend(Protocol):
    """Protocol of the classes that make calls.

    Every call that was submitted and not cancelled gets its outcome in bounded time.
    """

    def submit(self, calls: Sequence[Call]) -> None:
        """Submit calls without waiting for them. Any thread may call this.

        Args:
            calls: the calls, each of which is submitted once.
        """

    def close(self) -> None:
        """End all threads and processes that the backend has started, without waiting for calls that hang."""


def call_all(
    submit: Callable[[Sequence[Call]], None],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    timeout: float,
) -> list[Call]:
    """Call one function with several arguments in parallel, and wait for all calls. An interrupt cancels the calls.

    If no call ends for a long time (see `seconds_left`), the missing outcomes become errors.

    Args:
        submit: `submit` of a backend.
        function: see `Call`.
        arguments: `Call.arguments` of each call.
        timeout: see `Call`.

    Returns:
        The finished calls, in the order of `arguments`.
    """
    done, stop = threading.Semaphore(0), threading.Event()
    began, patience = time.monotonic(), LAST_SECONDS + timeout
    calls = [Call(function, one, timeout=timeout, done=lambda _: done.release(), stop=stop) for one in arguments]
    try:
        submit(calls)
        for _ in calls:
            while not done.acquire(timeout=seconds_left(began, patience)):
                if not seconds_left(began, patience):
                    stop.set()
                    for call in calls:
                        call.finish(error=lost(patience))
    except BaseException:
        stop.set()
        raise
    return calls


def seconds_left(began: float, patience: float) -> float:
    """Compute the seconds until missing outcomes count as lost.

    Outcomes count as lost if no call of this process ends for `patience` seconds.

    Args:
        began: time at which the caller began to wait, in seconds of the monotonic clock.
        patience: seconds without an ended call after which outcomes count as lost.
    """
    left = max(began, _last_end[0]) + patience - time.monotonic()
    return max(0.0, min(left, threading.TIMEOUT_MAX))


def lost(patience: float) -> RuntimeError:
    """Create the error of a call whose outcome is lost.

    Args:
        patience: seconds for which no call has ended.
    """
    return RuntimeError(f"its outcome was lost: no call has ended for {patience:g} s")


class Pace:
    """Limits the rate at which the calls of all threads start, by a least interval between two starts.

    Args:
        rate: largest number of starts per second.
    """

    def __init__(self, rate: float):
        self._between = 1 / rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait_seconds(self) -> float:
        """Reserve the next time to start a call; return the seconds until then, which the caller has to wait."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._between
        return start - now


class Request:
    """Collects the outcomes of F functions for N rows, and returns groups of rows as soon as they are complete.

    A group is complete when all functions are done with it. The outcomes may come in any order.

    Args:
        functions: number of functions, F.
        rows: number of rows, N.
        group_size: number of adjacent rows that make a group; the last group may be smaller.

    Attributes:
        outcomes: F lists of N outcomes; None = this outcome has not come.
        stop: event that cancels the calls; it is set when nobody waits for the outcomes any more.
        patience: seconds. If no call of this process ends for this time, missing outcomes count as lost.
        group_size: see the argument.
    """

    def __init__(self, functions: int, rows: int, group_size: int):
        self.outcomes: list[list[Any]] = [[None] * rows for _ in range(functions)]
        self.stop = threading.Event()
        self.patience = LAST_SECONDS
        self._lost = False
        self.group_size = group_size
        groups = range(0, rows, group_size)
        self._rows_left = [[min(group_size, rows - start) for start in groups] for _ in range(functions)]
        self._functions_left = [functions] * len(groups)
        self._lock = threading.Lock()
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._handed_out = 0

    def rows_of(self, group: int) -> range:
        """Return the rows of a group.

        Args:
            group: number of the group.
        """
        return range(len(self.outcomes[0]))[group * self.group_size : (group + 1) * self.group_size]

    def put(self, function: int, first: int, outcomes: Sequence[Any]) -> list[int]:
        """Store outcomes of a function for consecutive rows. Any thread may call this, but only once for each row.

        Args:
            function: number of the function.
            first: number of the first row.
            outcomes: outcomes of the rows from `first` on.

        Returns:
            Numbers of the groups for which the function now has all outcomes. The caller must call `complete` for each
            of them, now or later.
        """
        left, size = self._rows_left[function], self.group_size
        with self._lock:
            if self._lost:
                return []
            self.outcomes[function][first : first + len(outcomes)] = outcomes
            done = []
            for row in range(first, first + len(outcomes)):
                left[row // size] -= 1
                if not left[row // size]:
                    done.append(row // size)
        return done

    def complete(self, function: int, group: int) -> None:
        """Record that a function is done with a group. After the last function, the group is complete.

        Args:
            function: number of the function.
            group: number of the group.
        """
        with self._lock:
            if self._lost:
                return
            self._functions_left[group] -= 1
            last = not self._functions_left[group]
        if last:
            self._complete.put(group)

    @property
    def pending(self) -> bool:
        """Whether some group is not complete."""
        return any(self._functions_left)

    def next_groups(self, *, wait: bool = True) -> list[int]:
        """Return the numbers of complete groups that were not returned before.

        Args:
            wait: True = if there is no such group yet, wait for one. Call it with True only while groups are left.
        """
        found: list[int] = []
        while not self._complete.empty() or wait and not found:
            found.append(self._next())
            self._handed_out += 1
        return found

    def _next(self) -> int:
        """Wait for the next complete group.

        This wait always ends: after `patience` seconds without an outcome, the missing outcomes become errors.
        """
        began = time.monotonic()
        while True:
            try:
                return self._complete.get(timeout=seconds_left(began, self.patience))
            except queue.Empty:
                if not seconds_left(began, self.patience):
                    self._lose()

    def _lose(self) -> None:
        """Replace all missing outcomes by an error, and complete their groups."""
        self.cancel()
        error = lost(self.patience)
        with self._lock:
            self._lost = True
            self.outcomes = [[error if one is None else one for one in column] for column in self.outcomes]
            for group, left in enumerate(self._functions_left):
                if left:
                    self._functions_left[group] = 0
                    self._complete.put(group)

    def wait(self) -> None:
        """Wait until all groups are complete. If the wait is interrupted, no more calls start."""
        try:
            while self._handed_out < len(self._functions_left):
                self.next_groups()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the calls, because nobody waits for their outcomes any more."""
        self.stop.set()
