"""Worker processes for what may hang, crash or take too much memory.

    Workers.submit(function, rows, timeout) ──► a worker process ──► Task.result()
                                                   └─ killed at the timeout, with the parent, above MEMORY

Pebble's pool, because it kills a worker whose task exceeds its time, which concurrent.futures cannot.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import context, popen_spawn_posix, spawn
from typing import Any

logger = logging.getLogger(__name__)

MEMORY = 4 << 30  # bytes of address space of a worker: 10^{10^{10}} must not take the trainer's before its timeout
DEFAULT_MAX_WORKERS = 8  # per process; more do not pay for a batch of a few hundred rows
OUT_OF_WORK_AGAIN = 0.1  # CPU seconds after which a call that caught `OutOfWork` gets it again
POOL_CHECK_SECONDS = 0.5  # between looks at whether a pool that we wait for still lives


def default_workers() -> int:
    """This process's share of the machine's CPUs, at most `DEFAULT_MAX_WORKERS`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun and accelerate: the ranks on this machine
    return max(1, min(DEFAULT_MAX_WORKERS, cpus // ranks))


class WorkerDied(RuntimeError):
    """The worker of this call exited: a crash, or more memory than it may have."""


class Task:
    """One call on its way through a pool."""

    def __init__(self, pool: Any, future: Future):
        self._pool = pool
        self._future = future

    def result(self) -> Any:
        """Waits for the value.

        Raises:
            TimeoutError: it took too long, and its worker was killed.
            WorkerDied: its worker died.
            BrokenProcessPool: the pool stopped before the call was handed to a worker.
            Exception: what the call raised.
        """
        from pebble import ProcessExpired

        # pebble forgets the tasks it has not yet handed out when its pool breaks or stops: do not wait for these.
        while not wait([self._future], timeout=POOL_CHECK_SECONDS).done:
            if not self._pool.active and not self._future.done():
                raise BrokenProcessPool("the worker pool stopped")
        try:
            return self._future.result()
        except ProcessExpired as error:
            raise WorkerDied(f"exit code {error.exitcode}") from error

    def cancel(self) -> None:
        self._future.cancel()


class Workers:
    """A pool of `count` processes: it starts at the first task and stops when its last user leaves.

    Pebble's own exit handler ends the processes of a pool that nobody left.
    """

    def __init__(self, count: int, prepare: Callable[[], None]):
        self.count = count
        self.prepare = prepare
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pool: Any = None
        self._lock = threading.Lock()

    def submit(self, user: object, function: Callable[..., Any], *args: Any, timeout: float) -> Task:
        """Hands `function(*args)` to a worker; all of them importable, picklable, and free of the main script."""
        from pebble import ProcessPool

        with self._lock:
            self._users.add(user)
            if self._pool is not None and not self._pool.active:
                self._stop()
            if self._pool is None:
                self._pool = ProcessPool(
                    self.count, initializer=_start, initargs=(self.prepare,), context=_LightSpawnContext()
                )
                self._pool.schedule(_limit_memory).add_done_callback(_look_at_limit)
            return Task(self._pool, self._pool.schedule(function, args=args, timeout=timeout))

    def leave(self, user: object) -> None:
        """Stops the processes when their last user leaves."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _look_at_limit(limited: Future) -> None:
    """Asked of one worker, since the parent cannot try it: a limit below what a process has is refused or deadly."""
    if not limited.cancelled() and limited.exception() is None and not limited.result():
        _say_unlimited()


@functools.cache  # once, for all pools
def _say_unlimited() -> None:
    logger.warning(
        f"This system sets no limit to the memory of a worker process ({MEMORY >> 30} GiB elsewhere): a row that needs "
        "more may slow down or end the whole run before its timeout."
    )


_shared: dict[tuple[int, Callable[[], None]], Workers] = {}


# A forked child owns neither the processes nor the pool's threads: it starts its own.
os.register_at_fork(after_in_child=_shared.clear)


def shared_workers(count: int, prepare: Callable[[], None]) -> Workers:
    """The pool of this process with so many workers that `prepare` themselves in this way."""
    return _shared.setdefault((count, prepare), Workers(count, prepare))


def _start(prepare: Callable[[], None]) -> None:
    """Runs before the first task, whose timeout must not include imports."""
    _limit_memory()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    prepare()


def _limit_memory() -> bool:
    """Whether it could be done: macOS refuses every limit that would matter, and other systems lack the constant."""
    import resource  # POSIX only

    try:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (AttributeError, ValueError, OSError):
        return False
    return True


class OutOfWork(BaseException):
    """A call spent its CPU time. No `Exception`, since sympy goes on after these."""


def run_within(cpu_seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a worker's main thread, with a limit of CPU time, which no other process can use up.

    Raises:
        OutOfWork: it took longer. (A single operation in C that looks for no signal goes on until its end.)
    """

    def stop(*_: object) -> None:
        raise OutOfWork(f"more than {cpu_seconds:g} s of CPU time")

    signal.signal(signal.SIGVTALRM, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds, OUT_OF_WORK_AGAIN)
            return function(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # once more: the signal may come between the call's end and the line above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _die_with_parent() -> None:
    """A trainer killed with SIGKILL runs no exit handler, and its workers would wait for tasks forever."""
    import multiprocessing
    from multiprocessing.connection import wait as wait_for

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _launch_without_main() -> Callable[..., None]:
    """`Popen._launch` whose children do not import the parent's `__main__`.

    multiprocessing's spawn runs the main script once more in every child, for functions that were defined there. A
    training script would import torch and trl in every worker (5 s), or, without `if __name__ == "__main__"`, start
    training again. loky's "loky_init_main" is the same remedy. The method is rebound to a namespace of its own, since a
    patch of `multiprocessing.spawn` would hit other threads (a DataLoader's workers).
    """
    light_spawn = types.SimpleNamespace(**vars(spawn))
    light_spawn.get_preparation_data = lambda name: {
        key: value for key, value in spawn.get_preparation_data(name).items() if not key.startswith("init_main_from")
    }
    launch = popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]
    return types.FunctionType(launch.__code__, {**launch.__globals__, "spawn": light_spawn}, launch.__name__)


class _LightPopen(popen_spawn_posix.Popen):
    _launch = _launch_without_main()


class _LightProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _LightPopen:
        return _LightPopen(process_obj)


class _LightSpawnContext(context.SpawnContext):
    """Spawn, since forking a parent with torch's threads can deadlock the child."""

    Process = _LightProcess
