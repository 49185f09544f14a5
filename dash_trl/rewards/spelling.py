r"""Brings answers to one spelling. It compares no values; `math.py` does that.

Each rule changes a verdict of math-verify, rightly, on the answers of GSM8K or MATH-500 or on texts of a model
(`docs/results/rewards.md` has the table). All functions take time linear in the length of the text.
"""

import re
import unicodedata
from decimal import Decimal


def normalize_answer(answer: str) -> str:
    r"""Rewrites an answer in the LaTeX that math-verify reads, so that equal answers often get equal text.

    - Unicode becomes LaTeX (see `_to_latex`), and so do pi, sqrt(2) and 1e3.
    - Dollars that delimit a formula, bold print, an "=" at the start and a full stop at the end are removed.
    - 12 345, ``12\,345`` and 12,345 become 12345, and 5 million becomes 5000000. ``2 1/2`` becomes ``\frac{5}{2}``.
    - Words after a number are removed as its unit: "72 apples" becomes 72. Number words, such as dozen, are not.
    - The imaginary unit is written with a space, because math-verify reads ``5i`` and ``5 i`` as different symbols.

    Args:
        answer: the text of an answer.

    Returns:
        The same answer in LaTeX.
    """
    answer = re.sub(r"(?<!\\)\$|\*\*", "", _to_latex(answer))
    for pattern, spelling in _SPELLINGS if re.search("[a-zA-Z]", answer) else ():
        answer = pattern.sub(spelling, answer)
    answer = _GROUPS.sub(lambda found: found["tuple"] or re.sub(r"\D", "", found[0]), answer)
    answer = _LARGE.sub(lambda one: f"{Decimal(one[1]).scaleb(_THOUSANDS[one[2]]):f}", answer)
    answer = _MIXED.sub(lambda one: rf"\frac{{{int(one[1]) * int(one[3]) + int(one[2])}}}{{{one[3]}}}", answer)
    answer = re.sub(r"^(?:\s|=|\\approx)+", "", answer)
    bare = answer.rstrip('.,;: \t\n。"”」`')
    answer = answer[: len(bare) + 1] if bare.endswith("\\") else bare  # keeps the comma of `5\,`
    return _UNITS.sub("", answer).strip()


def _to_latex(text: str) -> str:
    r"""Returns ``x^{2}`` for x², ``\sqrt{2}`` for √2, `` 1/2`` for ½, ``90^\circ`` for 90°, 5 for the fullwidth ５."""
    if text.isascii():
        return text
    text = re.sub("([⁻⁰¹²³⁴-⁹]+)", r"^{\1}", text.translate(_SYMBOLS))
    text = re.sub("([¼-¾⅐-⅞])", r" \1", text)
    text = unicodedata.normalize("NFKC", text).replace("\N{FRACTION SLASH}", "/").replace("\N{MINUS SIGN}", "-")
    return re.sub(r"√\s*", r"\\sqrt", re.sub(r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}", text))


def as_words(text: str) -> str:
    r"""Rewrites an answer in words in one spelling, so that answers can be compared as text.

    Args:
        text: an answer.

    Returns:
        The words in lower case, without LaTeX: "c" for ``\text{(C)}.``, "no solution" for ``$\textbf{No  solution}$``.
    """
    text = re.sub(r"\\[ ,;!]|[$*~_`\"“”「」]", " ", re.sub(rf"{_TEXT}|[{{}}]", "", text))
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^\( ?([^()]*?) ?\)$", r"\1", text).casefold()


def is_words(gold: str) -> bool:
    r"""Returns whether a gold answer consists of words, so that it must be compared as text.

    Args:
        gold: a gold answer, as `gold_text` returns it.

    Returns:
        True for ``\text{Evelyn}``, ``No solution``, ``Yes`` and ``\text{(C)}``. False for ``5\text{ cm}`` (a number)
        and for up to three letters such as ``xy``, which may be a product.
    """
    is_wrapped = not re.sub(rf"{_TEXT}[^{{}}]*\}}|[ ,;$]", "", gold)
    is_long = bool(re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{4}|^(?:yes|no)$", gold, re.IGNORECASE))
    return bool(re.fullmatch(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*", as_words(gold))) and (is_wrapped or is_long)


_NAMES = zip("π∞∈∪≤≥≠×·⋅±", "pi infty in cup le ge ne times cdot cdot pm".split(), strict=True)
_SYMBOLS = str.maketrans({char: rf"\{name} " for char, name in _NAMES} | {"°": r"^\circ "})
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox)\s*\{"
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (rf"{_TEXT}([-+]?\\?\$?\.?\d[^{{}}]*|[^{{}}]*\b(?:or|and|thousand|million|billion)\b[^{{}}]*)\}}", r" \1 "),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
        (r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\?\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<=\d)(?:(?:st|nd|rd|th)(?![a-zA-Z])|\s*\^?\{{?{_TEXT}(?:st|nd|rd|th)\}}\}}?)", ""),
        (r"\\mathrm\s*\{e\}", " e "),
        (rf"{_TEXT}i\}}|(?<=\d)\s*(?:\\cdot\s*)?i(?![a-zA-Z])", " i"),
    )
]
# Groups of three digits. A comma without a space separates the members of (5,120) and \{1,200\}, which are no numbers
# (lm-evaluation-harness #4038). (1,000) is a number, since no member is 000; so is the formula \(1,200\).
_GROUPS = re.compile(
    r"(?P<tuple>(?:(?<![\\\d})])[(\[]|\\\{)\s*-?\d+(?:,-?(?!0\d)\d+)+\s*(?:\\right)?(?:[)\]]|\\\}))"
    r"|(?<![\d.,/^])[1-9]\d{0,2}(?:(?:,|\{,\}|[ ~]|\\[ ,;]|,?\\!\s*)\d{3})+(?!\d)"
)
_MIXED = re.compile(r"(?<![\d.,/^])(\d{1,15})\s*(?:\\[dt]?frac\s*\{?|(?<=\s))(\d+)(?:\}\s*\{|/)(\d+)(?![\d.])\}?")
_THOUSANDS = {"thousand": 3, "million": 6, "billion": 9}
_LARGE = re.compile(r"(?<![\w.,/^])(\d{1,15}(?:\.\d{1,10})?)(?:\s|~|\\ )*(thousand|million|billion)(?![a-zA-Z])")
_NUMBER_WORDS = "hundred|thousand|million|dozen|square[ds]|cubed|hal(?:f|ves)|third|quarter|fourth|fifth|tenth"
_UNITS = re.compile(
    rf"(?<=[\d}})])(?:\s|~|\\[ ,;!])*(?!.*(?:{_NUMBER_WORDS}))"
    rf"(?:{_TEXT}[^{{}}\d]*(?:\^\d)?\}}|(?:(?<=[\s~,])[a-z]{{3,}}(?: [a-z]+)*|(?<=\s)[ckm]?m)\.?)"
    r"(?:\s*\^\s*\{?\d\}?)?$"
)
