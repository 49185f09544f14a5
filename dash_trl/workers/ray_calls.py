"""`RayCalls`: calls that compute, on a Ray cluster, which several trainings may share.

    submit ──► rows that wait ──► a Ray task of some rows, on any node ──► a worker process beside it, see `Pool`
                     ▲                │   ◄── their outcomes together ──────┘
                     └── once more ◄──┴── the task is lost with its node

What a call does, it does to a worker process that the Ray worker has started, and that is killed as those of
`ProcessCalls` are: hangs and crashes do not reach Ray.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import queue
import socket
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from dash_trl.workers.calls import Call
from dash_trl.workers.process_calls import (
    ROWS_AHEAD,
    START_SECONDS,
    Packed,
    PackedFunctions,
    Pool,
    SentCall,
    WorkerDied,
    finish_row,
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


class RayCalls:
    """A `Backend` on the Ray that this process is connected to, else on that of the environment's `RAY_ADDRESS`.

    Where there is neither, it starts one of this process's share of the CPUs, which ends with the process. The nodes of
    a cluster need dash_trl, and the modules that the functions import. A task takes one CPU.

    Args:
        in_flight: rows that are with Ray at a time.
    Raises:
        ImportError: Ray is not installed.
        ConnectionError: there is no cluster at `RAY_ADDRESS`.
    """

    def __init__(self, in_flight: int = 256):
        if in_flight < 1:
            raise ValueError(f"{in_flight} rows in flight call nothing: give at least 1.")
        if importlib.util.find_spec("ray") is None:
            raise ImportError("Calls on a Ray cluster need Ray: pip install 'dash_trl[ray]'")
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._tasks: _Tasks | None = None
        self._packed = PackedFunctions(seconds=SECONDS_PER_TASK)
        _connect()

    def submit(self, calls: Sequence[Call]) -> None:
        """Raises ValueError: if a function cannot be sent to another process."""
        rows = [SentCall(call, self._packed(call.function)) for call in calls]
        with self._lock:
            if self._tasks is None:
                self._tasks = _Tasks(self._in_flight)
            self._tasks.submit(rows)

    def close(self) -> None:
        """Cancels what is out; these calls end with `WorkerDied`. The connection to Ray stays, until Python ends."""
        with self._lock:
            tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.close()


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

        if named:
            ray.init()
        else:
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
        self._name = uuid.uuid4().hex  # of this driver, for its functions
        self._sent: dict[int, Any] = {}  # a function's number → Ray's reference to its bytes
        self._waiting: deque[SentCall] = deque()
        self._out: dict[Any, list[SentCall]] = {}
        self._losses: dict[SentCall, int] = {}
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # rows, the references of tasks that ended, None: end
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl tasks of Ray")
        self._thread.start()

    def submit(self, rows: Sequence[SentCall]) -> None:
        self._news.put(rows)

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
        return QUIET_SECONDS + START_SECONDS + max(sum(row.timeout for row in rows) for rows in self._out.values())

    def _send(self) -> None:
        while self._waiting and self._room > 0:
            rows = self._next_rows()
            if not rows:
                continue
            function = rows[0][0].function
            if function.number not in self._sent:
                self._sent[function.number] = self._ray.put(function.data)
                while len(self._sent) > FUNCTIONS_KEPT:
                    del self._sent[next(iter(self._sent))]
            task = self._task.remote(
                f"{self._name} {function.number}",
                [self._sent[function.number]],  # in a list: Ray does not bring it to nodes that have the function
                [(arguments, row.timeout) for row, arguments in rows],
            )
            self._room -= len(rows)
            self._out[task] = [row for row, _ in rows]
            task.future().add_done_callback(self._news.put)

    def _next_rows(self) -> list[tuple[SentCall, bytes]]:
        """Of one function, with their arguments; so many as are worth a task."""
        rows: list[tuple[SentCall, bytes]] = []
        seconds = SECONDS_PER_TASK
        while self._waiting and len(rows) < min(self._room, ROWS_AHEAD) and seconds > 0:
            row = self._waiting[0]
            alone = row in self._losses  # it may be what ended its task
            if rows and (alone or row.function is not rows[0][0].function):
                break
            self._waiting.popleft()
            if row.cancelled:
                continue
            try:
                rows.append((row, row.arguments()))
            except Exception as error:
                finish_row(row, failure(error))
                continue
            seconds = 0.0 if alone else seconds - row.function.seconds
        return rows

    def _take(self, ended: Future[list[Outcome]]) -> None:
        rows = self._out.pop(ended.object_ref, [])  # type: ignore[attr-defined]  # []: it was given up
        self._room += len(rows)
        error = ended.exception()
        if error is None:
            for row, outcome in zip(rows, ended.result(), strict=True):
                self._losses.pop(row, None)
                row.function.took(outcome)
                finish_row(row, outcome)
            return
        reason = (
            f"{type(error).__name__}: {getattr(error, 'cause', error)}"  # the cause: of what our own code raised there
        )
        for row in reversed(rows):
            self._losses[row] = self._losses.get(row, 0) + 1
            if self._losses[row] < LOSSES:
                self._waiting.appendleft(row)
            else:
                del self._losses[row]
                finish_row(row, failure(WorkerDied(f"Ray lost its task: {reason}")))

    def _give_up(self, why: str) -> None:
        out, self._out = self._out, {}
        rows = [*itertools.chain(*out.values()), *self._waiting]
        self._room += sum(map(len, out.values()))
        self._waiting.clear()
        self._losses.clear()
        with contextlib.suppress(Exception):  # where the connection is lost
            self._cancel(list(out))
        for row in rows:
            if not row.cancelled:
                finish_row(row, failure(WorkerDied(why)))

    def _cancel(self, tasks: list[Any]) -> None:
        """Again where one goes on: Ray loses the cancellation of a task that is on its way to its worker just then."""
        for _ in range(CANCELLATIONS):
            for task in tasks:
                self._ray.cancel(task, force=True)
            if tasks:
                _, tasks = self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS, fetch_local=False)


# ------------------------------------------------------------------------------------------------- in a Ray worker


class _ReceivedRow:
    """A `Row` of another process."""

    cancelled = False

    def __init__(self, function: Packed, arguments: bytes, timeout: float, done: Callable[[], object]):
        self.function, self.timeout, self._arguments, self._done = function, timeout, arguments, done
        self.outcome: Any = None

    def arguments(self) -> bytes:
        return self._arguments

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._done()


_functions: dict[str, Packed] = {}


@functools.cache
def _pool() -> Pool:
    """This Ray worker's own, for all tasks to come."""
    return Pool(1, prepare_nothing)


def _run_rows(name: str, function: list[Any], rows: list[tuple[bytes, float]]) -> list[Outcome]:
    """What a Ray task does: their outcomes, in order.

    Args:
        name: of the function, unique in the cluster.
        function: Ray's reference to it, as `pack` made it.
        rows: arguments, as `dump` made them, and seconds.
    """
    if name not in _functions:
        import ray

        _functions[name] = Packed(ray.get(function[0]))
        while len(_functions) > FUNCTIONS_KEPT:
            del _functions[next(iter(_functions))]
    done = threading.Semaphore(0)
    received = [_ReceivedRow(_functions[name], arguments, timeout, done.release) for arguments, timeout in rows]
    _pool().submit(received)
    for _ in received:
        done.acquire()
    return [row.outcome for row in received]
