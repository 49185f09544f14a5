"""`Command` runs any program; `Command.stop` ends the program and its children. `run_within` limits CPU time."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

OUT_OF_WORK_AGAIN = 0.1  # CPU seconds after which `OutOfWork` is raised again, because the call may have caught it
STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL, when a `Command` is stopped


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

    def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Stop the program and its children: send SIGTERM, wait, then send SIGKILL.

        Args:
            seconds: the longest wait. 0: send only SIGKILL, at once.
        """
        if seconds:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM and do not wait. Several programs can thus end in parallel before `stop` is called for each."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        """Send a signal to the process group."""
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, number)
