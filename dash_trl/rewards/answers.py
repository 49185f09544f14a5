r"""Finds the final answer in the text of a completion. It compares no answers; `math.py` does that.

::

    completion ──► final_text ──► find_answer ──► Answer
                   (no thoughts)  boxes, else "#### ...", else "answer is ...", else a formula at the end, else prose

Every function takes time linear in the length of the text, also for a degenerate completion that repeats itself. An
answer that is longer than `MAX_ANSWER_CHARS` or nested deeper than `MAX_DEPTH` counts as no answer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dash_trl.rewards.spelling import UNITS, join_numbers, normalize_answer, split_list, split_units, squeeze, to_latex

# Number of characters at the end of a completion that are read if it has neither a box nor `####`. The number is small,
# because math-verify's patterns take quadratic time in degenerate text.
TAIL_CHARS = 2_000
# math-verify takes half a second to read an answer of this length. The longest answer of MATH-500 has 53 characters.
MAX_ANSWER_CHARS = 1_000
# Levels of nested brackets. math-verify takes 1.3 s for 20 levels and 8 s for 60. MATH-500's deepest answer has 2.
MAX_DEPTH = 16

Span = tuple[int, int, str]  # start, end, content


@dataclass(frozen=True)
class Answer:
    """The final answer of a completion.

    Attributes:
        text: the answer in the spelling of `normalize_answer`. Several adjacent answers (two boxes, "5 or 7") become a
            list "5, 7". A list is right only if the list equals the gold answer, or if each of its members does. Empty
            if the completion has no answer.
        prose: the text around the answer. If `text` has words, or math-verify cannot read it, math-verify searches
            `prose` for the answer instead. For a line `#### …`, `prose` is "answer is …", so that math-verify finds the
            number in the line. Empty if `text` comes from boxes or formulas, or is a list of numbers among words.
    """

    text: str = ""
    prose: str = ""


def final_text(completion: str) -> str:
    """Removes the thoughts from a completion.

    If the chat template opens the thought in the prompt, the completion has `</think>` without `<think>`. If such a
    thought never ends, the completion has neither tag, so the thought is read as if it were part of the answer.

    Args:
        completion: the text of a completion.

    Returns:
        The text after the last `</think>`, without a `<think>` that is never closed and the text after that. The whole
        text if it has neither tag.
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def find_answer(completion: str) -> Answer:
    r"""Finds the final answer in a completion, without its thoughts.

    The answer is the first of the following that the completion has:

    1. the last box, ``\boxed{...}``;
    2. the last line ``#### ...``;
    3. the text after the last "answer is" or "answer:";
    4. a formula at the end;
    5. the last sentence; if it has no number, the last `TAIL_CHARS` characters of the completion.

    Boxes or formulas with only "and", "or", commas or spaces between them count together as a list. So a completion
    cannot give two answers and get a reward for the right one. If the completion has a box that is never closed, and no
    complete box, the answer was cut off, and the completion has no answer.

    Args:
        completion: the text of a completion.

    Returns:
        The answer. Its `text` is empty if the completion has no answer.
    """
    text = final_text(completion)
    boxes, is_cut_off = _scan_boxes(text)
    if boxes or is_cut_off:
        return _side_by_side(_runs(text, boxes)[-1] if boxes else [])
    line = last_hashes(text)
    if line is not None:
        return _in_clause(line, f"answer is {line}", _OR_AND)
    tail = text[-TAIL_CHARS:]
    if len(text) > TAIL_CHARS:  # begin at a line if possible, because half a formula may look like another formula
        tail = tail[tail.find("\n") + 1 :]
    announced = [*re.finditer(r"(?i)\banswer\s*+(?:is|:)[:\s*]*+", tail)]
    if announced:
        rest = tail[announced[-1].end() :]
        runs = _runs(rest, list(_formulas(rest)))
        if runs and runs[0][0][0] == 0:
            return _side_by_side(runs[0])
        clause = _EXPLAINED.match(rest) or _CLAUSE.match(rest)
        return _in_clause(clause[0] if clause else "", tail[announced[-1].start() :], _OR_AND)
    runs = _runs(tail, list(_formulas(tail)))
    if runs and not tail[runs[-1][-1][1] :].strip(" \t\n.*"):
        return _side_by_side(runs[-1])
    last_sentence = next(
        (sentence for sentence in reversed(re.split(r"[.;!?](?!\d)|\n", tail)) if sentence.strip()), ""
    )
    # math-verify prefers a number after the word "answer", so it gets earlier sentences only if the last has no number.
    return _in_clause(last_sentence, last_sentence if re.search(r"\d", last_sentence) else tail, _OR)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``.

    Args:
        text: any text.

    Returns:
        The content without the box, or None if no box is complete.
    """
    boxes = _scan_boxes(text)[0]
    return boxes[-1][2] if boxes else None


def last_hashes(text: str) -> str | None:
    """Returns the text after the last `####`, which GSM8K writes before a final answer.

    Args:
        text: any text.

    Returns:
        The text after `####` in the last line that has such text; None if no line has it.
    """
    for rest in reversed(text.split("####")[1:]):
        line = rest.lstrip("# \t").partition("\n")[0].strip()
        if line:
            return line
    return None


def gold_text(gold: str) -> str:
    r"""Extracts the bare gold answer from a value of the column `answer`.

    Args:
        gold: ``72`` or ``$72$``, or a solution with a line ``#### 72`` or with ``\boxed{72}``.

    Returns:
        The answer in the spelling of `normalize_answer`: here ``72``.
    """
    boxes = _scan_boxes(gold)[0]
    in_boxes = ", ".join(dict.fromkeys(content for _, _, content in _runs(gold, boxes)[-1])) if boxes else ""
    return normalize_answer(last_hashes(gold) or in_boxes or gold)


def _scan_boxes(text: str) -> tuple[list[Span], bool]:
    r"""Returns the outermost complete ``\boxed{...}`` and ``\fbox{...}``, and a bool, True = a box is never closed.

    The MATH dataset also has ``\boxed 5``; such a box ends at the next space or ``$``. The text is read once; the stack
    holds the open boxes and braces.
    """
    boxes: list[Span] = []
    stack: list[re.Match[str]] = []
    for token in _BOX_TOKEN.finditer(text):
        if token["bare"]:
            boxes.append((token.start(), token.end(), token["bare"]))
        elif token["box"] or token[0] == "{":
            stack.append(token)
        elif token[0] == "}" and stack and (opened := stack.pop())["box"]:
            while boxes and boxes[-1][0] > opened.start():
                boxes.pop()  # this box lies inside the box that just closed
            boxes.append((opened.start(), token.end(), text[opened.end() : token.start()].strip()))
    return boxes, any(opened["box"] for opened in stack)


def _formulas(text: str) -> Iterator[Span]:
    r"""Yields every ``$...$``, ``$$...$$``, ``\(...\)`` and ``\[...\]``, with a percent sign or unit that follows."""
    for found in _FORMULA.finditer(text):
        content = "".join(group for group in found.group(2, 3, 4, 5) if group)
        behind = found["behind"]
        if behind and (not behind.isalpha() or behind.casefold() in UNITS):
            yield found.start(), found.end(), f"{content} {behind}"
        else:
            yield found.start(), found.end("formula"), content


def _runs(text: str, spans: Sequence[Span]) -> list[list[Span]]:
    """Groups boxes or formulas into runs: adjacent spans with only "and", "or", commas or spaces between them."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and _JOINT.fullmatch(text, runs[-1][-1][1], span[0]):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _side_by_side(run: Sequence[Span]) -> Answer:
    """Returns the answers of a run as one list; a repeated answer counts once."""
    contents = list(dict.fromkeys(content for _, _, content in run))
    if not is_readable(", ".join(contents)):
        return Answer()
    return Answer(", ".join({squeeze(answer): answer for answer in map(normalize_answer, contents)}.values()))


