r"""The accuracy reward: is the final answer of a completion mathematically equal to the gold answer?

    completion ──► extract_answer ──► same text? ──► math-verify in a worker process ──► 1.0 | 0.0 | NaN
    gold ────────► parse_gold (cached) ──────┘

NaN means "could not be scored" (unreadable gold, exception, timeout, crash) and is never 0: the trainer unscores such
a row. The comparison is math-verify's (https://github.com/huggingface/Math-Verify), with three deviations:

- it reads the word "silent" as s*i*l*e*n*t, which equals "listen"; answers in words are compared as text here;
- it ignores the base of a number, so that 52_8 = 52_9; here two written bases must agree;
- its own timeouts use SIGALRM, count as a wrong answer and fail outside the main thread; here a worker is killed.

Units, degree signs and a base on one side only are not compared (36 = 36^\circ = \$36, 52 = 52_8), nor are (a,b) and
{a,b} told apart where math-verify does not: the problem says which is meant.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from dash_trl.workers import Task, WorkerDied, default_workers, shared_workers

logger = logging.getLogger(__name__)

CHUNK_ROWS = 32  # rows per task: a task costs ~1 ms of messages, a row 0.3 to 4 ms
TAIL_CHARS = 2_000  # of a completion without a marked answer: math-verify's patterns are quadratic in degenerate text
MIN_WORD_LETTERS = 4  # a bare run of letters this long with a vowel is a word, a shorter one may be a product like xyz

Verify = Callable[[str, str], float]


# ---------------------------------------------------------------------------------------------- finding the answer


def boxed_answers(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Yields (start, end, content) of every complete \boxed{...} or \fbox{...}, braces balanced, outermost only.

    `\boxed 5`, which MATH has too, ends at the next space or `$`. A box that is never closed is skipped.
    """
    position = 0
    while found := _BOX.search(text, position):
        if found["open"]:
            end = _closing_brace(text, found.end())
            if end is None:
                position = found.end()
                continue
            content = text[found.end() : end]
            position = end + 1
        else:
            content, position = found["bare"], found.end()
        yield found.start(), position, content.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}; None without one."""
    boxes = list(boxed_answers(text))
    return boxes[-1][2] if boxes else None


def extract_answer(completion: str) -> str | None:
    r"""The answer that a completion announces, or None.

    In this order: the last \boxed{...} (boxes joined by "and", "or" or commas count together, so that a completion
    cannot offer two answers and have the right one counted), the last `#### ...` line of GSM8K.
    """
    boxes = list(boxed_answers(completion))
    if boxes:
        answers = [boxes[-1]]
        for box in reversed(boxes[:-1]):
            if not _JOINT.fullmatch(completion[box[1] : answers[0][0]]):
                break
            answers.insert(0, box)
        return ", ".join(content for _, _, content in answers)
    return last_hashes(completion)


def last_hashes(text: str) -> str | None:
    """What follows the last `####`, the mark of GSM8K's final answers, on its line."""
    marks = _HASHES.findall(text)
    return marks[-1].strip() if marks else None


def announced_phrase(text: str) -> str | None:
    """The few words after the last "answer is" or "answer:", up to the end of the clause."""
    found = _ANNOUNCED.findall(text)
    return found[-1] if found else None


def _closing_brace(text: str, position: int) -> int | None:
    depth = 1
    for found in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(found[0], 0)  # an escaped brace of a set, \{ or \}, counts for nothing
        if depth == 0:
            return found.start()
    return None


_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<open>\{)|\s+(?P<bare>[^\s${}]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINT = re.compile(r"[\s$,]*(?:\\[\]\)])?[\s,]*(?:and|or|,)?[\s,]*(?:\\[\[\(])?[\s$,]*")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_ANNOUNCED = re.compile(r"(?i:\banswer\s*(?:is|:))[:\s]*([^.,;\n]+)")


# ------------------------------------------------------------------------------------------------ answers in words


def normalize_text(text: str) -> str:
    r"""One spelling for answers in words: `\text{(C)}.` → "c", `$\textbf{No  solution}$` → "no solution"."""
    while (unwrapped := _TEXT_COMMAND.sub(r"\1", text)) != text:
        text = unwrapped
    text = re.sub(r"\\[ ,;!]|[$*~]", " ", text)
    text = " ".join(text.split()).rstrip(".").strip()
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1].strip()
    return text.casefold()


def is_text_answer(gold: str) -> bool:
    r"""Whether a gold answer is words, to be compared as text: \text{Evelyn}, No solution, \text{(C)}.

    Not xy (a product), x (a variable, or the choice X: `score_answer` tries both), 5\text{ cm} (a number).
    """
    words = normalize_text(gold)
    if not _WORDS.fullmatch(words):
        return False
    rest, wrapped = _TEXT_COMMAND.subn("", gold)
    if wrapped and not rest.strip(" ,;$"):
        return True
    return any(len(word) >= MIN_WORD_LETTERS and _VOWEL.search(word) for word in re.findall(r"[^\W\d_]+", words))


_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*")
_VOWEL = re.compile(r"[aeiouy]")


