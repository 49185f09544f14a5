"""`EventLoop` runs an asyncio loop on a thread. `Backend` makes calls; its subclasses differ in where the calls run.

The path of a call::

    submit ──► waits for a place on the backend's loop, then for the pace ──► a thread, another loop, a
    Call.finish ◄── value, or last error ◄── again after a pause, if the error allows ◄── worker process or a Ray task
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dash_trl.workers.calls import Call, GivenUp, Overdue

ANSWER_SECONDS = 1.0  # a loop that does not answer for this long is blocked; a cancelled task ends within this time
CLOSE_SECONDS = 5.0  # how long `EventLoop.close` waits for a loop that a coroutine blocks
LOST_SECONDS = 1200.0  # after its timeout, a call counts as lost, for example in the queue of a full cluster
LONGEST_PAUSE = 30.0  # seconds; limit of the random pause before a retry (up to 1 s at first, then up to 2 s, 4 s, ...)

Outcome = tuple[Any, BaseException | None]  # value and error of a call


def value_of(outcome: Outcome) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


async def _in_time(outcome: Awaitable[Any], seconds: float, error: Exception) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await outcome
    except TimeoutError:
        if limit.expired():
            raise error from None
        raise


async def unless_overdue(outcome: Future[Outcome], call: Call) -> Any:
    """Return the value of a call in this process, or raise its error, or `Overdue` after its timeout."""
    error = Overdue(f"took more than {call.timeout:g} s")
    return value_of(await _in_time(asyncio.wrap_future(outcome), call.timeout, error))


async def unless_lost(outcome: Awaitable[Any], seconds: float) -> Any:
    """Wait for the outcome of a worker that keeps to timeouts itself; give it up `LOST_SECONDS` after them."""
    seconds += LOST_SECONDS
    return await _in_time(outcome, seconds, GivenUp(f"no outcome has come within {seconds:.0f} s"))


def is_cancelled() -> bool:
    """Return whether the running task is cancelled; a user's function may raise a `CancelledError`, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class EventLoop:
    """Asyncio loop on a daemon thread, which runs many requests at once while the main thread waits for them.

    The main thread cannot run it, because a notebook runs a loop of its own there.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dash_trl event loop")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs: False after `close`, and in a fork of the process that has made the loop."""
        return self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, wait for its end and return its value. An interrupt of the wait cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine without waiting for it; return its future, which cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(
        self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None, *, seconds: float = CLOSE_SECONDS
    ) -> None:
        """Cancel all coroutines, run `last`, and end the thread. If a coroutine blocks the loop, this happens later.

        `last` closes objects of the loop, such as an HTTP session. `seconds` is the longest wait.
        """

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=ANSWER_SECONDS)
            if last is not None:
                await last()
            self._loop.call_later(0, self._loop.stop)

        if self.is_running:
            with suppress(TimeoutError):
                self.start(end()).result(seconds)


class Backend:
    """Makes calls: at most a number of them at once, at a pace, and again after errors that may pass.

    Every call gets its outcome in bounded time. Subclasses define `_made`. A fork of the process gets a loop, threads
    and processes of its own.

    Args:
        count: largest number of calls at once.
        rate_limit: largest number of calls that start per second. None: no limit.
        retry_on: types of the exceptions after which a call is made again. During the pause, it keeps its place.
        retries: largest number of repetitions of a call.
    """

    def __init__(
        self,
        count: int,
        *,
        rate_limit: float | None = None,
        retry_on: tuple[type[BaseException], ...] = (),
        retries: int = 0,
    ):
        self._count, self._distance = count, 1 / rate_limit if rate_limit else 0.0
        self._make: Callable[[Call], Awaitable[Any]] = retry(
            stop=stop_after_attempt(1 + retries),
            wait=wait_random_exponential(max=LONGEST_PAUSE),
            retry=retry_if_exception_type(retry_on),
            reraise=True,
        )(self._attempt)
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None

    def submit(self, calls: Sequence[Call]) -> None:
        """Submit calls, each once, without waiting for them. Any thread may call this."""
        with self._lock:
            if self._loop is None or not self._loop.is_running:
                self._loop = EventLoop()
                self._places, self._pace = asyncio.Semaphore(self._count), asyncio.Lock()
                self._open()
            for call in calls:
                self._begin(call, self._loop.start(self._serve(call, self._places)))

    def close(self) -> None:
        """End all calls with `GivenUp`, and all threads and processes. A later `submit` starts anew."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(self._stop)

    def _begin(self, call: Call, task: Future[None]) -> None:
        """Let a call and its task end together."""
        call.add_done_callback(lambda _: task.cancel())
        task.add_done_callback(lambda _: call.finish(error=GivenUp("the runner was closed")))

    async def _serve(self, call: Call, places: asyncio.Semaphore) -> None:
        """Make a call when there is a place. After `close`, an old loop with its places may go on beside a new one."""
        try:
            async with places:
                if not call.done():
                    call.finish(await self._make(call))
        except BaseException as error:  # SystemExit would end the loop
            if not is_cancelled():  # Python puts a StopIteration that leaves a coroutine into a RuntimeError
                call.finish(error=error.__cause__ if isinstance(error.__cause__, StopIteration) else error)

    async def _attempt(self, call: Call) -> Any:
        if self._distance:
            async with self._pace:
                await asyncio.sleep(self._distance)
        return await self._made(call)

    def _open(self) -> None:
        """Prepare the backend for its first call, and for its first call after `close`."""

    async def _stop(self) -> None:
        """End what the backend has started. Runs on the loop."""

    async def _made(self, call: Call) -> Any:
        """Make a call; return its value or raise its error. Runs on the loop."""
        raise NotImplementedError


class AsyncCalls(Backend):
    """`Backend` for coroutine functions. They all run on one event loop, not on the backend's own.

    A coroutine function that blocks (`requests.get`, `time.sleep`) stops all other calls on this loop. They end at
    their timeouts, and later calls run on a new loop.
    """

    def _open(self) -> None:
        self._users = EventLoop()

    async def _stop(self) -> None:
        self._users.close(seconds=0)

    async def _made(self, call: Call) -> Any:
        loop = self._users
        try:
            return await unless_overdue(loop.start(_outcome_of(call)), call)
        except Overdue:
            _, blocked = await asyncio.wait([asyncio.wrap_future(loop.start(asyncio.sleep(0)))], timeout=ANSWER_SECONDS)
            if blocked:
                if self._users is loop:
                    self._users = EventLoop()
                    loop.close(seconds=0)
                raise Overdue(
                    f"took more than {call.timeout:g} s, and a call blocks the event loop. An async function must "
                    "await instead of blocking. Write a function that blocks without async: it runs on threads"
                ) from None
            raise


async def _outcome_of(call: Call) -> Outcome:
    """Await a call. No error is raised here: SystemExit would end the loop."""
    try:
        return await call.function(**call.arguments), None
    except BaseException as error:
        return None, error


async def called(
    backend: Backend, function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout: float
) -> Call:
    """Make one call and wait for it, on any loop; return the ended call. Cancelling the wait cancels the call."""
    call, ended = Call(function, arguments, timeout=timeout), Future[None]()
    ended.set_running_or_notify_cancel()  # if this task is cancelled, the call still sets its result
    call.add_done_callback(lambda _: ended.set_result(None))
    backend.submit([call])
    try:
        await asyncio.wrap_future(ended)
    finally:
        call.cancel()
    return call
