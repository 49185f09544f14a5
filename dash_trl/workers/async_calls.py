"""`EventLoop`: `run(coroutine)` ──► the loop's thread ──► its result. And two backends that have such loops:

`AsyncCalls`: coroutine functions, many at once on an event loop of their own.

submit ──► waiting calls ──► a task on the loop's thread ──► Call.finish
                               └─ over its time: cancelled; where it blocks the loop, the whole loop is replaced

`RetriedCalls`: calls that are made again after errors that pass, on a backend of any kind.
"""

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dash_trl.workers.calls import Backend, Call, GivenUp, Overdue, Pace, forks

CLOSE_SECONDS = 5.0  # for a loop to answer
MOST_BLOCKED_LOOPS = 8  # abandoned because a call blocked them: beyond, the function is broken
MOST_DEAF = 64  # tasks that go on though they were cancelled: others wait until some have ended
PATIENCE = 3  # of a call's timeouts: if none of them has ended for so long, the function is broken
LOOK_SECONDS = 1.0  # between looks at whether the loop still answers, while calls are out
LONGEST_PAUSE = 30.0  # seconds; the first pauses are shorter: random, up to 1, 2, 4, ...


class EventLoop:
    """An asyncio loop on a daemon thread: many requests at once while the main thread waits for all of them.

    Not on the main thread, where a notebook runs a loop of its own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        _loops.add(self)
        threading.Thread(target=self._run, daemon=True, name="dash_trl event loop").start()

    def _run(self) -> None:
        process = os.getpid()
        self._loop.run_forever()
        if os.getpid() != process:  # the child of a call that forked, see `_stop_in_child`
            os._exit(1)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for the coroutine; cancels it when the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine, without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], Any]) -> None:
        """Runs a function soon on the loop's thread; does not wait for it."""
        self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Cancels what runs, runs one more coroutine, to close what lives in the loop, and ends the thread.

        If something blocks the loop, all but that coroutine happens when it comes back.
        """
        if self._loop.is_running():
            cancelled = asyncio.run_coroutine_threadsafe(self._cancel_others(), self._loop)
            try:
                cancelled.result(CLOSE_SECONDS)
            except TimeoutError:
                cancelled.add_done_callback(lambda _: self.call(self._loop.stop))
                return
            if last is not None:
                self.run(last())
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _cancel_others(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


_loops: weakref.WeakSet[EventLoop] = weakref.WeakSet()


def _stop_in_child() -> None:
    """In a forked process: what else runs on the loop is its parent's to do, by the same connections."""
    for loop in _loops:
        loop._loop.stop()


os.register_at_fork(after_in_child=_stop_in_child)


class _Lane:
    """A loop and the calls that run on it."""

    def __init__(self, count: int, pace: Pace | None, waiting: deque[Call]):
        self._count, self._pace, self._waiting = count, pace, waiting
        self.loop = EventLoop()
        self.out = threading.Event()  # calls are out
        self.running: dict[Call, bool] = {}  # whether its function has begun; in the order of their starts
        self.given_up = False
        self.closed = False
        self.longest = 0.0  # timeout of any call
        self._deaf: set[asyncio.Task[Any]] = set()  # cancelled, and not ended
        self._patience: asyncio.TimerHandle | None = None  # with them, where they are too many

    def look(self) -> None:
        """For calls that wait; from any thread."""
        self.out.set()
        self.loop.call(self.fill)

    def fill(self) -> None:
        """Starts calls that wait, as far as there is room; on the loop's thread."""
        if len(self._deaf) >= MOST_DEAF:
            if self._patience is None:
                loop = asyncio.get_running_loop()
                self._patience = loop.call_later(PATIENCE * self.longest, self._lose_patience)
            return
        while self._waiting and len(self.running) < self._count and not self.given_up and not self.closed:
            call = self._waiting.popleft()
            if not call.cancelled:
                self.running[call] = False
                self.longest = max(self.longest, call.timeout)
                asyncio.ensure_future(self._run(call))

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        """A task that was cancelled."""
        self._deaf.discard(task)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self.fill()

    def _lose_patience(self) -> None:
        self._patience = None
        error = GivenUp(f"{len(self._deaf)} calls go on though they were cancelled, so that no more are made")
        while self._waiting and not self.given_up and not self.closed:
            self._waiting.popleft().finish(error=error)

    async def _run(self, call: Call) -> None:
        """Never raises: asyncio lets SystemExit end the whole loop, and prints errors that come after a timeout."""
        task: Any = asyncio.current_task()
        outcome: tuple[Any, BaseException | None] = None, GivenUp("nobody waits for it")
        try:
            if self._pace is not None:
                await asyncio.sleep(self._pace.wait_seconds())
            if not (self.given_up or call.cancelled):  # the loop answers again, late; or it is after its pace
                outcome = await self._outcome(call, task), None
        except BaseException as error:
            closed = isinstance(error, asyncio.CancelledError) and self.closed
            outcome = None, GivenUp("the event loop was closed") if closed else error
        if task in self._deaf:
            self._has_ended(task)
        else:
            self._end(call, *outcome)

    async def _outcome(self, call: Call, task: asyncio.Task[Any]) -> Any:
        self.running[call] = True
        before = forks[0]
        # One timer, not wait_for: that waits for a task that does not let itself be cancelled.
        timer = asyncio.get_running_loop().call_later(call.timeout, self._give_up, call, task)
        try:
            return await call.function(**call.arguments)
        finally:
            timer.cancel()
            if forks[0] != before:  # it forked, and its child came back: the other calls are its parent's to make
                os._exit(1)

    def _give_up(self, call: Call, task: asyncio.Task[Any]) -> None:
        """A call that has taken its time; its task may go on."""
        task.cancel()
        self._deaf.add(task)
        self._end(call, None, Overdue(f"took more than {call.timeout:g} s"))

    def _end(self, call: Call, value: Any, error: BaseException | None) -> None:
        if not self.given_up:  # else it has its outcome, or is made on another loop
            del self.running[call]
            call.finish(value, error)
            self.fill()


