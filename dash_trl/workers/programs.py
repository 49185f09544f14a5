"""`Command` runs any program; `Command.stop` ends the program and its children."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 15.0  # between SIGTERM and SIGKILL, when a `Command` is stopped


class Command:
    """A program in a process group of its own, so that `stop` reaches its children and no other process.

    Args:
        arguments: the command line.
        environment: variables besides those of this process.
        log: file to which stdout and stderr are appended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: str | Path,
    ):
        self.log = Path(log)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                arguments,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Stop the program and its children: send SIGTERM, wait at most `seconds`, then send SIGKILL."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM and do not wait, so that several programs can end in parallel before their `stop`."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, number)
