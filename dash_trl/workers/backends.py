"""`EventLoop` runs an asyncio loop on a thread. `Backend` makes calls; its subclasses differ in where the calls run.

`AsyncCalls` and `ThreadCalls` run them in this process. A *call* is the future that `submit` returns. Its path::

    submit ──► waits for a place on the backend's loop, then for the pace ──► a thread, another loop, a
    future ◄── value, or last error ◄── again after a pause, if the error allows ◄── worker process or a Ray task
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Reversible, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

ANSWER_SECONDS = 1.0  # a loop that does not answer for this long is blocked; a cancelled task ends within this time
CLOSE_SECONDS = 5.0  # how long `EventLoop.close` waits for a loop that a coroutine blocks
CALLS_AHEAD = 16  # calls in a pool for each worker process, so that a worker does not wait for its next call
LOST_SECONDS = 1200.0  # after the timeouts of all calls ahead, a call counts as lost, for example in a full cluster
LONGEST_PAUSE = 30.0  # seconds; limit of the random pause before a retry (up to 1 s at first, then up to 2 s, 4 s, ...)
MOST_HANGING = 256  # while this many calls hang, further calls end with `GivenUp`: each of them would hold a thread


T = TypeVar("T")
Work = Coroutine[Any, Any, T]  # for an `EventLoop`
Function = Callable[..., Any]  # or a coroutine function


class Overdue(TimeoutError):
    """A call in this process took longer than its timeout. If it runs on a thread, the thread still runs."""


class GivenUp(RuntimeError):
    """A call was given up: its outcome is lost, or too many earlier calls hang."""


class Call(NamedTuple):
    function: Function
    arguments: Mapping[str, Any]
    timeout: float  # in seconds


def outcome_of(call: Future[T]) -> T | BaseException:
    """Return the value of an ended call, or its error."""
    try:
        return call.result()
    except BaseException as error:
        return error


def cancel_all(calls: Reversible[Future[Any]]) -> None:
    for call in reversed(calls):  # the last first: a call that ends would make room for a later one
        call.cancel()


async def together(works: Iterable[Work[T]]) -> list[T]:
    """Run coroutines concurrently; return their results in order, or cancel all and raise their first error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_time(outcome: Awaitable[T], seconds: float, error: Exception) -> T:
    """Wait for an outcome; raise `error` if it takes too long."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await outcome
    except TimeoutError:
        if limit.expired():
            raise error from None
        raise


def harmless(error: BaseException) -> Exception:
    """Return an error that a loop can pass on: SystemExit would end the loop, and StopIteration would get lost."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


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
        """False after `close`, and in a fork of the process that has made the loop."""
        return self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, coroutine: Work[T]) -> T:
        """Run a coroutine, wait for its end and return its value. An interrupt of the wait cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Work[T]) -> Future[T]:
        """Run a coroutine without waiting for it; return its future, which cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Callable[[], Work] | None = None, *, seconds: float = CLOSE_SECONDS) -> None:
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

    Every call gets its outcome in bounded time. Subclasses define `_made`. A fork of the process starts anew.

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
        self._count = count
        self._distance = 1 / rate_limit if rate_limit else 0.0
        self._make: Callable[[Call], Awaitable[Any]] = self._attempt
        if retry_on:  # tenacity takes as long as the rest of a short call
            self._make = retry(
                stop=stop_after_attempt(1 + retries),
                wait=wait_random_exponential(max=LONGEST_PAUSE),
                retry=retry_if_exception_type(retry_on),
                reraise=True,
            )(self._attempt)
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None

    def submit(self, function: Function, arguments: Mapping[str, Any], *, timeout: float) -> Future[Any]:
        """Submit a call, on any thread, without waiting for it; return its future, which cancels it.

        Args:
            function: the function; a coroutine function for `AsyncCalls`.
            arguments: name → value.
            timeout: seconds from the start of the call, not from its submission. Then the call ends with a
                `TimeoutError`, which is `Overdue` on threads and event loops.
        """
        with self._lock:
            if self._loop is None or not self._loop.is_running:
                self._loop = EventLoop()
                self._places = asyncio.Semaphore(self._count)
                self._pace = asyncio.Lock()
                self._open()
            return self._loop.start(self._serve(self._places, Call(function, arguments, timeout)))

    def close(self) -> None:
        """Cancel all calls, and end all threads and processes. A later `submit` starts anew."""
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is not None:
            loop.close(self._stop)

    async def _serve(self, places: asyncio.Semaphore, call: Call) -> Any:
        """Make a call when there is a place. After `close`, an old loop with its places may go on beside a new one."""
        async with places:
            return await self._make(call)

    async def _attempt(self, call: Call) -> Any:
        if self._distance:
            async with self._pace:
                await asyncio.sleep(self._distance)
        seconds = LOST_SECONDS + (1 + CALLS_AHEAD) * call.timeout
        return await in_time(self._made(call), seconds, GivenUp(f"no outcome has come within {seconds:.0f} s"))

    def _open(self) -> None:
        """Prepare the backend for its first call, and for its first call after `close`."""

    async def _stop(self) -> None:
        """End what the backend has started. Runs on the loop."""

    async def _made(self, call: Call) -> Any:
        """Make a call; return its value or raise its error, which is `harmless`. Runs on the loop."""
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
        said = f"took more than {call.timeout:g} s"
        try:
            value, error = await in_time(asyncio.wrap_future(loop.start(_ended(call))), call.timeout, Overdue(said))
        except Overdue:
            _, blocked = await asyncio.wait([asyncio.wrap_future(loop.start(asyncio.sleep(0)))], timeout=ANSWER_SECONDS)
            if blocked:
                if self._users is loop:
                    self._users = EventLoop()
                    loop.close(seconds=0)
                raise Overdue(
                    f"{said}, and a call blocks the event loop. An async function must await instead of blocking. "
                    "Write a function that blocks without async: it runs on threads"
                ) from None
            raise
        if error is not None:
            raise harmless(error)
        return value


