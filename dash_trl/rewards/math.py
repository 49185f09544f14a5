"""`MathAccuracyReward`: checks whether the final answer of a completion equals the gold answer mathematically.

::

    completion ──► find_answer ──► same text? ──► same words? ──► math-verify ──► 1.0 | 0.0 | NaN
    gold ────────► gold_text ─────► read_gold (cached) ──────────────┘

As in math-verify (https://github.com/huggingface/Math-Verify), the last member of a chain of equations counts, lists
have no order, and units are ignored. Deviations, whose verdicts `docs/results/rewards.md` lists: equal numbers are
equal exactly, but a decimal with six or more digits may round a fraction; brackets around several members, primes and
the bases of numbers must be the same; words that are left make an answer no number.

Rows are scored in worker processes, because math-verify's time-outs use SIGALRM, which needs a process's main thread.
Some operations (those of gmpy2) ignore signals, so a second time-out kills the worker.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dash_trl.rewards.answers import LABEL, MAX_ANSWER_CHARS, WORDS, find_answer, gold_text, plain_answer
from dash_trl.rewards.spelling import as_words, is_words
from dash_trl.workers import ProcessCalls, call_all, default_workers

logger = logging.getLogger(__name__)

# Limit in seconds by the clock for one row. math-verify's own limits may add up to this for a row with a hard answer.
TIMEOUT = 30.0


# -------------------------------------------------------------------------------------------------- scoring one row


class UnreadableGold(ValueError):
    """A gold answer is neither words nor an expression that math-verify can read.

    An answer with exactly the same text is scored nevertheless.
    """


def score_answer(completion: str, gold: str) -> float:
    """Score the final answer of one completion: 1.0 if it equals the gold answer, else 0.0. Runs in a worker's main
    thread.
    """
    bare = gold_text(gold)
    if _NUMBERS.fullmatch(bare):  # a list, so each comma separates
        completion = re.sub(r"(?<=\d),(?=\d)", ", ", completion)
    if _OTHER_HALF.search(f"{gold}\0{completion[-60:]}"):
        return 0.0
    text = find_answer(completion)
    if text == bare and any(map(str.isalnum, bare)):
        return 1.0
    label = LABEL.match(bare)
    chosen = LABEL.match(text)
    if label and chosen:
        return float(label[1] == chosen[1])
    if label:
        bare = bare[label.end() :] or bare
    elif chosen:
        text = text[chosen.end() :]
    if is_words(bare):
        return float(as_words(text) == as_words(bare))
    if "=" not in bare:
        text = _CHAIN.sub("", text).strip()
    if _INTEGER.fullmatch(text) and _INTEGER.fullmatch(bare):
        return float(int(text) == int(bare))
    read_gold(bare)  # an error if it cannot be read
    if _APART.search(text) or WORDS.search(text) and not WORDS.search(bare) or not _same_kind(bare, text):
        return 0.0
    signs = [r"\%", ""][: 1 + ("%" in bare + text)]  # 50 % is 0.5, and 50 percent of something
    return float(any(_are_equal(*(one.replace(r"\%", sign) for one in (bare, text))) for sign in signs))


@functools.lru_cache(maxsize=1024)  # the completions of a group have the same gold answer
def read_gold(bare: str) -> list[Any]:
    """Read a gold answer of `gold_text`: return the expressions that it may mean, or raise `UnreadableGold`."""
    expressions = _read(bare)
    if not expressions:
        raise UnreadableGold(
            f"the gold answer {bare!r:.100} ({len(bare)} characters) is neither words nor an expression that "
            f"math-verify can read, or it has more than {MAX_ANSWER_CHARS} characters"
        )
    return expressions


def _same_kind(gold: str, answer: str) -> bool:
    """Compare brackets around several members, and bases. An answer may leave out all but [ ]."""
    (known, bases), (found, others) = ([pattern.findall(one) for pattern in _KINDS] for one in (gold, answer))
    optional = {("(", ")"), (r"\{", r"\}")} if not found else {(r"\{", r"\}")} if not known else set()
    brackets = sorted(known) == sorted(found) or {*known, *found} <= optional or not ("," in gold and "," in answer)
    return brackets and (bases == others or not others)


def _are_equal(gold: str, answer: str) -> bool:
    """Compare two answers with math-verify, and exactly.

    Decimals are exact, too, but six digits of a fraction are equal to the fraction. `a ≈ b` is a, if b is within 5 %.
    """
    from math_verify import verify

    known = read_gold(gold)
    found, *about = map(_read, answer.split(r"\approx"))
    if not verify(known, found, allow_set_relation_comp=True):
        return False
    for one in about:
        value, *rounded = map(_exact, [found[0], *one[:1]])
        if not rounded or str(abs(value - rounded[0]) <= abs(value) / 20) != "True":  # it may be a relation
            return False
    if _ROUNDED.fullmatch(f"{gold} {answer}"):
        return True
    return verify(_exact(known[0]), _exact(found[0]), allow_set_relation_comp=True, numeric_precision=DIGITS)


def _exact(value: Any) -> Any:
    """Return an expression with fractions instead of decimals."""
    from sympy import Float, Rational

    exact = value.xreplace({digits: Rational(str(digits)) for digits in value.atoms(Float)})
    return exact.doit() if getattr(exact, "is_number", False) else exact


def _read(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    if len(answer) > MAX_ANSWER_CHARS:
        return []
    config = LatexExtractionConfig()
    # math-verify would remove the ab of 3ab, too, as a unit.
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    # math-verify's patterns for prose are not used, because they would find a number even in "? 5".
    return parse(rf"\boxed{{{answer}}}", [config], fallback_mode="no_fallback")


# A fraction, and at least six digits of it.
_FRACTION = r"-?(?:\\frac\{\d+\}\{\d+\}|\d+/\d+)"
_DIGITS = r"-?\d*\.(?=\d{6})\d{0,2}[1-9]\d+"
_ROUNDED = re.compile(f"{_FRACTION} {_DIGITS}|{_DIGITS} {_FRACTION}")
_INTEGER = re.compile(r"-?\d{1,15}")  # is compared without math-verify, which takes a millisecond
# All but the last member of a chain; the whole of an equation such as x^2 = 10, which is no value.
_CHAIN = re.compile(
    r"^\s*(?:(?:[-|]|\d+\s*(?:\^|[-+(]\s*\d*)?|\\sqrt(?:\[\d+\])?\s*|\\frac\s*\{?\d+\}?|e\^|\\l(?:floor|ceil)"
    r"|\\(?:sin|cos|tan|log(?:_\{?\d+\}?)?|ln)\s*)\s*\{?(?!x \d)[a-z](?![a-zA-Z])|[a-zA-Z]*[a-zA-Z]\s*\^"
    r"|\(?[a-z]\s*(?:/|!|[-+]\s*\d)|\\frac\s*\{[a-z]\}\s*\{?\d)"
    r"[^=,<>!:]*=(?!.*(?<![a-zA-Z\\])[a-df-hj-z](?![a-zA-Z])).*"
    r"|^(?:(?!\b(?:or|and|but|not|no|wrong)\b|\\(?:ne|not|lnot|land|wedge|q?quad|\\)|[<>])[^,;()]|\([^()]*\))*"
    r"(?<![<>!:/])=(?!/)"
)
_NUMBERS = re.compile(r"-?\d+(?:,\s*-?\d+)+")
# A gold answer "5 a.m.", and a completion that ends in "5 p.m."; as a unit, this is ignored if one is without it.
_HALF = r"\d\W*(?:text\W*)?"
_OTHER_HALF = re.compile(rf"(?is){_HALF}(?:a\.?m\W*\0.*{_HALF}p|p\.?m\W*\0.*{_HALF}a)\.?m\b(?!.*{_HALF}[ap]\.?m\b)")
# 1 2 3 is no product, 1 ≈ 2, 3 no value.
_APART = re.compile(r"(?<![\w^.])(?<!frac )\d+\s+\d|\\approx.*[,;]|\\q?quad\s*[a-z]\s*=")
# Brackets around several members; bases of numbers, times and dates, since 1:15 and 2:30 are no fractions.
_KINDS = [
    re.compile(r"(\(|\[|\\\{)(?:[^()\[\]\\]|\\[^{}])*?,(?:[^()\[\]\\]|\\[^{}])*?(\)|\]|\\\})"),
    re.compile(r"\d_\{?(\d+)|(^\d?\d:\d\d\b|^\d{4}-\d\d-\d\d$)"),
]
DIGITS = 100  # with which irrational numbers are compared; fractions are compared exactly


# ------------------------------------------------------------------------------------------------- inside a worker


def _prepare_worker() -> None:
    """Import math-verify and compile its patterns, so that the first task takes no longer than others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of each time-out
    score_answer(r"So $x=\boxed{\frac{1}{2}}$", "0.25")


