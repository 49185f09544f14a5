"""Worker processes for what may hang, crash or take too much memory.

    start_worker(prepare) ──► a process that prepares itself, then makes the calls that come over its socket
                                └─ killed by whoever started it, with it, above MEMORY

What goes over the socket is in frames of bytes, see `to_frame`:

    ──► calls: [(number of a function, the function where it is new, arguments), ...]
    ◄── ready: whether its memory is limited; once, when it has prepared itself
    ◄── begun: b"", when it has read such calls and loaded their functions; then an `Outcome` for each, in order
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import context, popen_spawn_posix, spawn
from multiprocessing.connection import wait
from typing import Any

from dash_trl.workers.wire import loads, outcome_of

MEMORY = 4 << 30  # bytes of address space of a worker: 10^{10^{10}} must not take the trainer's before its timeout
DEFAULT_MAX_WORKERS = 8  # per process; more do not pay for a batch of a few hundred rows
OUT_OF_WORK_AGAIN = 0.1  # CPU seconds after which a call that caught `OutOfWork` gets it again
FUNCTIONS_KEPT = 32  # by a worker, by whoever sends them: functions made anew for each call must not fill the memory
KILLED_SECONDS = 5.0  # to wait for the end of a process after SIGKILL: one in a system call that hangs does not end
BEGUN = b""
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def default_workers() -> int:
    """This process's share of the machine's CPUs, at most `DEFAULT_MAX_WORKERS`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun and accelerate: the ranks on this machine
    return max(1, min(DEFAULT_MAX_WORKERS, cpus // ranks))


# ------------------------------------------------------------------------------------------------ who started it


class WorkerProcess:
    """A process and the socket to it. It makes calls in the order in which they are sent.

    Args:
        prepare: runs in it first; importable. Its time is no call's.
    Attributes:
        known: numbers of the functions that it has.
    """

    def __init__(self, prepare: Callable[[], object]):
        self.socket, theirs = socket.socketpair()
        try:
            self.process = _LightProcess(target=_work, args=(theirs, prepare), name="dash_trl worker")
            self.process.start()
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        assert self.process.pid is not None
        self._pid = self.process.pid
        self.socket.setblocking(False)
        self.known: list[int] = []
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def wants_to_send(self) -> bool:
        return bool(self._outgoing)

    def send(self, calls: list[tuple[int, bytes, bytes]]) -> None:
        """Calls as (number of its function, the function, its arguments), as far as the socket takes them now.

        Raises:
            OSError: it is dead.
        """
        batch: list[tuple[int, bytes | None, bytes]] = []
        for number, function, arguments in calls:
            batch.append((number, None if number in self.known else function, arguments))
            if number not in self.known:
                self.known = [*self.known, number][-FUNCTIONS_KEPT:]
        self._outgoing += to_frame(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
        self.send_more()

    def send_more(self) -> None:
        """Raises OSError: it is dead."""
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass

    def receive(self) -> Iterator[bytes]:
        """The frames that are there now.

        Raises:
            OSError: it is dead.
        """
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the worker's end is closed")
        self._incoming += data
        while len(self._incoming) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                return
            frame = bytes(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            yield frame

    def kill(self) -> None:
        """Ends it, whatever it does, with what it has started; one that has already ended keeps its exit code."""
        self.process.kill()
        try:
            os.killpg(self._pid, signal.SIGKILL)  # not the group that it is in: at first that is ours
        except ProcessLookupError:  # it has not come so far as to have a group
            pass

    def bury(self) -> str:
        """After `kill`: waits for its end, so that nothing of it is left; says how it ended."""
        self.socket.close()
        self.process.join(KILLED_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "does not end"
        self.process.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"


def prepare_nothing() -> None:
    pass


def to_frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


# ------------------------------------------------------------------------------------------------ inside a worker


def _work(parent: socket.socket, prepare: Callable[[], object]) -> None:
    code = 1
    try:
        _serve(parent, prepare)
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # at once: that the socket closes tells the parent, who kills what still ends


def _serve(parent: socket.socket, prepare: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    os.setpgid(0, 0)  # for `WorkerProcess.kill`
    parent.set_inheritable(False)
    limited = _limit_memory()
    _die_with_parent()
    prepare()
    pid = os.getpid()
    frames = parent.makefile("rb")
    parent.sendall(to_frame(pickle.dumps(limited)))
    functions: dict[int, Callable[..., Any]] = {}
    while header := frames.read(_LENGTH.size):
        batch = pickle.loads(frames.read(_LENGTH.unpack(header)[0]))
        calls = []
        for number, function, arguments in batch:
            if function is not None:
                functions[number] = _load(function)
                while len(functions) > FUNCTIONS_KEPT:  # the oldest, as in `WorkerProcess.known`
                    del functions[next(iter(functions))]
            calls.append((functions[number], arguments))
        parent.sendall(to_frame(BEGUN))
        for function, arguments in calls:
            outcome = outcome_of(function, arguments)
            if os.getpid() != pid:  # it forked, and its child came back: the outcome is its parent's to send
                os._exit(1)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it left behind would strike another call
            parent.sendall(to_frame(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)))


def _load(function: bytes) -> Callable[..., Any]:
    """The function; one that cannot be loaded becomes one that says so."""
    try:
        return loads(function)
    except BaseException as error:
        reason = f"the function cannot be loaded in a worker process: {type(error).__name__}: {error}"

    def fail(**_: Any) -> None:
        raise ImportError(reason)

    return fail


def _die_with_parent() -> None:
    """A trainer killed with SIGKILL runs no exit handler, and its workers would go on forever.

    Linux's kernel sees to it, also where C code holds the interpreter; it would be late for a parent that is dead by
    now, and there are other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


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


# ------------------------------------------------------------------------------------------------------- spawning


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
    """Spawned, since forking a parent with torch's threads can deadlock the child."""

    @staticmethod
    def _Popen(process_obj: Any) -> _LightPopen:
        return _LightPopen(process_obj)
