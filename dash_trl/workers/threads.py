"""`ThreadCalls`: calls that wait for something, on daemon threads. `Feeder`: a thread that consumes what it is given.

    submit ──► waiting calls ──► a thread ──► Call.finish
                                   └─ over its time: given up, and replaced by another thread

Python cannot end a thread: one that hangs is left alone until it comes back, if it does.
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

MOST_ABANDONED = 64  # threads that hang at the same time: memory runs out, so that others wait until some come back
PATIENCE = 3  # of a call's timeouts: if no thread has come back for so long, the function is broken


class _Thread:
    """What the watch sees of a thread: the call that it is in, and until when it may be.

    Attributes:
        held: the call, in a list of its own. Whoever takes it out, the thread or the watch, decides how it ends: this
            needs no lock, which 256 threads would wait for after each call.
        ended: calls that it has made.
    """

    def __init__(self, calls: queue.SimpleQueue[Call | None]):
        self.calls = calls
        self.held: list[Call] = []
        self.deadline = 0.0
        self.ended = 0
        self.closed = False


class ThreadCalls:
    """A `Backend`: at most `count` calls at once, on threads that start as they are needed.

    Args:
        pace: of the starts, None: as soon as a thread is free.
    Attributes:
        abandoned: threads that hang now. At `MOST_ABANDONED` nothing is started until one comes back; if none does for
            `PATIENCE` timeouts, calls end with `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: set[_Thread] = set()
        self._submitted = 0  # calls, without those that ended otherwise than on one of these threads
        self._shortest = float("inf")  # timeout of any call
        self._running = threading.Event()  # since the watch last looked
        self._ending: threading.Event | None = None  # of the watch
        self.abandoned = 0
        self._came_back = threading.Condition(self._lock)
        self._returns = 0  # of threads that were given up
        self._hopeless_at = -1  # as many returns as there were when patience ended

    def submit(self, calls: Sequence[Call]) -> None:
        with self._lock:
            if self._ending is None:
                ending = threading.Event()
                _start(self._watch, ending)
                self._ending = ending
            self._submitted += len(calls)
            self._shortest = min([self._shortest, *(call.timeout for call in calls)])
            refused, waiting = self._start_threads(calls), self._waiting
        if not refused:
            for call in calls:  # without the lock, which each call's end needs
                waiting.put(call)
            if waiting is not self._waiting:  # it was closed meanwhile
                refused = [(call, GivenUp("the runner was closed")) for call in _taken(waiting)]
        for call, error in refused:
            call.finish(error=error)

    def close(self) -> None:
        """Calls that wait or run end with `GivenUp`. Ends the threads that wait; those in a call end after it."""
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
        """One for each call that finds none free; the lock is held.

        Args:
            new: calls that do not wait yet.
        Returns:
            What is refused, and why: all calls that wait, where the system starts no thread and none is left.
        """
        unfinished = self._submitted - sum(one.ended for one in self._threads)
        for _ in range(min(self._count, unfinished) - len(self._threads)):
            one = _Thread(self._waiting)
            try:
                _start(self._work, one)
            except RuntimeError as error:  # at the system's limit of threads
                calls = [] if self._threads else [*_taken(self._waiting), *new]
                self._submitted -= len(calls)
                return [(call, error) for call in calls]
            self._threads.add(one)
        return []

    def _work(self, me: _Thread) -> None:
        while (call := me.calls.get()) is not None:
            value = error = None
            me.deadline = math.inf  # it has not begun
            me.held = held = [call]  # before it looks at `closed`: either `close` sees it, or this thread is told
            room = self.abandoned < MOST_ABANDONED or self._wait_for_room(call, me)
            if self._pace is not None and not (me.closed or call.cancelled):
                time.sleep(self._pace.wait_seconds())
            if me.closed or call.cancelled:
                error = GivenUp("nobody waits for it")
            elif not room:
                error = GivenUp(f"{self.abandoned} calls hang, so that no more are made")
            else:
                value, error = self._make(call, me)
            if not _take(held):  # it did come back, but late
                with self._lock:
                    self.abandoned -= 1
                    self._returns += 1
                    self._came_back.notify_all()
                return
            me.ended += 1
            call.finish(value, error)
            del call, value, error  # a thread that waits for the next call must not keep them in memory

    def _wait_for_room(self, call: Call, me: _Thread) -> bool:
        """False where too many threads hang and none comes back."""
        with self._lock:
            while self.abandoned >= MOST_ABANDONED and not (me.closed or call.cancelled):
                before = self._returns
                if self._hopeless_at == before:
                    return False
                if not self._came_back.wait(PATIENCE * call.timeout) and self._returns == before:
                    self._hopeless_at = before
        return True

    def _make(self, call: Call, me: _Thread) -> tuple[Any, Any]:
        """(value, error)"""
        me.deadline = time.monotonic() + call.timeout
        if not self._running.is_set():  # its lock is every thread's
            self._running.set()
        before = forks[0]
        try:
            return call.function(**call.arguments), None
        except BaseException as error:  # of a user's function: SystemExit, too
            return None, error
        finally:
            if forks[0] != before:  # it forked, and its child came back: the other calls are its parent's to make
                os._exit(1)

    def _watch(self, ending: threading.Event) -> None:
        """Sleeps until the first deadline, at most for the shortest timeout: what starts meanwhile has longer."""
        while not ending.is_set():
            self._running.wait()
            self._running.clear()
            now = time.monotonic()
            late: list[tuple[Call, Exception]] = []
            with self._lock:
                pause = self._shortest
                for one in list(self._threads):
                    held = one.held  # before its deadline, which may be the next call's already
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
    """The call, for the first thread that asks."""
    try:
        return held.pop()
    except IndexError:
        return None


def _taken(waiting: queue.SimpleQueue[Call | None]) -> list[Call]:
    """The calls that wait, which wait no more."""
    taken: list[Call | None] = []
    with suppress(queue.Empty):
        while True:
            taken.append(waiting.get_nowait())
    for _ in range(taken.count(None)):  # each ends a thread
        waiting.put(None)
    return [call for call in taken if call is not None]


def _start(function: Callable[[Any], None], argument: Any) -> None:
    threading.Thread(target=function, args=(argument,), daemon=True, name="dash_trl call").start()


class Feeder:
    """A daemon thread that consumes what the main thread puts, at most `ahead` items behind it.

        put(item) ──► consume(items), on the thread; its failure is raised by the next put or by finish

    Args:
        consume: gets an iterator over the items; runs on the thread.
        timeout: seconds for which a put waits for room and `finish` for the end.
    """

    _END = object()

    def __init__(self, consume: Callable[[Iterator[Any]], Any], *, ahead: int, timeout: float):
        self._items: queue.Queue[Any] = queue.Queue(ahead)
        self._timeout = timeout
        self._done: Future[Any] = Future()
        _start(self._work, consume)

    def _work(self, consume: Callable[[Iterator[Any]], Any]) -> None:
        try:
            self._done.set_result(consume(iter(self._items.get, self._END)))
        except BaseException as error:  # relayed to the main thread
            self._done.set_exception(error)
            while not self._items.empty():  # a put that waits for room goes on, and finds the error
                self._items.get_nowait()

    def put(self, item: Any) -> None:
        """Raises what the thread raised, or TimeoutError."""
        try:
            if not self._done.done():
                self._items.put(item, timeout=self._timeout)
        except queue.Full:
            raise TimeoutError(f"nothing was consumed for {self._timeout:g} s") from None
        if self._done.done():
            self._done.result()

    def finish(self) -> Any:
        """The value of `consume`; raises as `put`."""
        self.put(self._END)
        return self._done.result(self._timeout)
