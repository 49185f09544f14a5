"""The only place that starts threads and processes."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.workers.async_calls import AsyncCalls
    from dash_trl.workers.calls import Backend, Call, GivenUp
    from dash_trl.workers.event_loop import EventLoop
    from dash_trl.workers.feeder import Feeder
    from dash_trl.workers.pace import Pace
    from dash_trl.workers.process_calls import ProcessCalls, WorkerDied, call_all, shared_workers
    from dash_trl.workers.processes import OutOfWork, default_workers, run_within
    from dash_trl.workers.programs import Command
    from dash_trl.workers.ray_calls import RayCalls
    from dash_trl.workers.request import Request
    from dash_trl.workers.retries import RetriedCalls
    from dash_trl.workers.sandbox import Sandbox, SandboxError, UnfitTests, Verdict
    from dash_trl.workers.threads import ThreadCalls

__getattr__, __dir__, __all__ = lazy(__name__)
