"""Worker processes for what may hang, crash or take too much memory.

    WorkerProcess(prepare) ──► its watch ──► a worker, which prepares itself and makes the calls that come by its socket
                                 │             └─ killed by whoever started it, with it, above MEMORY
                                 └─ ends all that the worker has started when the worker ends (Linux)

What goes over the socket is in frames of bytes, see `to_frame`:

    ──► calls: (number of a function, the function where it is new, the arguments of each call)
    ◄── ready: b"", once, when it has prepared itself
    ◄── begun: b"", when it has read such calls and loaded their function; then an `Outcome` for each, in order
    ◄── b"unfit": the last call has left it so, and it begins no other one

`Command`: any program with its children; `stop` ends them all.
"""

import ctypes
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

from dash_trl.workers.wire import outcome_of

MEMORY = 4 << 30  # bytes of address space of a worker: 10^{10^{10}} must not take the trainer's before its timeout
DEFAULT_MAX_WORKERS = 8  # per process; more do not pay for a batch of a few hundred rows
OUT_OF_WORK_AGAIN = 0.1  # CPU seconds after which a call that caught `OutOfWork` gets it again
FUNCTIONS_KEPT = 32  # by a worker, by whoever sends them: functions made anew for each call must not fill the memory
STOP_SECONDS = 15.0  # from a polite signal to SIGKILL, of a `Command`
KILLED_SECONDS = 5.0  # to wait for the end of a process after SIGKILL: one in a system call that hangs does not end
SIGNALLED = 128  # added to the number of the signal that ended a worker: the exit code of its watch, as of a shell
BEGUN, UNFIT = b"", b"unfit"
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
# What a new Python runs: not the main script, which would start training once more, but it finds the same modules.
_START = "import sys; sys.path[:] = {path!r}; from dash_trl.workers.processes import work; work({fd}, {prepare!r})"


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
        known: numbers of the functions that it has. outgoing: what waits to be sent.
    """

    def __init__(self, prepare: Callable[[], object]):
        self.socket, theirs = socket.socketpair()
        with theirs:
            start = _START.format(path=sys.path, fd=theirs.fileno(), prepare=pickle.dumps(prepare))
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # for `kill`; and the parent decides on Ctrl-C
            )
        self.socket.setblocking(False)
        self.known: list[int] = []
        self._incoming, self.outgoing = bytearray(), bytearray()

    def send(self, number: int, function: bytes, arguments: list[bytes]) -> None:
        """Calls of a function, as far as the socket takes them now; the function itself where it is new.

        Raises:
            OSError: it is dead.
        """
        new = number not in self.known
        if new:
            self.known = [*self.known, number][-FUNCTIONS_KEPT:]
        batch = number, function if new else None, arguments
        self.outgoing += to_frame(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
        self.send_more()

    def send_more(self) -> None:
        """Raises OSError: it is dead."""
        with suppress(BlockingIOError):
            del self.outgoing[: self.socket.send(self.outgoing)]

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
        if sys.platform == "linux":
            self._process.terminate()  # its watch, which kills it
            return
        with suppress(ProcessLookupError, PermissionError):  # a dead one, on some systems
            os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> str:
        """After `kill`: waits for its end, so that nothing of it is left; says how it ended."""
        self.socket.close()
        try:
            code = self._process.wait(KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not end"
        number = -code if code < 0 else code - SIGNALLED
        names = {one.value: one.name for one in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}" if number > 0 else f"exit code {code}"


def prepare_nothing() -> None:
    pass


def to_frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


# ------------------------------------------------------------------------------------------------ inside a worker


def work(fd: int, prepare: bytes) -> None:
    """Never returns.

    Args:
        fd: of the socket to whoever started it.
        prepare: pickled, see `WorkerProcess`.
    """
    code = 1
    try:
        parent = socket.socket(fileno=fd)
        parent.set_inheritable(False)
        if sys.platform == "linux":
            _leave_a_watch(parent)
        else:
            _at_the_end_of(parent, partial(os._exit, 1))
        _serve(parent, prepare)
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # at once: that the socket closes tells the parent, who kills what still ends


def _serve(parent: socket.socket, prepare: bytes) -> None:
    # macOS refuses every limit that would matter, and other systems lack the constant.
    with suppress(AttributeError, ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    state = _State()
    pickle.loads(prepare)()
    pid = os.getpid()
    frames = parent.makefile("rb")
    parent.sendall(to_frame(BEGUN))  # it is ready
    functions: dict[int, Callable[..., Any]] = {}
    while header := frames.read(_LENGTH.size):
        number, function, calls = pickle.loads(frames.read(_LENGTH.unpack(header)[0]))
        if function is not None:
            functions[number] = _load(function)
            if len(functions) > FUNCTIONS_KEPT:  # the oldest goes, as in `WorkerProcess.known`
                del functions[next(iter(functions))]
        parent.sendall(to_frame(BEGUN))
        state.remember()
        for arguments in calls:
            outcome = outcome_of(functions[number], arguments)
            if os.getpid() != pid:  # it forked, and its child came back: the outcome is its parent's to send
                os._exit(1)
            fit = state.restore()
            parent.sendall(to_frame(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)))
            if not fit:
                parent.sendall(to_frame(UNFIT))
                return


class _State:
    """What a call may change in its worker, to the harm of later calls: folder, environment, timers and limits.

    Python's own functions tell that they were called: to look at everything after each call takes as long as the call.
    """

    def __init__(self) -> None:
        self._set_timer, self._set_folder, self._set_limit = signal.setitimer, os.fchdir, resource.setrlimit
        self._touched: set[str] = set()
        for module, kind, names in (
            (signal, "timers", ("setitimer", "alarm")),
            (os, "folder", ("chdir", "fchdir")),
            (resource, "limits", ("setrlimit", "prlimit")),
        ):
            for name in filter(partial(hasattr, module), names):
                setattr(module, name, self._telling(kind, getattr(module, name)))
        self._folder = -1
        self._environment: dict[str, str] = {}
        self._known: dict[bytes, bytes] = {}  # the same, as Python keeps it
        self._limits: list[tuple[int, tuple[int, int]]] = []
        self._touched.update(("folder", "limits"))

    def _telling(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def tells(*arguments: Any, **named: Any) -> Any:
            self._touched.add(kind)
            return function(*arguments, **named)

        return tells

    def remember(self) -> None:
        """What functions find from now on: loading one may have changed it."""
        if _variables() != self._known:
            self._environment, self._known = os.environ.copy(), dict(_variables())
        if "folder" in self._touched:
            if self._folder != -1:
                os.close(self._folder)
            self._folder = -1
            with suppress(OSError):  # one that this user cannot read: no way leads back
                self._folder = os.open(".", os.O_RDONLY)
        if "limits" in self._touched:
            kinds = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
            self._limits = [(kind, resource.getrlimit(kind)) for kind in kinds]
        self._touched.clear()

    def restore(self) -> bool:
        """False where the folder stays another, or limits lower: only root may raise a hard one."""
        if _variables() != self._known:
            os.environ.clear()
            os.environ.update(self._environment)
        if not self._touched:
            return True
        if "timers" in self._touched:
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                self._set_timer(timer, 0)
        try:
            if "folder" in self._touched:
                self._set_folder(self._folder)
            if "limits" in self._touched:
                for kind, limits in self._limits:
                    if resource.getrlimit(kind) != limits:
                        self._set_limit(kind, limits)
        except (ValueError, OSError):
            return False
        self._touched.clear()
        return True


def _variables() -> dict[bytes, bytes]:
    """The environment as Python keeps it: comparing that takes a microsecond, not thirty."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _load(function: bytes) -> Callable[..., Any]:
    """The function; one that cannot be loaded becomes one that says so."""
    try:
        return pickle.loads(function)
    except BaseException as error:
        reason = f"the function cannot be loaded in a worker process: {type(error).__name__}: {error}"

    def fail(**_: Any) -> None:
        raise ImportError(reason)

    return fail


