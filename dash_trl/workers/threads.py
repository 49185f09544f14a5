"""`ThreadCalls` runs calls on daemon threads, for functions that wait. `Feeder` is a thread that consumes items.

The path of a call::

    submit ──► waiting calls ──► a thread ──► Call.finish
                                   └─ over its timeout: abandoned, and replaced by another thread

Python cannot end a thread. A thread that hangs is abandoned: nobody waits for it any more, but it may still return.
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dash_trl.workers.calls import Call, GivenUp, Overdue, Pace, forks

MOST_ABANDONED = 64  # limit of abandoned threads; more would exhaust memory, so new calls wait until one returns
PATIENCE = 3  # if no abandoned thread returns for this many timeouts of a call, the function counts as broken


class _Thread:
    """The state of a thread that the watcher (`ThreadCalls._watch`) reads: its current call and the call's deadline.

    Attributes:
        calls: queue from which the thread takes calls; None ends the thread.
        held: list with the current call; empty between calls. The thread or the watcher removes the call from the list,
            and the one that succeeds sets the call's outcome. With a lock instead, up to 256 threads would wait for it.
        deadline: time at which the current call is overdue, in seconds of the monotonic clock.
        ended: number of calls that the thread has finished.
        closed: True = the thread may start no more calls.
    """

    def __init__(self, calls: queue.SimpleQueue[Call | None]):
        self.calls = calls
        self.held: list[Call] = []
        self.deadline = 0.0
        self.ended = 0
        self.closed = False


class ThreadCalls:
    """`Backend` that makes calls on threads. Threads start when they are needed.

    Args:
        count: largest number of calls at once.
        pace: limits the rate at which calls start; None: a call starts as soon as a thread is free.

    Attributes:
        abandoned: number of abandoned threads that have not returned. If there are `MOST_ABANDONED`, no call starts
            until one returns. If none returns for `PATIENCE` timeouts, calls end with `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: set[_Thread] = set()
        # Number of submitted calls, without refused calls and without all calls of threads that were abandoned. The
        # number of unfinished calls is `_submitted` minus the sum of `ended` over `_threads`.
        self._submitted = 0
        self._shortest = float("inf")  # shortest timeout of any call
        self._running = threading.Event()  # wakes the watcher; set when a call starts, and while calls run
        self._ending: threading.Event | None = None  # ends the watcher
        self.abandoned = 0
        self._came_back = threading.Condition(self._lock)  # an abandoned thread has returned
        self._returns = 0  # number of abandoned threads that have returned
        self._hopeless_at = -1  # value of `_returns` when the patience ended

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls and start threads for them; see `Backend.submit`."""
        with self._lock:
            if self._ending is None:
                ending = threading.Event()
                _start(self._watch, ending)
                self._ending = ending
            self._submitted += len(calls)
            self._shortest = min([self._shortest, *(call.timeout for call in calls)])
            refused, waiting = self._start_threads(calls), self._waiting
        if not refused:
            for call in calls:  # after releasing the lock, so that other callers and the watcher need not wait
                waiting.put(call)
            if waiting is not self._waiting:  # `close` was called in the meantime
                refused = [(call, GivenUp("the runner was closed")) for call in _taken(waiting)]
        for call, error in refused:
            call.finish(error=error)

    def close(self) -> None:
        """End waiting and running calls with `GivenUp`. Idle threads end now, busy threads after their current call."""
        with self._lock:
            threads, calls = self._threads, _taken(self._waiting)
            for one in threads:
                one.closed = True
                self._waiting.put(None)
            if self._ending is not None:
                self._ending.set()
            self._threads, self._waiting, self._ending, self._submitted = set(), queue.SimpleQueue(), None, 0
            self._came_back.notify_all()
        self._running.set()
        for call in [*calls, *(call for one in threads for call in one.held)]:
            call.finish(error=GivenUp("the runner was closed"))

    def _start_threads(self, new: Sequence[Call] = ()) -> list[tuple[Call, Exception]]:
        """Start threads until there is one for each unfinished call, at most `count`. The caller holds the lock.

        Args:
            new: calls that are not queued yet.

        Returns:
            Refused calls, each with the reason. All waiting calls are refused if the system starts no more threads and
            there is no other thread. Otherwise no call is refused.
        """
        unfinished = self._submitted - sum(one.ended for one in self._threads)
        for _ in range(min(self._count, unfinished) - len(self._threads)):
            one = _Thread(self._waiting)
            try:
                _start(self._work, one)
            except RuntimeError as error:  # the system's limit of threads is reached
                calls = [] if self._threads else [*_taken(self._waiting), *new]
                self._submitted -= len(calls)
                return [(call, error) for call in calls]
            self._threads.add(one)
        return []

    def _work(self, me: _Thread) -> None:
        """Make calls, on a thread."""
        while (call := me.calls.get()) is not None:
            value = error = None
            me.deadline = math.inf  # the call has not started
            me.held = held = [call]  # set before `closed` is read: `close` sees the call, or we see `closed`
            room = self.abandoned < MOST_ABANDONED or self._wait_for_room(call, me)
            if self._pace is not None and not (me.closed or call.cancelled):
                time.sleep(self._pace.wait_seconds())
            if me.closed or call.cancelled:
                error = GivenUp("nobody waits for it")
            elif not room:
                error = GivenUp(f"{self.abandoned} calls hang, so no more calls are made")
            else:
                value, error = self._make(call, me)
            if not _take(held):  # the call returned after its timeout: this thread was abandoned
                with self._lock:
                    self.abandoned -= 1
                    self._returns += 1
                    self._came_back.notify_all()
                return
            me.ended += 1
            call.finish(value, error)
            del call, value, error  # a thread that waits for its next call must not keep these in memory

    def _wait_for_room(self, call: Call, me: _Thread) -> bool:
        """Wait while too many threads hang; return False if none returns."""
        with self._lock:
            while self.abandoned >= MOST_ABANDONED and not (me.closed or call.cancelled):
                before = self._returns
                if self._hopeless_at == before:
                    return False
                if not self._came_back.wait(PATIENCE * call.timeout) and self._returns == before:
                    self._hopeless_at = before
        return True

    def _make(self, call: Call, me: _Thread) -> tuple[Any, Any]:
        """Make a call; return (value, error)."""
        me.deadline = time.monotonic() + call.timeout
        if not self._running.is_set():  # because `set` takes a lock that all threads share
            self._running.set()
        before = forks[0]
        try:
            return call.function(**call.arguments), None
        except BaseException as error:  # a user's function may also raise SystemExit
            return None, error
        finally:
            if forks[0] != before:  # the call forked, and this is the child: the parent makes the other calls
                os._exit(1)

    def _watch(self, ending: threading.Event) -> None:
        """Abandon threads that are over their deadline.

        The watcher sleeps until the first deadline, and at most for the shortest timeout, so that it notices a call
        that starts in the meantime before the call's deadline.
        """
        while not ending.is_set():
            self._running.wait()
            self._running.clear()
            now = time.monotonic()
            late: list[tuple[Call, Exception]] = []
            with self._lock:
                pause = self._shortest
                for one in list(self._threads):
                    held = one.held  # read before the deadline, which may already belong to the next call
                    deadline = one.deadline
                    if not held:
                        continue
                    if deadline > now:
                        pause = min(pause, deadline - now)
                        self._running.set()
                    elif call := _take(held):
                        late.append((call, Overdue(f"took more than {call.timeout:g} s")))
                        self._threads.remove(one)
                        self.abandoned += 1
                        self._submitted -= one.ended + 1
                if late:
                    late += self._start_threads()
            for call, error in late:
                call.finish(error=error)
            ending.wait(min(pause, threading.TIMEOUT_MAX))


def _take(held: list[Call]) -> Call | None:
    """Take the call out of a list; only the first caller gets it, all others get None."""
    try:
        return held.pop()
    except IndexError:
        return None


def _taken(waiting: queue.SimpleQueue[Call | None]) -> list[Call]:
    """Take all waiting calls out of a queue."""
    taken: list[Call | None] = []
    with suppress(queue.Empty):
        while True:
            taken.append(waiting.get_nowait())
    for _ in range(taken.count(None)):  # put the end marks back: each ends a thread
        waiting.put(None)
    return [call for call in taken if call is not None]


def _start(function: Callable[[Any], None], argument: Any) -> None:
    """Start a daemon thread."""
    threading.Thread(target=function, args=(argument,), daemon=True, name="dash_trl call").start()


class Feeder:
    """Daemon thread that consumes the items that the main thread puts.

    If the thread fails, the next `put` or `finish` raises the thread's error.

    Args:
        consume: function that gets an iterator over the items; runs on the thread.
        ahead: largest number of items that wait to be consumed.
        timeout: seconds for which `put` waits for room and `finish` waits for the end.
    """

    _END = object()

    def __init__(self, consume: Callable[[Iterator[Any]], Any], *, ahead: int, timeout: float):
        self._items: queue.Queue[Any] = queue.Queue(ahead)
        self._timeout = timeout
        self._done: Future[Any] = Future()
        _start(self._work, consume)

    def _work(self, consume: Callable[[Iterator[Any]], Any]) -> None:
        """Run `consume`, on the thread."""
        try:
            self._done.set_result(consume(iter(self._items.get, self._END)))
        except BaseException as error:  # passed on to the main thread
            self._done.set_exception(error)
            while not self._items.empty():  # make room, so that a waiting `put` continues and raises the error
                self._items.get_nowait()

    def put(self, item: Any) -> None:
        """Pass an item to the thread.

        Args:
            item: the item.

        Raises:
            TimeoutError: if there is no room for the item within the timeout.
            Exception: the error of `consume`, if it has failed.
        """
        try:
            if not self._done.done():
                self._items.put(item, timeout=self._timeout)
        except queue.Full:
            raise TimeoutError(f"nothing was consumed for {self._timeout:g} s") from None
        if self._done.done():
            self._done.result()

    def finish(self) -> Any:
        """End the items and wait for the thread.

        Returns:
            Return value of `consume`.

        Raises:
            TimeoutError: if the thread does not end within the timeout.
            Exception: the error of `consume`, if it has failed.
        """
        self.put(self._END)
        return self._done.result(self._timeout)
