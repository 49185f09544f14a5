"""Interface of a sandbox for `CodeReward`."""

from collections.abc import Sequence
from typing import Protocol

from dash_trl.sandbox.box import Verdict
from dash_trl.sandbox.checker import Test


class ProgramSandbox(Protocol):
    """Runs untrusted programs against tests: `Sandbox`, `SandboxFusion`, or your own.

    `CodeReward` calls `run` from several threads. An attribute `count` limits the number of calls at once. A method
    `close` is called at the end. Both are optional.
    """

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against each test, and count the tests that pass.

        If the program fails (wrong answer, error, too slow, too much memory), return a verdict with failed tests. If
        there can be no verdict, because the sandbox fails or the tests are wrong, raise any exception: the row is then
        unscored.

        Args:
            program: Python source code.
            tests: scripts, or pairs of an input and the expected output, see `Test`. The program's output passes if
                `same_output` finds it equal to the expected output.
            entry_point: name of the function that the scripts call; None if it is not known.
        """
        ...