def _leave_a_watch(parent: socket.socket) -> None:
    """Returns in a child, the worker; this process stays behind as its watch, and exits as the worker does.

    When the worker ends, the watch ends all that descends from it: orphans become children of the watch. It ends the
    worker at SIGTERM, and with whoever started it: a trainer killed with SIGKILL runs no exit handler.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watch = os.getpid()
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)  # what signals its own group does not reach the watch
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watch:
            os._exit(1)
        return

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    # By both: the socket may have a copy elsewhere, and the starter may be dead by now.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _at_the_end_of(parent, end)
    ended, status = 0, 0
    while ended != worker:
        ended, status = os.wait()
    with suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in _children():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def _children() -> list[int]:
    """Of this process. Not every kernel has `/proc/self/task/*/children`."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            parent = Path("/proc", process, "stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(process))
    return found


def _at_the_end_of(parent: socket.socket, then: Callable[[], object]) -> None:
    """Calls a function, on a thread, when the other end of the socket is closed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(parent, 0)  # no event but that it hangs up
        poll.poll()
        then()

    threading.Thread(target=wait, daemon=True).start()


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


# ------------------------------------------------------------------------------------------------ other programs


class Command:
    """A program in a process group of its own, so that `stop` reaches its children and nobody else.

    Args:
        arguments: the command line. environment: added to this process's. log: file for stdout and stderr.
        pass_fds: open files that it inherits.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: str | Path,
        pass_fds: Sequence[int] = (),
    ):
        self.log = Path(log)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                list(arguments),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """SIGTERM, and SIGKILL to what is left of the group after `STOP_SECONDS`; `at_once`: SIGKILL now."""
        if not at_once:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """SIGTERM, without waiting: several programs end side by side."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of the group have gone
            os.killpg(self.process.pid, number)
