"""`ThreadCalls` makes calls on daemon threads.

Use threads for functions that spend their time waiting, for example for a server.

The threads of `concurrent.futures` are not used: the interpreter waits for them at its exit, and Python cannot end a
thread that hangs. If a call takes longer than its timeout, nobody waits for it any more, and another thread takes the
place of its thread. When the call returns after all, its thread can make further calls.
"""

import asyncio
import queue
import threading
from typing import Any

from dash_trl.workers.calls import Call, GivenUp
from dash_trl.workers.loops import Backend, Outcome, in_time, overdue, value_of

MOST_HANGING = 256  # while this many calls hang, further calls end with `GivenUp`: each of them would hold a thread
Box = queue.SimpleQueue[tuple[Call, asyncio.Future[Outcome]] | None]  # a thread takes its calls from it; None = the end


class ThreadCalls(Backend):
    """`Backend` that makes calls on threads. Threads start when they are needed. For its arguments, see `Backend`."""

    def _open(self) -> None:
        self._free: list[Box] = []  # boxes of idle threads
        self._hanging = 0  # number of calls that continue although nobody waits for them

    async def _stop(self) -> None:
        """End the idle threads. The others end after their calls, because the loop is closed."""
        for box in self._free:
            box.put(None)

    async def _made(self, call: Call) -> Any:
        if self._hanging >= MOST_HANGING:
            raise GivenUp(
                f"{self._hanging} calls hang, so no more calls start. A hanging thread cannot be ended: give the "
                "function a time limit of its own, or run it in worker processes, which are killed when they take too "
                "long (backend='process', ProcessTool)"
            )
        ended = asyncio.get_running_loop().create_future()
        if not self._free:
            box: Box = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(box,), daemon=True, name="dash_trl call").start()
            self._free.append(box)
        self._free.pop().put((call, ended))
        try:
            return value_of(await in_time(ended, call.timeout, overdue(call)))
        finally:
            self._hanging += ended.cancelled()

    def _work(self, box: Box) -> None:
        """Make the calls that come into the box. This is the function of a thread."""
        while (item := box.get()) is not None:
            call, ended = item
            value = error = None
            try:
                value = call.function(**call.arguments)
            except BaseException as caught:  # a user's function may also raise SystemExit
                error = caught
            try:
                ended.get_loop().call_soon_threadsafe(self._has_ended, box, ended, (value, error))
            except RuntimeError:  # the loop is closed
                return
            del item, call, ended, value, error  # a thread that waits must not keep these in memory

    def _has_ended(self, box: Box, ended: asyncio.Future[Outcome], outcome: Outcome) -> None:
        """Set the outcome of a call. Runs on the loop's thread."""
        self._free.append(box)
        if ended.cancelled():
            self._hanging -= 1
        else:
            ended.set_result(outcome)
