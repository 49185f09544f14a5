r"""`MathAccuracyReward`: checks whether the final answer of a completion equals the gold answer mathematically.

::

    completion ──► find_answer ──► same text? ──► math-verify in a worker process ──► 1.0 | 0.0 | NaN
    gold ────────► parse_gold (cached) ──┘

The reward is NaN if the row cannot be scored, because the gold answer is unreadable, an exception or a time-out
occurred, or the worker crashed. The trainer leaves such a row out of training; NaN never counts as 0.

`answers.py` finds the answer in the completion, `spelling.py` rewrites it in the LaTeX that math-verify reads, and
math-verify (https://github.com/huggingface/Math-Verify) compares the two answers. This module deviates from math-verify
as follows:

- **Words.** math-verify reads "silent" as ``s*i*l*e*n*t``, which equals "listen". Here, answers in words are compared
  as text.
- **Choices.** math-verify reads "(B) 5" as a product. Here, B is the label of a choice: "(B) 5" is right for the gold
  answer B, and the gold answer "(B) 5" is equal to B, to 5 and to itself, but not to "(B) 6".
- **Bases and units.** math-verify ignores the base of a number (52_8 = 52_9) and units (5 km = 5 m). Here, if both
  answers have a base, the bases must be the same; if both have units of `UNITS`, the units must be the same. Units are
  not converted: 5000 m is not 5 km.
- **Variables.** math-verify removes letters at the end that could be units, such as the ab of 3ab and the t of 20 + 3t.
  Here, a variable remains (`split_units`).
- **Numbers.** math-verify reads ``12\,345`` as 12 + 345 and 2 1/2 as (2 + 1)/2. Here, they are 12345 and 5/2, and
  ``0.\overline{3}`` is 1/3. "5 million" is 5000000; other words for numbers, such as dozen, are not removed like units.
- **The imaginary unit.** math-verify reads the i of ``5i`` and of ``5 i`` as different symbols. Here, they are equal.
- **Chains.** In a chain such as ``3 = 5`` or ``5 \approx 7``, math-verify compares only the first or the last member
  with the gold answer. Here, members that are plain numbers (without variables, such as 5, 1/3 and ``\sqrt{2}``) must
  agree with each other up to rounding; otherwise the answer is wrong. If they agree, the answer is right if its last
  member or any plain number equals the gold answer: ``1/3 \approx 0.333`` is right for 1/3 and for 0.333.
- **Inequalities.** If the gold answer is an inequality, math-verify also accepts its set of solutions. If the gold
  answer is the set, math-verify does not accept the inequality by default. Here, it is accepted, too.
- **Percent.** math-verify reads ``50\%`` as 50 and as 0.5, so both are right. Here, a percentage with decimals is read
  in both ways, too: ``12.5\%`` as 12.5 and as 0.125.
- **Time-outs.** math-verify's own time-outs use SIGALRM, which fails outside the main thread, and a time-out counts as
  a wrong answer. They are switched off here; see "Limits" below.

As in math-verify, floats are equal if they agree to 6 decimals, an equation that ends in 5 (2x = 5) equals 5, and lists
have no order. Whether (a,b), {a,b} and "a, b" are equal is also left to math-verify, because the notation alone does
not show whether a problem asks for a point, a set or a list.

**Limits.** An answer is wrong (0.0) if reading and comparing it takes more CPU time than `CPU_SECONDS`, or more memory
or recursion than a worker has, or if the answer exceeds the limits of `answers.py`. But after a comparison exceeds the
limits of the worker, the gold answer is compared with a plain number. If this also exceeds them, the gold answer is the
cause, and the reward is NaN. The CPU time of other processes does not count, so a busy machine does not make a right
answer wrong. Signals enforce the CPU limit, but cannot interrupt some operations (those of gmpy2). Therefore a second
time-out, by the clock, kills the worker; the reward is then NaN.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dash_trl.rewards.answers import MAX_ANSWER_CHARS, MAX_DEPTH, Answer, find_answer, gold_text, has_words, is_readable
from dash_trl.rewards.spelling import (
    is_text_answer,
    same_text,
    same_words,
    split_chain,
    split_label,
    split_list,
    split_units,
    squeeze,
)
from dash_trl.workers import OutOfWork, call_all, default_workers, leave_workers, run_within, shared_workers

logger = logging.getLogger(__name__)

# Limit in seconds of CPU time to read the gold answer, and again to read and compare the answer. Of several hundred
# answers, the slowest took 0.7 s, the second slowest 0.25 s.
CPU_SECONDS = 4.0
# Limit in seconds by the clock for one row. A row may need three times `CPU_SECONDS`: to read the gold answer, to
# compare the answer, and to compare the gold answer with a plain number.
TIMEOUT = 30.0


# -------------------------------------------------------------------------------------------------- scoring one row


class UnreadableGold(ValueError):
    """Raised if a gold answer is neither words nor an expression that math-verify can handle within the limits.

    An answer with exactly the same text is scored nevertheless.
    """


@dataclass(frozen=True)
class Gold:
    """A gold answer, with the units and expressions that were read from it.

    Attributes:
        text: the answer as `gold_text` returns it.
        value: the answer without units, see `split_units`.
        units: the units of the answer.
        expressions: the expressions that math-verify finds in `value`.
    """

    text: str
    value: str
    units: frozenset[str]
    expressions: tuple[Any, ...]


def score_answer(completion: str, gold: str) -> float:
    """Scores the final answer of one completion. It must run in the main thread of a worker, because it uses signals.

    Args:
        completion: the text of a completion.
        gold: the gold answer, in any form that `gold_text` reads.

    Returns:
        1.0 if the final answer equals the gold answer, else 0.0.

    Raises:
        UnreadableGold: if the answer has another text than the gold answer, and the gold answer cannot be read or takes
            too much work to compare.
        Exception: any exception of sympy in the comparison. The row is then unscored.
    """
    bare, answer = gold_text(gold), find_answer(completion)
    if same_text(answer.text, bare):
        return 1.0
    (label, value), (chosen, rest) = split_label(bare), split_label(answer.text)
    if label and chosen and not (label == chosen and value and rest):
        return float(label == chosen)
    if label and value:
        bare, answer = value, replace(answer, text=rest)
    if is_text_answer(bare) and is_readable(bare):
        return float(_is_right(answer.text, functools.partial(same_words, bare)))
    known = parse_gold(bare)
    try:
        return float(run_within(CPU_SECONDS, _compare, known, answer))
    except (*TOO_MUCH_WORK, KeyError):  # math-verify has no entry for some pairs of relations, such as ≠ and >
        try:  # if even a plain number takes too long, the gold answer is the cause
            run_within(CPU_SECONDS, _verify, known, _read_formula("104729"))
        except TOO_MUCH_WORK as error:
            raise UnreadableGold(f"comparing with the gold answer {bare!r} takes too much work: {error}") from error
        return 0.0


@functools.lru_cache(maxsize=1024)  # the completions of a group have the same gold answer
def parse_gold(bare: str) -> Gold:
    """Reads a gold answer with math-verify.

    Args:
        bare: the gold answer as `gold_text` returns it.

    Returns:
        The gold answer with its value, units and expressions.

    Raises:
        UnreadableGold: if math-verify finds no expression in the gold answer, or exceeds the limits.
    """
    value, units = split_units(bare)
    try:
        expressions = run_within(CPU_SECONDS, _read_formula, value) if is_readable(bare) else []
    except TOO_MUCH_WORK as error:
        raise UnreadableGold(f"reading the gold answer {bare!r} takes too much work: {error}") from error
    if not expressions:
        raise UnreadableGold(
            f"the gold answer {bare!r:.100} ({len(bare)} characters) is not an expression that math-verify can read, "
            f"and not words; or it has more than {MAX_ANSWER_CHARS} characters or {MAX_DEPTH} levels of nested brackets"
        )
    return Gold(bare, value, frozenset(units), tuple(expressions))


def _compare(gold: Gold, answer: Answer) -> bool:
    """Compares the text of an answer or, if the text is not a formula, what math-verify finds in the prose."""
    if answer.prose:
        value, units = split_units(answer.text)
        is_formula = _INTEGER.fullmatch(value) or not has_words(value) and _read_formula(value)
        if not is_formula:
            return _same_units(gold, units) and _verify(gold, _parse(answer.prose))
    return _is_right(answer.text, functools.partial(_equals, gold))


def _is_right(answer: str, equals: Callable[[str], bool]) -> bool:
    """Returns whether an answer is right. A list is also right if each member is right, for example "1/2 or 0.5"."""
    members = split_list(answer)
    return equals(answer) or len(members) > 1 and all(map(equals, members))


def _equals(gold: Gold, answer: str) -> bool:
    from math_verify.grader import is_relation

    value, units = split_units(answer)
    if not _same_units(gold, units):
        return False
    if _INTEGER.fullmatch(value) and _INTEGER.fullmatch(gold.value):
        return int(value.replace(",", "")) == int(gold.value.replace(",", ""))
    if gold.text.isalpha() and same_words(gold.text, answer):
        return True  # a choice such as "A", or "II"
    members = split_list(value)
    if not all(map(_is_true, members)):
        return False
    candidates = [value]
    if len(members) == 1 and not any(map(is_relation, gold.expressions)):
        chain = split_chain(value)
        candidates = [*chain[-1:], *filter(_PLAIN_NUMBER.fullmatch, chain[:-1])]
    return any(_same_base(gold.text, one) and _verify(gold, _read_formula(one)) for one in candidates)


def _is_true(chain: str) -> bool:
    r"""Returns whether the plain numbers of a chain ``a = b \approx c`` are equal up to rounding."""
    numbers = [member for member in split_chain(chain) if _PLAIN_NUMBER.fullmatch(member)]
    if len(numbers) < 2:
        return True
    is_rounded = r"\approx" in chain or r"\simeq" in chain
    values = [(_number(one), _last_digit(one, is_rounded)) for one in numbers]
    return all(_agree(*values[0], *other) for other in values[1:])


def _agree(one: float | None, digit: float, other: float | None, other_digit: float) -> bool:
    """Returns whether two numbers are equal, or rounding or cutting off the digits of one gives the other.

    Args:
        one: a number. None = a number without a real value, which agrees with every number.
        digit: the place value of the last digit of `one`; 0 if `one` is exact.
        other: another number.
        other_digit: the place value of its last digit.
    """
    if one is None or other is None or math.isclose(one, other):
        return True
    # Cutting off removes less than one unit of the last digit that is left: 5.0 does not become 4.9.
    excess, within = abs(one) - abs(other), 1 - 1e-9
    is_cut = 0 < excess < within * other_digit or 0 < -excess < within * digit
    return is_cut or abs(one - other) <= max(digit, other_digit) / 2


def _number(plain: str) -> float | None:
    """Returns the value of a plain number, or None if it has no real value, such as the root of -1."""
    with suppress(IndexError, TypeError):
        return float(_read_formula(plain)[0].evalf())
    return None


def _last_digit(written: str, is_rounded: bool) -> float:
    r"""Returns the place value of the last digit of a number; 0 if the number is exact.

    For example, it is 0.01 for 3.14 and 1000 for ``1.2 \times 10^4``. It is 0 for 1/3, and for 3 if the chain has no
    ``\approx``.

    Args:
        written: the number as it is written.
        is_rounded: True = the chain has ``\approx``.
    """
    found = _DECIMAL.fullmatch(written)
    if not found or not (is_rounded or found["decimals"] or found["exponent"]):
        return 0.0
    return 10.0 ** (int(found["exponent"] or 0) - len(found["decimals"] or ""))


def _verify(gold: Gold, answer: Sequence[Any]) -> bool:
    from math_verify import verify

    options = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return any(verify(g, a, **options) for g in gold.expressions for a in answer)


def _read_formula(formula: str) -> list[Any]:
    r"""Reads a formula with math-verify, as LaTeX only.

    math-verify's other patterns are not used, because they would find a number even in "? 5". For ``50\%``, the result
    contains both 0.5 and 50. For inequalities that are joined by "or", it also contains the set of their solutions.
    """
    from sympy import FiniteSet, Rel, Union

    forms = [formula, formula[:-1].rstrip("\\ ")] if formula.endswith("%") else [formula]
    values = [value for form in forms for value in _parse(rf"\boxed{{{form}}}", extraction_config=[_without_units()])]
    if re.search(r"\bor\b", formula) and values and isinstance(values[0], FiniteSet):
        relations = values[0].args
        if all(isinstance(one, Rel) for one in relations):
            with suppress(NotImplementedError):  # for example several variables
                values.append(Union(*(one.as_set() for one in relations)))
    return values


@functools.cache
def _without_units() -> Any:
    """Returns a configuration with which math-verify removes no units, since it would remove the ab of 3ab, too."""
    from math_verify import LatexExtractionConfig

    config = LatexExtractionConfig()
    return replace(config, normalization_config=replace(config.normalization_config, units=False))


def _parse(text: str, **options: Any) -> list[Any]:
    from math_verify import parse

    # No time-out of math-verify, because it would return "no answer" instead of raising an error.
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
    """Imports math-verify and compiles its patterns, so that the first task does not take longer than others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify would warn that its time-outs are off
    score_answer(r"So $x=\boxed{\frac{1}{2}}$", "0.25")


# ------------------------------------------------------------------------------------------------------- the reward


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
            With less than three times `CPU_SECONDS`, the reward of a slow wrong answer may be NaN instead of 0.0; on a
            busy machine, the reward of a right answer may be NaN, too.
        workers: number of worker processes. None = this process's share of the CPUs, at most 8. Rewards with the same
            number of workers share one pool. The pool starts with the first call, which takes about 1 s, and stops at
            `close()` of the last reward that uses it, or at exit.
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
        """
        arguments = [
            {"completion": completion_text(completion), "gold": "" if gold is None else str(gold)}
            for completion, gold in zip(completions, answer, strict=True)
        ]
        workers = shared_workers([self.score], self.workers, _prepare_worker, self)
        calls = call_all(workers.submit, self.score, arguments, timeout=self.timeout)
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
        """Stops the worker processes, unless another reward uses them. A later call starts them again."""
        leave_workers(self)


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