async def _ended(call: Call) -> tuple[Any, BaseException | None]:
    """Await a call; return its value and error. No error is raised here: SystemExit would end the loop."""
    try:
        return await call.function(**call.arguments), None
    except BaseException as error:
        return None, error


class ThreadCalls(Backend):
    """`Backend` that makes each call on a daemon thread of its own, for functions that wait, for example for a server.

    The threads of `concurrent.futures` are not used: the interpreter waits for them at its exit, and Python cannot end
    a thread that hangs. A call that takes longer than its timeout loses its place to another call.
    """

    def _open(self) -> None:
        self._hanging = set[Future[Any]]()  # calls that continue although nobody waits for them

    async def _made(self, call: Call) -> Any:
        if len(self._hanging) >= MOST_HANGING:
            raise GivenUp(
                f"{len(self._hanging)} calls hang, so no more calls start. A hanging thread cannot be ended: give the "
                "function a time limit of its own, or run it in worker processes, which are killed when they take too "
                "long (backend='process', ProcessTool)"
            )
        ended = Future[Any]()
        ended.set_running_or_notify_cancel()  # a call that has begun cannot be cancelled
        threading.Thread(target=_work, args=(call, ended), daemon=True, name="dash_trl call").start()
        try:
            error = Overdue(f"took more than {call.timeout:g} s")
            return await in_time(asyncio.wrap_future(ended), call.timeout, error)
        finally:
            self._hanging.add(ended)
            ended.add_done_callback(self._hanging.discard)


def _work(call: Call, ended: Future[Any]) -> None:
    """Make a call. This is the function of a thread."""
    try:
        ended.set_result(call.function(**call.arguments))
    except BaseException as error:  # a user's function may also raise SystemExit
        ended.set_exception(harmless(error))


def call_all(
    backend: Backend, function: Function, arguments: Sequence[Mapping[str, Any]], *, timeout: float
) -> list[Any]:
    """Call a function in parallel; return values and errors in the order of `arguments`. An interrupt cancels all."""
    calls = [backend.submit(function, one, timeout=timeout) for one in arguments]
    try:
        wait(calls)
    except BaseException:
        cancel_all(calls)
        raise
    return [outcome_of(call) for call in calls]
