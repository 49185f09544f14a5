"""Brings answers to one spelling. It compares no values; `math.py` does that.

Each rule rightly changes a verdict of math-verify on answers of a dataset or a model, see `tests/math_cases.jsonl`.
"""

import re
import unicodedata


def normalize_answer(answer: str) -> str:
    r"""Rewrite an answer in the LaTeX that math-verify reads, so that equal answers often get equal text.

    - Unicode becomes LaTeX (see `_to_latex`), and so do pi, sqrt(2), 2 sin x, 6.02 x 10^23 and 1e3.
    - Dollars, styles such as bold print, an "=" at the start and a full stop at the end are removed.
    - 12 345, ``12\,345`` and 12,345 become 12345, 5 million ``5 \times 10^{6}``, and 2 1/2 ``(2+\frac{1}{2})``.
    - A unit at the end (of a list, or a plural) is removed: "72 apples" becomes 72.
    - "negative 5" becomes -5. A column of a matrix becomes a tuple.
    """
    if answer.isascii() and answer.isdecimal():
        return answer
    answer = _GROUPS.sub(lambda found: found["tuple"] or re.sub(r"\D", "", found[0]), _to_latex(answer))
    for pattern, spelling in _SPELLINGS.items():
        answer = re.sub(pattern, spelling, answer)
    bare = answer.rstrip('.,;: \t\n。"”」`')
    answer = answer[: len(bare) + 1] if bare.endswith("\\") else bare  # keeps the comma of `5\,`
    return re.sub(r"\s*,\s*", ", ", _UNITS.sub("", answer)).strip()


