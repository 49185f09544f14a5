"""`ProcessCalls` makes CPU-bound calls in worker processes. A worker is killed if a call takes too long::

    submit ──► pickled arguments ──► pebble's pool ──► `_call` in a worker, which calls the function
    value ◄── pickled outcome ◄─────────────────────────────┘   └─ over its timeout: the worker's group is killed

Loky starts the workers of pebble's pool: they do not run the main script again, so it needs no main guard, and they are
no forks of this process, which has threads and CUDA. Arguments and outcomes travel as bytes, because pebble's pool
breaks at arguments that cannot be read.
"""

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import loky
from loky.backend.context import LokyContext
from loky.backend.process import LokyProcess
from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import PoolManager

from dash_trl.workers.backends import CALLS_AHEAD, Backend, Call, Function

# Limit of a worker's address space in bytes. Without a limit, a call that computes 10^{10^{10}} could use up the
# machine's memory before its timeout.
MEMORY = 4 << 30
DEFAULT_MAX_WORKERS = 8  # per rank; more workers do not speed up a batch of a few hundred rows
TEXT_CHARS = 1_000  # longest message of an error
TRACEBACK_CHARS = 8_000
_PR_SET_PDEATHSIG = 1  # number for Linux's prctl


class WorkerDied(RuntimeError):
    """The worker of this call exited, for example after a crash or because the system has no memory left."""