# -------------------------------------------------------------------------------------------------- scoring one row


class UnreadableGold(ValueError):
    """The gold answer means nothing to math-verify and is not words, so no completion can be scored against it."""


def gold_text(gold: str) -> str:
    r"""The bare gold answer in `72`, `... #### 72`, `$72$`, `\boxed{72}` or a solution that ends in one of these."""
    answer = (last_hashes(gold) or last_boxed(gold) or gold).strip()
    formula = _FORMULA.fullmatch(answer)
    return formula[1].strip() if formula else answer


@functools.lru_cache(maxsize=1024)  # a gold answer comes once per completion of its group
def parse_gold(answer: str) -> tuple[Any, ...]:
    """What math-verify reads in a gold answer.

    Raises:
        UnreadableGold: if that is nothing. (Its fallback to a string does not count: it compares only spelling.)
    """
    parsed = _read(rf"\boxed{{{answer}}}")
    if not parsed:
        raise UnreadableGold(f"the gold answer {answer!r} is neither an expression that math-verify reads nor words")
    return tuple(parsed)


def score_answer(completion: str, gold: str) -> float:
    """1.0 if the completion's final answer equals the gold answer, else 0.0. Runs in a worker's main thread.

    Raises:
        UnreadableGold: see `parse_gold`.
        Exception: whatever sympy raises while it compares; the row is then unscored.
    """
    gold, answer = gold_text(gold), extract_answer(completion)
    words = (announced_phrase(completion) or completion) if answer is None else answer
    if is_text_answer(gold):
        return float(_equal_words(gold, words))
    parsed_gold = parse_gold(gold)
    if answer is not None and _squeeze(answer) == _squeeze(gold):
        return 1.0
    if len(gold) == 1 and gold.isalpha() and _equal_words(gold, words):
        return 1.0  # the choice "A": math-verify finds no letter in a sentence
    if answer is not None and not _same_base(gold, answer):
        return 0.0
    return float(_equal_values(parsed_gold, _parse_answer(completion, answer)))


def _parse_answer(completion: str, answer: str | None) -> list[Any]:
    if answer is None:
        return _read(completion[-TAIL_CHARS:])
    if last_boxed(completion) is None and "\\" not in answer:
        return _read(answer)  # "#### 72 apples" is a number and a word; as LaTeX it would be a product
    return _read(rf"\boxed{{{answer}}}")


def _equal_words(gold: str, answer: str) -> bool:
    return normalize_text(answer) == normalize_text(gold)


