"""Worker processes, for calls that may hang, crash or take too much memory.

How a worker starts and ends::

    WorkerProcess(prepare) ──► a watcher ──► a worker, which runs `prepare` and makes the calls from its socket
     (in the starter)            │              └─ ends when the starter kills it or ends; may use at most MEMORY
                                 └─ when the worker ends, the watcher ends all processes that the worker started (Linux)

Messages on the socket are frames of bytes, see `to_frame`::

    ──► calls: (number of a function, the function if it is new, the arguments of each call)
    ◄── ready: b"", once, when `prepare` has ended
    ◄── begun: b"", when the worker has read calls and loaded their function; then one `Outcome` per call, in order
    ◄── b"unfit": the last call has changed the worker's state for good, so the worker makes no more calls

`Command` runs any program; `Command.stop` ends the program and its children.
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

# Limit of a worker's address space in bytes. Without a limit, a call that computes 10^{10^{10}} could use up the
# machine's memory before its timeout.
MEMORY = 4 << 30
DEFAULT_MAX_WORKERS = 8  # per rank; more workers do not speed up a batch of a few hundred rows
OUT_OF_WORK_AGAIN = 0.1  # CPU seconds after which `OutOfWork` is raised again, because the call may have caught it
# Number of functions that a worker and its starter remember. Without this limit, a program that creates a new function
# for each call would fill the memory.
FUNCTIONS_KEPT = 32
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL, when a `Command` is stopped
KILLED_SECONDS = 5.0  # longest wait for a process after SIGKILL; if the process hangs in a system call, it does not end
SIGNALLED = 128  # a watcher's exit code is this plus the number of the signal that ended its worker, as in a shell
BEGUN, UNFIT = b"", b"unfit"
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # numbers for Linux's prctl
# Code that a worker's Python interpreter runs. Unlike `multiprocessing`, it does not run the main script, which would
# start training again. `sys.path` is the starter's, so that the worker finds the same modules.
_START = "import sys; sys.path[:] = {path!r}; from dash_trl.workers.processes import work; work({fd}, {prepare!r})"


def default_workers() -> int:
    """Return this process's share of the machine's CPUs, at most `DEFAULT_MAX_WORKERS`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun and accelerate: the ranks on this machine
    return max(1, min(DEFAULT_MAX_WORKERS, cpus // ranks))


# -------------------------------------------------------------------------------------------- in the starting process


class WorkerProcess:
    """A worker process and the socket to it. The worker makes calls in the order in which they are sent.

    Args:
        prepare: importable function that runs first in the worker. Its time does not count towards a call's timeout.

    Attributes:
        socket: the socket to the worker.
        known: numbers of the functions that the worker has.
        outgoing: bytes that wait to be sent.
    """

    def __init__(self, prepare: Callable[[], object]):
        self.socket, theirs = socket.socketpair()
        with theirs:
            start = _START.format(path=sys.path, fd=theirs.fileno(), prepare=pickle.dumps(prepare))
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # so that `kill` reaches the group, and Ctrl-C reaches only the parent
            )
        self.socket.setblocking(False)
        self.known: list[int] = []
        self._incoming, self.outgoing = bytearray(), bytearray()

    def send(self, number: int, function: bytes, arguments: list[bytes]) -> None:
        """Send calls of a function; bytes for which the socket has no room wait in `outgoing`.

        If the worker does not have the function yet, the function is sent, too.

        Args:
            number: number of the function.
            function: the pickled function.
            arguments: pickled arguments of each call.

        Raises:
            OSError: if the worker is dead.
        """
        new = number not in self.known
        if new:
            self.known = [*self.known, number][-FUNCTIONS_KEPT:]
        batch = number, function if new else None, arguments
        self.outgoing += to_frame(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
        self.send_more()

    def send_more(self) -> None:
        """Send as many bytes of `outgoing` as the socket accepts now.

        Raises:
            OSError: if the worker is dead.
        """
        with suppress(BlockingIOError):
            del self.outgoing[: self.socket.send(self.outgoing)]

    def receive(self) -> Iterator[bytes]:
        """Yield the frames that have arrived, without waiting.

        Raises:
            OSError: if the worker is dead.
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
        """Kill the worker and all processes that it has started.

        A worker that has already ended keeps its exit code.
        """
        if sys.platform == "linux":
            self._process.terminate()  # this signals the watcher, which kills the worker
            return
        with suppress(ProcessLookupError, PermissionError):  # some systems raise these for a dead process
            os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> str:
        """After `kill`, wait until the worker and all processes that it has started have ended.

        The wait takes at most `KILLED_SECONDS`.

        Returns:
            Text that describes how the worker ended, such as "exit code 1".
        """
        self.socket.close()
        try:
            code = self._process.wait(KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not end"
        number = -code if code < 0 else code - SIGNALLED
        names = {one.value: one.name for one in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}" if number > 0 else f"exit code {code}"


def prepare_nothing() -> None:
    """Do nothing. This is the default of `prepare`."""


def to_frame(data: bytes) -> bytes:
    """Make a frame: the length of a message as 8 bytes (little-endian), then the message.

    Args:
        data: the message.
    """
    return _LENGTH.pack(len(data)) + data


# ------------------------------------------------------------------------------------------------ inside a worker


def work(fd: int, prepare: bytes) -> None:
    """Run a worker process. Never returns.

    Args:
        fd: file descriptor of the socket to the starter.
        prepare: the pickled function `prepare` of `WorkerProcess`.
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
    os._exit(code)  # without exit handlers; the starter notices the closed socket and kills the remaining processes


def _serve(parent: socket.socket, prepare: bytes) -> None:
    """Run `prepare`, and make the calls that arrive at the socket until it closes or the worker is unfit."""
    # macOS accepts no useful limit, and some systems do not have `RLIMIT_AS`. There, the worker runs without a limit.
    with suppress(AttributeError, ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    state = _State()
    pickle.loads(prepare)()
    pid = os.getpid()
    frames = parent.makefile("rb")
    parent.sendall(to_frame(BEGUN))  # the worker is ready
    functions: dict[int, Callable[..., Any]] = {}
    while header := frames.read(_LENGTH.size):
        number, function, calls = pickle.loads(frames.read(_LENGTH.unpack(header)[0]))
        if function is not None:
            functions[number] = _load(function)
            if len(functions) > FUNCTIONS_KEPT:  # drop the oldest, as `WorkerProcess.known` does
                del functions[next(iter(functions))]
        parent.sendall(to_frame(BEGUN))
        state.remember()
        for arguments in calls:
            outcome = outcome_of(functions[number], arguments)
            if os.getpid() != pid:  # the call forked, and this is the child: the parent sends the outcome
                os._exit(1)
            fit = state.restore()
            parent.sendall(to_frame(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)))
            if not fit:
                parent.sendall(to_frame(UNFIT))
                return


class _State:
    """Undoes a call's changes to its worker: current folder, environment variables, timers and resource limits.

    Without this, such a change would affect later calls. Python's functions that change the folder, timers or limits
    are wrapped, so that they record that they were called. Comparing the whole state after each call instead would take
    as long as a call.
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
                setattr(module, name, self._reporting(kind, getattr(module, name)))
        self._folder = -1
        self._environment: dict[str, str] = {}
        self._known: dict[bytes, bytes] = {}  # the same environment in Python's internal form, see `_variables`
        self._limits: list[tuple[int, tuple[int, int]]] = []
        self._touched.update(("folder", "limits"))

    def _reporting(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that changes a kind of state, so that a call adds the kind to `_touched`."""

        @wraps(function)
        def reporting(*arguments: Any, **named: Any) -> Any:
            self._touched.add(kind)
            return function(*arguments, **named)

        return reporting

    def remember(self) -> None:
        """Store the current state, which `restore` restores.

        Called before the calls of a batch and after their function is loaded, because loading may change the state.
        """
        if _variables() != self._known:
            self._environment, self._known = os.environ.copy(), dict(_variables())
        if "folder" in self._touched:
            if self._folder != -1:
                os.close(self._folder)
            self._folder = -1
            with suppress(OSError):  # the folder cannot be read, so `restore` cannot return to it
                self._folder = os.open(".", os.O_RDONLY)
        if "limits" in self._touched:
            kinds = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
            self._limits = [(kind, resource.getrlimit(kind)) for kind in kinds]
        self._touched.clear()

    def restore(self) -> bool:
        """Restore the state that `remember` stored.

        Returns:
            False if the folder cannot be restored, or if a call has lowered a hard limit, which only root may raise
            again. The worker must then end.
        """
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
    """Return the environment in Python's internal form, which takes one microsecond to compare instead of thirty."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _load(function: bytes) -> Callable[..., Any]:
    """Unpickle a function. If that fails, return a function that raises the reason."""
    try:
        return pickle.loads(function)
    except BaseException as error:
        reason = f"the function cannot be loaded in a worker process: {type(error).__name__}: {error}"

    def fail(**_: Any) -> None:
        raise ImportError(reason)

    return fail


def _leave_a_watch(parent: socket.socket) -> None:
    """Fork this process into a watcher and a worker, so that no process of the worker outlives the worker.

    The function returns in the child, which is the worker. The parent becomes the watcher, and exits with the worker's
    exit code (see `SIGNALLED`). When the worker ends, its descendants become children of the watcher, which kills them.
    The watcher kills the worker when the watcher gets SIGTERM, and when the starter ends. A starter that is killed by
    SIGKILL could not end the worker itself, because it runs no exit handler.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watch = os.getpid()
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)  # a call that signals its own process group must not reach the watcher
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watch:
            os._exit(1)
        return

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    # Two ways to notice the starter's end: no signal comes if the starter is dead already, and the socket does not
    # close while another process has a copy of it.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _at_the_end_of(parent, end)
    ended, status = 0, 0
    while ended != worker:
        ended, status = os.wait()
    with suppress(ChildProcessError):  # no child is left
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in _children():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def _children() -> list[int]:
    """Return the process ids of this process's children. Read `/proc/*/stat`, because some kernels list no children."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            parent = Path("/proc", process, "stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(process))
    return found


def _at_the_end_of(parent: socket.socket, then: Callable[[], object]) -> None:
    """When the other end of the socket is closed, call `then` on a thread."""

    def wait() -> None:
        poll = select.poll()
        poll.register(parent, 0)  # no event except the hang-up, which is always reported
        poll.poll()
        then()

    threading.Thread(target=wait, daemon=True).start()


class OutOfWork(BaseException):
    """A call has used up its CPU time. It is not an `Exception`, because sympy catches exceptions and continues."""


def run_within(cpu_seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with a limit of CPU time. Use it in the main thread of a worker, because it needs signals.

    Only the CPU time of this process counts, so the call does not fail because the machine is busy.

    Args:
        cpu_seconds: the limit, in seconds.
        function: the function.
        args: positional arguments of the function.

    Returns:
        Return value of the function.

    Raises:
        OutOfWork: if the call takes longer. An operation in C that does not check for signals runs to its end first.
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
    finally:  # again, because the signal may come between the end of the call and the line above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


# ------------------------------------------------------------------------------------------------ other programs


class Command:
    """A program in a process group of its own, so that `stop` reaches its children and no other process.

    Args:
        arguments: the command line.
        environment: variables that are added to this process's environment.
        log: file to which stdout and stderr are appended.
        pass_fds: file descriptors that the program inherits.

    Attributes:
        process: the running program.
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
        """Whether the program has not ended."""
        return self.process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the program and its children: send SIGTERM, wait at most `STOP_SECONDS`, then send SIGKILL.

        Args:
            at_once: True = send only SIGKILL, at once.
        """
        if not at_once:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM and do not wait. Several programs can thus end in parallel before `stop` is called for each."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        """Send a signal to the process group."""
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, number)