def _in_clause(clause: str, prose: str, joint: re.Pattern[str]) -> Answer:
    """Returns the answer of a clause.

    If the clause has words, and `joint` separates several different numbers in it, `text` of the answer is the list of
    these numbers. Otherwise `text` is the whole clause, and `prose` is given with it.

    Args:
        clause: the text of the clause.
        prose: see `Answer`.
        joint: pattern of the words between two answers.
    """
    if not is_readable(clause):
        return Answer()
    answer = normalize_answer(clause.rstrip("! "))
    places = [_NUMBER.findall(place) for place in joint.split(clause)]
    offered = list(dict.fromkeys(numbers[-1] for numbers in places if numbers))  # the last number of each piece
    if len(offered) > 1 and has_words(answer):
        return Answer(", ".join(offered))
    return Answer(answer, prose=join_numbers(to_latex(prose[:TAIL_CHARS])))


def has_words(answer: str) -> bool:
    """Returns whether an answer has words other than "or", "and", LaTeX commands and units.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        True for "72 since", False for "x = 5 km".
    """
    return any(re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", split_units(member)[0]) for member in split_list(answer))


def is_readable(answer: str) -> bool:
    """Returns whether an answer is within `MAX_ANSWER_CHARS` and `MAX_DEPTH`.

    Args:
        answer: any text.

    Returns:
        False if the answer is too long, or its brackets are nested too deep.
    """
    depths = accumulate(1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", answer))
    return len(answer) <= MAX_ANSWER_CHARS and max(depths, default=0) <= MAX_DEPTH


_BOX_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s*+\{)|\\{1,2}(?:boxed|fbox)\s++(?P<bare>[^\s${}]++)|\\.|[{}]", re.DOTALL
)
_JOINT = re.compile(
    r"(?:[\s$,;&~*]|\\[()\[\] ,;:!]|\\q?quad(?![a-zA-Z])|\\text\s*+\{\s*+(?:and|or)?\s*+\}"
    r"|\b(?:and|or|either|maybe|perhaps|possibly)\b)*+"
)
_FORMULA = re.compile(
    r"(?P<formula>(?<!\\)(?:\$\$(.+?)\$\$|\$((?:[^$\\]|\\.)+)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]))"
    r"(?:\s*(?P<behind>\\?%|[a-zA-Z]+(?=\s*(?:[.;!*]|$))))?",
    re.DOTALL,
)
_CLAUSE = re.compile(r"(?:\\.|[^.,;\n\\]|[.,](?=\d)|,(?=\s*(?:or\b|and\b|[-+]?\\?\$?\d)))*")
# A number at the beginning, before a reason or a list of its parts in brackets. The numbers of these are no answers.
_EXPLAINED = re.compile(
    r"(?!.*\bor\b)[-+]?\\?\$?\d[\d.,]*"
    r"(?:(?= +(?:because|since)\b)|(?: +[a-zA-Z]+){1,3}(?= \(\d[^()]*\)\**(?:[.\n]|\Z)))"
)
_OR = re.compile(r"\bor\b(?!.*,(?!\d))")  # an "or" in the last clause of a sentence, so no comma follows the "or"
_OR_AND = re.compile(r"\bor\b|\band\b(?=\s*[-+]?\\?\$*\d)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?")
