r"""One spelling for answers, and their parts: text only, no mathematics.

For single answers, whose length `answers.py` limits; `to_latex` alone meets longer text, and is linear in it.
"""

import re
import unicodedata

MIN_WORD_LETTERS = 4  # a bare run of letters this long with a vowel is a word, a shorter one may be a product like xyz

# ------------------------------------------------------------------------------------------- one spelling for answers


def normalize_answer(answer: str) -> str:
    r"""An answer in the spelling that math-verify reads.

    Unicode becomes LaTeX (see `to_latex`), 1e3 `1 \times 10^{3}`, pi `\pi`, percent `\%`; dollars that delimit a
    formula, bold print, a full stop and an "=" in front go; numbers and "or" leave their \text{...}.
    """
    answer = re.sub(r"(?<!\\)\$|\*\*", "", to_latex(answer))
    if re.search("[a-zA-Z]", answer):
        for pattern, spelling in _SPELLINGS:
            answer = pattern.sub(spelling, answer)
    answer = answer.lstrip("= \t\n")
    bare = answer.rstrip(".,;: \t\n")
    return answer[: len(bare) + 1].strip() if bare.endswith("\\") else bare.strip()  # of `5\,` the comma is no stop


def to_latex(text: str) -> str:
    r"""Unicode's mathematics as LaTeX: ½ → \frac{1}{2}, √2 → \sqrt{2}, x² → x^{2}, 90° → 90^\circ, fullwidth ５ → 5."""
    if text.isascii():
        return text
    text = re.sub(r"[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+", lambda run: f"^{{{_plain(run[0])}}}", text)
    text = re.sub(r"[\u2080-\u208e\u2090-\u209c]+", lambda run: f"_{{{_plain(run[0])}}}", text)
    text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)  # of any script
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
_PERCENT = "(?:percent(?:age)?|pct)"
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
        # math-verify takes the c of \frac1c for a unit
        (r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
    )
]


def squeeze(answer: str) -> str:
    r"""Without spacing, `\left`, `\right` and the size of a fraction, which never change a value."""
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[ ,;!]", "", answer)
    answer = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", answer)
    return re.sub(r" (?![a-zA-Z0-9])|(?<![a-zA-Z0-9]) ", "", " ".join(answer.split()))


# ------------------------------------------------------------------------------------------------ parts of an answer


def split_list(answer: str) -> list[str]:
    r"""The members of "1, 2 or 3", outside brackets; thousands stay together."""
    return _split(answer, _LIST)


def split_chain(answer: str) -> list[str]:
    r"""The members of `x = 2 + 3 = 5` and `\pi \approx 3.14`, outside brackets."""
    return [member for member in _split(answer, _CHAIN) if member]


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
    r"""(answer without units, its units): `5\text{ kilometers}` → ("5", {"km"}), `25 cm^2` → ("25", {"cm^2"}).

    Words that are no unit known here are removed, too ("72 apples"), and count for nothing.
    """
    members = [_split_unit(member) for member in split_list(answer)]
    without = ", ".join(value for value, _ in members) if any(unit is not None for _, unit in members) else answer
    return without, {unit for _, unit in members if unit}


def _split_unit(answer: str) -> tuple[str, str | None]:
    """(value, unit); the unit is "" where it is unknown and None where there is none."""
    currency = _CURRENCY.match(answer)
    if currency:
        value = _split_unit(answer[currency.end() :])[0]
        return f"{currency['sign']}{value}", UNITS.get(currency["unit"], "")
    found = _TEXT_UNIT.fullmatch(answer) or _BARE_UNIT.fullmatch(answer)
    if not found:
        return answer, None
    words = found["unit"].casefold().replace(".", "").split()
    power = found["power"] or ""
    if len(words) > 1 and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    name = UNITS.get(" ".join(words), "")
    if found.re is _BARE_UNIT:
        is_letter = len(found["unit"]) == 1 and found["unit"].isalpha()  # 3x + 2h is no number of hours
        if is_letter and not re.fullmatch(r"[-+\d.,/ ]+", found["value"]) or not name and not all(map(_is_word, words)):
            return answer, None
    return found["value"].strip(), f"{name}^{power}" if name and power else name


def _is_word(letters: str) -> bool:
    is_long = len(letters) >= MIN_WORD_LETTERS and bool(_VOWEL.search(letters))
    return letters in UNITS or letters == "per" or is_long and letters not in _NUMBER_WORDS


_BRACKETS = r"(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])|\\."
_LIST = re.compile(
    rf"(?P<separator>{_TEXT}\s*(?:,?\s*and|,?\s*or|,)\s*\}}|\\l?or(?![a-zA-Z])|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
    rf"|(?<!\d),|,(?!\\!|\d{{3}}(?!\d))|;)|{_BRACKETS}"
)
_CHAIN = re.compile(rf"(?P<separator>(?<![<>!:])=|\\(?:approx|simeq)(?![a-zA-Z]))|{_BRACKETS}")
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
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
        "g gram",
        "kg kilogram",
        "oz ounce",
        "lb pound",
        "ml milliliter millilitre",
        "l liter litre",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year yr",
        "mph",
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
_TEXT_UNIT = re.compile(rf"(?P<value>.*\S)\s*(?:\\[ ,;!]\s*|~)*{_TEXT}(?P<unit>[^{{}}\d]*)\}}{_POWER}", re.DOTALL)
_BARE_UNIT = re.compile(
    r"(?P<value>.*[\d)}\]!])\s*(?:\\[ ,;!]\s*|~)*(?:\^\s*\{?(?=\\circ))?"
    rf"(?P<unit>\\circ|\\\$|[€£¥₹¢]|[a-zA-Z]+(?:\ [a-zA-Z]+)*)\.?(?:(?<=\\circ)\s*\}})?{_POWER}",
    re.DOTALL,
)
_NUMBER_WORDS = set("hundred thousand million billion trillion dozen half halves third thirds quarter quarters".split())


# ------------------------------------------------------------------------------------------------ answers in words


def normalize_text(text: str) -> str:
    r"""One spelling for answers in words: `\text{(C)}.` → "c", `$\textbf{No  solution}$` → "no solution"."""
    text = re.sub(r"\\[ ,;!]|[$*~]", " ", re.sub(rf"{_TEXT}|[{{}}]", "", text))
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^\( ?([^()]*?) ?\)$", r"\1", text).casefold()


def is_text_answer(gold: str) -> bool:
    r"""Whether a gold answer is words, to be compared as text: \text{Evelyn}, No solution, \text{(C)}.

    Not xy (a product), x (a variable, or the choice X: `score_answer` tries both), 5\text{ cm} (a number).
    """
    words = normalize_text(gold)
    is_wrapped = not re.sub(rf"{_TEXT}[^{{}}]*\}}|[ ,;$]", "", gold)
    is_long = any(len(word) >= MIN_WORD_LETTERS and _VOWEL.search(word) for word in re.findall(r"[^\W\d_]+", words))
    return bool(re.fullmatch(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*", words)) and (is_wrapped or is_long)


def same_words(one: str, other: str) -> bool:
    """Whether two answers are the same words, in any order of a list."""
    one, other = normalize_text(one), normalize_text(other)
    return sorted(split_list(one)) == sorted(split_list(other))


def same_text(one: str, other: str) -> bool:
    """Whether two answers are spelled alike, in any order of a list, and say something."""
    one, other = squeeze(one), squeeze(other)
    return sorted(split_list(one)) == sorted(split_list(other)) and any(char.isalnum() for char in one)


_VOWEL = re.compile(r"[aeiouy]")
