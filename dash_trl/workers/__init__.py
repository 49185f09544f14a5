"""Runs function calls on threads, in worker processes and as Ray tasks.

Apart from the sandbox, no other folder of the package starts threads or processes.
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.workers.async_calls import AsyncCalls, EventLoop, RetriedCalls, called
    from dash_trl.workers.calls import LAST_SECONDS, Backend, Call, GivenUp, Overdue, Pace, Request, call_all
    from dash_trl.workers.process_calls import ROWS_AHEAD, ProcessCalls, WorkerDied, shared_workers
    from dash_trl.workers.processes import Command, OutOfWork, default_workers, run_within
    from dash_trl.workers.ray_calls import RayCalls
    from dash_trl.workers.threads import Feeder, ThreadCalls
    from dash_trl.workers.wire import pack

__getattr__, __dir__, __all__ = lazy(__name__)
