"""`AsyncCalls`: coroutine functions, many at once on an event loop of their own.

submit ──► waiting calls ──► a task on the loop's thread ──► Call.finish
                               └─ over its time: cancelled; where it blocks the loop, the whole loop is replaced
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dash_trl.workers.calls import Call, GivenUp
from dash_trl.workers.event_loop import EventLoop
from dash_trl.workers.pace import Pace

MOST_BLOCKED_LOOPS = 8  # abandoned because a call blocked them: beyond, the function is broken
LOOK_SECONDS = 1.0  # between looks at whether the loop still answers, while calls are out


class AsyncCalls:
    """A `Backend`: at most `count` calls at once, on one thread.

    A coroutine function that blocks (`requests.get`, `time.sleep`) stops all the others. When the loop does not answer
    for a call's timeout, all calls that have begun on it end with `TimeoutError`, and the others begin on a new loop.

    Args:
        pace: of the starts, None: as soon as one has ended.
    Attributes:
        abandoned: loops that hang, or hung. At `MOST_BLOCKED_LOOPS` nothing is started any more: `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._out = threading.Event()  # calls are out
        self._lane: _Lane | None = None
        self.abandoned = 0

    def submit(self, calls: Sequence[Call]) -> None:
        with self._lock:
            if self._lane is None:
                self._lane = _Lane(self._count, self._pace, self._waiting)
                threading.Thread(target=self._watch, daemon=True, name="dash_trl watch over a loop").start()
            self._waiting.extend(calls)
            lane = self._lane
        self._out.set()
        lane.look()

    def close(self) -> None:
        """Cancels what runs, and ends the loop."""
        with self._lock:
            lane, self._lane = self._lane, None
        self._out.set()  # the watch ends
        if lane is not None:
            lane.close()

    def _watch(self) -> None:
        while True:
            self._out.wait()
            lane = self._lane
            if lane is None:
                return
            if not lane.busy:
                self._out.clear()
                if lane.busy:  # since then
                    self._out.set()
                continue
            answered = threading.Event()
            lane.call(answered.set)
            if answered.wait(lane.longest + LOOK_SECONDS):
                time.sleep(LOOK_SECONDS)
            else:
                self._abandon(lane)

    def _abandon(self, lane: _Lane) -> None:
        with self._lock:
            self.abandoned += 1
            begun, left = lane.give_up()
            if self._lane is lane:
                self._lane = _Lane(self._count, self._pace, self._waiting)
            if self.abandoned < MOST_BLOCKED_LOOPS:
                self._waiting.extendleft(reversed(left))
                left = []
            else:
                left += self._waiting
                self._waiting.clear()
            lane_now = self._lane
        for call in begun:
            call.finish(
                error=TimeoutError(
                    f"the event loop did not answer for {lane.longest:g} s: a call blocks it. An async reward function "
                    "must await; one that blocks is better written without async, which is run on threads"
                )
            )
        for call in left:
            call.finish(error=GivenUp(f"{self.abandoned} event loops hang, so that no more calls are made"))
        if lane_now is not None:
            lane_now.look()


class _Lane:
    """A loop and the calls that run on it; all but `give_up` runs, or is run, on its thread."""

    def __init__(self, count: int, pace: Pace | None, waiting: deque[Call]):
        self._count, self._pace, self._waiting = count, pace, waiting
        self._loop = EventLoop()
        self._running: dict[Call, bool] = {}  # whether its function has begun; in the order of their starts
        self._given_up = False
        self.longest = 0.0  # timeout of any call

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def call(self, function: Callable[[], Any]) -> None:
        self._loop.call(function)

    def look(self) -> None:
        """For calls that wait."""
        self._loop.call(self._fill)

    def give_up(self) -> tuple[list[Call], list[Call]]:
        """Those that have begun, and those that have not."""
        self._given_up = True
        calls = list(self._running.items())
        return [call for call, begun in calls if begun], [call for call, begun in calls if not begun]

    def close(self) -> None:
        self._loop.close()

    def _fill(self) -> None:
        while len(self._running) < self._count and not self._given_up:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            if not call.cancelled:
                self._running[call] = False
                self.longest = max(self.longest, call.timeout)
                asyncio.ensure_future(self._run(call))

    async def _run(self, call: Call) -> None:
        outcome: tuple[Any, BaseException | None] = None, GivenUp("the event loop was closed")
        try:
            if self._pace is not None:
                await asyncio.sleep(self._pace.wait_seconds())
            task = asyncio.ensure_future(self._outcome(call))
            # Not wait_for, which waits for a task that does not let itself be cancelled.
            done, _ = await asyncio.wait({task}, timeout=call.timeout)
            if done:
                outcome = task.result()
            else:
                task.cancel()
                outcome = None, TimeoutError(f"took more than {call.timeout:g} s")
        finally:
            if not self._given_up:  # else it has its outcome, or is made on another loop
                del self._running[call]
                call.finish(*outcome)
                self._fill()

    async def _outcome(self, call: Call) -> tuple[Any, BaseException | None]:
        """Never raises: asyncio lets SystemExit end the whole loop, and prints errors that come after a timeout."""
        if self._given_up:  # the loop answers again, late
            return None, None
        self._running[call] = True
        try:
            return await call.function(**call.arguments), None
        except BaseException as error:
            return None, error
