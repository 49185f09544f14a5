"""`ThreadCalls` makes calls on daemon threads. `Feeder` is a daemon thread that consumes items.

Use threads for functions that spend their time waiting, for example for a server.

The path of a call::

    submit ──► waiting calls ──► a thread ──► Call.finish
                                   └─ over its timeout: abandoned, and replaced by another thread

Python cannot end a thread. If a call takes longer than its timeout, its thread is abandoned: nobody waits for the
thread any more, but the call may still return.
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

MOST_ABANDONED = 64  # limit of abandoned threads, which use memory; at this limit, calls wait until a thread returns
PATIENCE = 3  # at the limit, a call waits this multiple of its timeout; if no thread returns, calls end with `GivenUp`


class _Thread:
    """The state of a thread: its current call and the call's deadline, which the watcher (`ThreadCalls._watch`) reads.

    Attributes:
        calls: queue from which the thread takes calls; the item None ends the thread.
        held: list with the current call; empty between calls. The thread and the watcher both try to remove the call
            from the list, and the one that succeeds sets the outcome of the call. So no lock is needed; up to
            256 threads would have to wait for it.
        deadline: time at which the timeout of the current call ends, in seconds of the monotonic clock.
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
        abandoned: number of abandoned threads that have not returned. If there are `MOST_ABANDONED` of these threads,
            no call starts until one of them returns. If none returns while a call waits for `PATIENCE` × its timeout,
            calls end with `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: set[_Thread] = set()
        # Number of submitted calls. Refused calls are subtracted, and also all calls of an abandoned thread, because it
        # is no longer in `_threads`. So `_submitted` minus the sum of `ended` over `_threads` is the number of
        # unfinished calls.
        self._submitted = 0
        self._shortest = float("inf")  # shortest timeout of any call
        self._running = threading.Event()  # wakes the watcher; set when a call starts, and while calls run
        self._ending: threading.Event | None = None  # ends the watcher; None: there is no watcher
        self.abandoned = 0
        self._came_back = threading.Condition(self._lock)  # notified when an abandoned thread returns
        self._returns = 0  # number of abandoned threads that have returned
        self._hopeless_at = -1  # value of `_returns` when a call last waited in vain for a thread to return

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
            Refused calls, each with the reason. If the system cannot start a thread and no other thread runs, all
            waiting calls are refused. Otherwise no call is refused.
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
        """Make calls until the queue returns None or this thread is abandoned. Each thread runs this function."""
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
        """Wait while there are too many abandoned threads; return False if no abandoned thread returns."""
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
        """Abandon threads whose call has passed its deadline. This is the function of the watcher's thread.

        The watcher sleeps until the first deadline, but at most for the shortest timeout. So if a call starts while the
        watcher sleeps, the watcher wakes before the deadline of the call.
        """
        while not ending.is_set():
            self._running.wait()
            self._running.clear()
            now = time.monotonic()
            late: list[tuple[Call, Exception]] = []
            with self._lock:
                pause = self._shortest
                for one in list(self._threads):
                    held = one.held  # first, so that a new call is never compared with the deadline of the last call
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
    """Remove and return the call in a list. Only the first caller gets the call; later callers get None."""
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
    for _ in range(taken.count(None)):  # put each None back, because it ends a thread
        waiting.put(None)
    return [call for call in taken if call is not None]


def _start(function: Callable[[Any], None], argument: Any) -> None:
    """Start a daemon thread."""
    threading.Thread(target=function, args=(argument,), daemon=True, name="dash_trl call").start()


class Feeder:
    """Daemon thread that consumes items while the main thread makes the next items.

    The main thread passes items with `put`. If the daemon thread fails, the next `put` or `finish` raises its error.

    Args:
        consume: function that runs on the daemon thread and gets an iterator over the items.
        ahead: largest number of items that wait to be consumed.
        timeout: longest wait in seconds: of `put` for room, and of `finish` for the end of the thread.
    """

    _END = object()

    def __init__(self, consume: Callable[[Iterator[Any]], Any], *, ahead: int, timeout: float):
        self._items: queue.Queue[Any] = queue.Queue(ahead)
        self._timeout = timeout
        self._done: Future[Any] = Future()
        _start(self._work, consume)

    def _work(self, consume: Callable[[Iterator[Any]], Any]) -> None:
        """Run `consume`, and store its return value or its error. This is the function of the thread."""
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
        """Signal that no more items come, and wait until `consume` has returned.

        Returns:
            Return value of `consume`.

        Raises:
            TimeoutError: if the thread does not end within the timeout.
            Exception: the error of `consume`, if it has failed.
        """
        self.put(self._END)
        return self._done.result(self._timeout)
