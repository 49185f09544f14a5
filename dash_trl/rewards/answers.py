r"""Where a completion gives its final answer: text only, no mathematics.

    completion ──► final_text ──► find_answer ──► Answer
                   (no thoughts)  boxes, else "#### ...", else "answer is ...", else a formula at the end, else prose

Everything here takes time linear in the text, whatever a degenerate completion repeats. An answer longer than
`MAX_ANSWER_CHARS` or nested deeper than `MAX_DEPTH` is no answer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dash_trl.rewards.spelling import UNITS, normalize_answer, split_list, split_units, squeeze, to_latex

TAIL_CHARS = 2_000  # of a completion without a marked answer: math-verify's patterns are quadratic in degenerate text
MAX_ANSWER_CHARS = 1_000  # reading so many costs math-verify half a second; MATH-500's longest answer has 53
MAX_DEPTH = 16  # brackets in brackets: 20 take math-verify 1.3 s, 60 take 8 s; MATH-500's deepest answer has 2

Span = tuple[int, int, str]  # start, end, content


@dataclass(frozen=True)
class Answer:
    """What a completion gives as its final answer.

    Attributes:
        text: the answer, as `normalize_answer` spells it; several that stand side by side (two boxes, "5 or 7") are a
            list "5, 7", which is a hedge unless the gold answer has several, too. Empty: there is none.
        prose: of an answer without marks, the text in which its number has to be found if other words surround it.
    """

    text: str = ""
    prose: str = ""


def final_text(completion: str) -> str:
    """What stands behind the last `</think>` and before a `<think>` that is never closed; without these tags, all.

    A template may have opened the thought in the prompt, so `</think>` need not have its `<think>`. (A thought that the
    prompt opened and that never ends has no tag, and reads as an answer.)
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def find_answer(completion: str) -> Answer:
    r"""The answer that a completion gives outside its thoughts.

    In this order: its last box, else its last `#### ...` line, else what follows the last "answer is" or "answer:",
    else a formula that it ends with, else its last `TAIL_CHARS` characters as prose. Boxes or formulas joined by "and",
    "or", commas or nothing count together, so that a completion cannot offer two answers and have the right one
    counted. Where no box is closed and one is open, the answer was cut off.
    """
    text = final_text(completion)
    boxes, is_cut_off = _scan_boxes(text)
    if boxes or is_cut_off:
        return _side_by_side(_runs(text, boxes)[-1] if boxes else [])
    line = last_hashes(text)
    if line is not None:
        return _in_clause(line, f"answer is {line}", _OR_AND)
    tail = text[-TAIL_CHARS:]
    if len(text) > TAIL_CHARS:  # from the start of a line if possible: a formula cut in two reads as another
        tail = tail[tail.find("\n") + 1 :]
    announced = [*re.finditer(r"(?i)\banswer\s*+(?:is|:)[:\s*]*+", tail)]
    if announced:
        rest = tail[announced[-1].end() :]
        runs = _runs(rest, list(_formulas(rest)))
        if runs and runs[0][0][0] == 0:
            return _side_by_side(runs[0])
        clause = _CLAUSE.match(rest)
        return _in_clause(clause[0] if clause else "", tail[announced[-1].start() :], _OR_AND)
    runs = _runs(tail, list(_formulas(tail)))
    if runs and not tail[runs[-1][-1][1] :].strip(" \t\n.*"):
        return _side_by_side(runs[-1])
    last_sentence = next(
        (sentence for sentence in reversed(re.split(r"[.;!?](?!\d)|\n", tail)) if sentence.strip()), ""
    )
    return _in_clause(last_sentence, tail, _OR)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}; None without one."""
    boxes = _scan_boxes(text)[0]
    return boxes[-1][2] if boxes else None


def last_hashes(text: str) -> str | None:
    """What follows the last `####`, the mark of GSM8K's final answers, on its line."""
    for rest in reversed(text.split("####")[1:]):
        line = rest.lstrip("# \t").partition("\n")[0].strip()
        if line:
            return line
    return None


def gold_text(gold: str) -> str:
    r"""The bare gold answer in `72`, `... #### 72`, `$72$`, `\boxed{72}` or a solution that ends in one of these."""
    boxes = _scan_boxes(gold)[0]
    in_boxes = ", ".join(dict.fromkeys(content for _, _, content in _runs(gold, boxes)[-1])) if boxes else ""
    return normalize_answer(last_hashes(gold) or in_boxes or gold)


def _scan_boxes(text: str) -> tuple[list[Span], bool]:
    r"""The complete, outermost \boxed{...} and \fbox{...}, braces balanced, and whether a box is never closed.

    `\boxed 5`, which MATH has too, ends at the next space or `$`. One pass: the stack holds what is open.
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
                boxes.pop()  # it was inside
            boxes.append((opened.start(), token.end(), text[opened.end() : token.start()].strip()))
    return boxes, any(opened["box"] for opened in stack)


def _formulas(text: str) -> Iterator[Span]:
    r"""Yields every $...$, $$...$$, \(...\) and \[...\], with a percent sign or a unit that stands behind it. Short."""
    for found in _FORMULA.finditer(text):
        content = "".join(group for group in found.group(2, 3, 4, 5) if group)
        behind = found["behind"]
        if behind and (not behind.isalpha() or behind.casefold() in UNITS):
            yield found.start(), found.end(), f"{content} {behind}"
        else:
            yield found.start(), found.end("formula"), content


def _runs(text: str, spans: Sequence[Span]) -> list[list[Span]]:
    """Boxes or formulas, those together which only separators stand between."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and _JOINT.fullmatch(text, runs[-1][-1][1], span[0]):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _side_by_side(run: Sequence[Span]) -> Answer:
    """The answers of a run; a repeated answer is one answer."""
    contents = list(dict.fromkeys(content for _, _, content in run))
    if not is_readable(", ".join(contents)):
        return Answer()
    return Answer(", ".join({squeeze(answer): answer for answer in map(normalize_answer, contents)}.values()))


def _in_clause(clause: str, prose: str, joint: re.Pattern[str]) -> Answer:
    """The answer in a clause: a formula, "5 or 7", or a number among words, of which `joint` may join several."""
    if not is_readable(clause):
        return Answer()
    answer = normalize_answer(clause.rstrip("! "))
    places = [_NUMBER.findall(place) for place in joint.split(clause)]
    offered = list(dict.fromkeys(numbers[-1] for numbers in places if numbers))  # of several in one place the last
    if len(offered) > 1 and has_words(answer):
        return Answer(", ".join(offered))
    return Answer(answer, prose=to_latex(prose[:TAIL_CHARS]))


def has_words(answer: str) -> bool:
    """Whether an answer holds other words than "or", "and", LaTeX commands and units: "72 since", not "x = 5 km"."""
    return any(re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", split_units(member)[0]) for member in split_list(answer))


def is_readable(answer: str) -> bool:
    """Whether an answer is within the limits of length and nesting."""
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
_OR = re.compile(r"\bor\b(?!.*,(?!\d))")  # in the last clause of a sentence
_OR_AND = re.compile(r"\bor\b|\band\b(?=\s*[-+]?\\?\$*\d)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?")
