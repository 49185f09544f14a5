r"""Checks that the accuracy reward reads the gold answers of GSM8K and MATH-500 in every form, and measures its speed.

    python benchmarks/math_reward.py --json math_reward.json        # ~20 s on 2 cores

Every gold answer (7,473 + 1,319 + 500) is written into completions of every form in `FORMS`. Scored against itself, it
must get 1. In some forms it is also scored against a different gold answer of another problem, and must get 0. In most
forms, completion and gold answer contain the same text, so math-verify is not needed; in the form "equation",
math-verify has to parse and compare. Two gold answers are different if their `canonical` texts differ. `canonical`
shares no code with the reward or with math-verify.

If the data has `answers.jsonl`, with pairs of a gold answer and a completion, the verdicts of an expert and those of
math-verify alone, the last rows count the wrong answers that are paid, and the right ones that are missed.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script runs without an installation

from dash_trl.rewards import MathAccuracyReward  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
FILES = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "math500/test.jsonl")


def canonical(gold: str) -> str | Fraction:
    r"""Return the same form for gold answers of the same meaning.

    It removes spacing, thousands separators, units, degrees, `x =` and bases, and writes \frac1 4 as a fraction. Bases
    and units are removed because math-verify ignores them.
    """
    text = re.sub(r"\\(?:left|right|!|,|;| )|\s|\\\$|\^\{?\\circ\}?|^[a-z](?:=|\\in)", "", gold)
    text = re.sub(r"(?<=[0-9a-z})])\\(?:text|mbox)\{[^}]*\}(?:\^\d)?$|_\{?\d+\}?$", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"^(-?)\\[dt]?frac\{?(\d+?)\}?\{?(\d+)\}?$", r"\1\2/\3", text)
    if re.fullmatch(r"-?\d*\.?\d+|-?\d+/\d+", text):
        return Fraction(text)
    # "1,-2" and "-2,1" are the same set, and (-2,1) may mean this set
    return ",".join(sorted(text.strip("()").split(",")))


def in_sentence(gold: str) -> str:
    is_plain = re.fullmatch(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?|\\text\{.*\}", gold)
    return f"So the answer is {gold}." if is_plain else f"So the answer is ${gold}$."


def in_box(gold: str) -> str:
    return f"So it is $\\boxed{{{gold}}}$."


def in_equation(gold: str) -> str | None:
    """Return a box with an equation that ends with the gold; None if the gold is an equation, words or a list."""
    has_list = "," in re.sub(r"[(\[].*[)\]]|\\!|,(?=\d{3})", "", gold.replace("\\!", ""))
    return None if "=" in gold or "\\in" in gold or "\\text{" in gold[:6] or has_list else in_box(f"A = {gold}")


FORMS: dict[str, Callable[[str], str | None]] = {
    "box": in_box,
    "box twice": lambda gold: f"So it is $\\boxed{{{gold}}}$, or $\\boxed{{ {gold} }}$.",
    "sentence": in_sentence,
    "display math": lambda gold: f"The answer is\n\\[ {gold} \\]",
    "####": lambda gold: f"So it is.\n#### {gold}",
    "behind a thought": lambda gold: f"<think>Perhaps $\\boxed{{104729}}$?</think>{in_box(gold)}",
    "equation": in_equation,
}
AGAINST_OTHERS = ("sentence", "box", "box twice")  # forms in which answers are also compared with other gold answers


def others(golds: Sequence[str]) -> list[str]:
    """Return for each gold the next different gold."""
    forms = [canonical(gold) for gold in golds]
    n = len(golds)
    return [golds[next(j % n for j in range(i + 1, i + n) if forms[j % n] != forms[i])] for i in range(n)]


def run(reward: Callable[..., list[float]], data: Path = DATA) -> dict[str, Any]:
    """Runs all checks on all gold answers; returns the figures of each check and the rows with a wrong score."""
    report: dict[str, Any] = {"golds": 0, "checks": [], "failures": []}
    for file in FILES:
        lines = map(json.loads, (data / file).read_text().splitlines())
        golds = [line["answer"].split("####")[-1].strip() for line in lines]
        report["golds"] += len(golds)
        checks = [(form, "self", golds) for form in FORMS]
        checks += [(form, "other", others(golds)) for form in AGAINST_OTHERS]
        for form, name, answers in checks:
            rows = [row for row in zip(map(FORMS[form], answers), golds, answers, strict=True) if row[0] is not None]
            start = time.perf_counter()
            scores = reward(completions=[text for text, _, _ in rows], answer=[gold for _, gold, _ in rows])
            figures = {"rows": len(rows), "rows_per_s": len(rows) / (time.perf_counter() - start)}
            failures = [(*row, score) for row, score in zip(rows, scores, strict=True) if score != (row[1] == row[2])]
            report["checks"].append({"check": f"{file} {form}, {name}", **figures, "failed": len(failures)})
            report["failures"] += failures
    return report


def verdicts(reward: Callable[..., list[float]], table: Path) -> list[dict[str, Any]]:
    """Return the number of wrong answers that are paid, and of right answers that are missed."""
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    ours = reward([row["completion"] for row in rows], [row["gold"] for row in rows])
    counts = []
    for name, scores in (("this reward", ours), ("math-verify", [row["math_verify"] for row in rows])):
        pairs = [(row["expert"], score == 1) for row, score in zip(rows, scores, strict=True)]
        counts.append(
            {"check": f"{table.name}, {name}", "paid": pairs.count((0, True)), "missed": pairs.count((1, False))}
        )
    return counts


def main(data: Path, workers: int | None) -> dict[str, Any]:
    with closing(MathAccuracyReward(workers=workers)) as reward:
        reward([in_box("1")], ["1"])  # starts the workers
        report = run(reward, data)
        if (table := data / "answers.jsonl").exists():
            report["checks"] += verdicts(reward, table)
    for row in [*report["checks"], {"check": "all", "golds": report["golds"], "failed": len(report["failures"])}]:
        harness.say(row["check"], row)
    return report


if __name__ == "__main__":
    import harness  # here, since the tests import this file

    harness.run(
        main,
        __doc__,
        data={"type": Path, "default": DATA, "help": "the folder with gsm8k/ and math500/"},
        workers={"type": int, "help": "processes; by default, one for each CPU"},
    )
