r"""The accuracy reward: is the final answer of a completion mathematically equal to the gold answer?

    completion ──► find_answer ──► same text? ──► math-verify in a worker process ──► 1.0 | 0.0 | NaN
    gold ────────► parse_gold (cached) ──┘

NaN means "could not be scored" (unreadable gold, exception, time-out, crash) and is never 0: the trainer unscores such
a row. `answers.py` finds the answer, `spelling.py` spells it. The comparison is math-verify's
(https://github.com/huggingface/Math-Verify), with these deviations:

- it reads the word "silent" as s*i*l*e*n*t, which equals "listen"; answers in words are compared as text here;
- it ignores the base of a number, so that 52_8 = 52_9, and units, so that 5 km = 5 m; where both sides name a base, or
  a unit that is known here, these must agree. Nothing is converted: 5000 m is not 5 km;
- it takes the first of 3 = 5 or 5 \approx 7, or the last; here the plain numbers of such a chain must agree, rounded as
  they are written, else it is false and wrong. The last member counts, and every plain number: 1/3 \approx 0.333 is
  right for 1/3 and for 0.333;
- an inequality equals the set of its solutions, also where the gold answer is the set;
- 50 and 0.5 both equal 50\%, as there, but so do 12.5 and 0.125 equal 12.5\%;
- its own timeouts use SIGALRM, count as a wrong answer and fail outside the main thread; here see below.

math-verify decides that floats agree to 6 decimals, that an equation ending in 5 (2x = 5) equals 5, that lists have no
order, and which of (a,b), {a,b} and "a, b" are the same: the problem says which is meant.

**Limits.** A completion whose answer takes more than `CPU_SECONDS` to read and compare, more memory or recursion than a
worker has, or is longer or deeper than the limits in `answers.py`, is wrong (0.0). If comparing the gold answer alone
costs as much, the row is NaN. CPU time counts no other process, so a busy machine makes no right answer wrong; the
time-out by the clock ends what no signal can (gmpy2's operations), and leaves NaN.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dash_trl.rewards.answers import MAX_ANSWER_CHARS, MAX_DEPTH, Answer, find_answer, gold_text, has_words, is_readable
from dash_trl.rewards.spelling import (
    is_text_answer,
    same_text,
    same_words,
    split_chain,
    split_list,
    split_units,
    squeeze,
)
from dash_trl.workers import OutOfWork, call_all, default_workers, run_within, shared_workers

logger = logging.getLogger(__name__)

CPU_SECONDS = 4.0  # to read or to compare one answer; of some hundred answers, the dearest took 0.7 s, the next 0.25 s
TIMEOUT = 30.0  # seconds by the clock for a row: more than twice the CPU time that reading, comparing and judging take


# -------------------------------------------------------------------------------------------------- scoring one row


class UnreadableGold(ValueError):
    """The gold answer means nothing to math-verify and is not words: only its own text can be scored against it."""


@dataclass(frozen=True)
class Gold:
    """A gold answer: as `gold_text` gives it, its value and units (see `split_units`), what math-verify reads in it."""

    text: str
    value: str
    units: frozenset[str]
    expressions: tuple[Any, ...]


def score_answer(completion: str, gold: str) -> float:
    """1.0 if the completion's final answer equals the gold answer, else 0.0. Runs in a worker's main thread.

    Raises:
        UnreadableGold: see `parse_gold`; not for an answer of the same text.
        Exception: whatever sympy raises while it compares; the row is then unscored.
    """
    bare, answer = gold_text(gold), find_answer(completion)
    if same_text(answer.text, bare):
        return 1.0
    if is_text_answer(bare) and is_readable(bare):
        return float(_is_right(answer.text, functools.partial(same_words, bare)))
    known = parse_gold(bare)
    try:
        return float(run_within(CPU_SECONDS, _compare, known, answer))
    except TOO_MUCH_WORK:
        try:  # whether the gold answer is to blame: beside a plain number
            run_within(CPU_SECONDS, _verify, known, _read_formula("104729"))
        except TOO_MUCH_WORK as error:
            raise UnreadableGold(f"the gold answer {bare!r} is too much work to compare with: {error}") from error
        return 0.0


@functools.lru_cache(maxsize=1024)  # a gold answer comes once per completion of its group
def parse_gold(bare: str) -> Gold:
    """A gold answer, read.

    Raises:
        UnreadableGold: if math-verify finds nothing in it, or only beyond the limits of work.
    """
    value, units = split_units(bare)
    try:
        expressions = run_within(CPU_SECONDS, _read_formula, value) if is_readable(bare) else []
    except TOO_MUCH_WORK as error:
        raise UnreadableGold(f"the gold answer {bare!r} is too much work to read: {error}") from error
    if not expressions:
        raise UnreadableGold(
            f"the gold answer {bare!r:.100} ({len(bare)} characters) is neither an expression that math-verify reads "
            f"nor words, or it has more than {MAX_ANSWER_CHARS} characters or brackets nested deeper than {MAX_DEPTH}"
        )
    return Gold(bare, value, frozenset(units), tuple(expressions))


def _compare(gold: Gold, answer: Answer) -> bool:
    if answer.prose:
        value, units = split_units(answer.text)
        is_formula = _INTEGER.fullmatch(value) or not has_words(value) and _read_formula(value)
        if not is_formula:
            return _same_units(gold, units) and _verify(gold, _parse(answer.prose))
    return _is_right(answer.text, functools.partial(_equals, gold))


def _is_right(answer: str, equals: Callable[[str], bool]) -> bool:
    """Whether an answer is the gold answer, or each member of its list is (1/2 or 0.5)."""
    members = split_list(answer)
    return equals(answer) or len(members) > 1 and all(map(equals, members))


def _equals(gold: Gold, answer: str) -> bool:
    from math_verify.grader import is_relation

    value, units = split_units(answer)
    if not _same_units(gold, units):
        return False
    if _INTEGER.fullmatch(value) and _INTEGER.fullmatch(gold.value):
        return int(value.replace(",", "")) == int(gold.value.replace(",", ""))
    if len(gold.text) == 1 and gold.text.isalpha() and same_words(gold.text, answer):
        return True  # the choice "A"
    members = split_list(value)
    if not all(map(_is_true, members)):
        return False
    candidates = [value]
    if len(members) == 1 and not any(map(is_relation, gold.expressions)):
        chain = split_chain(value)
        candidates = [*chain[-1:], *filter(_PLAIN_NUMBER.fullmatch, chain[:-1])]
    return any(_same_base(gold.text, one) and _verify(gold, _read_formula(one)) for one in candidates)


def _is_true(chain: str) -> bool:
    r"""Whether the plain numbers in a = b \approx c agree, as far as they are written."""
    numbers = [member for member in split_chain(chain) if _PLAIN_NUMBER.fullmatch(member)]
    if len(numbers) < 2:
        return True
    is_rounded = r"\approx" in chain or r"\simeq" in chain
    values = [(_number(one), _last_digit(one, is_rounded)) for one in numbers]
    return all(_agree(*values[0], *other) for other in values[1:])


def _agree(one: float | None, digit: float, other: float | None, other_digit: float) -> bool:
    """Whether one number is the other, rounded or cut at its last digit."""
    if one is None or other is None or math.isclose(one, other):
        return True
    excess, within = abs(one) - abs(other), 1 - 1e-9  # a whole digit is no rounding: 4.9 is not 5
    is_cut = 0 < excess < within * other_digit or 0 < -excess < within * digit
    return is_cut or abs(one - other) <= max(digit, other_digit) / 2


def _number(plain: str) -> float | None:
    """The value of a plain number; None for what is none after all, like the root of -1."""
    with suppress(IndexError, TypeError):
        return float(_read_formula(plain)[0].evalf())
    return None


def _last_digit(written: str, is_rounded: bool) -> float:
    r"""What the last digit counts: 0.01 in 3.14, 1000 in 1.2 \times 10^4; 0 in 1/3, and in 3 without an \approx."""
    found = _DECIMAL.fullmatch(written)
    if not found or not (is_rounded or found["decimals"] or found["exponent"]):
        return 0.0
    return 10.0 ** (int(found["exponent"] or 0) - len(found["decimals"] or ""))


def _verify(gold: Gold, answer: Sequence[Any]) -> bool:
    from math_verify import verify

    options = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return any(verify(g, a, **options) for g in gold.expressions for a in answer)


def _read_formula(formula: str) -> list[Any]:
    r"""As LaTeX only: in "? 5", which is none, math-verify would find the number.

    Of 50\% it gives the share and the number, of inequalities joined by "or" also the set of their solutions.
    """
    from math_verify import LatexExtractionConfig
    from sympy import FiniteSet, Rel, Union

    forms = [formula, formula[:-1].rstrip("\\ ")] if formula.endswith("%") else [formula]
    values = [
        value for form in forms for value in _parse(rf"\boxed{{{form}}}", extraction_config=[LatexExtractionConfig()])
    ]
    if re.search(r"\bor\b", formula) and values and isinstance(values[0], FiniteSet):
        relations = values[0].args
        if all(isinstance(one, Rel) for one in relations):
            with suppress(NotImplementedError):  # of several variables, say
                values.append(Union(*(one.as_set() for one in relations)))
    return values


def _parse(text: str, **options: Any) -> list[Any]:
    from math_verify import parse

    # No timeout of its own: it would turn into "no answer".
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True, **options)


def _same_units(gold: Gold, units: set[str]) -> bool:
    return not gold.units or not units or gold.units == units


def _same_base(gold: str, answer: str) -> bool:
    bases = [found[1] for found in map(_BASE.search, (squeeze(gold), squeeze(answer))) if found]
    return len(set(bases)) < 2


TOO_MUCH_WORK = (OutOfWork, RecursionError, MemoryError, OverflowError)
_INTEGER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d{1,15})")
_PLAIN_NUMBER = re.compile(
    r"(?=.*(?:\d|\\pi))"
    r"(?:[-+*/^(){}.!\d\s]|,\d{3}(?!\d)|\\(?:[dt]?frac|sqrt|times|cdot|div|pi|left|right|[,!; ])(?![a-zA-Z]))++"
)
_DECIMAL = re.compile(
    r"[-+]?\d*(?:\.(?P<decimals>\d*))?(?:\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*(?P<exponent>-?\d{1,3})\s*\}?)?"
)
_BASE = re.compile(r"^-?[0-9A-Za-z]+_\{?(?:\\text\{)?(\d+)\}*\$?$")


# ------------------------------------------------------------------------------------------------- inside a worker


def _prepare_worker() -> None:
    """Pays for the imports and the patterns before the first task."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we switched its timeouts off
    score_answer(r"So $x=\boxed{\frac{1}{2}}$", "0.25")


