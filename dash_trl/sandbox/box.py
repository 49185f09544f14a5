"""`Sandbox` runs untrusted programs against tests. This module is its part in the trainer's process::

    run(program, tests) ──► starter ──► two confined processes ──► Verdict, or an error if there is no verdict

`confinement.py` has the code of the starter, and `checker.py` the code of the two confined processes.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash_trl.sandbox.checker import Test, receive, send
from dash_trl.workers import default_workers

logger = logging.getLogger(__name__)

CPU_SECONDS = 4  # CPU time of a program with all its calls; the slowest correct solution of MBPP+ takes 0.3 s
WALL_SECONDS = 60.0  # many times the CPU time, so that a busy machine does not make a right answer wrong
MEMORY = 1 << 30  # bytes of address space of each of a program's processes, in addition to the interpreter's
PROCESSES = 8  # threads in addition to the first, and child processes if they are allowed
DISK = 64 << 20  # bytes of all files; with namespaces the files are in memory
START_SECONDS = 60.0  # for the starter, which imports numpy
END_SECONDS = 10.0  # for the kernel to clean up killed processes
# Fraction of wall time. A program that runs out of wall time, but waited for a CPU during less than this fraction, has
# failed. Otherwise the machine is too busy, and the program is not scored.
IDLE = 0.5
# If a process ends by SIGKILL after more CPU time than this fraction of the limit, the limit counts as the cause. The
# kernel counts CPU time in ticks, and has been seen to kill at 0.8 of the limit.
OUT_OF_CPU = 0.5

# Kind of isolation → what it limits or protects; the best kind first.
ALWAYS = ("CPU time", "memory", "size of a file", "network", "starting processes")
STRICTLY = (*ALWAYS, "reading the user's files", "writing files", "other processes")
LOOKED_AT = "size of all files and number of threads (looked at every 0.05 s)"
PROTECTS: dict[str, tuple[str, ...]] = {
    "namespaces": (*STRICTLY, "size of all files", "number of threads"),
    "landlock": (*STRICTLY, LOOKED_AT),
    "rlimits": (*ALWAYS, LOOKED_AT),
}
STRICT = ("namespaces", "landlock")  # kinds that `isolation=None` may choose


class SandboxError(RuntimeError):
    """A program could not be confined or its tests could not be run, so there is no verdict about it."""


class UnfitTests(ValueError):
    """The tests themselves are wrong, so that they cannot score any program."""


@dataclass(frozen=True)
class Verdict:
    """Result of a program on its tests.

    Attributes:
        passed: number of tests that passed.
        failed: number of tests that failed.
        reason: reason of the first failure; None if all tests passed.
        cpu_seconds: CPU time of the program, in seconds; NaN if unknown.
    """

    passed: int
    failed: int
    reason: str | None
    cpu_seconds: float

    @property
    def right(self) -> bool:
        """Whether there were tests and all of them passed."""
        return self.failed == 0 and self.passed > 0


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs untrusted programs against tests, each program in processes of its own.

    Any thread may call `run`. The confined processes are forks of another process, the starter. The first call of `run`
    starts the starter. If the starter has ended, the next call starts it again.

    Args:
        cpu_seconds: limit of CPU time for one program with all its calls, in seconds.
        wall_seconds: limit of wall time for one program, in seconds.
        memory: limit of address space for each of a program's processes, in bytes, in addition to the interpreter's.
        processes: limit of the number of a program's threads and child processes, not counting its first thread.
        disk: limit of the size of all files of a program together, in bytes.
        count: largest number of programs at once; None: this process's share of the CPUs.
        isolation: kind of isolation, a key of `PROTECTS`; None: the best kind of `STRICT` that this machine supports.
        children: whether a program may start processes. The CPU time of these processes counts, too. Requires
            namespaces.

    Raises:
        ValueError: if an argument is invalid, or arguments contradict each other.
    """

    def __init__(
        self,
        *,
        cpu_seconds: int = CPU_SECONDS,
        wall_seconds: float = WALL_SECONDS,
        memory: int = MEMORY,
        processes: int = PROCESSES,
        disk: int = DISK,
        count: int | None = None,
        isolation: str | None = None,
        children: bool = False,
    ):
        self.settings: dict[str, Any] = {
            "cpu_seconds": cpu_seconds,
            "memory": memory,
            "processes": processes,
            "disk": disk,
        }
        for name, value in {**self.settings, "count": 1 if count is None else count}.items():
            least = 0 if name == "processes" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        if not (math.isfinite(wall_seconds) and wall_seconds > cpu_seconds):
            raise ValueError(
                f"wall_seconds={wall_seconds!r} must be more than cpu_seconds={cpu_seconds}, and many times as much on "
                "a busy machine: a program that runs out of wall time because it had to wait for a CPU is not scored."
            )
        if isolation is not None and isolation not in PROTECTS:
            raise ValueError(f"isolation={isolation!r} is unknown. Choose one of {list(PROTECTS)}.")
        if children and isolation not in (None, "namespaces"):
            raise ValueError(
                f"children={children!r} needs isolation='namespaces', not {isolation!r}: only namespaces end all "
                "processes that a program has started."
            )
        self.settings["children"] = bool(children)
        self.others: dict[str, Any] = {"wall_seconds": wall_seconds, "count": count, "isolation": isolation}
        self.count = count or default_workers()
        self._slots = threading.BoundedSemaphore(self.count)
        self._lock = threading.Lock()
        self._starter: _Starter | None = None

    @property
    def kind(self) -> str:
        """Kind of isolation in use, a key of `PROTECTS`. Starts the sandbox if needed."""
        with self._lock:
            return self._started().kind

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against tests.

        Args:
            program: Python source code.
            tests: each test is a script, which runs with the names that the program defines, or a pair of an input and
                the expected output, see `Test`.
            entry_point: name of the function that the scripts call. It is needed only if Python itself has a function
                of this name, such as `sum`.

        Returns:
            The verdict.

        Raises:
            UnfitTests: if a script is not valid Python, or passes the program a value that cannot be sent to the
                program's process; if no script calls the program; or if a test is too large.
            TimeoutError: if the program took longer than `wall_seconds` without using up its CPU time, and a busy
                machine may be the cause. If the program only slept, it gets a verdict instead: it has failed.
            SandboxError: if the program could not be run, or was killed by something outside the sandbox.
        """
        job = {"tests": list(tests), "entry_point": entry_point}
        with self._slots:
            try:
                with self._lock:
                    solution, checker = self._started().begin()
            except OSError as error:
                raise SandboxError(f"no process can be started for the program: {error}") from error
            with solution, checker:
                try:
                    end = time.monotonic() + self.others["wall_seconds"]  # the start of the sandbox does not count
                    # True = the program runs at once, while its tests are read. Only scripts use this run; for a pair,
                    # the program runs anew with the input of the pair.
                    ahead = any(isinstance(one, str) for one in tests)
                    return self._score({"program": program, "ahead": ahead}, job, solution, checker, end)
                finally:
                    for one in (solution, checker):
                        _end(one)
                    for one in (solution, checker):
                        _wait(one)

    def _score(self, program: Any, job: Any, solution: socket.socket, checker: socket.socket, end: float) -> Verdict:
        """Send a program and its tests to the two processes, and read the verdict."""
        asked = False
        try:
            for one, message in ((solution, program), (checker, job)):
                one.settimeout(max(0.0, end - time.monotonic()))
                with suppress(BrokenPipeError, ConnectionResetError):  # the process has ended; its report follows
                    send(one, json.dumps(message).encode())
            verdict = _read(checker, end)
            asked = verdict is not None and "asked" in verdict
            if asked:
                verdict = _read(checker, end)
            if verdict is None or "passed" not in verdict or verdict["ended"] is None:
                _end(solution)
            status = _read(solution, end) or {}
        except TimeoutError:
            # The tests' process is killed first. If the program were, the tests' process would end by itself, and its
            # `delay` would not be measured.
            of_tests, status = _last(checker), _last(solution)
            wall = self.others["wall_seconds"]
            reason = (
                f"the program and its tests took more than {wall:g} s of wall time, but not more than "
                f"{self.settings['cpu_seconds']} s of CPU time"
            )
            if asked and is_idle(wall, status.get("delay"), of_tests.get("delay")):
                return Verdict(0, 1, f"{reason}: they wait for something", status["cpu"])
            raise TimeoutError(f"{reason}: the machine is busy") from None
        for side in (status, verdict or {}):
            if "unconfined" in side:
                raise SandboxError(f"a process could not be confined: {side['unconfined']}")
        if verdict is None or "passed" not in verdict:
            if not asked or verdict is None or self._killed(verdict):
                raise SandboxError(f"the tests' process ended without a verdict: {verdict}")
            reason = "the tests took too much CPU time or memory with what the program gave them"
            return Verdict(0, 1, reason, float(status.get("cpu", math.nan)))
        if verdict["unfit"] is not None:
            raise UnfitTests(f"these tests cannot score a program: {verdict['unfit']}")
        reason = verdict["reason"] if verdict["ended"] is None else self._cause(status, verdict["ended"])
        return Verdict(verdict["passed"], verdict["failed"], reason, float(status.get("cpu", math.nan)))

    def _cause(self, status: dict[str, Any], ended: str) -> str:
        """Return why the program's process ended before its tests.

        Raises:
            SandboxError: if the program is not the cause.
        """
        if "ended" not in status:
            raise SandboxError("the program's supervisor ended")
        code, cpu = status["ended"], status["cpu"]
        if status["excess"] is not None:
            return str(status["excess"])
        if code == -9:
            if self._killed(status):
                raise SandboxError(
                    f"something killed the program after {cpu:.1f} s of CPU time. Has the machine run out of memory?"
                )
            return f"more than {self.settings['cpu_seconds']} s of CPU time"
        return f"the program's process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}; {ended}"

    def _killed(self, status: dict[str, Any]) -> bool:
        """Return whether a process was killed from outside the sandbox. Inside, only a limit sends SIGKILL."""
        if status["excess"] is not None:  # its supervisor killed it for exceeding a limit
            return False
        return status["ended"] == -9 and status["cpu"] < OUT_OF_CPU * self.settings["cpu_seconds"]

    def _started(self) -> _Starter:
        """Return the starter; start one if there is none or the last one has ended."""
        if self._starter is not None and not self._starter.alive:
            self._starter.close()
            self._starter = None
        if self._starter is None:
            causes = {}
            kinds = ["namespaces"] if self.settings["children"] else STRICT
            for kind in kinds if self.others["isolation"] is None else [self.others["isolation"]]:
                try:
                    self._starter = _Starter({**self.settings, "isolation": kind})
                    break
                except SandboxError as error:
                    causes[kind] = str(error)
            else:
                raise SandboxError(
                    f"programs cannot be confined on this machine: {causes}. Use a machine that allows user namespaces "
                    "or whose kernel has Landlock (5.13 or newer); see docs/reference/rewards.md. For programs that "
                    "you trust there is isolation='rlimits', which protects no files."
                )
            if causes:
                _warn(self._starter.kind, json.dumps(causes))
        return self._starter

    def close(self) -> None:
        """End all processes of the sandbox."""
        with self._lock:
            if self._starter is not None:
                self._starter.close()
                self._starter = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments, because another process has to start a sandbox of its own."""
        return functools.partial(Sandbox, **self.settings, **self.others), ()


