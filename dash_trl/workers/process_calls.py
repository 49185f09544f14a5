"""`ProcessCalls` makes CPU-bound calls in worker processes. A worker is killed if a call takes too long.

The path of a call (a `Row` in the code; it is not a row of a batch)::

    submit ──► waiting calls ──► the pool's thread ──► a worker's socket ──► a few calls ahead of the running one
                    ▲                 │   ◄── one outcome after the other ──┘
                    └── not begun ◄───┴── the worker was killed or died: only the call that it was running fails

A worker reports each outcome at once, so the pool knows which call a dead worker was running. No call is made twice.
"""

import atexit
import functools
import itertools
import logging
import math
import pickle
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dash_trl.workers.calls import Call
from dash_trl.workers.processes import BEGUN, FUNCTIONS_KEPT, UNFIT, WorkerProcess, prepare_nothing
from dash_trl.workers.wire import Outcome, dump, failure, finish, pack

logger = logging.getLogger(__name__)

# A worker gets calls in advance until it has `ROWS_AHEAD` calls, or calls that take about `SECONDS_AHEAD` together. So
# the worker does not wait for its next call, and few calls wait behind a call that takes long.
ROWS_AHEAD = 32
SECONDS_AHEAD = 0.01
# Limit for the start of a worker, and for loading a function. Both import modules, and do not count towards a timeout.
START_SECONDS = 300.0
# After this many consecutive failed starts of workers, all waiting calls fail, unless a worker is ready. A call also
# fails after this many workers have ended when the call was their next one, for example while they loaded its function.
STARTS = 3
NEWEST = 0.1  # weight of the newest call in the moving average of the seconds that a function's calls take


class WorkerDied(RuntimeError):
    """The worker of this call exited, for example after a crash or because it exceeded its memory limit."""


class Packed:
    """A pickled function, with an estimate of the seconds that a call takes.

    Args:
        data: the pickled function.
        seconds: first estimate of the seconds that a call takes.

    Attributes:
        number: number that identifies the function on the workers.
        seconds: moving average of the seconds that a call takes.
        reference: Ray's reference to `data`; None before `data` is stored in Ray.
    """

    _numbers = itertools.count()

    def __init__(self, data: bytes, seconds: float = SECONDS_AHEAD):
        self.data, self.number, self.seconds = data, next(self._numbers), seconds
        self.reference: Any = None

    def took(self, outcome: Outcome) -> None:
        """Update the moving average `seconds` with the time of a finished call."""
        self.seconds += NEWEST * (outcome[-1] - self.seconds)


class Row:
    """A call on its way to another process and back.

    In this module and in `ray_calls`, names with `row` stand for calls; elsewhere a row is a row of a batch.

    Args:
        call: the call.
        function: the call's function.

    Attributes:
        losses: number of workers that ended when this call was the next one that they would have begun. In `ray_calls`:
            number of lost tasks.
    """

    def __init__(self, call: Call, function: Packed):
        self.call, self.function, self.losses = call, function, 0

    def arguments(self) -> bytes:
        """Pickle the call's arguments.

        Raises:
            ValueError: if the arguments cannot be pickled.
        """
        try:
            return dump(dict(self.call.arguments))
        except Exception as error:
            text = f"its arguments cannot be sent to another process: {type(error).__name__}: {error}"
            raise ValueError(text) from error

    def finish(self, outcome: Outcome) -> None:
        """Finish the call. An error of its `done` is only logged, so that the other calls can continue."""
        try:
            finish(self.call, outcome)
        except Exception:
            logger.exception("The function that receives the outcome of a call has failed.")


def next_rows(waiting: deque[Row], room: int, seconds: float) -> tuple[list[Row], list[bytes]]:
    """Take calls with the same function and timeout from the front of the waiting calls, to send them together.

    Args:
        waiting: waiting calls; taken calls are removed.
        room: largest number of calls to take.
        seconds: calls are taken until their expected times add up to this number.

    Returns:
        The calls, and their pickled arguments.
    """
    rows: list[Row] = []
    arguments: list[bytes] = []
    while waiting and len(rows) < room and seconds > 0:
        row = waiting[0]
        like = not rows or row.function is rows[0].function and row.call.timeout == rows[0].call.timeout
        if not like or rows and row.losses:  # a call that has lost a worker is sent alone: it may be the cause
            break
        waiting.popleft()
        if row.call.cancelled:
            continue
        try:
            arguments.append(row.arguments())
        except ValueError as error:
            row.finish(failure(error))
            continue
        rows.append(row)
        seconds = 0.0 if row.losses else seconds - row.function.seconds
    return rows, arguments


