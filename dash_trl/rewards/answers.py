"""Finds the final answer in the text of a completion. It compares no answers; `math.py` does that.

::

    completion ──► final_text ──► find_answer ──► Answer
                   (no thoughts)  `<answer>`; there boxes, else "#### ...", else "answer is ...", else a formula, prose

Every function takes linear time, also for a degenerate completion that repeats itself.
"""

import re
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from dash_trl.rewards.spelling import normalize_answer

# Number of characters at the end of a completion that are read if it has neither a box nor `####`. The number is small,
# because math-verify's patterns take quadratic time in degenerate text.
TAIL_CHARS = 2_000
# math-verify takes half a second to read an answer of this length. The longest answer of MATH-500 has 53 characters.
MAX_ANSWER_CHARS = 1_000

Span = tuple[int, int, str]  # start, end, content


def final_text(completion: str) -> str:
    """Return the text of a completion after its last thought, without a thought that is never closed.

    Thoughts are marked as open models do it, `<think>…</think>` and the like. `</think>` alone is enough, because a
    chat template may open the thought in the prompt. Not recognised are such a thought that never ends, and tags that
    decoding skips as special tokens (Gemma 4, Magistral).
    """
    return _THOUGHT.split(_END_OF_THOUGHT.split(completion)[-1])[0]


def ground_truth(value: object) -> Any:
    """Return the gold answer in a value of verl's column `reward_model`, and any other value as it is."""
    return value["ground_truth"] if isinstance(value, Mapping) and "ground_truth" in value else value


def plain_answer(value: object) -> str:
    """Return a gold answer as text: 42 for 42.0, since a column with an empty cell has floats; "1, 2" for a list.

    Args:
        value: a text, a number, a list of these, None or NaN (""), or a value of verl's column `reward_model`. Others
            are a ValueError.
    """
    value = ground_truth(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain_answer, value))
    if not isinstance(value, (str, Number, type(None))) or isinstance(value, float) and abs(value) > 1 << 53:
        raise ValueError(
            f"The gold answer {value!r:.200} is of type {type(value).__name__}, so its text does not say exactly "
            "which answers are right. Store a text or a smaller number, or name another column (answer_column)."
        )
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    return "" if value is None or value != value else str(plain).strip()


