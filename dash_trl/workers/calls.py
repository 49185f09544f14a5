"""`Call`: one call of a function on its way through a backend, to exactly one outcome.

`Request`: the outcomes of a batch of calls as they come, and which of its groups are complete.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

LAST_SECONDS = 1800.0  # beyond the time-outs, without the end of any call: longer than workers and Ray take to start
_last_end = [0.0]  # of any call, by the monotonic clock; an attribute of `Call` would empty Python's caches of it


class Call:
    """One call of `function`, by keyword.

    Args:
        function: what is called; a coroutine function where the backend awaits it.
        arguments: by name.
        timeout: seconds from its start, not from its submission, after which it is given up with `Overdue`.
        done: gets the call as soon as it has its outcome, once, on any thread. It must not raise, nor take long.
        stop: once it is set, nobody waits for the call: a backend does not start it any more, and need not finish it.
    Attributes:
        value: what the function returned. error: what it raised, or why it has no value. One of them, once it is done.
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
        return self.stop is not None and self.stop.is_set()

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Its outcome. The first one counts: a thread that was given up may still bring a second one."""
        try:
            done = self._done
            del self._done  # succeeds on one thread only: no lock, no further object per call
        except AttributeError:
            return
        self.value, self.error = value, error
        _last_end[0] = time.monotonic()
        done(self)


forks = [0]  # between this process and the one that imported this: cheaper to look at than a process's number


def _in_child() -> None:
    forks[0] += 1


os.register_at_fork(after_in_child=_in_child)


class Overdue(TimeoutError):
    """A call took longer than its timeout. A thread that is in it still runs."""


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
    """Calls of one function, side by side; waits until all of them are done. An interrupt cancels them.

    Those whose outcome is lost end with an error, see `seconds_left`.
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
    """Until outcomes that have not come are lost: `patience` after the last end of any call in this process.

    Args:
        began: when somebody began to wait for them, by the monotonic clock.
    """
    left = max(began, _last_end[0]) + patience - time.monotonic()
    return max(0.0, min(left, threading.TIMEOUT_MAX))


def lost(patience: float) -> RuntimeError:
    return RuntimeError(f"its outcome was lost: no call has ended for {patience:g} s")


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


class Request:
    """What F functions say of N rows; each outcome is kept at its own place, whenever it comes.

    Args:
        functions: F. rows: N. group_size: G adjacent rows are a group; the last one may be smaller.
    Attributes:
        outcomes: [F][N]; None = has not come.
        stop: of its calls; set, once nobody waits for it.
        patience: seconds without the end of any call in this process, after which the rows that are missing are lost.
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
        return range(len(self.outcomes[0]))[group * self.group_size : (group + 1) * self.group_size]

    def put(self, function: int, first: int, outcomes: Sequence[Any]) -> list[int]:
        """The outcomes of a function for rows from `first` on, each once; from any thread.

        Returns:
            The groups of which it has now said all; each has to be told to `complete`, then or later.
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
        """A function has nothing more to say of a group."""
        with self._lock:
            if self._lost:
                return
            self._functions_left[group] -= 1
            last = not self._functions_left[group]
        if last:
            self._complete.put(group)

    @property
    def pending(self) -> bool:
        """Some group is not complete."""
        return any(self._functions_left)

    def next_groups(self, *, wait: bool = True) -> list[int]:
        """Numbers of the groups that are complete and were not handed out before.

        Args:
            wait: for one, where there is none yet. There has to be one left.
        """
        found: list[int] = []
        while not self._complete.empty() or wait and not found:
            found.append(self._next())
            self._handed_out += 1
        return found

    def _next(self) -> int:
        """A last deadline, whatever has gone wrong: the rows that are missing end with an error."""
        began = time.monotonic()
        while True:
            try:
                return self._complete.get(timeout=seconds_left(began, self.patience))
            except queue.Empty:
                if not seconds_left(began, self.patience):
                    self._lose()

    def _lose(self) -> None:
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
        """Until all groups are complete; where that is interrupted, nothing more is started."""
        try:
            while self._handed_out < len(self._functions_left):
                self.next_groups()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self.stop.set()
