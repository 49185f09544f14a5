"""`RayCalls`: calls that compute, on a Ray cluster, which several trainings may share.

    submit ──► rows that wait ──► a Ray task of some rows, on any node ──► a worker process beside it, see `Pool`
                     ▲                │   ◄── their outcomes together ──────┘
                     └── once more ◄──┴── the task is lost with its node

What a call does, it does to a worker process that the Ray worker has started, and that is killed as those of
`ProcessCalls` are: hangs and crashes do not reach Ray.
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

SECONDS_PER_TASK = 0.05  # of work: a task costs Ray a few milliseconds
LOSSES = 2  # of a row's tasks, after which it is not tried again
CONNECT_SECONDS = 30.0
CANCEL_SECONDS, CANCELLATIONS = 1.0, 5
LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # in spite of its name, on Linux, too: Ray listens on 127.0.0.1 alone
}
QUIET_SECONDS = 900.0  # without an outcome of any task, beyond what they may take: the cluster has no CPU for us


class RayCalls(RemoteCalls):
    """A `Backend` on the Ray that this process is connected to, else on that of the environment's `RAY_ADDRESS`.

    Where there is neither, it starts one of this process's share of the CPUs, which ends with the process. The nodes of
    a cluster need dash_trl, and the modules that the functions import. A task takes one CPU.

    Args:
        in_flight: rows that are with Ray at a time.
    Raises:
        ConnectionError: there is no cluster at `RAY_ADDRESS`.
    """

    def __init__(self, in_flight: int = 256):
        _connect()
        super().__init__(functools.partial(_Tasks, in_flight), seconds=SECONDS_PER_TASK)


def _connect() -> None:
    """Only to what somebody has named: Ray's own search would also find the cluster of another user of this machine."""
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
            # Read once more: TRL imports vLLM where it is installed, and with it Ray, before the variable is there.
            ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False)
            ray.init(address="local", num_cpus=default_workers(), include_dashboard=False)
    finally:
        for name in added:  # nothing for other programs that this one starts
            del os.environ[name]


def _check_answers(address: str) -> None:
    """Ray itself tries for many minutes. An address without a port, such as "auto", is left to Ray."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"RAY_ADDRESS = {address} does not answer ({error}): start the cluster there (ray start), or unset "
                "RAY_ADDRESS to use a Ray of this machine."
            ) from error


class _Tasks:
    """Rows that wait, tasks that are out, and the thread that alone knows of both."""

    def __init__(self, in_flight: int):
        import ray

        self._ray = ray
        self._task = ray.remote(max_retries=0)(_run_rows)
        self._room = in_flight
        self._waiting: deque[Row] = deque()
        self._out: dict[Any, list[Row]] = {}
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # rows, the references of tasks that ended, None: end
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl tasks of Ray")
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> bool:
        self._news.put(rows)
        return True

    def close(self) -> None:
        self._news.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
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
            except Exception as error:  # of Ray: the connection is lost, say
                self._give_up(f"Ray takes no tasks: {type(error).__name__}: {error}")
        self._give_up("the Ray tasks were cancelled")

    def _patience(self) -> float | None:
        if not self._out:
            return None
        longest = max(sum(row.call.timeout for row in rows) for rows in self._out.values())
        return QUIET_SECONDS + START_SECONDS + longest

    def _send(self) -> None:
        while self._waiting and self._room > 0:
            rows, arguments = next_rows(self._waiting, min(self._room, ROWS_AHEAD), SECONDS_PER_TASK)
            if not rows:
                continue
            function = rows[0].function
            if function.reference is None:
                function.reference = self._ray.put(function.data)
            # The reference in a list: Ray does not bring the function to nodes that have it.
            task = self._task.remote([function.reference], arguments, rows[0].call.timeout)
            self._room -= len(rows)
            self._out[task] = rows
            task.future().add_done_callback(self._news.put)

    def _take(self, ended: Future[list[Outcome]]) -> None:
        rows = self._out.pop(ended.object_ref, [])  # type: ignore[attr-defined]  # []: it was given up
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
                cause = getattr(error, "cause", error)  # of what our own code raised there
                row.finish(failure(WorkerDied(f"Ray lost its task: {type(error).__name__}: {cause}")))

    def _give_up(self, why: str) -> None:
        out, self._out = self._out, {}
        rows = [*itertools.chain(*out.values()), *self._waiting]
        self._room += sum(map(len, out.values()))
        self._waiting.clear()
        with suppress(Exception):  # where the connection is lost
            self._cancel(list(out))
        for row in rows:
            if not row.call.cancelled:
                row.finish(failure(WorkerDied(why)))

    def _cancel(self, tasks: list[Any]) -> None:
        """Again where one goes on: Ray loses the cancellation of a task that is on its way to its worker just then."""
        for _ in range(CANCELLATIONS):
            for task in tasks:
                self._ray.cancel(task, force=True)
            if tasks:
                _, tasks = self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS, fetch_local=False)


# ------------------------------------------------------------------------------------------------- in a Ray worker


class _ReceivedRow(Row):
    """Of another process: its arguments come, and its outcome goes back, as bytes."""

    def arguments(self) -> bytes:
        return self.call.arguments  # type: ignore[return-value]

    def finish(self, outcome: Outcome) -> None:
        self.call.finish(outcome)


@functools.cache
def _pool() -> Pool:
    """This Ray worker's own, for all tasks to come."""
    return Pool(1, prepare_nothing)


@functools.lru_cache(FUNCTIONS_KEPT)
def _packed(reference: Any) -> Packed:
    import ray

    return Packed(ray.get(reference))


def _run_rows(function: list[Any], arguments: list[bytes], timeout: float) -> list[Outcome]:
    """What a Ray task does: the outcomes of calls, in order.

    Args:
        function: Ray's reference to it, as `pack` made it.
        arguments: of each call, as `dump` made them.
    """
    packed = _packed(function[0])

    def submit(calls: Sequence[Call]) -> None:
        _pool().submit([_ReceivedRow(call, packed) for call in calls])

    calls = call_all(submit, len, arguments, timeout=timeout)
    return [call.value if call.error is None else failure(call.error) for call in calls]