def find_answer(completion: str) -> str:
    r"""Find the final answer in the text of a completion, in the spelling of `normalize_answer`; "" if none is sure.

    It is the first of the following that the completion has:

    1. the last box that is not empty, ``\boxed{...}``;
    2. the last line ``#### ...`` that is no heading;
    3. the text after the last "answer is", "answer:", "correct option is", "答案是" or the like;
    4. a formula at the end;
    5. the last sentence with a number, or a last line of one or two words; between tags, the last line.

    If there is a tag `<answer>` (or `<response>`, `<SOLUTION>`), only the text in the last one counts. Clauses such as
    "when n = 5" do not count. Of a sentence with other words, the answer is its only number; several numbers, or a word
    that changes numbers, such as "half", make it no answer.

    Boxes, formulas or numbers with only "or" or the like between them are a list, so that two answers do not earn the
    reward of the right one. A box that is never closed, without a complete one, is no answer.
    """
    *before, opened = _TAG.split(final_text(completion))
    text = _END_OF_TAG.split(opened)[0]
    boxes, is_cut_off = _scan_boxes(text)
    if boxes or is_cut_off:
        return _as_list(_runs(text, boxes)[-1]) if boxes else ""
    text = _EMPHASIS.sub(r"\2", text)
    line = last_hashes(text)
    tail = (text if line is None else f"answer: {line[:MAX_ANSWER_CHARS]}")[-TAIL_CHARS:].rstrip(" \t\n.*。")
    *_, announced = [None, *_ANNOUNCED.finditer(tail)]
    rest = tail[announced.end() :] if announced else tail
    if rest.endswith(("?", "？")):
        return ""
    formulas = [(one.start(), one.end(), "".join(filter(None, one.groups()))) for one in _FORMULA.finditer(rest)]
    for run in _runs(rest, formulas):
        start = run[0][0]
        end = run[-1][1]
        if start == 0 if announced else re.fullmatch(r"\s*[a-z]*", rest[end:]):
            around = _END.split(rest[:start])[-1] + _CLAUSE.sub("", f"5{_END.split(rest[end:])[0]}")[1:]
            return "" if _CHANGES.search(around) or announced and re.search(r"\d", around) else _as_list(run)
    pieces = rest.splitlines() if before and not announced else _END.split(rest)
    sentences = [one[:MAX_ANSWER_CHARS] for one in pieces if one.strip()] or [""]
    if announced:
        return _in_sentence(sentences[0])
    # The last sentence may have no number: "She has 18 eggs left. I hope this helps!"
    with_number = (one for one in reversed(sentences) if re.search(r"\d", one))
    is_short = before or len(sentences[-1].split()) < 3
    return _in_sentence(sentences[-1] if is_short else next(with_number, sentences[-1]))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` that is complete and not empty, or None."""
    boxes = _scan_boxes(text)[0]
    return boxes[-1][2] if boxes else None


def last_hashes(text: str) -> str | None:
    """Return the text after the last `####`, which GSM8K writes before a final answer.

    A heading, or a line without text after `####`, does not count. None if no line counts.
    """
    return next((line for line in reversed([one.strip(" #\t") for one in _HASHES.findall(text)]) if line), None)


def gold_text(gold: str) -> str:
    r"""Return the normalized gold answer in a column's value such as ``$72$``, ``#### 72`` or ``\boxed{72}``."""
    boxes = _scan_boxes(gold)[0]
    return normalize_answer(last_hashes(gold) or (_as_list(_runs(gold, boxes)[-1]) if boxes else gold))


def _scan_boxes(text: str) -> tuple[list[Span], bool]:
    r"""Return the outermost complete ``\boxed{...}`` and ``\fbox{...}``, and whether a box is never closed.

    ``\boxed 5``, as in MATH, ends at the next space or ``$``. The stack holds the open boxes and braces.
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
    return [box for box in boxes if box[2]], any(opened["box"] for opened in stack)


def _runs(text: str, spans: Sequence[Span]) -> list[list[Span]]:
    """Group adjacent boxes or formulas with only "and", "or", commas or spaces between them."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and _JOINT.fullmatch(text, runs[-1][-1][1], span[0]):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _as_list(run: Sequence[Span]) -> str:
    """Join the answers of a run; a repeated answer counts once."""
    contents = list(dict.fromkeys(content for *_, content in run))
    if sum(map(len, contents)) > MAX_ANSWER_CHARS:
        return ""
    return ", ".join({answer.replace(" ", ""): answer for answer in map(_cleaned, contents)}.values())


def _cleaned(answer: str) -> str:
    """Normalize an answer, without what introduces it or says when it holds."""
    return normalize_answer(_BEGINNING.sub("", _CLAUSE.sub("", normalize_answer(answer))))


def _in_sentence(sentence: str) -> str:
    """Return the answer in a sentence: a formula, a choice, words, the only number, or numbers with "or" between."""
    answer = _cleaned(sentence)
    if LABEL.match(answer) or not (_WORDS.search(answer) and re.search(r"\d", answer)):
        return answer
    value = answer if _OR.search(answer) else _EQUALS.split(answer)[-1]
    if _CHANGES.search(answer):
        return ""
    alone = _PHRASE.sub("", value)
    numbers = list(dict.fromkeys(_NUMBER.findall(alone) or _NUMBER.findall(value)))
    return ", ".join(numbers) if len(numbers) == 1 or _OR.search(value) else ""


