"""What a sandbox for `CodeReward` is given, what it answers, and how the checker's answer is read."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dash_trl.sandbox.checker import Test


class SandboxError(RuntimeError):
    """A program could not be confined or its tests could not be run."""


class UnfitTests(ValueError):
    """The tests themselves are wrong, so that they cannot score any program."""


@dataclass(frozen=True)
class Verdict:
    """Result of a program on its tests.

    Attributes:
        passed: number of tests that passed.
        failed: number of tests that failed.
        reason: why the first failed test failed, if any.
    """

    passed: int
    failed: int
    reason: str | None

    @property
    def right(self) -> bool:
        """Whether there were tests and all of them passed."""
        return self.failed == 0 and self.passed > 0


class ProgramSandbox(Protocol):
    """Runs untrusted programs against tests: `Sandbox`, or your own.

    `CodeReward` calls `run` from several threads. Optional: an attribute `count`, the limit of calls at once.
    """

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against each test, and count the tests that pass.

        If the program fails (wrong answer, error, too slow, too much memory), return a verdict with failed tests. If
        the sandbox fails or the tests are wrong, raise any exception: the row is then unscored.

        Args:
            program: Python source code.
            tests: scripts, or pairs of an input and the expected output, see `same_output`.
            entry_point: the only name of the program that the scripts use. None: any but those of Python's functions
                and modules.
        """
        ...


def job_of(program: str, tests: Sequence[Test], entry_point: str | None) -> tuple[str, str]:
    """Return a nonce, and the job with it that the checker reads."""
    nonce = secrets.token_hex(16)
    job = {"program": program, "tests": list(tests), "entry_point": entry_point, "nonce": nonce}
    return nonce, json.dumps(job)


def read_verdict(output: str, nonce: str, count: int) -> Verdict | None:
    """Read the checker's output for a number of tests. None if the checker ended before the program had begun.

    Raises:
        UnfitTests: if the tests cannot score any program.
    """
    lines = [line.removeprefix(nonce) for line in output.split("\n")[:-1] if line.startswith(nonce)]
    if not lines:
        return None
    if not lines[-1]:
        reason = "the tests took too much CPU time or memory with what the program gave them"
        return Verdict(0, count, reason)
    answer = json.loads(lines[-1])
    if unfit := answer.pop("unfit"):
        raise UnfitTests(f"these tests cannot score a program: {unfit}")
    return Verdict(**answer)
