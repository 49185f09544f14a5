"""`ThreadCalls` makes each call on a daemon thread of its own, for functions that wait, for example for a server.

The threads of `concurrent.futures` are not used: the interpreter waits for them at its exit, and Python cannot end a
thread that hangs. A call that takes longer than its timeout loses its place to another call.
"""

import threading
from concurrent.futures import Future
from typing import Any

from dash_trl.workers.calls import Call, GivenUp
from dash_trl.workers.loops import Backend, Outcome, unless_overdue

MOST_HANGING = 256  # while this many calls hang, further calls end with `GivenUp`: each of them would hold a thread


class ThreadCalls(Backend):
    """`Backend` that makes calls on threads. For its arguments, see `Backend`."""

    def _open(self) -> None:
        self._hanging: set[Future[Outcome]] = set()  # calls that continue although nobody waits for them

    async def _made(self, call: Call) -> Any:
        if len(self._hanging) >= MOST_HANGING:
            raise GivenUp(
                f"{len(self._hanging)} calls hang, so no more calls start. A hanging thread cannot be ended: give the "
                "function a time limit of its own, or run it in worker processes, which are killed when they take too "
                "long (backend='process', ProcessTool)"
            )
        ended = Future[Outcome]()
        ended.set_running_or_notify_cancel()  # a call that has begun cannot be cancelled
        threading.Thread(target=_work, args=(call, ended), daemon=True, name="dash_trl call").start()
        try:
            return await unless_overdue(ended, call)
        finally:
            self._hanging.add(ended)
            ended.add_done_callback(self._hanging.discard)


def _work(call: Call, ended: Future[Outcome]) -> None:
    """Make a call. This is the function of a thread."""
    value = error = None
    try:
        value = call.function(**call.arguments)
    except BaseException as caught:  # a user's function may also raise SystemExit
        error = caught
    ended.set_result((value, error))