class AsyncCalls:
    """A `Backend`: at most `count` calls at once, on one thread.

    A coroutine function that blocks (`requests.get`, `time.sleep`) stops all the others. When the loop does not answer
    for a call's timeout, all calls that have begun on it end with `Overdue`, and the others begin on a new loop.

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
        """Calls that wait or run end with `GivenUp`; ends the loop."""
        with self._lock:
            lane, self._lane = self._lane, None
            calls = list(self._waiting)
            self._waiting.clear()
        if lane is not None:
            lane.closed = True
            lane.out.set()  # the watch ends
            lane.loop.close()
            calls += list(lane.running)  # a blocked loop's, and tasks that were cancelled before they began
        for call in calls:
            call.finish(error=GivenUp("the runner was closed"))

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
            if self._lane is not lane:  # it was closed
                return
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
            now = self._open_lane()
        for call in begun:
            call.finish(
                error=Overdue(
                    f"the event loop did not answer for {lane.longest:g} s: a call blocks it. An async function must "
                    "await; one that blocks is better written without async, which is run on threads"
                )
            )
        for call in left:
            call.finish(error=GivenUp(f"{self.abandoned} event loops hang, so that no more calls are made"))
        now.look()


class RetriedCalls:
    """A `Backend` over another. Between two attempts a call takes no room there from others.

    Args:
        retry_on: exceptions after which a call is made again. retries: how often at most.
    """

    def __init__(self, backend: Backend, retry_on: tuple[type[BaseException], ...], retries: int):
        self._backend, self._loop = backend, EventLoop()
        self._retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + retries),
            wait=wait_random_exponential(max=LONGEST_PAUSE),
            retry=retry_if_exception_type(retry_on),
            reraise=True,
        )

    def submit(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._loop.start(self._finish(call))

    def close(self) -> None:
        self._loop.close()  # first: a call that the backend ends would be made again
        self._backend.close()

    async def _finish(self, call: Call) -> None:
        try:
            call.finish(await self._retrying.copy()(self._attempt, call))
        except BaseException as error:  # SystemExit would end the loop, and with it all other calls
            task = asyncio.current_task()
            closed = task is not None and task.cancelling()  # else a CancelledError is the function's own
            call.finish(error=GivenUp("the runner was closed") if closed else error)

    async def _attempt(self, call: Call) -> Any:
        one = await called(self._backend, call.function, call.arguments, timeout=call.timeout, stop=call.stop)
        if one.error is not None:
            raise one.error
        return one.value


async def called(
    backend: Backend,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    stop: threading.Event | None = None,
) -> Call:
    """Waits for one call, which then has its value or error.

    Args:
        backend, function, arguments, timeout, stop: see `Call`.
    """
    ended: Future[Call] = Future()
    ended.set_running_or_notify_cancel()  # if this task is cancelled, the backend still sets a result
    call = Call(function, arguments, timeout=timeout, done=ended.set_result, stop=stop)
    backend.submit([call])
    await asyncio.wrap_future(ended)
    return call
