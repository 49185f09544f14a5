r"""Brings answers to one spelling and splits answers into parts. It compares no values; `math.py` does that.

`answers.py` limits the length of a completion's answer before it calls these functions. The exception is
`to_latex`, which also gets longer parts of a completion, but takes time linear in the length of the text.
"""

import re
import unicodedata
from decimal import Decimal

# A run of letters counts as a word if it has at least this number of letters and a vowel. A shorter run may be a
# product such as xyz.
MIN_WORD_LETTERS = 4

# ------------------------------------------------------------------------------------------- one spelling for answers


def normalize_answer(answer: str) -> str:
    r"""Rewrites an answer in the LaTeX that math-verify reads, so that equal answers often get equal text.

    - Unicode becomes LaTeX (see `to_latex`), 1e3 becomes ``1 \times 10^{3}``, pi ``\pi`` and percent ``\%``.
    - Dollars that delimit a formula, bold print, a full stop at the end and an "=" at the start are removed.
    - The ``\text{...}`` around numbers and "or" is removed, but not its content.
    - 12 345 becomes 12345, and 2 1/2 becomes 5/2; 5 million and ``0.\overline{3}`` become numbers (see `join_numbers`).
    - The imaginary unit is written with a space, because math-verify reads ``5i`` and ``5 i`` as different symbols.

    Args:
        answer: the text of an answer.

    Returns:
        The same answer in LaTeX.
    """
    answer = re.sub(r"(?<!\\)\$|\*\*", "", to_latex(answer))
    answer = join_numbers(answer)
    if re.search("[a-zA-Z]", answer):
        for pattern, spelling in _SPELLINGS:
            answer = pattern.sub(spelling, answer)
    answer = answer.lstrip("= \t\n")
    bare = answer.rstrip(".,;: \t\n")
    return answer[: len(bare) + 1].strip() if bare.endswith("\\") else bare.strip()  # keeps the comma of `5\,`


def join_numbers(text: str) -> str:
    r"""Writes numbers without spaces, words and repeating decimals.

    math-verify would read 12 345 as 12 + 345, 2 1/2 as (2 + 1)/2, "5 million" in prose as 5, and no ``0.\overline{3}``.

    Args:
        text: an answer, or a text with numbers.

    Returns:
        The text with 12345 for ``12 345`` and ``12\,345``, with 5/2 for the mixed number ``2 1/2``, with 2500000 for
        ``2.5 million``, and with ``\frac{3}{9}`` for ``0.\overline{3}``.
    """
    text = _GROUPS.sub(lambda number: re.sub(_GAP, "", number[0]), text)
    text = _LARGE.sub(
        lambda one: f"{Decimal(one[1].replace(',', '')).scaleb(_THOUSANDS[one['word']]):f}{one['text'] or ''}", text
    )
    text = _REPEATING.sub(_as_fraction, text)
    return _MIXED.sub(lambda one: f"{int(one[1]) * int(one[3]) + int(one[2])}/{one[3]}", text)


def _as_fraction(one: re.Match[str]) -> str:
    """Writes a repeating decimal as a fraction, which is (16 - 1)/90 for 0.1666…"""
    start, digits, repeated = one.groups(default="")
    value = int(start + digits + repeated) - int((start + digits) or 0)
    return rf"\frac{{{value}}}{{{'9' * len(repeated)}{'0' * len(digits)}}}"


def to_latex(text: str) -> str:
    r"""Writes Unicode's mathematical characters as LaTeX.

    Args:
        text: any text, of any length.

    Returns:
        The text with ``\frac{1}{2}`` for ½, ``\sqrt{2}`` for √2, ``x^{2}`` for x², ``90^\circ`` for 90° and 5 for the
        fullwidth ５.
    """
    if text.isascii():
        return text
    text = re.sub(r"[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+", lambda run: f"^{{{_plain(run[0])}}}", text)
    text = re.sub(r"[\u2080-\u208e\u2090-\u209c]+", lambda run: f"_{{{_plain(run[0])}}}", text)
    text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)  # digits of other scripts
    text = _plain(text.translate(_SYMBOLS))
    return _ROOT.sub(lambda root: f"{_ROOTS[root[1]]}{{{root[2]}}}" if root[2] else _ROOTS[root[1]], text)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").replace("\N{FRACTION SLASH}", "/")