def _to_latex(text: str) -> str:
    r"""Return ``x^{2}`` for x², ``\sqrt{2}`` for √2, `` 1/2`` for ½, ``90^\circ`` for 90°, 5 for the fullwidth ５."""
    if text.isascii():
        return text
    text = re.sub("([⁻⁰¹²³⁴-⁹]+)", r"^{\1}", text.translate(_SYMBOLS))
    text = re.sub("([¼-¾⅐-⅞])", r" \1", text)
    text = unicodedata.normalize("NFKC", text)
    return re.sub(r"√\s*", r"\\sqrt", re.sub(r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}", text))


def as_words(text: str) -> str:
    """Return the words of a normalized answer in lower case, without LaTeX: "c" for ``(C)``."""
    text = re.sub(r"\\[ ,;!]|[{}$*~_`\"“”「」]", " ", text)
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^\( ?([^()]*?) ?\)$", r"\1", text).casefold()


def is_words(gold: str) -> bool:
    """Return whether a normalized gold answer must be compared as text: Evelyn, No solution, Yes, ACB or C.

    Up to three letters such as xy may be a product.
    """
    is_long = re.search(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{4}|[A-Z]{2}|(?i:yes|no)$)|[^\W\d_a-zA-Zα-ω]", gold)
    return bool(is_long and re.fullmatch(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*", as_words(gold)))


_NAMES = "pi infty in cup le ge ne times cdot cdot pm approx degree degree prime".split()
_SYMBOLS = str.maketrans({char: rf"\{name} " for char, name in zip("π∞∈∪≤≥≠×·⋅±≈°º′", _NAMES, strict=True)})
_CELL = r"((?:(?!\\\\)[^&])+)"
_COLUMN = rf"\\begin\{{[pb]matrix\}}{_CELL}"
_SPELLINGS = {  # <<48/2=24>> is a calculation in GSM8K
    r"\\?\$|(?<![\w)])\*\*|\*\*(?![\w(-])|<<[^<>]*>>"
    r"|\\(?:color(?:\[\w+\])?|tag|hspace)\{[^{}]+\}|\\(?:checkmark|(?:black)?square|pounds)\b"
    r"|\\(?:[hH]uge|LARGE|Large|large|small|[bB]ig+[lr]?|displaystyle|textstyle|bf|rm|tt)(?![a-zA-Z])"
    r"|\\(?:(?:textcolor|colorbox)\{#?\w+\}|underline|emph|boldsymbol|bm|pmb|bold|boxed|fbox)(?=\s*\{)": "",
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|up|md|normal)?|math(?:rm|bf|it|sf|tt)|[mh]box)\s*\{([^{}]*)\}": r" \1 ",
    r"(?<=[\w)])\*\*(\w+)": r"^{\1}",
    "\N{MINUS SIGN}": "-",
    "\N{FRACTION SLASH}": "/",
    r"\\(?:lor|vee)(?![a-zA-Z])": " or ",
    r",\s*and\b": ",",
    r"\b(?:[Nn]egative|[Mm]inus)\s+(?=\d)|负\s*(?=\d)|(?<![\w)}])[‐–—]\s*(?=\d)": "-",
    r"\\degree(?![a-zA-Z])": r"^\\circ ",
    r"(?:\\left\s*)?\\langle": "(",
    r"(?:\\right\s*)?\\rangle": ")",
    rf"{_COLUMN}\\\\{_CELL}\\end\{{[pb]matrix\}}": r"(\1,\2)",
    rf"{_COLUMN}\\\\{_CELL}\\\\{_CELL}\\end\{{[pb]matrix\}}": r"(\1,\2,\3)",
    r"\\varnothing|\\\{\s*\\\}": r"\\emptyset ",
    r"\\dots(?![a-zA-Z])": r"\\ldots ",
    r"\^\s*\{?\s*\\prime\s*\}?|'|\\prime(?![a-zA-Z])": r"\\varphi ",  # 5' are not 5°
    r"\.(\d)\1+\s*(?:\\ldots|\.\.\.)": r".\\overline{\1}",
    r"\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}": r".\1\2\2\2\2\2\2\2",
    r"(?<=\d)\s*(?:\\ldots|\.\.\.)\s*$": " etcetera",
    r"\\(sin|cos|tan)\s*((?:\\left)?\()?(\d+)\s*\^\{?\\circ\s*\}?(?(2)\s*(?:\\right)?\))": r"\\\1(\\frac{\3\\pi}{180})",
    r"(?<![\d.:])([1-9]\d*)\s*:\s*([1-9]\d*)\s*:\s*([1-9]\d*)(?![\d.:])": r"(\1/\3,\2/\3)",  # a ratio
    r"(?<=\d)_\{?10\}?(?!\d)": "",
    r"(?<=\d)\s+x\s+(?=10\^)": r" \\times ",
    r"10\^(\d{2,})": r"10^{\1}",
    r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d{1,4})(?![\w.])": r"\1 \\times 10^{\2}",
    r"(?<![\w.,/^])(\d+(?:\.\d+)?)(?:\s|~|\\ )*thousand(?![a-zA-Z])": r"\1 \\times 10^{3}",
    r"(?<![\w.,/^])(\d+(?:\.\d+)?)(?:\s|~|\\ )*million(?![a-zA-Z])": r"\1 \\times 10^{6}",
    r"(?<![\w.,/^])(\d+(?:\.\d+)?)(?:\s|~|\\ )*billion(?![a-zA-Z])": r"\1 \\times 10^{9}",
    r"\\[dt]?frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
    # A mixed number; an index, as in \log_2\frac18, is none.
    r"(?<![\w.,/^])(\d{1,15})\s*\\[dt]?frac\s*(\{\d+\}\s*\{\d+\})": r"(\1+\\frac\2)",
    r"(?<![\w.,/^])(\d{1,15})\s+(\d+)/(\d+)(?![\d.])": r"(\1+\\frac{\2}{\3})",
    r"(?<![a-zA-Z\\])pi(?![a-zA-Z])": r"\\pi ",
    r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])": r"\\infty ",
    r"\\?\bsqrt\s*\(([^()]*)\)|(?<=\d)sqrt\s*\(([^()]*)\)": r"\\sqrt{\1\2}",
    r"(?<![a-zA-Z\\])(sin|cos|tan|log|ln)(?![a-zA-Z])": r"\\\1 ",
    r"(?<=\d)\s*\^?\{?\s*(?:st|nd|rd|th)\b\s*\}?": "",
    r"(?<=\d)\s*(?:\\cdot\s*)?i(?![a-zA-Z])": " i",
    r"(?<=\d)\s*per\s?cent\b|(?:\\?%)+": r"\\%",
    r"^(?:[a-z]\s*\\approx|\s|=|\\approx)+|^\s*(?:USD|Rs\.?|[€£¥₹])\s*(?=[\d.])": "",
}
# Groups of three digits. A comma without a space separates the members of (5,120) and \{1,200\}, which are no numbers
# (lm-evaluation-harness #4038). (1,000) is a number, since no member is 000; so is the formula \(1,200\).
_GROUPS = re.compile(
    r"(?P<tuple>(?:(?<![\\\d})])[(\[]|\\\{)\s*-?\d+(?:,-?(?!0\d)\d+)+\s*(?:\\right)?(?:[)\]]|\\\}))"
    r"|(?<![\d.,/^])[1-9]\d{0,2}(?:(?:,|\{,\}|[ ~]|\\[ ,;]|,?\\!\s*)\d{3})+(?!\d)"
)
# Words in the plural, but not those that change a number.
_PLURAL = (
    r"(?!(?:times|cos|dozens|scores|pairs|couples|tens|(?:zero|one|two|three|four|five|seven|eight|nine)s|sixe?s|halves|thirds"
    r"|quarters|hundreds|thousands|[a-z]*illions|percents|lakhs|crores|grosses|powers|factorials|modulos|googols|wrongs)\b)"
    r"(?:[a-z]{2,}(?<![su])(?<!th)s|months)"
)
_UNIT = (
    r"(?:\\mu\s*|(?:sq(?:uare|\.)?|cu(?:bic|\.)?|more|different|distinct|possible|positive|real|red|blue|green)\s+)*"
    r"(?:(?<=[\s,;!~])[mglLshJNVAWK]|[kcmn]m|[km]g|m[lL]|lbs?|oz|gal|ft|yd|in|km/h|kmh|mph|min|sec|hrs?|people|men|women"
    r"|children|feet|degree|dollar|cent|hour|minute|second|day|week|month|year|mile|inch|foot|unit|[a-z]*meter|[a-z]*gram"
    rf"|[a-z]*liter|{_PLURAL})\b"
    rf"|[€£¥₹¢元个人円岁度米]|(?:平方)?[厘千]?米|USD|EUR|(?i:[ap]\.?m)|\\Omega|\^\s*\{{?\\circ\s*\}}?"
)
_UNITS = re.compile(
    rf"(?:(?<=[\d}})])|(?<=\\pi)(?!\s*[a-zA-Z]\b))(?:\s|~|\\[ ,;!])*(?:{_UNIT})\.?"
    r"(?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*[a-z]+)?(?:\s*\^\s*\{?\d\}?)?"
    r"(?: (?:each|left|old|per [a-z]+))?\s*$"
)