class _Starter:
    """Starts the process that forks confined processes (the starter), and has the socket to it."""

    def __init__(self, settings: dict[str, Any]):
        packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
        settings = {**settings, "packages": sorted(packages), "start_seconds": START_SECONDS}
        self.kind = str(settings["isolation"])
        self.owner = os.getpid()
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    os.path.realpath(sys.executable),
                    "-P",
                    "-s",
                    "-S",
                    Path(__file__).with_name("confinement.py"),
                    json.dumps(settings),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self.channel.settimeout(START_SECONDS)
        try:
            answer = json.loads(receive(self.channel) or b'{"error": "its first process ended"}')
        except (OSError, ValueError) as error:
            answer = {"error": repr(error)}
        if answer["error"] is not None:
            self.close()
            raise SandboxError(answer["error"])
        self.channel.settimeout(None)

    @property
    def alive(self) -> bool:
        """Whether the starter runs and belongs to this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def begin(self) -> tuple[socket.socket, socket.socket]:
        """Request two confined processes, and return the sockets to the program's and to the tests' supervisor."""
        solution, its_end = socket.socketpair()
        checker, other_end = socket.socketpair()
        with its_end, other_end:
            socket.send_fds(self.channel, [b"j"], [its_end.fileno(), other_end.fileno()])
        return solution, checker

    def close(self) -> None:
        """End the starter by closing its channel. All confined processes end with it."""
        if self.owner != os.getpid():
            self.channel.close()
            return  # this is a forked child's copy, and the process belongs to the parent
        with suppress(OSError):  # the starter may have ended
            self.channel.shutdown(socket.SHUT_RDWR)  # closing alone has no effect if a forked child has a copy
        self.channel.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# All environment variables that a program gets; the trainer's may contain secrets. PYTHONHASHSEED makes the order of
# sets the same in each run.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _read(source: socket.socket, end: float) -> dict[str, Any] | None:
    """Wait for the next message, at most until the time `end`; return None if there are no more messages."""
    source.settimeout(max(1e-3, end - time.monotonic()))
    try:
        message = receive(source)
    except ConnectionResetError:
        return None
    return None if message is None else json.loads(message)


def _last(control: socket.socket) -> dict[str, Any]:
    """Have a process killed, and return its supervisor's report on how it ended; an empty dict if there is none."""
    _end(control)
    message: dict[str, Any] | None = {}
    with suppress(OSError, ValueError):
        while message is not None and "cpu" not in message:
            message = _read(control, time.monotonic() + END_SECONDS)
    return message or {}