class RemoteCalls:
    """Base class of the backends that make calls in other processes.

    A service object (a `Pool`, or `_Tasks` in `ray_calls`) sends the calls. It starts with the first call. The module
    `wire` converts functions, arguments and outcomes to bytes.

    Args:
        start: function that starts and returns the service. The service's `submit` takes calls (`Row`) and returns
            False if the service has ended; its `close` ends the service.
        seconds: first estimate of the seconds that a call takes.
    """

    def __init__(self, start: Callable[[], Any], seconds: float = SECONDS_AHEAD):
        self._start = start
        self._lock = threading.Lock()
        self._service: Any = None

        def packed(function: Callable[..., Any]) -> Packed:
            return Packed(pack(function), seconds)

        self._pack, self._packed_lately = packed, functools.lru_cache(FUNCTIONS_KEPT)(packed)

    def submit(self, calls: Sequence[Call]) -> None:
        """Submit calls; see `Backend.submit`.

        Args:
            calls: the calls.

        Raises:
            ValueError: if a function cannot be sent to another process.
        """
        rows = [Row(call, self._packed(call.function)) for call in calls]
        with self._lock:
            if self._service is None or not self._service.submit(rows):
                self._service = self._start()
                self._service.submit(rows)

    def close(self) -> None:
        """End the service; unfinished calls end with `WorkerDied`. A later `submit` starts a new service."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def _packed(self, function: Callable[..., Any]) -> Packed:
        """Pack a function, or return it from the cache."""
        try:
            return self._packed_lately(function)
        except TypeError:  # the function is not hashable
            return self._pack(function)


class ProcessCalls(RemoteCalls):
    """`Backend` that makes calls in worker processes. The workers end at `close` or when this process exits.

    A worker may use at most `MEMORY` bytes of address space (see `processes`).

    Args:
        count: largest number of workers.
        prepare: importable function that runs first in each worker, for example to do slow imports.

    Attributes:
        users: objects that share this backend, see `shared_workers`.
    """

    def __init__(self, count: int, *, prepare: Callable[[], object] = prepare_nothing):
        super().__init__(functools.partial(Pool, count, prepare))
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave(self, user: object) -> None:
        """Remove a user of the backend, and close the backend after the last user.

        Args:
            user: an object that was passed to `shared_workers`.
        """
        self.users.discard(user)
        if not self.users:
            self.close()


_shared: dict[tuple[int, Callable[[], object]], ProcessCalls] = {}


def shared_workers(count: int, prepare: Callable[[], object], user: object) -> ProcessCalls:
    """Return this process's shared backend for a number of workers and a `prepare` function.

    Args:
        count: see `ProcessCalls`.
        prepare: see `ProcessCalls`.
        user: object that uses the backend; it calls `leave` when it no longer needs the backend.
    """
    workers = _shared.setdefault((count, prepare), ProcessCalls(count, prepare=prepare))
    workers.users.add(user)
    return workers


class _Worker:
    """A worker process and its unfinished calls. Calls that were sent together are a batch.

    Attributes:
        process: the process.
        ready: whether `prepare` has ended in the worker.
        rows: unfinished calls that were sent to the worker, in order.
        begun: number of unfinished calls in the batch that the worker has begun. They are the first calls in `rows`.
        batches: number of calls in each batch that the worker has not begun.
        deadline: time at which the worker is killed unless it has reported something, in seconds of the monotonic
            clock.
    """

    def __init__(self, prepare: Callable[[], object]):
        self.process = WorkerProcess(prepare)
        self.ready = False
        self.rows: deque[Row] = deque()
        self.begun = 0
        self.batches: deque[int] = deque()
        self.deadline = time.monotonic() + START_SECONDS

    def expect(self, now: float) -> None:
        """Set the deadline of the worker's next report: the next call, or loading a function, begins at `now`."""
        if self.begun:
            self.deadline = now + self.rows[0].call.timeout
        else:
            self.deadline = now + START_SECONDS if self.rows else math.inf


