"""`Command`: a program with its children; `stop` ends them all."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 15.0  # from a polite signal to SIGKILL


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