def is_idle(wall: float, *delays: float | None) -> bool:
    """Return whether a program and its tests spent little of their wall time waiting for a CPU.

    Args:
        wall: seconds of wall time that both took together.
        delays: seconds that the program waited for a CPU, and seconds that the tests did. If one is None (unknown), the
            function returns False.
    """
    known = [one for one in delays if one is not None]
    return len(known) == len(delays) and sum(known) < IDLE * wall


def _end(control: socket.socket) -> None:
    """Close the sending end of a supervisor's socket, after which the supervisor kills its process."""
    with suppress(OSError):  # the supervisor has ended
        control.shutdown(socket.SHUT_WR)


def _wait(control: socket.socket) -> None:
    """Wait until a supervisor and all its processes have ended, so that at most `count` programs run at once."""
    end = time.monotonic() + END_SECONDS
    with suppress(OSError, ValueError):
        while _read(control, end) is not None:
            pass


@functools.cache  # one warning per cause
def _warn(kind: str, causes: str) -> None:
    """Warn that the best kind of isolation is not available."""
    logger.warning(
        f"Programs are confined by {kind}, because this machine supports nothing better ({causes}). This limits or "
        f"protects: {', '.join(PROTECTS[kind])}. See docs/reference/rewards.md, or use a machine that allows user "
        "namespaces."
    )
