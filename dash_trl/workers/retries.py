"""`RetriedCalls`: calls that are made again after errors that pass, on a backend of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
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
        try:
            call.finish(await self._retrying.copy()(self._attempt, call))
        except asyncio.CancelledError:
            call.finish(error=GivenUp("the agent was closed"))
        except BaseException as error:  # SystemExit would end the loop, and with it all other calls
            call.finish(error=error)

    async def _attempt(self, call: Call) -> Any:
        ended: Future[Call] = Future()
        ended.set_running_or_notify_cancel()  # where this task is cancelled, the backend still sets a result
        one = Call(call.function, call.arguments, timeout=call.timeout, done=ended.set_result, stop=call.stop)
        self._backend.submit([one])
        await asyncio.wrap_future(ended)
        if one.error is not None:
            raise one.error
        return one.value
