"""`Sandbox`: a program that nobody trusts, scored by tests. Here is the trainer's side; inside is `confinement.py`.

run(program, tests) ──► starter ──► two confined processes ──► Verdict, or an error where there is none
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

CPU_SECONDS = 4  # of a program with all its calls; the dearest of MBPP+'s correct solutions takes 0.3 s
WALL_SECONDS = 60.0  # many times the CPU time: a busy machine makes no right answer wrong
MEMORY = 1 << 30  # bytes of address space beside the interpreter's, of each of a program's processes
PROCESSES = 8  # threads beside its first, and child processes if it may have any
DISK = 64 << 20  # bytes of all files; in namespaces they are in memory
START_SECONDS = 60.0  # for the starter, which imports numpy
END_SECONDS = 10.0  # for the kernel to clear away what was killed
IDLE = 0.5  # of the time by the clock: who waits less than this for a CPU is not slow because the machine is busy
OUT_OF_CPU = 0.5  # of its CPU time, after which a kill is the limit's: the kernel counts ticks, and came at 0.8 of it

# What holds, by kind of isolation, best kind first.
ALWAYS = ("CPU time", "memory", "size of a file", "network", "no process")
STRICTLY = (*ALWAYS, "reading the user's files", "writing files", "other processes")
LOOKED_AT = "size of all files and number of threads (looked at every 0.05 s)"
PROTECTS: dict[str, tuple[str, ...]] = {
    "namespaces": (*STRICTLY, "size of all files", "number of threads"),
    "landlock": (*STRICTLY, LOOKED_AT),
    "rlimits": (*ALWAYS, LOOKED_AT),
}
STRICT = ("namespaces", "landlock")  # what is chosen from; `rlimits` is by name only


class SandboxError(RuntimeError):
    """A program could not be confined, or its tests not be run: no verdict about it."""


class UnfitTests(ValueError):
    """The tests themselves are at fault: no program can be scored by them."""


@dataclass(frozen=True)
class Verdict:
    """passed, failed: numbers of tests. reason: of the first failure. cpu_seconds: what the program took."""

    passed: int
    failed: int
    reason: str | None
    cpu_seconds: float

    @property
    def right(self) -> bool:
        return self.failed == 0 and self.passed > 0


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs programs against tests, each in processes of its own, at most `count` at once; from any thread.

    The processes that wait for work start with the first program, and again after they have died.

    Args:
        cpu_seconds, memory, processes, disk: limits of one program, see the constants; memory is per process.
        wall_seconds: of one program by the clock.
        count: how many at once; by default this process's share of the CPUs.
        isolation: one of `PROTECTS`; None: the best of `STRICT` that this machine gives.
        children: whether a program may start processes, whose CPU time is added up. Needs namespaces.
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
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if not (math.isfinite(wall_seconds) and wall_seconds > cpu_seconds):
            raise ValueError(
                f"wall_seconds={wall_seconds!r} must be more than cpu_seconds={cpu_seconds}, many times it on a busy "
                "machine: what the clock ended for want of a CPU is not scored."
            )
        if isolation is not None and isolation not in PROTECTS:
            raise ValueError(f"isolation={isolation!r} is none of {list(PROTECTS)}.")
        if children and isolation not in (None, "namespaces"):
            raise ValueError(
                f"children={children!r} needs isolation='namespaces', not {isolation!r}: nothing else ends what a "
                "program has started."
            )
        self.settings["children"] = bool(children)
        self.others: dict[str, Any] = {"wall_seconds": wall_seconds, "count": count, "isolation": isolation}
        self.count = count or default_workers()
        self._slots = threading.BoundedSemaphore(self.count)
        self._lock = threading.Lock()
        self._starter: _Starter | None = None

    @property
    def kind(self) -> str:
        """The isolation that this machine gives; `PROTECTS[kind]` is what holds. Starts the sandbox if need be."""
        with self._lock:
            return self._started().kind

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Runs each script of `tests` with the program's names; a pair is the program's input and expected output.

        Args:
            entry_point: what the tests call; needed only where Python has that name itself (`sum`).

        Raises:
            UnfitTests: a test is no Python, calls nothing of the program, or hands it what cannot be sent to it.
            TimeoutError: it took longer than `wall_seconds` by the clock, but not its CPU time, and most of it for want
                of a CPU. A program that sleeps is wrong.
            SandboxError: it could not be run, or something outside ended it.
        """
        job = {"tests": list(tests), "entry_point": entry_point}
        with self._slots:
            try:
                with self._lock:
                    solution, checker = self._started().begin()
            except OSError as error:
                raise SandboxError(f"no process for the program: {error}") from error
            with solution, checker:
                try:
                    end = time.monotonic() + self.others["wall_seconds"]  # without the sandbox's own start
                    ahead = any(isinstance(one, str) for one in tests)  # else it runs with its inputs only
                    return self._score({"program": program, "ahead": ahead}, job, solution, checker, end)
                finally:
                    for one in (solution, checker):
                        _end(one)
                    for one in (solution, checker):
                        _wait(one)

    def _score(self, program: Any, job: Any, solution: socket.socket, checker: socket.socket, end: float) -> Verdict:
        asked = False
        try:
            for one, message in ((solution, program), (checker, job)):
                one.settimeout(max(0.0, end - time.monotonic()))
                with suppress(BrokenPipeError, ConnectionResetError):  # it says below why it is gone
                    send(one, json.dumps(message).encode())
            verdict = _read(checker, end)
            asked = verdict is not None and "asked" in verdict
            if asked:
                verdict = _read(checker, end)
            if verdict is None or "passed" not in verdict or verdict["ended"] is None:
                _end(solution)
            status = _read(solution, end) or {}
        except TimeoutError:
            of_tests, status = _last(checker), _last(solution)  # the tests first, which else end by themselves
            wall = self.others["wall_seconds"]
            reason = (
                f"the program and its tests took more than {wall:g} s by the clock, but not more than "
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
            raise UnfitTests(f"these tests score no program: {verdict['unfit']}")
        reason = verdict["reason"] if verdict["ended"] is None else self._cause(status, verdict["ended"])
        return Verdict(verdict["passed"], verdict["failed"], reason, float(status.get("cpu", math.nan)))

    def _cause(self, status: dict[str, Any], ended: str) -> str:
        """Why the program's process ended before its tests did; raises SandboxError where that is not its own doing."""
        if "ended" not in status:
            raise SandboxError("the program's supervisor ended")
        code, cpu = status["ended"], status["cpu"]
        if status["excess"] is not None:
            return str(status["excess"])
        if code == -9:
            if self._killed(status):
                raise SandboxError(f"something killed the program after {cpu:.1f} s of CPU time; no memory left?")
            return f"more than {self.settings['cpu_seconds']} s of CPU time"
        return f"the program's process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}; {ended}"

    def _killed(self, status: dict[str, Any]) -> bool:
        """Whether a process that ended was killed from outside. Nothing inside can send SIGKILL but a limit."""
        if status["excess"] is not None:  # by its supervisor
            return False
        return status["ended"] == -9 and status["cpu"] < OUT_OF_CPU * self.settings["cpu_seconds"]

    def _started(self) -> _Starter:
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
                    f"programs cannot be confined on this machine: {causes}. Run where user namespaces are allowed or "
                    "the kernel has Landlock (5.13 or newer); see docs/reference/rewards.md, also for "
                    "isolation='rlimits', which protects no file and is for programs that you trust."
                )
            if causes:
                _warn(self._starter.kind, json.dumps(causes))
        return self._starter

    def close(self) -> None:
        """Ends all of its processes."""
        with self._lock:
            if self._starter is not None:
                self._starter.close()
                self._starter = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process starts a sandbox of its own."""
        return functools.partial(Sandbox, **self.settings, **self.others), ()


class _Starter:
    """The process that forks confined ones, and this end of its socket."""

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
        return self.owner == os.getpid() and self.process.poll() is None

    def begin(self) -> tuple[socket.socket, socket.socket]:
        """The sockets of a new job's two supervisors."""
        solution, its_end = socket.socketpair()
        checker, other_end = socket.socketpair()
        with its_end, other_end:
            socket.send_fds(self.channel, [b"j"], [its_end.fileno(), other_end.fileno()])
        return solution, checker

    def close(self) -> None:
        """Closing the channel ends the starter, and with it the namespace of all others."""
        if self.owner != os.getpid():
            self.channel.close()
            return  # a forked child's copy: the process is its parent's
        with suppress(OSError):  # the starter may have gone
            self.channel.shutdown(socket.SHUT_RDWR)  # close alone does not end it where a forked child has a copy
        self.channel.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# All that programs see of an environment: no keys, and the same order of sets in every run.
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
    """The next message, until `end`; None when there is none any more."""
    source.settimeout(max(1e-3, end - time.monotonic()))
    try:
        message = receive(source)
    except ConnectionResetError:
        return None
    return None if message is None else json.loads(message)


