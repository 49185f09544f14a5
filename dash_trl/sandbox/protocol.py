"""What `CodeReward` needs of a sandbox, which may be anybody's."""

from collections.abc import Sequence
from typing import Protocol

from dash_trl.sandbox.box import Verdict
from dash_trl.sandbox.checker import Test


class ProgramSandbox(Protocol):
    """Runs untrusted programs against tests: `Sandbox`, `SandboxFusion`, or your own.

    `CodeReward` calls it from several threads. If it has an attribute `count`, at most so many calls run at once; if it
    has a method `close`, that is called at the end.
    """

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Runs each test and counts those that pass.

        A failure of the program (wrong, an error, too slow, too much memory) is a verdict. If there is none, because
        the sandbox or the tests are at fault, it raises any exception, and the row is unscored.

        Args:
            program: Python source.
            tests: of either kind, see `Test`; `same_output` compares outputs.
            entry_point: the function that the scripts call.
        """
        ...
