"""`RayCalls` makes CPU-bound calls on a Ray cluster, which several training runs may share.

The path of a call (a `Row` in the code)::

    submit ──► waiting calls ──► a Ray task with some calls, on any node ──► a worker process on that node, see `Pool`
                    ▲               │   ◄── the outcomes of all its calls ───┘
                    └── retried ◄───┴── the task is lost with its node

A call does not run in the Ray worker itself, but in a worker process that the Ray worker has started. If a call hangs
or crashes, only this worker process ends, as with `ProcessCalls`. The Ray worker continues.
"""

import functools
import itertools
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dash_trl.workers.calls import Call, call_all
from dash_trl.workers.process_calls import (
    ROWS_AHEAD,
    START_SECONDS,
    Packed,
    Pool,
    RemoteCalls,
    Row,
    WorkerDied,
    next_rows,
)
from dash_trl.workers.processes import FUNCTIONS_KEPT, default_workers, prepare_nothing
from dash_trl.workers.wire import Outcome, failure

SECONDS_PER_TASK = 0.05  # expected time of a task's calls; the overhead of a Ray task is a few milliseconds
LOSSES = 2  # a call fails after this many lost tasks
CONNECT_SECONDS = 30.0  # limit for the test whether a cluster answers at `RAY_ADDRESS`
CANCEL_SECONDS, CANCELLATIONS = 1.0, 5  # wait after a cancellation of tasks; largest number of cancellations of a task
# Environment variables with which a local Ray starts.
LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1 only; in spite of its name, also on Linux
}
# If no task ends, and no call is submitted, for this time plus `START_SECONDS` plus the timeouts of a task's calls, the
# cluster probably has no free CPU for this run: all calls fail.
QUIET_SECONDS = 900.0


class RayCalls(RemoteCalls):
    """`Backend` that makes calls on a Ray cluster.

    If this process is connected to a cluster, the backend uses this cluster. Otherwise it connects to the cluster at
    the address in the environment variable `RAY_ADDRESS`. If the variable is not set, the backend starts a local Ray,
    which gets this process's share of the CPUs and ends with this process. The nodes of a cluster need dash_trl and the
    modules that the functions import. A Ray task uses one CPU.

    Args:
        in_flight: largest number of calls that are submitted to Ray at a time.

    Raises:
        ConnectionError: if there is no cluster at `RAY_ADDRESS`.
    """

    def __init__(self, in_flight: int = 256):
        _connect()
        super().__init__(functools.partial(_Tasks, in_flight), seconds=SECONDS_PER_TASK)


def _connect() -> None:
    """Connect to the cluster at `RAY_ADDRESS`, or start a local Ray.

    Ray's own search for a cluster is not used, because it would also find a cluster of another user of this machine.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return
    named = os.environ.get("RAY_ADDRESS")
    if named:
        _check_answers(named)
    added = {} if named else {name: value for name, value in LOCAL_RAY.items() if name not in os.environ}
    os.environ.update(added)  # before Ray is imported
    try:
        import ray
        from ray._private import ray_constants

        if named:
            ray.init()
        else:
            # Read the variable again: TRL imports vLLM, if installed, and vLLM imports Ray before the variable is set.
            ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False)
            ray.init(address="local", num_cpus=default_workers(), include_dashboard=False)
    finally:
        for name in added:  # programs that this process starts later must not inherit the variables
            del os.environ[name]


def _check_answers(address: str) -> None:
    """Raise `ConnectionError` if nothing listens at the address, because Ray itself would wait for many minutes.

    An address without a port, such as "auto", is not checked.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"RAY_ADDRESS = {address} does not answer ({error}). Start the cluster there (ray start), or unset "
                "RAY_ADDRESS to start a local Ray on this machine."
            ) from error


