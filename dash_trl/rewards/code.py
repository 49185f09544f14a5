"""`CodeReward`: runs the program in a completion against its unit tests.

::

    completion ──► find_program ──► sandbox: one process for the program, one for its tests ──► 1.0 | 0.0, share passed

A completion without a program, or whose program fails a test or exceeds a limit, is wrong (0.0). If the program is not
the cause (a busy machine, tests that cannot be run), the reward function raises an exception and the row is unscored.
"""

import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager

from dash_trl.rewards.answers import final_text
from dash_trl.rewards.math import completion_text
from dash_trl.sandbox import ProgramSandbox, Sandbox, Test


class CodeReward(AbstractContextManager["CodeReward"]):
    """Per-sample reward function: 1.0 if the program in a completion passes all of its unit tests, else 0.0.

    The metric `rewards/code/passed` is the share of tests that pass. Many threads may call it at once.

    Example::

        trainer = DASHTrainer(..., reward_funcs=RewardRunner([CodeReward()]), train_dataset=load_code_dataset(...))

    Args:
        sandbox: a `Sandbox`, or a `ProgramSandbox` of your own. None = `Sandbox()`.
    """

    __name__ = "code"  # TRL's metrics get this name

    def __init__(self, sandbox: ProgramSandbox | None = None):
        self.sandbox: ProgramSandbox = Sandbox() if sandbox is None else sandbox
        # Limits the runner: a call beyond `count` would wait for the sandbox while its own time limit runs.
        self.max_concurrency = getattr(self.sandbox, "count", None)

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing: a `with` block may hold this reward, as a `RewardRunner`."""

    def __call__(
        self,
        completion: object,
        tests: str | Sequence[str] | None = None,
        entry_point: str | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> tuple[float, dict[str, float | str]]:
        """Score one completion.

        Args:
            completion: a string, or a conversation whose last message has the program.
            tests: a script with asserts, or a list of scripts; `load_code_dataset` makes them from the columns of MBPP.
            entry_point: the name of the function that the tests call.
            inputs: standard inputs of the program, for further tests.
            outputs: the expected standard output for each of the inputs.

        Returns:
            The reward, and notes: `passed`, the share of tests that pass; and `explanation` of the first failure.

        Raises:
            ValueError: if there are no tests, the numbers of inputs and outputs differ, or no test can score a program.
            TimeoutError, SandboxError: see `Sandbox.run`.
        """
        scripts: list[Test] = [tests] if isinstance(tests, str) else list(tests or ())
        if str in (type(inputs), type(outputs)) or len(inputs or ()) != len(outputs or ()):
            raise ValueError(
                f"this row's inputs {inputs!r:.100} and outputs {outputs!r:.100} are not lists of the same number of "
                "texts, one output for each input: remove the row or correct it, such as by json.loads"
            )
        scripts += zip(inputs or (), outputs or (), strict=True)
        if not any(one if isinstance(one, tuple) else one.strip() for one in scripts):
            raise ValueError("this row has no tests: remove it, or load the dataset with load_code_dataset")
        program = find_program(completion_text(completion), entry_point, reads=bool(inputs))
        if program is None:
            return 0.0, {"passed": 0.0, "explanation": "no program"}
        verdict = self.sandbox.run(program, scripts, entry_point)
        notes: dict[str, float | str] = {"passed": verdict.passed / max(1, verdict.passed + verdict.failed)}
        if verdict.reason:
            notes["explanation"] = verdict.reason
        return float(verdict.right), notes


# ------------------------------------------------------------------------------------------------ from text to program

# Programs are found by patterns, not by Python's parser: a text can crash the parser, and with it the trainer.
_PYTHON = ("", "python", "py", "python3")
_STATEMENT = re.compile(r"^(?:(?:async[ ]+)?def|class|import|from|@\w)|^\w+[ ]*=[^=]", re.MULTILINE)
_READS = re.compile(r"\b(?:input|open)[ ]*\(|\bstdin\b")
_DEFINED = re.compile(r"^[ \t]*(?:(?:async[ ]+)?def|class)[ ]+(\w+)", re.MULTILINE)
_TAG = r"(?m)^[ \t]*<answer>|</answer>[ \t]*$"  # around an answer, as in the format of DeepSeek-R1
# A fence on one line.
_ONE_LINE = re.compile(
    r"^(`{3,})(?:python|py)?[ \t]*((?:\w+[ \t]*[(=]|def |class |import |from )[^`\n]*)\1[ \t]*$", re.MULTILINE
)


def find_program(completion: str, entry_point: str | None, *, reads: bool) -> str | None:
    """Find the program in the text of a completion; return None if there is none.

    - The program is the last fenced block of Python that defines the entry point, because a block that only calls it
      often follows; else the last one of Python.
    - An earlier block that defines what the program uses comes before it.
    - Text without fences counts as a block if it has a statement such as `def`; so does text before a fence without a
      language, which may close a block that the prompt opened.
    - Thoughts do not count.

    Args:
        entry_point: the function that the tests call. None = any function or class.
        reads: True = look for a block that reads standard input instead.
    """
    before, language, blocks = _split(re.sub(_TAG, "", final_text(completion)))
    unfenced = [before] if not language and _STATEMENT.search(before) else []
    candidates = [*unfenced, *blocks]
    if not candidates:
        return None
    whole = [one for one in candidates if (_READS.search(one) if reads else _defines(one, entry_point))]
    program = (whole or unfenced or blocks)[-1]
    # Neither the `add` of `seen.add(x)` nor a variable of the program is a function of an earlier block.
    assigned = re.findall(r"(?m)^[ \t]*(\w+)[ ]*=(?!=|.*\b\1\b)", program)
    used = {*re.findall(r"(?<![.\w])\w+", program)}.difference(_DEFINED.findall(program), assigned, [entry_point])
    earlier = [one for one in candidates[: candidates.index(program)] if used.intersection(_DEFINED.findall(one))]
    return "\n".join(map(textwrap.dedent, [*earlier, program]))


def _split(text: str) -> tuple[str, str, list[str]]:
    """Return the text before the first fence, the language of that fence, and the fenced blocks of Python.

    A block without a closing fence ends with the text. A regular expression would take quadratic time over an endless
    "~~~~".
    """
    before: list[str] = []
    blocks: list[tuple[str, list[str]]] = []
    first = ""  # the language of the first fence
    quotes = 0  # number of triple quotes in the block: a fence in a docstring does not end it
    fence = None
    lines = before
    for line in _ONE_LINE.sub(r"\1python\n\2\n\1", text).split("\n"):
        bare = line.strip()
        quotes += line.count('"""')
        mark = re.sub(r"(`+|~+|).*", r"\1", bare)
        info = re.sub(r"[{.]*(\w*).*", r"\1", bare[len(mark) :].strip().lower())  # of `python title="a.py"`, `{python}`
        if len(mark) < 3 or "`" in bare[len(mark) :]:
            lines.append(line)
        elif fence is None or mark.startswith(fence) and len(blocks) == 1 and not first and info in _PYTHON[1:]:
            if fence is not None:  # the first fence closed a block that the prompt had opened
                blocks.clear()
            elif not blocks:
                first = info
            fence = mark
            lines = []
            quotes = 0
            blocks.append((info, lines))
        elif mark.startswith(fence) and not info and quotes % 2 == 0:
            fence = None
            lines = []
        else:
            lines.append(line)
    return "\n".join(before), first, ["\n".join(body) for info, body in blocks if info in _PYTHON]


def _defines(program: str, name: str | None) -> bool:
    """Return whether the program defines this name at its top level. None = any function or class."""
    known = r"\w+" if name is None else re.escape(name)
    # `y = f(1)` defines no function: if the name is not known, a block that only uses the function has such lines.
    defined = rf"^[ \t]*(?:(?:async[ ]+)?def|class)[ ]+{known}\b" + (rf"|^[ \t]*{known}[ ]*=[^=]" if name else "")
    return re.search(defined, textwrap.dedent(program), re.MULTILINE) is not None
