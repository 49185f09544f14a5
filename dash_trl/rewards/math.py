r"""`MathAccuracyReward`: checks whether the final answer of a completion equals the gold answer mathematically.

::

    completion ──► find_answer ──► same text? ──► same words? ──► math-verify ──► 1.0 | 0.0 | NaN
    gold ────────► gold_text ─────► read_gold (cached) ──────────────┘

`answers.py` finds the answer in the completion, `spelling.py` rewrites it in the LaTeX that math-verify reads, and
math-verify (https://github.com/huggingface/Math-Verify) compares the two answers. `docs/results/rewards.md` lists where
this deviates from plain math-verify, with the verdicts that each deviation changes.

As in math-verify, floats are equal if they agree to 6 decimals, the last member of a chain of equations counts, lists
have no order, and units and the base of a number are ignored. Deviation: small numbers must also agree to 1 %.

Rows are scored in worker processes, because math-verify's time-outs use SIGALRM, which works only in the main thread of
a process. If reading or comparing an answer takes longer than math-verify's limit (5 s each), the answer is wrong. Some
operations (those of gmpy2) ignore signals. Therefore a second time-out kills the worker; the row is then unscored.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dash_trl.rewards.answers import MAX_ANSWER_CHARS, find_answer, gold_text, plain_answer
from dash_trl.rewards.spelling import as_words, is_words
from dash_trl.workers import ProcessCalls, call_all, default_workers

logger = logging.getLogger(__name__)

# Limit in seconds by the clock for one row. math-verify's own limits may add up to this for a row with a hard answer.
TIMEOUT = 30.0

# math-verify rounds floats to 6 decimals and sets products below 1e-15 to 0. So it takes 1.6e-19 for 9.1e-31. Numbers
# below this limit must also agree to 1 %.
SMALL = 1e-4


# -------------------------------------------------------------------------------------------------- scoring one row


class UnreadableGold(ValueError):
    """Raised if a gold answer is neither words nor an expression that math-verify can read.

    An answer with exactly the same text is scored nevertheless.
    """


def score_answer(completion: str, gold: str) -> float:
    """Scores the final answer of one completion. It must run in the main thread of a worker, see above.

    Args:
        completion: the text of a completion.
        gold: the gold answer, in any form that `gold_text` reads.

    Returns:
        1.0 if the final answer equals the gold answer, else 0.0.

    Raises:
        UnreadableGold: if the answer has another text than the gold answer, and the gold answer cannot be read.
    """
    bare, (text, prose) = gold_text(gold), find_answer(completion)
    if text == bare and any(map(str.isalnum, bare)):
        return 1.0
    label, chosen = _LABEL.match(bare), _LABEL.match(text)
    if label and chosen:
        return float(label[1] == chosen[1])
    if is_words(bare):
        return float(as_words(text) == as_words(bare))
    if "=" not in bare:
        text = _last_member(text)
    if _INTEGER.fullmatch(text) and _INTEGER.fullmatch(bare):
        return float(int(text) == int(bare))
    from math_verify import verify

    known = read_gold(bare)
    found = ([] if prose and _WORDS.search(text) else _read(text)) or _read(prose, in_prose=True)
    return float(verify(known, found, allow_set_relation_comp=True) and not _are_small_and_differ(known, found))


@functools.lru_cache(maxsize=1024)  # the completions of a group have the same gold answer
def read_gold(bare: str) -> list[Any]:
    """Reads a gold answer with math-verify.

    Args:
        bare: the gold answer as `gold_text` returns it.

    Returns:
        The expressions that it may mean.

    Raises:
        UnreadableGold: if math-verify finds no expression in the gold answer.
    """
    expressions = _read(bare)
    if not expressions:
        raise UnreadableGold(
            f"the gold answer {bare!r:.100} ({len(bare)} characters) is neither words nor an expression that "
            f"math-verify can read, or it has more than {MAX_ANSWER_CHARS} characters"
        )
    return expressions


def _are_small_and_differ(known: list[Any], found: list[Any]) -> bool:
    """Returns whether two answers are different numbers that math-verify rounds to 0, such as 2^{-99} and 2^{-98}."""
    numbers = [one[0].doit().evalf() for one in (known, found) if getattr(one[0], "is_number", False)]
    return bool(
        len(numbers) == 2 and max(map(abs, numbers)) < SMALL and abs(numbers[0] - numbers[1]) > abs(numbers[0]) / 100
    )


def _last_member(answer: str) -> str:
    """Returns the last member of a chain such as ``f(2) = 3 + 2 = 5``; the whole answer if it is no chain."""
    *others, last = _EQUALS.split(answer)
    is_list = _SEPARATOR.search(re.sub(r"\([^()]*\)", "", "".join(others)))
    return answer if is_list else last.strip()


def _read(answer: str, in_prose: bool = False) -> list[Any]:
    """Reads a formula with math-verify, or searches for an answer in prose."""
    from math_verify import parse

    if len(answer) > MAX_ANSWER_CHARS:
        return []
    if in_prose:
        return parse(answer, fallback_mode="no_fallback")
    # math-verify's patterns for prose are not used, because they would find a number even in "? 5".
    return parse(rf"\boxed{{{answer}}}", [_without_units()], fallback_mode="no_fallback")


@functools.cache
def _without_units() -> Any:
    """Returns a configuration with which math-verify removes no units, since it would remove the ab of 3ab, too."""
    from math_verify import LatexExtractionConfig

    config = LatexExtractionConfig()
    return replace(config, normalization_config=replace(config.normalization_config, units=False))


_WORDS = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}")  # words, not commands such as \frac or \begin{pmatrix}
_INTEGER = re.compile(r"-?\d{1,15}")  # is compared without math-verify, which takes a millisecond
_EQUALS = re.compile(r"(?<![<>!:])=")
_SEPARATOR = re.compile(r"[,;]|(?<![a-zA-Z])(?:or|and)(?![a-zA-Z])")  # of a list
# The label of a choice, (B) or B. or \textbf{(B)}, and no second label: "(A) or (B)" chooses nothing. A mark and a
# space end a label, unlike in A(5), and no operator follows it, unlike in (A) + 5.
_LABEL = re.compile(
    r"(?:\(|\\(?:text(?:bf|rm)?|mathrm)\s*\{)*+([A-J])(?=[).}\s]*\Z|\}*[).:](?:[}\s~]|\\[ ,;]|\\q?quad))"
    r"(?!.*(?<![a-zA-Z\\])[A-HJ](?![a-zA-Z]))(?![).:}\s]*[+*/^=<>])(?!.*\bor\b)",
    re.DOTALL,
)


# ------------------------------------------------------------------------------------------------- inside a worker


def _prepare_worker() -> None:
    """Imports math-verify and compiles its patterns, so that the first task does not take longer than others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of each time-out
    score_answer(r"So $x=\boxed{\frac{1}{2}}$", "0.25")


