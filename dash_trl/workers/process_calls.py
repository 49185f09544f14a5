"""`ProcessCalls`: calls that compute, on worker processes that are killed when a call takes too long.

    submit ──► rows that wait ──► the pool's thread ──► a worker's socket ──► a few rows ahead of what it computes
                     ▲                  │   ◄── outcome after outcome ──┘
                     └── never begun ◄──┴── killed, or dead: the row that it was at has failed, and no other

A worker reports each outcome as it comes, so that it is known which call a dead worker was at. No call is made twice.
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

# A worker gets so many rows, or rows of so many seconds, ahead: it never waits for the next, and little waits behind a
# row that takes long.
ROWS_AHEAD = 32
SECONDS_AHEAD = 0.01
START_SECONDS = 300.0  # for a worker to start, or to load functions: imports, which no call's timeout includes
STARTS = 3  # of workers that fail in a row, or of one row's, after which the reason is theirs
NEWEST = 0.1  # weight of the last call in a function's mean seconds


class WorkerDied(RuntimeError):
    """The worker of this call exited: a crash, or more memory than it may have."""


class Packed:
    """A function as bytes; `number` names it to workers that have it, `seconds` is what a call of it takes lately.

    Attributes:
        reference: Ray's, to the bytes.
    """

    _numbers = itertools.count()

    def __init__(self, data: bytes, seconds: float = SECONDS_AHEAD):
        self.data, self.number, self.seconds = data, next(self._numbers), seconds
        self.reference: Any = None

    def took(self, outcome: Outcome) -> None:
        self.seconds += NEWEST * (outcome[-1] - self.seconds)


class Row:
    """A call on its way to another process and back; `losses`: workers that ended before it had begun."""

    def __init__(self, call: Call, function: Packed):
        self.call, self.function, self.losses = call, function, 0

    def arguments(self) -> bytes:
        """Raises ValueError: if they cannot be sent."""
        try:
            return dump(dict(self.call.arguments))
        except Exception as error:
            text = f"its arguments cannot be sent to another process: {type(error).__name__}: {error}"
            raise ValueError(text) from error

    def finish(self, outcome: Outcome) -> None:
        """Whatever comes of it, where other rows wait."""
        try:
            finish(self.call, outcome)
        except Exception:
            logger.exception("What was to be done after a call has failed.")


def next_rows(waiting: deque[Row], room: int, seconds: float) -> tuple[list[Row], list[bytes]]:
    """The first rows that wait, and their arguments; of one function and timeout.

    Args:
        room: so many at most. seconds: as many as take so long.
    """
    rows: list[Row] = []
    arguments: list[bytes] = []
    while waiting and len(rows) < room and seconds > 0:
        row = waiting[0]
        like = not rows or row.function is rows[0].function and row.call.timeout == rows[0].call.timeout
        if not like or rows and row.losses:  # one that was lost goes alone: it may be what ended its worker
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
    """A `Backend` by a service, which starts as it is needed. Functions and arguments are sent as `wire` says.

    Args:
        start: starts what brings rows to other processes, by `submit` (False if it has ended) until `close`.
        seconds: what is thought of a new function's calls.
    """

    def __init__(self, start: Callable[[], Any], seconds: float = SECONDS_AHEAD):
        self._start = start
        self._lock = threading.Lock()
        self._service: Any = None

        def packed(function: Callable[..., Any]) -> Packed:
            return Packed(pack(function), seconds)

        self._pack, self._packed_lately = packed, functools.lru_cache(FUNCTIONS_KEPT)(packed)

    def submit(self, calls: Sequence[Call]) -> None:
        """Raises ValueError: if a function cannot be sent to another process."""
        rows = [Row(call, self._packed(call.function)) for call in calls]
        with self._lock:
            if self._service is None or not self._service.submit(rows):
                self._service = self._start()
                self._service.submit(rows)

    def close(self) -> None:
        """Ends what it has started; calls that are out end with `WorkerDied`. A later call starts it again."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def _packed(self, function: Callable[..., Any]) -> Packed:
        try:
            return self._packed_lately(function)
        except TypeError:  # it has no hash
            return self._pack(function)


class ProcessCalls(RemoteCalls):
    """A `Backend` of `count` worker processes, each with `MEMORY` of address space. They end at `close` or at exit.

    Args:
        prepare: runs in each worker first, to pay for imports; importable.
    """

    def __init__(self, count: int, *, prepare: Callable[[], object] = prepare_nothing):
        super().__init__(functools.partial(Pool, count, prepare))
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave(self, user: object) -> None:
        """`close`, when the last user leaves."""
        self.users.discard(user)
        if not self.users:
            self.close()


_shared: dict[tuple[int, Callable[[], object]], ProcessCalls] = {}