class _Tasks:
    """The service of `RayCalls`: a thread that sends waiting calls as Ray tasks, and finishes the calls of ended tasks.

    No other thread uses the waiting calls and the tasks.
    """

    def __init__(self, in_flight: int):
        import ray

        self._ray = ray
        self._task = ray.remote(max_retries=0)(_run_rows)
        self._room = in_flight
        self._waiting: deque[Row] = deque()
        self._out: dict[Any, list[Row]] = {}  # running task → its calls
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # new calls, futures of ended tasks; None = end
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl tasks of Ray")
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> bool:
        """Submit calls; always returns True."""
        self._news.put(rows)
        return True

    def close(self) -> None:
        """Cancel all tasks; unfinished calls end with `WorkerDied`."""
        self._news.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        """Start tasks and read their outcomes until `close`. This is the function of the thread."""
        while True:
            patience = self._patience()
            try:
                news = self._news.get(timeout=patience)
                if news is None:
                    break
                if isinstance(news, Future):
                    self._take(news)
                else:
                    self._waiting.extend(news)
                self._send()
            except queue.Empty:
                self._give_up(f"Ray gave no outcome for {patience:g} s: are all CPUs of the cluster taken?")
            except Exception as error:  # an error of Ray, such as a lost connection
                self._give_up(f"Ray accepts no tasks: {type(error).__name__}: {error}")
        self._give_up("the Ray tasks were cancelled")

    def _patience(self) -> float | None:
        """Return the seconds to wait for the next item of `_news`. None: no task runs, so wait without a limit."""
        if not self._out:
            return None
        longest = max(sum(row.call.timeout for row in rows) for rows in self._out.values())
        return QUIET_SECONDS + START_SECONDS + longest

    def _send(self) -> None:
        """Start tasks for waiting calls, up to the limit of calls in flight."""
        while self._waiting and self._room > 0:
            rows, arguments = next_rows(self._waiting, min(self._room, ROWS_AHEAD), SECONDS_PER_TASK)
            if not rows:
                continue
            function = rows[0].function
            if function.reference is None:
                function.reference = self._ray.put(function.data)
            # Ray would fetch the function for each task if the reference itself were an argument. With the reference in
            # a list, `_packed` fetches the function once.
            task = self._task.remote([function.reference], arguments, rows[0].call.timeout)
            self._room -= len(rows)
            self._out[task] = rows
            task.future().add_done_callback(self._news.put)

    def _take(self, ended: Future[list[Outcome]]) -> None:
        """Finish the calls of an ended task with their outcomes. If the task was lost, retry its calls."""
        rows = self._out.pop(ended.object_ref, [])  # type: ignore[attr-defined]  # []: the task was given up
        self._room += len(rows)
        error = ended.exception()
        if error is None:
            for row, outcome in zip(rows, ended.result(), strict=True):
                row.function.took(outcome)
                row.finish(outcome)
            return
        for row in reversed(rows):
            row.losses += 1
            if row.losses < LOSSES:
                self._waiting.appendleft(row)
            else:
                cause = getattr(error, "cause", error)  # Ray wraps an error that our own code raised in the task
                row.finish(failure(WorkerDied(f"Ray lost its task: {type(error).__name__}: {cause}")))

    def _give_up(self, why: str) -> None:
        """Cancel all tasks, and end all calls with an error."""
        out, self._out = self._out, {}
        rows = [*itertools.chain(*out.values()), *self._waiting]
        self._room += sum(map(len, out.values()))
        self._waiting.clear()
        with suppress(Exception):  # the connection may be lost
            self._cancel(list(out))
        for row in rows:
            if not row.call.cancelled:
                row.finish(failure(WorkerDied(why)))

    def _cancel(self, tasks: list[Any]) -> None:
        """Cancel tasks, repeatedly until they end: Ray may lose the cancellation of a task on its way to a worker."""
        for _ in range(CANCELLATIONS):
            for task in tasks:
                self._ray.cancel(task, force=True)
            if tasks:
                _, tasks = self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS, fetch_local=False)


# ------------------------------------------------------------------------------------------------- in a Ray worker


class _ReceivedRow(Row):
    """A call from another process: its arguments arrive as bytes, and its outcome is sent back as bytes."""

    def arguments(self) -> bytes:
        """Return the arguments, which are already pickled."""
        return self.call.arguments  # type: ignore[return-value]

    def finish(self, outcome: Outcome) -> None:
        """Finish the call with the outcome as its value."""
        self.call.finish(outcome)


@functools.cache
def _pool() -> Pool:
    """Return the pool of this Ray worker, which has one worker process. All tasks on the Ray worker share the pool."""
    return Pool(1, prepare_nothing)


@functools.lru_cache(FUNCTIONS_KEPT)
def _packed(reference: Any) -> Packed:
    """Fetch a pickled function from Ray, or return it from the cache of this Ray worker."""
    import ray

    return Packed(ray.get(reference))


def _run_rows(function: list[Any], arguments: list[bytes], timeout: float) -> list[Outcome]:
    """Make calls of one function. This is the function of a Ray task.

    Args:
        function: list whose only item is Ray's reference to the function, pickled by `pack`.
        arguments: arguments of each call, pickled by `dump`.
        timeout: seconds for each call.

    Returns:
        The outcomes, in the order of the calls.
    """
    packed = _packed(function[0])

    def submit(calls: Sequence[Call]) -> None:
        _pool().submit([_ReceivedRow(call, packed) for call in calls])

    calls = call_all(submit, len, arguments, timeout=timeout)
    return [call.value if call.error is None else failure(call.error) for call in calls]
