"""Runs function calls on threads, on an event loop, in worker processes and as Ray tasks.

Apart from the sandbox, no other folder of the package starts threads or processes.
"""

from dash_trl.workers.backends import (
    AsyncCalls,
    Backend,
    EventLoop,
    GivenUp,
    Overdue,
    ThreadCalls,
    Work,
    call_all,
    cancel_all,
    outcome_of,
    together,
)
from dash_trl.workers.processes import ProcessCalls, WorkerDied, default_workers
from dash_trl.workers.programs import Command
from dash_trl.workers.ray_calls import RayCalls
