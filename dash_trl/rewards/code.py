"""The code reward: does the program in a completion pass its unit tests?

    completion ──► find_program ──► sandbox: the program and its tests, in a process each ──► 1.0 | 0.0, share passed

The tests are scripts with asserts that call the program's functions (`load_code_dataset` makes them of MBPP's, MBPP+'s
and HumanEval's columns). Programs are untrusted: `dash_trl.workers.Sandbox` says what holds them. No program, a program
that does not run, too much CPU time or memory: wrong (0.0). What says nothing about the program (a machine so busy that
the clock ran out, tests that cannot be run, no sandbox) raises, and the row is unscored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from dash_trl.rewards.math import completion_text
from dash_trl.workers import Sandbox


class CodeReward:
    """1.0 if all unit tests pass, else 0.0; and the share of them that pass, as the figure `passed`.

        trainer = DASHTrainer(reward_funcs=RewardAgent([CodeReward()]), train_dataset=load_code_dataset(...))

    Safe to call from many threads at once; so many programs run at a time as this process has CPUs.

    Args:
        sandbox: with other limits than the default ones.
    """

    __name__ = "code"  # of the metrics

    def __init__(self, sandbox: Sandbox | None = None):
        self.sandbox = Sandbox() if sandbox is None else sandbox

    def __call__(
        self,
        completion: Any,
        tests: str | Sequence[str],
        entry_point: str | None = None,
        starter_code: str | None = None,
    ) -> tuple[float, dict[str, float | str]]:
        """The score of one completion, with the share of tests that pass and the reason of the first that does not.

        Args:
            completion: a text, or a conversation whose last message has it.
            tests: one script, or several.
            entry_point: the function that the tests call.
            starter_code: what a completion without a program of its own continues, as in HumanEval.
        Raises:
            ValueError: there are no tests, or none that could score a program.
            TimeoutError, SandboxError: see `Sandbox.run`.
        """
        scripts = [tests] if isinstance(tests, str) else list(tests or ())
        if not any(script.strip() for script in scripts):
            raise ValueError("this row has no tests: remove it, or load the dataset by load_code_dataset")
        program = find_program(completion_text(completion), entry_point, starter_code)
        if program is None:
            return 0.0, {"passed": 0.0, "explanation": "no program"}
        verdict = self.sandbox.run(program, scripts, entry_point)
        notes: dict[str, float | str] = {"passed": verdict.passed / max(1, verdict.passed + verdict.failed)}
        if verdict.reason:
            notes["explanation"] = verdict.reason
        return float(verdict.right), notes

    def close(self) -> None:
        """Ends the sandbox's processes; they start again when they are needed."""
        self.sandbox.close()

    def __enter__(self) -> CodeReward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------ from text to program

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# A fence begins a line and has at least three backticks; its end has as many, or is the text's.
_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\n`]*)\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3", "python 3")


def find_program(completion: str, entry_point: str | None = None, starter_code: str | None = None) -> str | None:
    """The program of a completion; None if there is none.

    The last fenced block of Python that defines the entry point, since an example of its use often follows; else the
    last one. An unfenced text counts if it is a program as a whole. Nothing within <think>…</think> counts. With
    `starter_code`, a block or text that does not define the entry point continues it, as HumanEval's bodies do.
    """
    text = _THOUGHT.sub("", completion)
    if "</think>" in text:  # the prompt has opened it
        text = text.rpartition("</think>")[2]
    blocks = [body for _, language, body in _FENCED.findall(text) if language.strip().lower() in _PYTHON]
    if not blocks and "```" not in text:
        blocks = [text]
    whole = [block for block in blocks if _defines(block, entry_point)]
    if whole:
        program = whole[-1]
        # HumanEval's prompt has the imports, and sometimes a helper, which a rewritten function relies on.
        joined = f"{starter_code or ''}    pass\n\n\n{program}"
        return joined if starter_code is not None and _parse(joined) is not None else program
    for block in reversed(blocks):
        if starter_code is not None:
            for joined in (starter_code + block, f"{starter_code.rstrip()}\n{_indented(block)}"):
                if _parse(joined) is not None and block.strip():
                    return joined
        if (tree := _parse(block)) is not None and any(not isinstance(node, ast.Expr) for node in tree.body):
            return block
    return None


def _parse(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a null byte
        return None


def _defines(program: str, entry_point: str | None) -> bool:
    """Whether it is a program with this name among its own, or with any function where no name is known."""
    tree = _parse(program)
    names = set() if tree is None else {name for node in tree.body for name in _names(node)}
    return bool(names) if entry_point is None else entry_point in names


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _indented(block: str) -> str:
    """A body whose first line lost its indentation, as a chat model writes it."""
    lines = block.strip("\n").splitlines()
    return "\n".join(f"    {line}" for line in lines) + "\n"
