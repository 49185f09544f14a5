"""`ProcessCalls`: calls that compute, on worker processes that are killed when a call takes too long.

    submit ──► rows that wait ──► the pool's thread ──► a worker's socket ──► a few rows ahead of what it computes
                     ▲                  │   ◄── outcome after outcome ──┘
                     └── never begun ◄──┴── killed, or dead: the row that it was at has failed, and no other

A worker reports each outcome as it comes, so that it is known which call a dead worker was at. No call is made twice.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
import os
import pickle
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dash_trl.workers.calls import Call
from dash_trl.workers.processes import BEGUN, FUNCTIONS_KEPT, MEMORY, WorkerProcess, prepare_nothing
from dash_trl.workers.wire import Outcome, arguments_of, failure, finish, pack

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
    """A function as bytes; `number` names it to workers that have it, `seconds` is what a call of it takes lately."""

    _numbers = itertools.count()

    def __init__(self, data: bytes, seconds: float = SECONDS_AHEAD):
        self.data, self.number, self.seconds = data, next(self._numbers), seconds

    def took(self, outcome: Outcome) -> None:
        self.seconds += NEWEST * (outcome[-1] - self.seconds)


class PackedFunctions:
    """Packs a function once, unless many others came since; `seconds` is what is thought of one that is new."""

    def __init__(self, seconds: float = SECONDS_AHEAD):
        self._seconds = seconds
        self._recent = functools.lru_cache(FUNCTIONS_KEPT)(self._pack)

    def _pack(self, function: Callable[..., Any]) -> Packed:
        return Packed(pack(function), self._seconds)

    def __call__(self, function: Callable[..., Any]) -> Packed:
        """Raises ValueError: if it cannot be sent to another process."""
        try:
            hash(function)
        except TypeError:
            return self._pack(function)
        return self._recent(function)


class Row(Protocol):
    """A call on its way through a pool."""

    function: Packed
    timeout: float

    @property
    def cancelled(self) -> bool: ...

    def arguments(self) -> bytes: ...

    def finish(self, outcome: Outcome) -> None: ...


class ProcessCalls:
    """A `Backend` of `count` worker processes. They start as they are needed, and end at `close` or at exit.

    A worker has `MEMORY` of address space. Functions and arguments are sent as `dash_trl.workers.wire` says.

    Args:
        prepare: runs in each worker first, to pay for imports; importable.
    """

    def __init__(self, count: int, *, prepare: Callable[[], object] = prepare_nothing):
        if count < 1:
            raise ValueError(f"{count} worker processes can call nothing: give at least 1.")
        self.count, self._prepare = count, prepare
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._packed = PackedFunctions()

    def submit(self, calls: Sequence[Call], *, user: object = None) -> None:
        """Raises ValueError: if a function cannot be sent to another process."""
        rows = [SentCall(call, self._packed(call.function)) for call in calls]
        with self._lock:
            if user is not None:
                self._users.add(user)
            if self._pool is None or not self._pool.submit(rows):
                self._pool = Pool(self.count, self._prepare)
                self._pool.submit(rows)

    def close(self) -> None:
        """Ends the processes; calls that are out end with `WorkerDied`. A later call starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def leave(self, user: object) -> None:
        """`close`, when the last user leaves."""
        self._users.discard(user)
        if not self._users:
            self.close()


_shared: dict[tuple[int, Callable[[], object]], ProcessCalls] = {}


def shared_workers(count: int, prepare: Callable[[], object]) -> ProcessCalls:
    """The workers of this process that are so many and `prepare` themselves in this way."""
    return _shared.setdefault((count, prepare), ProcessCalls(count, prepare=prepare))


def call_all(
    submit: Callable[[Sequence[Call]], None],
    function: Callable[..., Any],
    arguments: Sequence[Mapping[str, Any]],
    *,
    timeout: float,
) -> list[Call]:
    """Calls of one function, side by side; waits until all of them are done. An interrupt cancels them."""
    done = threading.Semaphore(0)
    calls = [Call(function, one, timeout=timeout, done=lambda _: done.release()) for one in arguments]
    try:
        submit(calls)
        for _ in calls:
            done.acquire()
    except BaseException:
        for call in calls:
            call.cancelled = True
        raise
    return calls


class SentCall:
    """A `Row` that is a `Call` of this process."""

    def __init__(self, call: Call, function: Packed):
        self.call, self.function, self.timeout = call, function, call.timeout

    @property
    def cancelled(self) -> bool:
        return self.call.cancelled

    def arguments(self) -> bytes:
        return arguments_of(self.call)

    def finish(self, outcome: Outcome) -> None:
        finish(self.call, outcome)