# ------------------------------------------------------------------------------------------------------- the reward


class MathAccuracyReward:
    r"""Reward function for TRL: 1.0 for a right final answer, 0.0 for a wrong or missing one, NaN if that is unknown.

        trainer = DASHTrainer(..., reward_funcs=[MathAccuracyReward()])

    The data set's column `answer` holds the gold answers: numbers, LaTeX, words, or solutions that end in `#### 72` or
    \boxed{72}. A completion's answer is its last box, else its last `####` line, else "... the answer is 72", else the
    last formula or number (see `find_answer`), outside `<think>...</think>`.

    Args:
        timeout: seconds by the clock that one row may take before its worker is killed and the row is NaN. Less than
            three times `CPU_SECONDS` can make wrong rows, and on a busy machine right ones, NaN.
        workers: processes; default: this process's share of the CPUs, at most 8. Rewards with the same number share
            them. They start at the first call (~1 s) and stop at `close()` of the last reward or at exit.
    """

    __name__ = "math_accuracy"  # TRL names its metrics after it
    score = staticmethod(score_answer)  # of one row, in a worker

    def __init__(self, *, timeout: float = TIMEOUT, workers: int | None = None):
        self.timeout = timeout
        self.workers = workers or default_workers()
        self._told: set[type] = set()

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
        """Scores a batch; may be called from any thread.

        Args:
            completions: strings, or conversations `[{"role": "assistant", "content": ...}]`.
            answer: the gold answers, one per completion.
            kwargs: TRL's other columns, unused.
        Returns:
            One of 1.0, 0.0 and NaN per completion, in order.
        """
        arguments = [
            {"completion": completion_text(completion), "gold": "" if gold is None else str(gold)}
            for completion, gold in zip(completions, answer, strict=True)
        ]
        workers = shared_workers(self.workers, _prepare_worker, self)
        calls = call_all(workers.submit, self.score, arguments, timeout=self.timeout)
        for call in calls:
            if call.error is not None and type(call.error) not in self._told:  # the trainer's metrics count them all
                self._told.add(type(call.error))
                logger.warning(
                    f"An answer could not be scored and is NaN: {type(call.error).__name__}, {call.error!s:.300} (gold "
                    f"answer {call.arguments['gold']!r:.100}, completion ends in "
                    f"{call.arguments['completion'][-100:]!r}). Further failures of this kind are not reported."
                )
        return [call.value if call.error is None else math.nan for call in calls]

    def close(self) -> None:
        """Stops the worker processes unless another reward uses them. A later call starts them again."""
        shared_workers(self.workers, _prepare_worker, self).leave(self)


def completion_text(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last message that the assistant wrote."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion or [] if m.get("role", "assistant") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # multi-modal parts
        content = "".join(part.get("text") or "" for part in content)
    return content or ""
