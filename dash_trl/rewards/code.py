"""The code reward: does the program in a completion pass its unit tests?

    completion ──► find_program ──► sandbox: the program and its tests, in a process each ──► 1.0 | 0.0, share passed

The tests are scripts with asserts that call the program's functions, or inputs of a program that reads standard input,
with the outputs that are expected (`load_code_dataset` makes them of the columns of MBPP, HumanEval, APPS and others).
Programs are untrusted: `dash_trl.sandbox.Sandbox` says what holds them. No program, a program that does not run, too
much CPU time or memory, one that sleeps: wrong (0.0). What says nothing about the program (a machine so busy that the
clock ran out, tests that cannot be run, no sandbox) raises, and the row is unscored.
"""

import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from dash_trl.rewards.math import completion_text
from dash_trl.sandbox import ProgramSandbox, Sandbox, Test


class CodeReward(AbstractContextManager["CodeReward"]):
    """1.0 if all unit tests pass, else 0.0; and the share of them that pass, as the figure `passed`.

        trainer = DASHTrainer(reward_funcs=RewardRunner([CodeReward()]), train_dataset=load_code_dataset(...))

    Safe to call from many threads at once; so many programs run at a time as this process has CPUs.

    Args:
        sandbox: a `Sandbox` with other limits than the default ones, a server's (`SandboxFusion`), or your own.
    """

    __name__ = "code"  # of the metrics

    def __init__(self, sandbox: ProgramSandbox | None = None):
        self.sandbox: ProgramSandbox = Sandbox() if sandbox is None else sandbox
        self.max_concurrency = getattr(self.sandbox, "count", None)  # more would wait within their time limit

    def __call__(
        self,
        completion: Any,
        tests: str | Sequence[str] | None = None,
        entry_point: str | None = None,
        starter_code: str | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> tuple[float, dict[str, float | str]]:
        """The score of one completion, with the share of tests that pass and the reason of the first that does not.

        Args:
            completion: a text, or a conversation whose last message has it.
            tests: one script, or several.
            entry_point: the function that the tests call.
            starter_code: what a completion without a program of its own continues, as in HumanEval.
            inputs, outputs: more tests: what a program reads from standard input, and what it then has to print.
        Raises:
            ValueError: there are no tests, or none that could score a program.
            TimeoutError, SandboxError: see `Sandbox.run`.
        """
        scripts: list[Test] = [tests] if isinstance(tests, str) else list(tests or ())
        if len(inputs or ()) != len(outputs or ()):
            raise ValueError(f"this row has {len(inputs or ())} inputs and {len(outputs or ())} outputs: remove it")
        scripts += zip(inputs or (), outputs or (), strict=True)
        if not any(one if isinstance(one, tuple) else one.strip() for one in scripts):
            raise ValueError("this row has no tests: remove it, or load the dataset by load_code_dataset")
        program = find_program(completion_text(completion), entry_point, starter_code, reads=bool(inputs))
        if program is None:
            return 0.0, {"passed": 0.0, "explanation": "no program"}
        verdict = self.sandbox.run(program, scripts, entry_point)
        notes: dict[str, float | str] = {"passed": verdict.passed / max(1, verdict.passed + verdict.failed)}
        if verdict.reason:
            notes["explanation"] = verdict.reason
        return float(verdict.right), notes

    def close(self) -> None:
        """Ends the sandbox's processes; they start again when they are needed."""
        if close := getattr(self.sandbox, "close", None):
            close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------ from text to program

# By patterns alone: Python's parser can be crashed by a text, and this is the trainer's process.
_PYTHON = ("", "python", "py", "python3", "python 3")
_STATEMENT = re.compile(r"^(?:(?:async[ ]+)?def|class|import|from|@\w)|^\w+[ ]*=[^=]", re.MULTILINE)
_READS = re.compile(r"\b(?:input|open)[ ]*\(|\bstdin\b")


def find_program(
    completion: str, entry_point: str | None = None, starter_code: str | None = None, *, reads: bool = False
) -> str | None:
    """The program of a completion; None if there is none.

    The last fenced block of Python that defines the entry point, since an example of its use often follows; else the
    last one. A text without fences counts if it has a statement of a program, and so does the text before a fence
    without a language, which may be the end of one that the prompt opened. Nothing within <think>…</think> counts.
    With `reads`, the block has to read standard input instead of defining something. With `starter_code`, a block or
    text that does not define the entry point continues it, as HumanEval's bodies do.
    """
    text = re.sub(r"(?s)<think>.*?(?:</think>|\Z)", "", completion).rpartition("</think>")[2]  # the prompt may open one
    before, language, blocks = _split(text)
    continued = bool(starter_code and re.search(r"(?m)^[ \t]*return\b", before))
    raw = continued and before.lstrip("\n").startswith((" ", "\t"))
    unfenced = before if raw or not language and (continued or _STATEMENT.search(before)) else None
    candidates = [one for one in (unfenced, *blocks) if one is not None]
    if not candidates:
        return None
    whole = [
        textwrap.dedent(one) for one in candidates if (_READS.search(one) if reads else _defines(one, entry_point))
    ]
    rest = blocks[-1] if unfenced is None else unfenced
    if not starter_code:
        return whole[-1] if whole else textwrap.dedent(rest)
    if whole:  # which may rely on the imports before the function that it writes anew
        return f"{starter_code.rstrip()}\n    pass\n\n\n{whole[-1]}"
    if not rest.lstrip("\n").startswith((" ", "\t")):  # a chat model's, without its indentation
        rest = textwrap.indent(rest, "    ")
    return f"{starter_code.rstrip()}\n{rest}"


def _split(text: str) -> tuple[str, str, list[str]]:
    """The text before the first fence, that fence's language, and the fenced blocks of Python.

    A fence begins a line and has at least three characters; its end has as many or more, or is the text's. Line by
    line, since a pattern for all of it takes quadratic time over a model's endless "~~~~".
    """
    before: list[str] = []
    blocks: list[tuple[str, list[str]]] = []
    first = ""  # language
    fence = None
    lines = before
    for line in text.split("\n"):
        bare = line.strip()
        mark = bare[: len(bare) - len(bare.lstrip(bare[:1]))] if bare[:1] in ("`", "~") else ""
        info = bare[len(mark) :].strip().lower()
        if len(mark) < 3 or "`" in info:
            lines.append(line)
        elif fence is None or mark.startswith(fence) and len(blocks) == 1 and not first and info in _PYTHON[1:]:
            if fence is not None:  # the first fence was the end of one that the prompt opened
                blocks.clear()
            elif not blocks:
                first = info
            fence, lines = mark, []
            blocks.append((info, lines))
        elif mark.startswith(fence) and not info:
            fence, lines = None, []
        else:
            lines.append(line)
    return "\n".join(before), first, ["\n".join(body) for info, body in blocks if info in _PYTHON]


def _defines(program: str, name: str | None) -> bool:
    """Whether it has a function or class of this name at its top, or of any where none is known."""
    known = r"\w+" if name is None else re.escape(name)
    defined = rf"^[ \t]*(?:(?:async[ ]+)?def|class)[ ]+{known}\b|^[ \t]*{known}[ ]*=[^=]"
    return re.search(defined, textwrap.dedent(program), re.MULTILINE) is not None
