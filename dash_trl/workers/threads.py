"""`ThreadCalls`: calls that wait for something, on daemon threads.

    submit ──► waiting calls ──► a thread ──► Call.finish
                                   └─ over its time: given up, and replaced by another thread

Python cannot end a thread: one that hangs is left alone until it comes back, if it does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from dash_trl.workers.calls import Call, GivenUp
from dash_trl.workers.pace import Pace

LONGEST_SLEEP = 3600.0  # seconds, of the watch: no clock of the system can wait for ever
MOST_ABANDONED = 64  # threads that hang at the same time: beyond, a function is broken, and memory runs out


class _Thread:
    """What the watch sees of a thread: the call that it is in, and until when it may be."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.call: Call | None = None
        self.deadline = 0.0
        self.given_up = False


class ThreadCalls:
    """A `Backend`: at most `count` calls at once, on threads that start as they are needed.

    Args:
        pace: of the starts, None: as soon as a thread is free.
    Attributes:
        abandoned: threads that hang now. At `MOST_ABANDONED` nothing is started any more: calls end with `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[_Thread] = set()
        self._unfinished = 0  # calls that wait or run on a thread that is not given up
        self._shortest = float("inf")  # timeout of any call
        self._running = threading.Event()  # since the watch last looked
        self._watched = False
        self._ending = threading.Event()
        self.abandoned = 0

    def submit(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        with self._lock:
            self._unfinished += len(calls)
            self._shortest = min(self._shortest, *(call.timeout for call in calls))
            if not self._watched:
                self._watched = True
                self._ending = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._ending,), daemon=True, name="dash_trl watch over calls"
                ).start()
            missing = min(self._count, self._unfinished) - len(self._threads)
            new = [_Thread() for _ in range(missing)]
            self._threads.update(new)
        for call in calls:
            self._waiting.put(call)
        for one in new:
            self._start(one)

    def close(self) -> None:
        """Ends the threads that wait; those in a call end after it."""
        with self._lock:
            ending, self._threads, self._watched = len(self._threads), set(), False
            self._ending.set()
        self._running.set()
        for _ in range(ending):
            self._waiting.put(None)

    def _start(self, one: _Thread) -> None:
        threading.Thread(target=self._work, args=(one,), daemon=True, name="dash_trl call").start()

    def _work(self, me: _Thread) -> None:
        while (call := self._waiting.get()) is not None:
            if call.cancelled:
                self._ended()
                continue
            if self.abandoned >= MOST_ABANDONED:
                self._ended()
                call.finish(error=GivenUp(f"{self.abandoned} calls hang, so that no more are made"))
                continue
            if self._pace is not None:
                time.sleep(self._pace.wait_seconds())
            with me.lock:
                me.call, me.deadline = call, time.monotonic() + call.timeout
            self._running.set()
            value = error = None
            try:
                value = call.function(**call.arguments)
            except BaseException as raised:  # of a user's function: SystemExit, too
                error = raised
            with me.lock:
                me.call = None
                if me.given_up:  # it did come back, but late
                    break
            self._ended()
            call.finish(value, error)
        if me.given_up:
            with self._lock:
                self.abandoned -= 1

    def _ended(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def _watch(self, ending: threading.Event) -> None:
        """Sleeps until the first deadline, at most for the shortest timeout: what starts meanwhile has longer."""
        while not ending.is_set():
            self._running.wait()
            self._running.clear()
            until = time.monotonic() + self._shortest
            with self._lock:
                threads = list(self._threads)
            for one in threads:
                with one.lock:
                    call, late = one.call, one.deadline <= time.monotonic()
                    if call is not None and late:
                        one.given_up = True
                    elif call is not None:
                        until = min(until, one.deadline)
                        self._running.set()
                if call is not None and late:
                    self._replace(one)
                    call.finish(error=TimeoutError(f"took more than {call.timeout:g} s"))
            ending.wait(max(0.0, min(until - time.monotonic(), LONGEST_SLEEP)))

    def _replace(self, one: _Thread) -> None:
        with self._lock:
            self.abandoned += 1
            self._unfinished -= 1
            if one not in self._threads:  # closed
                return
            self._threads.remove(one)
            another = _Thread()
            self._threads.add(another)
        self._start(another)
