"""`AsyncCalls`: coroutine functions, many at once on an event loop of their own.

submit ──► waiting calls ──► a task on the loop's thread ──► Call.finish
                               └─ over its time: cancelled; where it blocks the loop, the whole loop is replaced
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from dash_trl.workers.calls import Call, GivenUp, Pace
from dash_trl.workers.event_loop import EventLoop

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
        self._lane: _Lane | None = None
        self.abandoned = 0

    def submit(self, calls: Sequence[Call]) -> None:
        with self._lock:
            self._waiting.extend(calls)
            lane = self._lane or self._open_lane()
        lane.look()

    def close(self) -> None:
        """Cancels what runs, and ends the loop."""
        with self._lock:
            lane, self._lane = self._lane, None
        if lane is not None:
            lane.out.set()  # the watch ends
            lane.loop.close()

    def _open_lane(self) -> _Lane:
        lane = self._lane = _Lane(self._count, self._pace, self._waiting)
        threading.Thread(target=self._watch, args=(lane,), daemon=True, name="dash_trl watch over a loop").start()
        return lane

    def _watch(self, lane: _Lane) -> None:
        """Until the lane is closed, or its loop does not answer while calls are out."""
        while lane is self._lane:
            lane.out.wait()
            lane.out.clear()
            while lane is self._lane and (lane.running or self._waiting):
                answered = threading.Event()
                lane.loop.call(answered.set)
                if answered.wait(lane.longest + LOOK_SECONDS):
                    time.sleep(LOOK_SECONDS)
                else:
                    self._abandon(lane)

    def _abandon(self, lane: _Lane) -> None:
        with self._lock:
            self.abandoned += 1
            lane.given_up = True
            calls = list(lane.running.items())
            begun, left = [call for call, has in calls if has], [call for call, has in calls if not has]
            if self.abandoned < MOST_BLOCKED_LOOPS:
                self._waiting.extendleft(reversed(left))
                left = []
            else:
                left += self._waiting
                self._waiting.clear()
            now = self._open_lane() if self._lane is lane else self._lane
        for call in begun:
            call.finish(
                error=TimeoutError(
                    f"the event loop did not answer for {lane.longest:g} s: a call blocks it. An async reward function "
                    "must await; one that blocks is better written without async, which is run on threads"
                )
            )
        for call in left:
            call.finish(error=GivenUp(f"{self.abandoned} event loops hang, so that no more calls are made"))
        if now is not None:
            now.look()


class _Lane:
    """A loop and the calls that run on it."""

    def __init__(self, count: int, pace: Pace | None, waiting: deque[Call]):
        self._count, self._pace, self._waiting = count, pace, waiting
        self.loop = EventLoop()
        self.out = threading.Event()  # calls are out
        self.running: dict[Call, bool] = {}  # whether its function has begun; in the order of their starts
        self.given_up = False
        self.longest = 0.0  # timeout of any call

    def look(self) -> None:
        """For calls that wait; from any thread."""
        self.out.set()
        self.loop.call(self.fill)

    def fill(self) -> None:
        """Starts calls that wait, as far as there is room; on the loop's thread."""
        while self._waiting and len(self.running) < self._count and not self.given_up:
            call = self._waiting.popleft()
            if not call.cancelled:
                self.running[call] = False
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
            if not self.given_up:  # else it has its outcome, or is made on another loop
                del self.running[call]
                call.finish(*outcome)
                self.fill()

    async def _outcome(self, call: Call) -> tuple[Any, BaseException | None]:
        """Never raises: asyncio lets SystemExit end the whole loop, and prints errors that come after a timeout."""
        if self.given_up:  # the loop answers again, late
            return None, None
        self.running[call] = True
        try:
            return await call.function(**call.arguments), None
        except BaseException as error:
            return None, error
