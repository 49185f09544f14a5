"""`EventLoop` runs an asyncio loop on a thread. The backends `AsyncCalls` and `RetriedCalls` each have an `EventLoop`.

`AsyncCalls` runs coroutine functions, many at once, on its event loop::

    submit ──► waiting calls ──► a task on the loop's thread ──► Call.finish
                                   └─ over its timeout: cancelled; if it blocks the loop, the loop is replaced

`RetriedCalls` repeats calls of any backend after temporary errors.
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

CLOSE_SECONDS = 5.0  # how long `EventLoop.close` waits for a loop that a coroutine blocks
MOST_BLOCKED_LOOPS = 8  # when calls have blocked this many loops, waiting calls end with `GivenUp`
MOST_DEAF = 64  # while this many tasks continue after their cancellation, no further call starts
PATIENCE = 3  # at this limit, if no cancelled task ends for this many timeouts, waiting calls end with `GivenUp`
LOOK_SECONDS = 1.0  # between two checks whether the loop still answers; checks are made while calls run or wait
LONGEST_PAUSE = 30.0  # seconds; limit of the random pause before a retry (up to 1 s at first, then up to 2 s, 4 s, ...)


class EventLoop:
    """Asyncio loop on a daemon thread, which runs many requests at once while the main thread waits for them.

    The loop does not run on the main thread, because a notebook runs a loop of its own there.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        _loops.add(self)
        threading.Thread(target=self._run, daemon=True, name="dash_trl event loop").start()

    def _run(self) -> None:
        """Run the loop until it is stopped. This is the function of the loop's thread."""
        process = os.getpid()
        self._loop.run_forever()
        if os.getpid() != process:  # a call forked, and this is the child, see `_stop_in_child`
            os._exit(1)
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for its end. If the wait is interrupted, the coroutine is cancelled.

        Args:
            coroutine: the coroutine.

        Returns:
            Return value of the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine without waiting for it.

        Args:
            coroutine: the coroutine.
        """
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], Any]) -> None:
        """Run a function on the loop's thread, without waiting for it.

        Args:
            function: a function without arguments; it must not block.
        """
        self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Cancel all coroutines, run `last`, and end the thread.

        If a coroutine blocks the loop, `last` does not run. When the loop is free again, the other coroutines are
        cancelled and the thread ends.

        Args:
            last: coroutine function that closes objects of the loop, such as an HTTP session. None: nothing to close.
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
    """Stop all loops in a forked process. Only the parent may continue their tasks, which use its connections."""
    for loop in _loops:
        loop._loop.stop()


os.register_at_fork(after_in_child=_stop_in_child)


class _Lane:
    """An event loop and the calls that run on it.

    Attributes:
        loop: the event loop.
        out: event that wakes the watcher (`AsyncCalls._watch`); set when calls are submitted.
        running: call → whether its function has begun, in the order in which the calls started.
        given_up: True = the loop was abandoned because a call blocks it.
        closed: True = the lane may start no more calls.
        longest: longest timeout of any call, in seconds.
    """

    def __init__(self, count: int, pace: Pace | None, waiting: deque[Call]):
        self._count, self._pace, self._waiting = count, pace, waiting
        self.loop = EventLoop()
        self.out = threading.Event()
        self.running: dict[Call, bool] = {}
        self.given_up = False
        self.closed = False
        self.longest = 0.0
        self._deaf: set[asyncio.Task[Any]] = set()  # tasks that were cancelled and have not ended
        self._patience: asyncio.TimerHandle | None = None  # timer that runs while there are too many of these tasks

    def look(self) -> None:
        """Make the loop and the watcher check for waiting calls. Any thread may call this."""
        self.out.set()
        self.loop.call(self.fill)

    def fill(self) -> None:
        """Start waiting calls, up to the limit of calls at once. Runs on the loop's thread."""
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
        """Record that a cancelled task has ended, and start waiting calls."""
        self._deaf.discard(task)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self.fill()

    def _lose_patience(self) -> None:
        """End the waiting calls with `GivenUp`, because too many cancelled tasks continue."""
        self._patience = None
        error = GivenUp(f"{len(self._deaf)} calls continue although they were cancelled, so no more calls are made")
        while self._waiting and not self.given_up and not self.closed:
            self._waiting.popleft().finish(error=error)

    async def _run(self, call: Call) -> None:
        """Run a call until its end or its timeout, and finish it.

        This coroutine never raises an error. In asyncio, SystemExit would end the whole loop, and an error after the
        timeout would be printed.
        """
        task: Any = asyncio.current_task()
        outcome: tuple[Any, BaseException | None] = None, GivenUp("nobody waits for it")
        try:
            if self._pace is not None:
                await asyncio.sleep(self._pace.wait_seconds())
            if not (self.given_up or call.cancelled):  # else another loop makes the call, or nobody waits for it
                outcome = await self._outcome(call, task), None
        except BaseException as error:
            closed = isinstance(error, asyncio.CancelledError) and self.closed
            outcome = None, GivenUp("the event loop was closed") if closed else error
        if task in self._deaf:
            self._has_ended(task)
        else:
            self._end(call, *outcome)

    async def _outcome(self, call: Call, task: asyncio.Task[Any]) -> Any:
        """Await a call's function, and cancel it after the call's timeout."""
        self.running[call] = True
        before = forks[0]
        # Not by `asyncio.wait_for`, which would keep waiting for a task that ignores its cancellation.
        timer = asyncio.get_running_loop().call_later(call.timeout, self._give_up, call, task)
        try:
            return await call.function(**call.arguments)
        finally:
            timer.cancel()
            if forks[0] != before:  # the call forked, and this is the child: the parent makes the other calls
                os._exit(1)

    def _give_up(self, call: Call, task: asyncio.Task[Any]) -> None:
        """Finish a call whose timeout has passed, even if its task ignores the cancellation and continues."""
        task.cancel()
        self._deaf.add(task)
        self._end(call, None, Overdue(f"took more than {call.timeout:g} s"))

    def _end(self, call: Call, value: Any, error: BaseException | None) -> None:
        """Finish a call and start the next one."""
        if not self.given_up:  # otherwise the call already has its outcome, or runs on another loop
            del self.running[call]
            call.finish(value, error)
            self.fill()


