"""`RayCalls` makes CPU-bound calls on a Ray cluster, which several training runs may share::

    submit ──► a Ray task on any node ──► `ProcessCalls` with one worker process on that node

If a call hangs or crashes, only this worker process ends, not the Ray worker.
"""

import asyncio
import functools
import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any

from dash_trl.workers.backends import Backend, Call, Function, outcome_of
from dash_trl.workers.processes import ProcessCalls, WorkerDied, pack

CONNECT_SECONDS = 30.0  # limit for the test whether a cluster answers at `RAY_ADDRESS`
RETRIES = 1  # a call whose Ray worker is lost, for example with its node, is made once more


class RayCalls(Backend):
    """`Backend` that makes calls on the Ray cluster to which this process is connected, or else that at `RAY_ADDRESS`.

    The nodes of a cluster need dash_trl and the modules that the functions import. A call uses one CPU, and at most
    `count` calls are submitted to Ray at a time.

    Raises:
        ConnectionError: if there is no cluster at `RAY_ADDRESS`.
        ValueError: if this process is not connected, and `RAY_ADDRESS` is not set; see also `ProcessCalls`.
    """

    def __init__(self, functions: Sequence[Function], count: int = 256, **settings: Any):
        super().__init__(count, **settings)
        packed = pack(functions)
        _connect()
        import ray

        self._ray = ray
        self._functions = functions
        self._task = ray.remote(max_retries=RETRIES)(_make)
        self._packed = [ray.put(packed)]  # in a list, because Ray would fetch an argument for each task

    async def _made(self, call: Call) -> Any:
        number = self._functions.index(call.function)
        task = self._task.remote(self._packed, number, dict(call.arguments), call.timeout)
        try:
            outcome = await task
        except asyncio.CancelledError:
            self._ray.cancel(task, force=True)
            raise
        except Exception as lost:
            raise WorkerDied(f"Ray lost its task: {type(lost).__name__}: {getattr(lost, 'cause', lost)}") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _connect() -> None:
    """Connect to the cluster at `RAY_ADDRESS`. Ray's own search would also find a cluster of another user."""
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        raise ValueError(
            "backend='ray' needs a Ray cluster: set RAY_ADDRESS to one, or call ray.init() before. On one machine, "
            "backend='process' does the same without Ray."
        )
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # if nothing listens there, Ray itself would wait for many minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"RAY_ADDRESS = {address} does not answer ({error}). Start the cluster there (ray start)."
            ) from error
    ray.init()


# ------------------------------------------------------------------------------------------------- in a Ray worker


@functools.lru_cache(1)
def _workers(packed: Any) -> ProcessCalls:
    import ray

    return ProcessCalls(pickle.loads(ray.get(packed)), 1)


def _make(packed: list[Any], number: int, arguments: dict[str, Any], timeout: float) -> Any:
    """Make a call in a Ray task; return its value or error. `packed` has Ray's reference to the packed functions."""
    workers = _workers(packed[0])
    return outcome_of(workers.submit(workers.functions[number], arguments, timeout=timeout))