_BOX_TOKEN = re.compile(
    # What stands around a box may change its number: -\boxed{5}, not \boxed{5}, \boxed{5} dozen, \boxed{5} or 6.
    r"(?=[\\b])(?<!-)(?<!= - )(?<!n[o'’]t )(?<!n[o'’]t \$)(?<!\d or )(?<!\d or \$)(?<!\d\$ or )(?<!\d\$ or \$)"
    r"(?P<box>(?:\\{1,2}fbox|\\{0,2}(?<![a-zA-Z])boxed)\s*+\{)|\\{1,2}(?:boxed|fbox)\s++(?P<bare>[^\s${}]++)|\\."
    r"|\}\$?,?\s+(?:dozen|hundred|thousand|[mb]illion|or\s+\$?-?\d|is\s+(?:wrong|incorrect|not)\b)(?![^{}]*\})|[{}]",
    re.DOTALL,
)
_JOINT = re.compile(
    r"(?:[\s$,;&~*|/()]|\\[()\[\] ,;:!\\]|\\hfill|[.:]\s+(?=[Oo]r)|\\q?quad(?![a-zA-Z])"
    r"|\\text\s*+\{\s*+(?:and|or)?\s*+\}"
    r"|\b(?:and|[Oo]r|else|also|as well as|but|while|vs|versus|alternatively|either|maybe|perhaps|possibly)\b)*+"
)
_THINK = r"(?i:(?:\w+:)?(?:think|thinking|thought|reasoning))"  # also of <seed:think> and <mm:think>
# Each alternative begins with a character, which makes the search fast.
# Where a thought begins, or the answer ends. `analysis` and `commentary` are channels of gpt-oss.
_THOUGHT = re.compile(
    rf"<{_THINK}>|\[THINK\]|<\|channel>thought|◁think▷|<\|(?:START_THINKING|begin_of_thought)\|>"
    r"|<\|(?:END_RESPONSE|end|return|call|im_end|endoftext|end_of_text|eot_id)\|>"
    r"|<\|channel\|>(?:analysis|commentary)|(?:analysis(?<=\Aanalysis)|assistant(?:analysis|commentary))(?=[^\s:,.])"
)
_END_OF_THOUGHT = re.compile(
    rf"</{_THINK}>|\[/THINK\]|<channel\|>|◁/think▷|<\|(?:END_THINKING|START_RESPONSE|end_of_thought)\|>"
    r"|Here(?: is|'s) my response:"  # Granite 3.2
    r"|<\|channel\|>final[^<\n]{0,40}<\|message\|>|assistantfinal|final(?<=\Afinal)(?=[A-Z\d\\$*(-])"
)
# R1, Hunyuan and TRL's examples have <answer>, Unsloth <SOLUTION>, Granite 3.3 <response>.
_TAG, _END_OF_TAG = (re.compile(rf"<{end}(?i:answer|final_answer|response)>|<{end}SOLUTION>") for end in ("", "/"))
# Markdown's marks around words: *73*, __73__, `73`. Not the * of a product, nor the _ of an index.
_EMPHASIS = re.compile(r"(?<![\w*\\)\]}^$`])(\*{1,3}|__?|`+)(?=[^\s*_`])([^*_`\n]*[^\s*_`])\1(?![\w*`])")
_ANNOUNCED = re.compile(
    r"(?i:(?:\banswer\s+is\s+not\s+\S+?,?\s+but\b"
    r"|(?<!\bor )(?<!\bor the )\banswers?\s*+(?:is\b(?!n't|\s+not\b)|are\b|would\s+be\b|[:：=])"
    r"|\banswer\s+(?:to|for|of)\b[^.:\n]{1,80}?\bis\b"
    r"|\b(?:correct|right|best|final)\s+(?:option|choice|statement)\s*+(?:is\b|would\s+be\b|[:：])"
    r"|\b(?:is|be|choose|pick|select|with)\s+(?:option|choice)\b(?=\W{1,3}[A-J]\b)"
    r"|(?<!nor )(?<!not )(?<!\w)(?=\(?[A-J]\)?\s+is\s+(?:the\s+)?(?:correct|right)\b(?!\?))"
    r"|\b(?:go\s+with|choose|pick|select)\b(?=\W{1,3}[A-J]\b)|选(?=\W{0,2}[A-J](?![a-zA-Z]))"
    r"|\b(?:option|choice)\b(?=\W{1,3}[A-J]\W+is\s+(?:correct|right)\b)"
    r"|(?:答案|选项|選項|正解|答え)(?:是|为|為|は|[:：])|[故应應]选|답은|정답[:：]"
    r"|\b(?:réponse|respuesta|resposta|risposta|antwort|ответ)(?:\s+\w+)?\s*+(?:est\b|es\b|é\b|è\b|ist\b|lautet\b|[:：—–]))"
    r"(?:[:：\s*\"“「]|\b(?:option|choice)\b)*+)"
)
_FORMULA = re.compile(r"(?<!\\)(?:\$\$(.+?)\$\$|\$((?:[^$\\]|\\.)+)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.DOTALL)
# The end of a sentence; "5. Or 7" goes on.
_END = re.compile(r"(?<!\bRs)(?<!\\)[.;!](?!\d|\s*(?:[Oo]r|[Aa]lso|[Oo]therwise)\b)|[。；！\n](?!\s*or\b)")
_NUMBER = re.compile(
    r"-?\\frac\{-?\d+\}\{\d+\}|-?\(\d+\+\\frac\{\d+\}\{\d+\}\)"
    r"|[-+]?(?<![a-zA-Z-]\()(?<!-\{)(?<!\|)(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+|:\d+)?(?![a-zA-Zα-ω\d]| [b-z]\b)"
    r"(?!\s*\\(?:pi|sqrt|infty))(?:\s*\\%|\s*\\times 10\^\{-?\d+\})?"
)
# Two answers: "5 or 7", "x = 5 and y = 7"
_OR = re.compile(r"\b(?:or|ou|oder|или)\b|或|=[^=,;]*(?:,|\b(?:and|but|while)\b)\s*\$?[a-zA-Z]\w{0,2}\s*=[^=]*$")
# A line that begins with four hashes; a heading begins with a word or "1. ", and has more text below it.
_HASHES = re.compile(r"(?<!#)####(?!#)(?!\s*(?:\d+[.)]\s+)?[A-Za-z]{3}[^\n]{0,200}\n\s*\S)((?:(?!####)[^\n])*)")
# A clause that says when or why an answer holds, or what it is not; none that offers another answer.
_CLAUSE = re.compile(
    r"(?<=[\w)}\]$%.])(?:[,;]?[\s~]+(?:since|because|when|whenever|if|where|reached|given|assuming|provided|unless|once"
    r"|which (?:satisf|check|match|agree|work|leave)\w+|(?:at|for|with|using|while|until)(?=\s+\$?\w+\s*=))\b"
    r"|(?<=\d)[\s~]+(?:as|by|from|in|on|under|after|before)(?=\s+\$?[a-zA-Z]\s*=)"
    r"|,?\s+is\s+(?:the\s+)?(?:correct|right)\b|[,;]\s*(?:not|as)\b"
    r"|(?:\s|\\ |\\quad)+\((?:(?:[^()\d]+|[a-z]{3,}[^()]*)=[^()]*|not \d[^()]*"
    r"|(?:one|two|three|four|five|six|seven|eight|nine|ten)[a-z]*)\)\s*$)"
    r"(?!.*(?:\b(?:or|otherwise|else|but|also|wrong|incorrect|means)\b|not [^,()]*\d(?!\)$)|\\ne|或"
    r"|\d.*\b(?:if|when|at|for)\b)).*",
    re.DOTALL,
)
# "The maximum is 9", "Maximum: 9", "Option B"
_BEGINNING = re.compile(
    r"^(?!.*(?i:\b(?:way|true|right|correct|possible|case|untrue|false|wrong|incorrect|impossible)\s+(?:that|if)\b)"
    r"|\s*(?i:none\b|not|minus|half|double|twice|wrong|error|check|verification)\b[^\d=:]*:)"
    r"(?:[a-zA-Z\s]*\b(?:is|are|equals)\b(?:\s+an?\b|\s*:)?|[a-zA-Z\s]{3,}:\s*(?=-?\d)"
    r"|\s*(?:[Oo]ption|[Cc]hoice)\s+(?=\(?[A-J]\b))"
)
_CHANGES = re.compile(
    r"(?i)\b(?:not|no|none|neither|never|cannot|\w+n(?:['’]|\\varphi )t (?:(?:be|have|equal|to|the|a"
    r"|exactly) )*(?:[-${]*\d+|right|correct)|negative|plus|minus|times|divided|multiplied|modulo|mod|least|most|than"
    r"|or (?:more|less|fewer|so|higher|lower|greater|larger|smaller|some\w+)|out of|\d+ (?:in|to) \d+|(?:ten|hundred"
    r"|thousand|illion)th|\d \d+ths|except|without|unlike|impossible|false|untrue|wrong|incorrect|mistaken|fails"
    r"|rule out|excluded|doubt|exceeds|any\w+ but|far from|close to|next to|nearly|short of|too (?:small|large|big|low"
    r"|high)|bound|reciprocal|inverse|opposite|negation|absolute value|multiple|divisor|(?:(?:co)?sine|tangent"
    r"|logarithm|log|digits) of|square of \d|raised to|to the power|in base|cube|tens|lakh|crore|mil|bn|differs|below"
    r"|above|under|over|between|half|halves|third|quarter|double|twice|(?:four|fif|six|seven|eigh|nin|ten)th|dozen"
    r"|score|gross|hundred|thousand|[a-z]*illion|squared|cubed|root|factorial|(?:check|verification)(?=:)|(?:step|case"
    r"|part|problem) \d+$)s?\b|\\%\s*of\s*\d"
    r"|的平方|次方|根号|分之|倍|一半|至[少多]|[大小多少超]于|超过|以[上下内外]|没有|除[了以]|并非|非|[不百千万亿]"
)
# What a number in a sentence may count besides the answer: "on 3 pens", "of the 4 friends"; and brackets.
_PHRASE = re.compile(
    r"(?i:\b(?:of|on|in|for|by|from|to|per|within|after|before|at|with))\s+(?:[a-z]+\s+)?-?\d[\d.]*"
    r"(?=\s+(?!and\b|or\b)[a-z]|\s*$)|\((?!.*\bor\b)[^()]*\)"
)
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx")
WORDS = re.compile(r"(?<![\\a-zA-Z{])(?!(?:and|or)\b)[a-zA-Z]{3,}|[^\W\d_a-zA-Zα-ω]")  # no commands, no environments
_WORDS = re.compile(rf"(?<![\\a-zA-Z{{])(?!(?:and|or)\b)[a-zA-Z]{{2}}|{WORDS.pattern}")
# The label of a choice, (B) or B., and no second label: "(A) or (B)" chooses nothing. A mark and a space end a label,
# unlike in A(5), and no operator follows it, unlike in (A) + 5.
LABEL = re.compile(
    r"\(?\s*([A-J])(?:[).\s]*\Z|\s*[).:]+(?:[\s~]|\\[ ,;]|\\q?quad)+)"
    r"(?!.*(?<![a-zA-Z\\])[A-HJ](?![a-zA-Z]))(?![).:\s]*[+*/^=<>])(?!.*\bor\b)",
    re.DOTALL,
)
# Where the final answer of a text may begin. It begins with its last sentence, if the text has none of these.
ANSWER_BEGINS = (
    r"(?:\*\*|\$|\b(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore|[Tt]he|[Ff]inal|[Ii]t|is)\b,?\s*){0,4}"
    rf"(?:{_ANNOUNCED.pattern}|\\(?:boxed|fbox)\b|{_HASHES.pattern}|{_TAG.pattern})"
)