_FRACTIONS = zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑", "12 13 23 14 34 15 25 35 45 16 56 17 18 38 58 78 19".split(), strict=True)
_COMMANDS = zip(
    "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ×·⋅÷±≤≥≠≈∞∈∪∩∅",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega "
    "times cdot cdot div pm le ge ne approx infty in cup cap emptyset".split(),
    strict=True,
)
_SYMBOLS = str.maketrans(
    {
        **{char: rf"\frac{{{digits[0]}}}{{{digits[1]}}}" for char, digits in _FRACTIONS},
        **{char: f"\\{name} " for char, name in _COMMANDS},
        **{char: rf"\mathbb{{{letter}}} " for char, letter in zip("ℝℤℚℕℂ", "RZQNC", strict=True)},
        **dict.fromkeys("°º", r"^\circ "),
        "\N{ZERO WIDTH SPACE}": "",
        "∨": " or ",
    }
)
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-z]+|)")
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|boldsymbol|bm|operatorname)\s*\{"
_ORDINAL = "(?:st|nd|rd|th)"
_PERCENT = "(?:percent(?:age)?|pct)"
_GAP = r"(?:[ ~]|\\[ ,;])"
_GROUPS = re.compile(rf"(?<![\d.,/^])\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d)")  # a number in groups of three digits
_MIXED = re.compile(rf"(?<![\d.,/^])(\d{{1,15}}){_GAP}+(\d{{1,15}})\s*/\s*(\d{{1,15}})(?![\d.])")
_REPEATING = re.compile(r"(?<![\w.,^])(\d{1,15})?\.(\d{0,15})\\(?:overline|bar)\s*\{(\d{1,15})\}(?!\d)")
_THOUSANDS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE = re.compile(
    rf"(?<![\w.,/^])(\d{{1,3}}(?:,\d{{3}}){{1,4}}|\d{{1,15}}(?:\.\d{{1,10}})?){_GAP}*+"
    rf"(?P<text>{_TEXT}\s*)?(?P<word>{'|'.join(_THOUSANDS)})(?![a-zA-Z])"
)
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (
            rf"{_TEXT}\s*+([-+]?\\?\$?\.?\d[^{{}}]*|[^\w{{}}]*(?:or|and)\b[^{{}}]*|[^{{}}]*\b(?:or|and)\b[^{{}}a-zA-Z]*"
            r"|[^{}]*\b(?:or|and)\b[^{}]*\d[^{}]*)\}",
            r" \1 ",
        ),
        (r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}"),
        (rf"{_TEXT}\s*{_PERCENT}\s*\}}|(?<![a-zA-Z\\]){_PERCENT}(?![a-zA-Z])", r"\\%"),
        (r"(?<![a-zA-Z\\])(alpha|beta|gamma|delta|theta|lambda|mu|pi|sigma|phi|omega)(?![a-zA-Z])", r"\\\1 "),
        (r"\\?\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        # math-verify would read the c of \frac1c as a unit
        (r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (rf"({_TEXT}[^{{}}\d^]*)\^(\d)\s*\}}", r"\1}^\2"),  # the power of a unit
        (rf"(?<=\d)(?:{_ORDINAL}(?![a-zA-Z])|\s*\^?\s*\{{?{_TEXT}\s*{_ORDINAL}\s*\}}(?:\s*\}})?)", ""),
        (rf"{_TEXT}\s*i\s*\}}|(?<=\d)\s*i(?![a-zA-Z])", " i"),
    )
]


def squeeze(answer: str) -> str:
    r"""Removes LaTeX that never changes a value: spaces, ``\left`` and ``\right``, and the size of a fraction.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        The answer, with one space left between two words or numbers, and ``\frac`` for ``\dfrac`` and ``\tfrac``.
    """
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[ ,;!]", "", answer)
    answer = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", answer)
    return re.sub(r" (?![a-zA-Z0-9])|(?<![a-zA-Z0-9]) ", "", " ".join(answer.split()))


# ------------------------------------------------------------------------------------------------ parts of an answer


def split_list(answer: str) -> list[str]:
    r"""Splits a list such as "1, 2 or 3" into its members.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        The members. Separators within brackets and commas of large numbers (1,000) do not count.
    """
    return _split(answer, _LIST)


def split_chain(answer: str) -> list[str]:
    r"""Splits a chain of equations such as ``x = 2 + 3 = 5`` or ``\pi \approx 3.14`` into its members.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        The members that are not empty. Equals signs within brackets do not count.
    """
    return [member for member in _split(answer, _CHAIN) if member]


def split_label(answer: str) -> tuple[str, str]:
    r"""Separates the label of a choice from its value.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        ("B", "5") for ``\textbf{(B)}\ 5`` and for "B. 5", and ("B", "") for "(B)". ("", answer) if the answer has no
        label, or a second one: "(A) or (B)" chooses nothing.
    """
    found = _LABEL.fullmatch(answer)
    if not found or _OTHER_LABEL.search(found["value"]) or len(split_list(answer)) > 1:
        return "", answer
    value = found["value"]
    if value.count("}") > value.count("{"):  # the label is within the brackets, as in \text{(B) 5}
        value = normalize_answer(rf"\text{{{value}")
    return found["label"], value


def _split(answer: str, separators: re.Pattern[str]) -> list[str]:
    members, depth, start = [], 0, 0
    for token in separators.finditer(answer):
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
        elif token["separator"] and depth == 0:
            members.append(answer[start : token.start()].strip())
            start = token.end()
    return [*members, answer[start:].strip()]


def split_units(answer: str) -> tuple[str, set[str]]:
    r"""Separates an answer from its units.

    Args:
        answer: an answer in the spelling of `normalize_answer`.

    Returns:
        The answer without units, and the set of the units: ("5", {"km"}) for ``5\text{ kilometers}``, ("25", {"cm^2"})
        for ``25 cm^2``. Words after a number that are not in `UNITS` are removed, too, but are not in the set:
        ("72", set()) for "72 apples".
    """
    members = [_split_unit(member) for member in split_list(answer)]
    without = ", ".join(value for value, _ in members) if any(unit is not None for _, unit in members) else answer
    return without, {unit for _, unit in members if unit}


def _split_unit(answer: str) -> tuple[str, str | None]:
    """Returns (value, unit) of one member. A unit of "" is a word that is not in `UNITS`; None = no unit."""
    currency = _CURRENCY.match(answer)
    if currency:
        value = _split_unit(answer[currency.end() :])[0]
        return f"{currency['sign']}{value}", UNITS.get(currency["unit"], "")
    found = _TEXT_UNIT.fullmatch(answer) or _BARE_UNIT.fullmatch(answer)
    if not found:
        return answer, None
    words = found["unit"].casefold().replace(".", "").split()
    power = found["power"] or ""
    for place in (0, -1):  # square meters, meters squared
        if len(words) > 1 and words[place] in _POWERS:
            power = _POWERS[words.pop(place)]
    if _NUMBER_WORDS.intersection(words):
        return answer, None
    name = UNITS.get(" ".join(words), "")
    if found.re is _BARE_UNIT:
        is_letter = len(found["unit"]) == 1 and found["unit"].isalpha()  # the h of 3x + 2h does not mean hours
        is_variable = is_letter and not re.fullmatch(r"[-+]?[\d.,/]+", found["value"])
        if is_variable or not name and not all(map(_is_word, words)):
            return answer, None
    return found["value"].strip(), f"{name}^{power}" if name and power else name


def _is_word(letters: str) -> bool:
    is_long = len(letters) >= MIN_WORD_LETTERS and bool(_VOWEL.search(letters))
    return letters in UNITS or letters == "per" or is_long


_BRACKETS = r"(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])|\\."
_LIST = re.compile(
    rf"(?P<separator>{_TEXT}\s*(?:,?\s*and|,?\s*or|,)\s*\}}|\\l?or(?![a-zA-Z])|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
    rf"|(?<!\d),|,(?!\\!|\d{{3}}(?!\d))|;)|{_BRACKETS}"
)
_SPACE = r"\s|~|\\[ ,;:!]|\\q?quad(?![a-zA-Z])"
# A mark and a space end a label, unlike in A(5). A value begins with no operator, unlike in (A) + 5.
_LABEL = re.compile(
    rf"(?:\(|{_TEXT}\s*)*+(?P<label>[A-J])(?=[)}}\s]*\Z|\}}*[).:](?:\}}|{_SPACE}))(?:[).:}}]|{_SPACE})*+"
    r"(?P<value>(?![+*/^=<>]).*)",
    re.DOTALL,
)
_OTHER_LABEL = re.compile(r"(?<![a-zA-Z\\])[A-J](?![a-zA-Z])")
_CHAIN = re.compile(rf"(?P<separator>(?<![<>!:])=|\\(?:approx|simeq)(?![a-zA-Z]))|{_BRACKETS}")
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "dm decimeter decimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram gm",
        "kg kilogram",
        "oz ounce",
        "lb pound",
        "ml milliliter millilitre",
        "l liter litre",
        "gal gallon",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year yr",
        "mph",
        "kmh kmph kph",
        "am",
        "pm",
        "ohm",
        r"dollar \$ usd",
        "euro € eur",
        "cent ¢",
        r"degree \circ deg",
        "radian rad",
    )
    for form in names.split()
    for name in (form, f"{form}s")
}
_CURRENCY = re.compile(r"(?P<sign>[-+]?)\s*(?P<unit>\\\$|[€£¥₹])\s*(?=[-+]?[\d.\\])")
_POWER = r"(?:\s*\^\s*\{?(?P<power>\d)\}?)?"
_TEXT_UNIT = re.compile(rf"(?P<value>.*?\S)\s*(?:\\[ ,;!]\s*|~)*+{_TEXT}(?P<unit>[^{{}}\d]*)\}}{_POWER}", re.DOTALL)
_BARE_UNIT = re.compile(
    r"(?P<value>.*[\d)}\]!])\s*(?:\\[ ,;!]\s*|~)*(?:\^\s*\{?(?=\\circ))?"
    rf"(?P<unit>\\circ|\\\$|[€£¥₹¢]|[a-zA-Z]+(?:\ [a-zA-Z]+)*)\.?(?:(?<=\\circ)\s*\}})?{_POWER}",
    re.DOTALL,
)
_NUMBER_WORDS = set(
    "hundred thousand million billion trillion dozen squared cubed half halves third thirds quarter quarters "
    "fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths".split()
)