def finish_row(row: Row, outcome: Outcome) -> None:
    """Whatever comes of it, where other rows wait."""
    try:
        row.finish(outcome)
    except Exception:
        logger.exception("What was to be done after a call has failed.")


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
            self.deadline = now + self.rows[0].timeout
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
        self._losses: weakref.WeakKeyDictionary[Row, int] = weakref.WeakKeyDictionary()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="dash_trl worker processes")
        self._thread.start()
        _pools.add(self)

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

    def _wake(self) -> None:
        try:
            self._mouth.send(b"\0")
        except OSError:  # it has enough to wake up by, or it has ended
            pass

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
                self._end_overdue()
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
                        finish_row(self._waiting.popleft(), failure(error))
                return
            try:
                worker = _Worker(self._prepare)
            except OSError as error:  # no memory, or no process more
                self._failed_starts, self._why = self._failed_starts + 1, str(error)
                continue
            self._workers.append(worker)
            self._selector.register(worker.process.socket, selectors.EVENT_READ, worker)
            free += 1

    def _feed(self, worker: _Worker) -> None:
        if not worker.ready or len(worker.rows) > ROWS_AHEAD // 2:
            return
        room = min(ROWS_AHEAD - len(worker.rows), math.ceil(len(self._waiting) / (2 * self._count)))
        seconds = SECONDS_AHEAD - sum(row.function.seconds for row in worker.rows)
        batch = []
        while self._waiting and room > 0 and seconds > 0:
            row = self._waiting.popleft()
            if row.cancelled:
                continue
            try:
                arguments = row.arguments()
            except Exception as error:
                finish_row(row, failure(error))
                continue
            batch.append((row.function.number, row.function.data, arguments))
            worker.rows.append(row)
            room, seconds = room - 1, seconds - row.function.seconds
        if batch:
            worker.batches.append(len(batch))
            if len(worker.rows) == len(batch):
                worker.expect(time.monotonic())
            self._reach(worker, functools.partial(worker.process.send, batch))

    def _reach(self, worker: _Worker, send: Callable[[], None]) -> None:
        try:
            send()
        except OSError:
            return  # it is dead, which its socket tells when it has been read to the end
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.wants_to_send else 0)
        self._selector.modify(worker.process.socket, events, worker)

    def _hear(self, worker: _Worker) -> None:
        now = time.monotonic()
        try:
            for frame in worker.process.receive():
                if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                    if not pickle.loads(frame):
                        _say_unlimited()
                elif frame == BEGUN:
                    worker.begun = worker.batches.popleft()
                else:
                    outcome: Outcome = pickle.loads(frame)
                    row = worker.rows.popleft()
                    worker.begun -= 1
                    row.function.took(outcome)
                    finish_row(row, outcome)
                worker.expect(now)
        except Exception:  # its end; or what it says is not what a worker says
            self._lose(worker, overdue=False)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.deadline <= now]:
            self._hear(worker)  # this thread may be late itself
            if worker.deadline <= now and worker in self._workers:
                self._lose(worker, overdue=True)

    def _lose(self, worker: _Worker, *, overdue: bool) -> None:
        """Ends a worker. The row that it was at has failed; the others wait again, in front."""
        self._workers.remove(worker)
        self._selector.unregister(worker.process.socket)
        worker.process.kill()
        end = worker.process.bury()
        if not worker.ready:
            self._failed_starts += 1
            self._why = f"not ready after {START_SECONDS:g} s" if overdue else end
        elif worker.begun:
            row = worker.rows.popleft()
            error = TimeoutError(f"took more than {row.timeout:g} s") if overdue else WorkerDied(end)
            finish_row(row, failure(error))
        elif worker.rows:  # while it loaded a function, unless it was ended from outside
            row = worker.rows[0]
            self._losses[row] = self._losses.get(row, 0) + 1
            if self._losses[row] >= STARTS:
                worker.rows.popleft()
                loading = f"while it loaded a function ({START_SECONDS:g} s at most)"
                finish_row(row, failure(WorkerDied(f"{end} {loading}")))
        self._waiting.extendleft(reversed(worker.rows))

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
            if not row.cancelled:
                finish_row(row, failure(WorkerDied("the worker processes were ended")))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register  # before multiprocessing's own handler, which would wait for the processes
def _end_all() -> None:
    for pool in list(_pools):
        pool.close()


def _forget() -> None:
    """A forked child owns neither the processes nor the pools' threads: it starts its own."""
    _shared.clear()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)


@functools.cache  # once, for all pools
def _say_unlimited() -> None:
    logger.warning(
        f"This system sets no limit to the memory of a worker process ({MEMORY >> 30} GiB elsewhere): a row that needs "
        "more may slow down or end the whole run before its timeout."
    )
