"""Runs function calls on threads, on an event loop, in worker processes and as Ray tasks.

Apart from the sandbox, no other folder of the package starts threads or processes.
"""

from dash_trl.workers.calls import Call, GivenUp, Overdue, Request, call_all
from dash_trl.workers.loops import AsyncCalls, Backend, EventLoop, called
from dash_trl.workers.processes import ProcessCalls, WorkerDied, default_workers
from dash_trl.workers.programs import Command
from dash_trl.workers.ray_calls import RayCalls
from dash_trl.workers.threads import ThreadCalls