class Pool:
    """Worker processes, and a thread that starts them, sends calls to them and finishes the calls.

    No other thread uses the workers.

    Args:
        count: see `ProcessCalls`.
        prepare: see `ProcessCalls`.
    """

    def __init__(self, count: int, prepare: Callable[[], object]):
        self._count, self._prepare = count, prepare
        self._lock = threading.Lock()  # for `_waiting` and `_closing`, which other threads also change
        self._waiting: deque[Row] = deque()
        self._closing = False
        # The thread waits at the receiver. A byte that is sent with the sender wakes it.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # number of consecutive failed starts of workers
        self._why = ""  # reason why the last start failed
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl worker processes")
        self._thread.start()
        atexit.register(self.close)

    def submit(self, rows: Sequence[Row]) -> bool:
        """Submit calls.

        Args:
            rows: the calls.

        Returns:
            False if the pool is closed, or if this process was forked from the process that created the pool.
        """
        with self._lock:
            if self._closing or not self._thread.is_alive():
                return False
            self._waiting.extend(rows)
        self._wake()
        return True

    def close(self) -> None:
        """End the workers; unfinished calls end with `WorkerDied`."""
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def _wake(self) -> None:
        """Wake the thread."""
        with suppress(OSError):  # a full socket wakes the thread anyway, or the thread has ended
            self._wake_sender.send(b"\0")

    # ------------------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        """Start workers, send calls and read reports until the pool is closed. This is the function of the thread."""
        try:
            while not self._closing:
                self._start_workers()
                for worker in self._workers:
                    self._feed(worker)
                first = min((worker.deadline for worker in self._workers), default=math.inf)
                pause = None if first == math.inf else max(0.0, first - time.monotonic())
                for key, events in self._selector.select(pause):
                    if key.data is None:
                        self._wake_receiver.recv(1 << 16)
                        continue
                    if events & selectors.EVENT_READ:
                        self._hear(key.data)
                    if events & selectors.EVENT_WRITE and key.data in self._workers:
                        self._reach(key.data, key.data.process.send_more)
                now = time.monotonic()
                for worker in [one for one in self._workers if one.deadline <= now]:
                    self._hear(worker)  # a report may have come while this thread was busy
                    if worker.deadline <= now and worker in self._workers:
                        self._lose(worker, overdue=True)
        except BaseException:
            logger.exception("The thread that serves worker processes has failed. Its calls end with errors.")
        finally:
            self._end()

    def _start_workers(self) -> None:
        """Start workers until there is an idle worker for each waiting call, but at most `count` workers."""
        free = sum(not worker.rows for worker in self._workers)
        while free < len(self._waiting) and len(self._workers) < self._count:
            if self._failed_starts >= STARTS:
                if not any(worker.ready for worker in self._workers):
                    self._failed_starts = 0
                    error = WorkerDied(f"worker processes do not start: {self._why}")
                    for _ in range(len(self._waiting)):
                        self._waiting.popleft().finish(failure(error))
                return
            worker = _Worker(self._prepare)
            self._workers.append(worker)
            self._selector.register(worker.process.socket, selectors.EVENT_READ, worker)
            free += 1

    def _feed(self, worker: _Worker) -> None:
        """Send waiting calls to a worker that has few calls left."""
        if not worker.ready or len(worker.rows) > ROWS_AHEAD // 2:
            return
        room = min(ROWS_AHEAD - len(worker.rows), math.ceil(len(self._waiting) / (2 * self._count)))
        seconds = SECONDS_AHEAD - sum(row.function.seconds for row in worker.rows)
        rows, arguments = next_rows(self._waiting, room, seconds)
        if rows:
            worker.rows += rows
            worker.batches.append(len(rows))
            if len(worker.rows) == len(rows):
                worker.expect(time.monotonic())
            function = rows[0].function
            self._reach(worker, functools.partial(worker.process.send, function.number, function.data, arguments))

    def _reach(self, worker: _Worker, send: Callable[[], None]) -> None:
        """Call `send`. If the worker's socket is full, register it, so that `_serve` sends the other bytes later."""
        try:
            send()
        except OSError:
            return  # the worker is dead; `_hear` notices this when it reads the socket
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.outgoing else 0)
        self._selector.modify(worker.process.socket, events, worker)

    def _hear(self, worker: _Worker) -> None:
        """Read a worker's reports, and finish the calls whose outcomes they contain."""
        now = time.monotonic()
        try:
            for frame in worker.process.receive():
                if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                elif frame == BEGUN:
                    worker.begun = worker.batches.popleft()
                elif frame == UNFIT:  # the worker has begun none of its remaining calls
                    self._end_worker(worker)
                    self._waiting.extendleft(reversed(worker.rows))
                    return
                else:
                    outcome: Outcome = pickle.loads(frame)
                    row = worker.rows.popleft()
                    worker.begun -= 1
                    row.function.took(outcome)
                    row.finish(outcome)
                worker.expect(now)
        except Exception:  # the worker has ended, or its report is malformed
            self._lose(worker, overdue=False)

    def _lose(self, worker: _Worker, *, overdue: bool) -> None:
        """End a worker. Its running call fails; its other calls go back to the front of the waiting calls."""
        end = self._end_worker(worker)
        if not worker.ready:
            self._failed_starts += 1
            self._why = f"not ready after {START_SECONDS:g} s" if overdue else end
        elif worker.begun:
            row = worker.rows.popleft()
            error = TimeoutError(f"took more than {row.call.timeout:g} s") if overdue else WorkerDied(end)
            row.finish(failure(error))
        elif worker.rows:  # it ended while it loaded a function, or between two batches
            row = worker.rows[0]
            row.losses += 1
            if row.losses >= STARTS:
                worker.rows.popleft()
                row.finish(failure(WorkerDied(f"{end} while it loaded a function ({START_SECONDS:g} s at most)")))
        self._waiting.extendleft(reversed(worker.rows))

    def _end_worker(self, worker: _Worker) -> str:
        """End a worker; return how it ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.process.socket)
        worker.process.kill()
        return worker.process.bury()

    def _end(self) -> None:
        """End all workers, and all unfinished calls."""
        with self._lock:
            self._closing = True
        for worker in self._workers:
            worker.process.kill()
        rows = list(self._waiting)
        for worker in self._workers:
            worker.process.bury()
            rows += worker.rows
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        for row in rows:
            if not row.call.cancelled:
                row.finish(failure(WorkerDied("the worker processes were ended")))