def _equal_values(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    from math_verify import verify

    return any(verify(g, a, timeout_seconds=None, raise_on_error=True) for g in gold for a in answer)


def _read(text: str) -> list[Any]:
    from math_verify import parse

    # No timeout of its own (it would turn into "no answer"): the pool kills this process. One extraction configuration
    # for everything, because math-verify caches the compiled patterns of a single one.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)


def _same_base(gold: str, answer: str) -> bool:
    bases = [found[1] for found in map(_BASE.search, (_squeeze(gold), _squeeze(answer))) if found]
    return len(set(bases)) < 2


def _squeeze(answer: str) -> str:
    r"""Without spacing, `\left`, `\right` and the size of a fraction, which never change a value."""
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[ ,;!]", "", answer)
    answer = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", answer)
    return re.sub(r"\s+(?![a-zA-Z0-9])|(?<![a-zA-Z0-9])\s+", "", answer)


_FORMULA = re.compile(r"\$+(.*?)(?<!\\)\$+", re.DOTALL)
_BASE = re.compile(r"^-?[0-9A-Za-z]+_\{?(?:\\text\{)?(\d+)\}*\$?$")


# ------------------------------------------------------------------------------------------------- inside a worker


def _prepare_worker() -> None:
    """Pays for the imports and the patterns before the first task."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that we switched their timeouts off
    score_answer(r"So $x=\boxed{\frac{1}{2}}$", "0.25")


def _score_chunk(verify: Verify, rows: Sequence[tuple[str, str]]) -> list[float | str]:
    """One entry per row: its score, or why it has none. Runs in a worker."""
    return [_score_row(verify, *row) for row in rows]


def _score_row(verify: Verify, completion: str, gold: str) -> float | str:
    try:
        return float(verify(completion, gold))
    except Exception as error:  # whatever sympy raises: this row failed, its neighbours did not
        return f"{type(error).__name__}: {error}"[:300]


# ------------------------------------------------------------------------------------------------------- the reward


class MathAccuracyReward:
    r"""Reward function for TRL: 1.0 for a right final answer, 0.0 for a wrong or missing one, NaN if that is unknown.

        trainer = DASHTrainer(..., reward_funcs=[MathAccuracyReward()])

    The data set's column `answer` holds the gold answers: numbers, LaTeX, words, or solutions that end in `#### 72` or
    \boxed{72}. A completion's answer is its last box, else its last `####` line, else what math-verify finds in it
    ("... the answer is 72", or the last formula or number).

    Args:
        timeout: seconds that one row may take before its worker is killed and the row is NaN.
        workers: processes; default: this process's share of the CPUs, at most 8. Rewards with the same number share
            them. They start at the first call (~1 s) and stop at `close()` of the last reward or at exit.
        verify: (completion, gold) → score, to be run in the workers instead of `score_answer`. It must be importable.
    """

    __name__ = "math_accuracy"  # TRL names its metrics after it

    def __init__(self, *, timeout: float = 5.0, workers: int | None = None, verify: Verify = score_answer):
        if not timeout > 0:
            raise ValueError(f"timeout = {timeout} would kill every row: give the seconds that a row may take, e.g. 5.")
        if workers is not None and workers < 1:
            raise ValueError(
                f"workers = {workers} can score nothing: give at least 1, or None to use this machine's CPUs."
            )
        if verify.__module__ == "__main__":
            raise ValueError(
                f"verify = {verify.__qualname__} is defined in the main script, which the worker processes do not run: "
                "move it into a module and import it from there."
            )
        for package in ("math_verify", "pebble"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"MathAccuracyReward needs {package}: pip install {package.replace('_', '-')}")
        self.timeout = timeout
        self.workers = workers or default_workers()
        self.verify = verify
        self._told: set[str] = set()

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
        """Scores a batch; may be called from any thread.

        Args:
            completions: strings, or conversations `[{"role": "assistant", "content": ...}]`.
            answer: the gold answers, one per completion.
            kwargs: TRL's other columns, unused.
        Returns:
            One of 1.0, 0.0 and NaN per completion, in order.
        """
        if len(completions) != len(answer):
            raise ValueError(
                f"{len(completions)} completions cannot be compared with {len(answer)} answers: pass one gold answer "
                "per completion, repeated for the completions of one prompt."
            )
        rows = [(completion_text(c), "" if a is None else str(a)) for c, a in zip(completions, answer, strict=True)]
        outcomes = self._score(rows)
        self._tell_failures(rows, outcomes)
        return [math.nan if isinstance(outcome, str) else outcome for outcome in outcomes]

    def _score(self, rows: Sequence[tuple[str, str]]) -> list[float | str]:
        """One outcome per row: its score, or why it has none."""
        outcomes: list[float | str] = ["not scored"] * len(rows)
        size = max(1, min(CHUNK_ROWS, math.ceil(len(rows) / (2 * self.workers))))
        everything = list(range(len(rows)))
        pending = self._run(rows, [everything[i : i + size] for i in everything[::size]], outcomes)
        pending = self._run(rows, [[i] for i in pending], outcomes)
        for i in pending:  # a dying worker can take the whole pool along: one after another, a failure is the row's own
            self._run(rows, [[i]], outcomes)
        return outcomes

    def _run(self, rows: Sequence[tuple[str, str]], chunks: list[list[int]], outcomes: list[float | str]) -> list[int]:
        """Runs chunks of row numbers concurrently and fills in their outcomes.

        Returns:
            The rows to be run again: those that shared a task, or a pool, with the one that failed.
        """
        workers = shared_workers(self.workers, _prepare_worker)
        tasks: list[Task] = []
        again: list[int] = []
        try:
            for chunk in chunks:
                tasks.append(
                    workers.submit(self, _score_chunk, self.verify, [rows[i] for i in chunk], timeout=self.timeout)
                )
            for chunk, task in zip(chunks, tasks, strict=True):
                try:
                    scores = task.result()
                except TimeoutError:
                    scores, final = [f"timeout after {self.timeout} s"] * len(chunk), len(chunk) == 1
                except WorkerDied as error:
                    scores, final = [f"crash of its worker, {error}"] * len(chunk), len(chunk) == 1
                except (BrokenProcessPool, CancelledError, RuntimeError, OSError) as error:
                    scores, final = [f"loss of its worker: {error}"] * len(chunk), False
                else:
                    final = True
                for i, score in zip(chunk, scores, strict=True):
                    outcomes[i] = score
                again += [] if final else chunk
        finally:
            for task in tasks:  # after an interrupt; a finished task cannot be cancelled
                task.cancel()
        return again

    def _tell_failures(self, rows: Sequence[tuple[str, str]], outcomes: Sequence[float | str]) -> None:
        """Logs the first failure of each kind; the trainer's metrics count them all."""
        for (completion, gold), outcome in zip(rows, outcomes, strict=True):
            kind = outcome.split()[0] if isinstance(outcome, str) else ""
            if kind and kind not in self._told:
                self._told.add(kind)
                logger.warning(
                    f"An answer could not be scored and is NaN: {outcome} (gold answer {gold!r:.100}, completion ends "
                    f"in {completion[-100:]!r}). Further failures of this kind are not reported."
                )

    def close(self) -> None:
        """Stops the worker processes unless another reward uses them. A later call starts them again."""
        shared_workers(self.workers, _prepare_worker).leave(self)

    def __enter__(self) -> MathAccuracyReward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def completion_text(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last message that the assistant wrote."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion or [] if m.get("role", "assistant") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # multi-modal parts
        content = "".join(part.get("text") or "" for part in content)
    return content or ""