class AsyncCalls:
    """`Backend` for coroutine functions. All calls run on one event loop.

    A coroutine function that blocks (`requests.get`, `time.sleep`) stops all other calls on the loop. If the loop does
    not answer for the longest timeout of its calls, all calls that have begun on it end with `Overdue`. The other calls
    begin on a new loop.

    Args:
        count: largest number of calls at once.
        pace: limits the rate at which calls start. None: a call starts as soon as fewer than `count` calls run.

    Attributes:
        abandoned: number of loops that calls have blocked so far. When the number reaches `MOST_BLOCKED_LOOPS`, waiting
            calls end with `GivenUp`.
    """

    def __init__(self, count: int, *, pace: Pace | None = None):
        self._count, self._pace = count, pace
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._lane: _Lane | None = None
        self.abandoned = 0

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls; see `Backend.submit`."""
        with self._lock:
            self._waiting.extend(calls)
            lane = self._lane or self._open_lane()
        lane.look()

    def close(self) -> None:
        """End waiting and running calls with `GivenUp`, and end the loop."""
        with self._lock:
            lane, self._lane = self._lane, None
            calls = list(self._waiting)
            self._waiting.clear()
        if lane is not None:
            lane.closed = True
            lane.out.set()  # ends the watcher
            lane.loop.close()
            calls += list(lane.running)  # calls on a blocked loop, and calls whose task was cancelled before it began
        for call in calls:
            call.finish(error=GivenUp("the runner was closed"))

    def _open_lane(self) -> _Lane:
        """Start a new loop and its watcher."""
        lane = self._lane = _Lane(self._count, self._pace, self._waiting)
        threading.Thread(target=self._watch, args=(lane,), daemon=True, name="dash_trl watch over a loop").start()
        return lane

    def _watch(self, lane: _Lane) -> None:
        """Watch a lane until it is closed, and abandon it if its loop does not answer while calls run or wait."""
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
        """Replace a lane whose loop is blocked; calls that have begun on it end with `Overdue`."""
        with self._lock:
            if self._lane is not lane:  # the lane was closed
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
                    f"the event loop did not answer for {lane.longest:g} s because a call blocks it. An async function "
                    "must await instead of blocking. Write a function that blocks without async: it runs on threads"
                )
            )
        for call in left:
            call.finish(error=GivenUp(f"{self.abandoned} event loops hang, so no more calls are made"))
        now.look()


class RetriedCalls:
    """`Backend` that makes calls on another backend, and repeats failed calls after a pause.

    During the pause, a call does not count towards the other backend's limit of calls at once.

    Args:
        backend: the other backend, which makes the calls.
        retry_on: types of the exceptions after which a call is repeated.
        retries: largest number of repetitions of a call.
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
        """Start calls; see `Backend.submit`."""
        for call in calls:
            self._loop.start(self._finish(call))

    def close(self) -> None:
        """End all calls with `GivenUp`, and close the backend."""
        self._loop.close()  # first, because calls that fail when the backend closes would be repeated
        self._backend.close()

    async def _finish(self, call: Call) -> None:
        """Make a call, with repetitions, and finish it."""
        try:
            call.finish(await self._retrying.copy()(self._attempt, call))
        except BaseException as error:  # SystemExit would end the loop and with it all other calls
            task = asyncio.current_task()
            closed = task is not None and task.cancelling()  # otherwise the function itself raised CancelledError
            call.finish(error=GivenUp("the runner was closed") if closed else error)

    async def _attempt(self, call: Call) -> Any:
        """Make a call once; raise its error or return its value."""
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
    """Make one call and wait for it.

    Args:
        backend: the backend that makes the call.
        function: see `Call`.
        arguments: see `Call`.
        timeout: see `Call`.
        stop: see `Call`.

    Returns:
        The finished call with its value or error.
    """
    ended: Future[Call] = Future()
    ended.set_running_or_notify_cancel()  # if this task is cancelled, the backend still sets a result
    call = Call(function, arguments, timeout=timeout, done=ended.set_result, stop=stop)
    backend.submit([call])
    await asyncio.wrap_future(ended)
    return call