def _last(control: socket.socket) -> dict[str, Any]:
    """How a side ended that is ended now."""
    _end(control)
    message: dict[str, Any] | None = {}
    with suppress(OSError, ValueError):
        while message is not None and "cpu" not in message:
            message = _read(control, time.monotonic() + END_SECONDS)
    return message or {}


def is_idle(wall: float, *delays: float | None) -> bool:
    """Whether a program and its tests, which took so long, were waiting for something else than a CPU.

    Args:
        delays: for how many seconds each waited for a CPU; None: unknown.
    """
    known = [one for one in delays if one is not None]
    return len(known) == len(delays) and sum(known) < IDLE * wall


def _end(control: socket.socket) -> None:
    """Asks a supervisor to end its side."""
    with suppress(OSError):  # it has gone
        control.shutdown(socket.SHUT_WR)


def _wait(control: socket.socket) -> None:
    """Until the supervisor has gone, and all of its namespace with it: no more run at once than there are slots."""
    end = time.monotonic() + END_SECONDS
    with suppress(OSError, ValueError):
        while _read(control, end) is not None:
            pass


@functools.cache  # once per cause
def _warn(kind: str, causes: str) -> None:
    logger.warning(
        f"Programs are confined by {kind}, since this machine gives no better ({causes}). What holds: "
        f"{', '.join(PROTECTS[kind])}. See docs/reference/rewards.md, or run where user namespaces are allowed."
    )