def shared_workers(count: int, prepare: Callable[[], object], user: object) -> ProcessCalls:
    """The workers of this process that are so many and `prepare` themselves in this way; `user` may `leave` them."""
    workers = _shared.setdefault((count, prepare), ProcessCalls(count, prepare=prepare))
    workers.users.add(user)
    return workers


class _Worker:
    """A worker process and what it has been given."""

    def __init__(self, prepare: Callable[[], object]):
        self.process = WorkerProcess(prepare)
        self.ready = False
        self.rows: deque[Row] = deque()  # that it has been given, in batches
        self.begun = 0  # the first so many are what is left of a batch that it has begun
        self.batches: deque[int] = deque()  # sizes of the other batches
        self.deadline = time.monotonic() + START_SECONDS

    def expect(self, now: float) -> None:
        """What it is at has begun now."""
        if self.begun:
            self.deadline = now + self.rows[0].call.timeout
        else:
            self.deadline = now + START_SECONDS if self.rows else math.inf


class Pool:
    """Worker processes and the thread that serves them, which alone touches them."""

    def __init__(self, count: int, prepare: Callable[[], object]):
        self._count, self._prepare = count, prepare
        self._lock = threading.Lock()  # of what is handed over to the thread:
        self._waiting: deque[Row] = deque()
        self._closing = False
        self._ear, self._mouth = socket.socketpair()  # what is said to the thread
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._why = ""  # the last of them failed
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl worker processes")
        self._thread.start()
        atexit.register(self.close)

    def submit(self, rows: Sequence[Row]) -> bool:
        """False if it is closed, or of a process that this one was forked from."""
        with self._lock:
            if self._closing or not self._thread.is_alive():
                return False
            self._waiting.extend(rows)
        self._wake()
        return True

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def _wake(self) -> None:
        with suppress(OSError):  # it has enough to wake up by, or it has ended
            self._mouth.send(b"\0")

    # ------------------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._start_workers()
                for worker in self._workers:
                    self._feed(worker)
                first = min((worker.deadline for worker in self._workers), default=math.inf)
                pause = None if first == math.inf else max(0.0, first - time.monotonic())
                for key, events in self._selector.select(pause):
                    if key.data is None:
                        self._ear.recv(1 << 16)
                        continue
                    if events & selectors.EVENT_READ:
                        self._hear(key.data)
                    if events & selectors.EVENT_WRITE and key.data in self._workers:
                        self._reach(key.data, key.data.process.send_more)
                now = time.monotonic()
                for worker in [one for one in self._workers if one.deadline <= now]:
                    self._hear(worker)  # this thread may be late itself
                    if worker.deadline <= now and worker in self._workers:
                        self._lose(worker, overdue=True)
        except BaseException:
            logger.exception("The thread that serves worker processes has failed, and its calls with it.")
        finally:
            self._end()

    def _start_workers(self) -> None:
        """One for each row that waits and finds no worker without rows."""
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
        try:
            send()
        except OSError:
            return  # it is dead, which its socket tells when it has been read to the end
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.outgoing else 0)
        self._selector.modify(worker.process.socket, events, worker)

    def _hear(self, worker: _Worker) -> None:
        now = time.monotonic()
        try:
            for frame in worker.process.receive():
                if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                elif frame == BEGUN:
                    worker.begun = worker.batches.popleft()
                elif frame == UNFIT:  # it has begun none of its rows
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
        except Exception:  # its end; or what it says is not what a worker says
            self._lose(worker, overdue=False)

    def _lose(self, worker: _Worker, *, overdue: bool) -> None:
        """Ends a worker. The row that it was at has failed; the others wait again, in front."""
        end = self._end_worker(worker)
        if not worker.ready:
            self._failed_starts += 1
            self._why = f"not ready after {START_SECONDS:g} s" if overdue else end
        elif worker.begun:
            row = worker.rows.popleft()
            error = TimeoutError(f"took more than {row.call.timeout:g} s") if overdue else WorkerDied(end)
            row.finish(failure(error))
        elif worker.rows:  # while it loaded a function, unless it was ended from outside
            row = worker.rows[0]
            row.losses += 1
            if row.losses >= STARTS:
                worker.rows.popleft()
                row.finish(failure(WorkerDied(f"{end} while it loaded a function ({START_SECONDS:g} s at most)")))
        self._waiting.extendleft(reversed(worker.rows))

    def _end_worker(self, worker: _Worker) -> str:
        """Says how it ended."""
        self._workers.remove(worker)
        self._selector.unregister(worker.process.socket)
        worker.process.kill()
        return worker.process.bury()

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        for worker in self._workers:
            worker.process.kill()
        rows = list(self._waiting)
        for worker in self._workers:
            worker.process.bury()
            rows += worker.rows
        self._selector.close()
        self._ear.close()
        self._mouth.close()
        for row in rows:
            if not row.call.cancelled:
                row.finish(failure(WorkerDied("the worker processes were ended")))