# ------------------------------------------------------------------------------------------------------- the reward


@functools.cache  # a pool for all rewards with these arguments
def _workers(score: Callable[..., float], count: int) -> ProcessCalls:
    return ProcessCalls([score], count, prepare=_prepare_worker)


class MathAccuracyReward:
    r"""Reward function of TRL's form that compares the final answer of a completion with the gold answer.

    The reward is 1.0 for a right answer, 0.0 for a wrong or missing one, and NaN (unscored) if it cannot be told.

    Example::

        trainer = DASHTrainer(..., reward_funcs=[MathAccuracyReward()])

    The column `answer` of the dataset contains the gold answers: numbers, LaTeX, words, or solutions that end in ``####
    72`` or ``\boxed{72}``. `find_answer` describes what the answer of a completion is.

    Args:
        timeout: seconds by the clock for one row; then its worker is killed and its reward is NaN. What takes
            math-verify more than 5 s is wrong.
        workers: number of worker processes. None = this process's share of the CPUs, at most 8. Rewards with the same
            number share one pool, until `close()` of one of them, or exit.
    """

    __name__ = "math_accuracy"  # TRL's metrics get this name
    score = staticmethod(score_answer)  # scores one row, in a worker process

    def __init__(self, *, timeout: float = TIMEOUT, workers: int | None = None):
        self.timeout = timeout
        self.workers = workers or default_workers()
        self._told = set[type]()

    def math_accuracy(self, completion: object, answer: object) -> float:
        """Score one completion. `reward_pipeline` takes this method as the reward function."""
        (score,) = self([completion], [answer])
        return score

    def __call__(self, completions: Sequence[object], answer: Sequence[object], **kwargs: object) -> list[float]:
        """Score a batch. Any thread may call it.

        Args:
            completions: [N] strings or conversations.
            answer: [N] gold answers, in the same order.

        Returns:
            [N]: 1.0, 0.0 or NaN.

        Raises:
            ValueError: if a gold answer is a dict, a date or the like.
        """
        arguments = [
            {"completion": completion_text(completion), "gold": plain_answer(gold)}
            for completion, gold in zip(completions, answer, strict=True)
        ]
        outcomes = call_all(_workers(self.score, self.workers), self.score, arguments, timeout=self.timeout)
        for outcome, known in zip(outcomes, arguments, strict=True):
            if isinstance(outcome, Exception) and type(outcome) not in self._told:  # once per type of exception
                self._told.add(type(outcome))
                logger.warning(
                    f"An answer could not be scored, so its reward is NaN and its row is unscored: "
                    f"{type(outcome).__name__}, {outcome!s:.300} (gold answer {known['gold']!r:.100}, the completion "
                    f"ends in {known['completion'][-100:]!r}). Further failures of this type are not reported."
                )
        return [math.nan if isinstance(outcome, Exception) else outcome for outcome in outcomes]

    def close(self) -> None:
        """Stop the worker processes, which rewards may share. A call starts them again."""
        _workers(self.score, self.workers).close()


def completion_text(completion: Any) -> str:
    """Return the text of a completion: a string, or the last message of the assistant in a conversation, else ""."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion or [] if m.get("role", "assistant") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # the parts of a multi-modal message
        content = "".join(part.get("text") or "" for part in content)
    return content or ""