def default_workers() -> int:
    """Return this process's share of the machine's CPUs, at most `DEFAULT_MAX_WORKERS`."""
    # torchrun and accelerate set the number of ranks on this machine.
    return max(1, min(DEFAULT_MAX_WORKERS, loky.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


# -------------------------------------------------------------------------------------------- in the starting process


class _Worker(LokyProcess):
    """A worker process. It leads a process group that ends with it, so what a call has started ends, too."""

    def terminate(self) -> None:
        """Kill the group. Pebble's SIGTERM would reach neither a call that ignores it, nor what it has started."""
        with suppress(ProcessLookupError, PermissionError):  # some systems raise these for a group that has ended
            os.killpg(self.pid, signal.SIGKILL)
        super().terminate()  # it may not lead a group yet

    def is_alive(self) -> bool:
        """Return whether the worker runs; if not, kill what it has started."""
        alive = super().is_alive()
        if not alive:
            self.terminate()
        return alive


class _Context(LokyContext):
    Process = _Worker


class _Manager(PoolManager):
    """Pebble's manager with another order: all messages of a dead worker before its end, its end before its locks.

    Pebble could give the error of a worker's death to the worker's previous call, whose value is still in the pipe. And
    it removes the locks first, so a worker that starts meanwhile would find none.
    """

    def __init__(self, *contexts: Any):
        super().__init__(*contexts)
        self._expired = deque[tuple[int, int]]()

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        self._expired.append(expiration)

    def process_next_message(self, timeout: float) -> None:
        super().process_next_message(timeout)
        while self._expired and not self.worker_manager.pool_channel.poll(0):  # type: ignore[union-attr]
            super().handle_worker_expiration(self._expired.popleft())

    def stop(self) -> None:
        self.worker_manager.force_stop_workers()
        super().stop()


def _end(reference: "weakref.ref[ProcessPool]") -> None:
    """Stop a pool, if there still is one, and wait for its workers to end."""
    if (pool := reference()) is not None:
        pool.stop()
        pool.join()


def pack(functions: Sequence[Function]) -> bytes:
    """Pickle functions for other processes, or raise a `ValueError` if one cannot be pickled."""
    try:
        return cloudpickle.dumps(functions)
    except Exception as error:
        names = ", ".join(getattr(one, "__qualname__", type(one).__name__) for one in functions)
        raise ValueError(
            f"{names} cannot be sent to another process ({type(error).__name__}: {error}). A function refers to an "
            "object that exists in this process only, such as a lock, a connection or an open file. Create this "
            "object within the function, or call the function on threads of this process (backend='thread', or no "
            "ProcessTool)."
        ) from error


class ProcessCalls(Backend):
    """`Backend` that makes calls in worker processes, which end at `close` or when this process exits.

    A worker may use at most `MEMORY` bytes of address space.

    Args:
        functions: the functions that can be called. Each worker gets them once, by value (cloudpickle) if they are
            from the main script, a notebook or a file that was loaded by its path.
        count: number of workers.
        prepare: importable function that runs first in each worker, for example to do slow imports.

    Raises:
        ValueError: if a function cannot be sent to another process.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        count: int,
        *,
        prepare: Callable[[], object] | None = None,
        **settings: Any,
    ):
        super().__init__(CALLS_AHEAD * count, **settings)
        self.functions = functions
        self._workers = count
        self._started_with = pack(functions), prepare

    def _open(self) -> None:
        # Workers load the functions before their first call, so this time does not count towards a timeout.
        self._pool = ProcessPool(self._workers, initializer=_begin, initargs=(*self._started_with, os.getpid()))
        self._pool._pool_manager = _Manager(self._pool._context, _Context())
        self._futures = set[Future[bytes]]()
        # A process that `multiprocessing` has started runs no other finalizers, and waits for its children. At 0, the
        # locks of the workers are removed.
        Finalize(self._pool, _end, (weakref.ref(self._pool),), exitpriority=1)

    async def _stop(self) -> None:
        _end(weakref.ref(self._pool))

    async def _made(self, call: Call) -> Any:
        # This starts the workers from the loop's thread: on Linux, they end with the thread that has started them.
        if not self._pool.active:  # it is broken
            await self._stop()
            self._open()
        packed = cloudpickle.dumps((self.functions.index(call.function), dict(call.arguments)))
        future = self._pool.schedule(_call, (packed,), timeout=call.timeout)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            answer = await asyncio.wrap_future(future)
        except TimeoutError:
            raise TimeoutError(f"took more than {call.timeout:g} s") from None
        except ProcessExpired as error:
            raise WorkerDied(
                f"killed by {signal.Signals(-code).name}" if (code := error.exitcode) < 0 else f"exit code {code}"
            ) from None
        except (BrokenProcessPool, asyncio.CancelledError):
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # nobody waits for the call
                raise
            for one in self._futures.copy():  # pebble forgets the calls that are still in its queue
                one.cancel()
            raise WorkerDied("the workers do not start, or one was killed while it waited; see the log") from None
        value, failure = pickle.loads(answer)
        if failure is not None:
            raise failure
        return value


# ------------------------------------------------------------------------------------------------ inside a worker

_functions: list[Function] = []


def _begin(packed: bytes, prepare: Callable[[], object] | None, parent: int) -> None:
    global _functions
    os.setpgid(0, 0)
    if sys.platform == "linux":  # elsewhere, a worker ends with its parent when it has made its call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    # Refused on macOS, on systems without `RLIMIT_AS`, and if a stricter limit holds already.
    with suppress(AttributeError, ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _functions = pickle.loads(packed)
    if prepare is not None:
        prepare()


def _call(packed: bytes) -> bytes:
    """Make a call in a worker; return its pickled value and error, and never raise an error."""
    try:
        number, arguments = pickle.loads(packed)
        return cloudpickle.dumps((_functions[number](**arguments), None))
    except BaseException as error:  # a user's function may also raise SystemExit
        text = "".join(traceback.format_exception_only(error)).strip()
        with suppress(BaseException):  # some errors accept no notes, or cannot be pickled or read
            error.add_note(f"In its worker:\n{''.join(traceback.format_tb(error.__traceback__))[-TRACEBACK_CHARS:]}")
            payload: bytes = cloudpickle.dumps((None, error))
            if isinstance(pickle.loads(payload)[1], Exception):
                return payload
        return pickle.dumps((None, RuntimeError(text[:TEXT_CHARS])))