# ------------------------------------------------------------------------------------------------ answers in words


def normalize_text(text: str) -> str:
    r"""Rewrites an answer in words in one spelling, so that answers can be compared as text.

    Args:
        text: an answer.

    Returns:
        The words in lower case, without LaTeX: "c" for ``\text{(C)}.``, "no solution" for ``$\textbf{No  solution}$``.
    """
    text = re.sub(r"\\[ ,;!]|[$*~]", " ", re.sub(rf"{_TEXT}|[{{}}]", "", text))
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^\( ?([^()]*?) ?\)$", r"\1", text).casefold()


def is_text_answer(gold: str) -> bool:
    r"""Returns whether a gold answer consists of words, so that it must be compared as text.

    Args:
        gold: a gold answer, as `gold_text` returns it.

    Returns:
        True for ``\text{Evelyn}``, ``No solution``, ``Yes`` and ``\text{(C)}``. False for ``5\text{ cm}`` (a number)
        and for up to three letters, such as ``xy``, ``II`` and ``B``, which `score_answer` also compares as formulas.
    """
    words = normalize_text(gold)
    is_wrapped = not re.sub(rf"{_TEXT}[^{{}}]*\}}|[ ,;$]", "", gold)
    is_long = any(len(word) >= MIN_WORD_LETTERS and _VOWEL.search(word) for word in re.findall(r"[^\W\d_]+", words))
    is_word = is_wrapped or is_long or words in ("yes", "no")
    return bool(re.fullmatch(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*", words)) and is_word


def same_words(one: str, other: str) -> bool:
    """Returns whether two answers have the same words; the members of a list may be in any order.

    Args:
        one: an answer.
        other: another answer.

    Returns:
        True if they are equal after `normalize_text`.
    """
    one, other = normalize_text(one), normalize_text(other)
    return sorted(split_list(one)) == sorted(split_list(other))


def same_text(one: str, other: str) -> bool:
    """Returns whether two answers have the same spelling; the members of a list may be in any order.

    Args:
        one: an answer, in the spelling of `normalize_answer`.
        other: another answer, in the same spelling.

    Returns:
        True if they are equal after `squeeze` and have at least one letter or digit.
    """
    one, other = squeeze(one), squeeze(other)
    return sorted(split_list(one)) == sorted(split_list(other)) and any(char.isalnum() for char in one)


_VOWEL = re.compile(r"[aeiouy]")
