"""`RetriedCalls`: calls that are made again after errors that pass, on a backend of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dash_trl.workers.calls import Backend, Call, GivenUp
from dash_trl.workers.event_loop import EventLoop

LONGEST_PAUSE = 30.0  # seconds; the first pauses are shorter: random, up to 1, 2, 4, ...


class RetriedCalls:
    """A `Backend` over another. Between two attempts a call takes no room there from others.

    Args:
        transient: exceptions after which a call is made again. retries: how often at most.
    """

    def __init__(self, backend: Backend, transient: tuple[type[BaseException], ...], retries: int):
        self._backend, self._loop = backend, EventLoop()
        self._retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + retries),
            wait=wait_random_exponential(max=LONGEST_PAUSE),
            retry=retry_if_exception_type(transient),
            reraise=True,
        )

    def submit(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._loop.start(self._finish(call))

    def close(self) -> None:
        self._loop.close()  # first: a call that the backend ends would be made again
        self._backend.close()

    async def _finish(self, call: Call) -> None:
        error: BaseException = GivenUp("the agent was closed")
        value = None
        try:
            async for attempt in self._retrying.copy():
                with attempt:
                    if call.cancelled:
                        return
                    value = await self._attempt(call)
            call.finish(value)
        except BaseException as raised:  # SystemExit would end the loop, and with it all other calls
            error = raised
        finally:
            call.finish(error=error)  # counts where there is no value

    async def _attempt(self, call: Call) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Call] = loop.create_future()

        def done(one: Call) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(partial(future.set_result, one))

        self._backend.submit([_Attempt(call, done)])
        outcome = await future
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


class _Attempt(Call):
    """One of the calls that are made for a call; cancelled with it."""

    __slots__ = ("_of",)

    def __init__(self, of: Call, done: Callable[[Call], None]):
        self._of = of
        super().__init__(of.function, of.arguments, timeout=of.timeout, done=done)

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        return self._of.cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        pass  # of itself it never is