# ------------------------------------------------------------------------------------------------------- the reward


@functools.cache  # a pool for all rewards with these arguments
def _workers(score: Callable[..., float], count: int) -> ProcessCalls:
    return ProcessCalls([score], count, prepare=_prepare_worker)


class MathAccuracyReward:
    r"""Reward function of TRL's form that compares the final answer of a completion with the gold answer.

    The reward is 1.0 for a right answer and 0.0 for a wrong or missing answer. If a row cannot be scored, the reward is
    NaN and the row is unscored.

    Example::

        trainer = DASHTrainer(..., reward_funcs=[MathAccuracyReward()])

    The column `answer` of the dataset contains the gold answers: numbers, LaTeX, words, or solutions that end in
    ``#### 72`` or ``\boxed{72}``. The answer of a completion is the first of these that the completion has: its last
    box, its last `####` line, the text after its last "answer is", its last formula or number. Text within
    `<think>...</think>` does not count. See `find_answer`.

    Args:
        timeout: seconds by the clock for one row. If a row takes longer, its worker is killed and its reward is NaN.
            math-verify itself stops after 5 s of reading or comparing an answer, which is then wrong (0.0).
        workers: number of worker processes. None = this process's share of the CPUs, at most 8. Rewards with the same
            number of workers share one pool. The pool starts with the first call, which takes about 1 s, and stops at
            `close()` of a reward that uses it, or at exit.
    """

    __name__ = "math_accuracy"  # TRL's metrics get this name
    score = staticmethod(score_answer)  # scores one row, in a worker process

    def __init__(self, *, timeout: float = TIMEOUT, workers: int | None = None):
        self.timeout = timeout
        self.workers = workers or default_workers()
        self._told: set[type] = set()

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
        """Scores a batch. Any thread may call it.

        Args:
            completions: [N] strings, or conversations `[{"role": "assistant", "content": ...}]`.
            answer: [N] gold answers, in the same order.
            kwargs: the other columns that TRL passes; not used.

        Returns:
            [N] rewards in the same order: 1.0, 0.0 or NaN.

        Raises:
            ValueError: if a gold answer is a dict, a date or the like.
        """
        arguments = [
            {"completion": completion_text(completion), "gold": plain_answer(gold)}
            for completion, gold in zip(completions, answer, strict=True)
        ]
        calls = call_all(_workers(self.score, self.workers).submit, self.score, arguments, timeout=self.timeout)
        for call in calls:
            if call.error is not None and type(call.error) not in self._told:  # once per type of exception
                self._told.add(type(call.error))
                logger.warning(
                    f"An answer could not be scored, so its reward is NaN and its row is unscored: "
                    f"{type(call.error).__name__}, {call.error!s:.300} (gold answer {call.arguments['gold']!r:.100}, "
                    f"the completion ends in {call.arguments['completion'][-100:]!r}). Further failures of this type "
                    "are not reported."
                )
        return [call.value if call.error is None else math.nan for call in calls]

    def close(self) -> None:
        """Stops the worker processes, which rewards with the same number of workers share. A call starts them again."""
        _workers(self.score, self.workers).close()


def completion_text(completion: Any) -> str:
    """Returns the text of a completion.

    Args:
        completion: a string, or a list of messages.

    Returns:
        The string itself, or the text of the last message of the assistant; empty if there is no such message.
    """
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion or [] if m.get("role", "assistant") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # the parts of a multi-modal message
        content = "".join(part.get("text") or "" for part in content)
    return content or ""
