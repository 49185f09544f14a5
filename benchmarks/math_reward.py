r"""Checks that the accuracy reward reads the gold answers of GSM8K and MATH-500 in every form, and measures its speed.

    python benchmarks/math_reward.py --json math_reward.json        # ~12 s on 2 cores

Every gold answer (7,473 + 1,319 + 500) is written into completions of every form in `FORMS`. Scored against itself, it
must get 1. In some forms it is also scored against a different gold answer of another problem, and must get 0. In most
forms, completion and gold answer contain the same text, so math-verify is not needed; in the form "equation",
math-verify has to parse and compare. Two gold answers are different if their `canonical` texts differ. `canonical`
shares no code with the reward or with math-verify.

The benchmark also scores the cases of the tests (`tests/math_cases.py`), by topic and expected result: right, wrong or
unscored.
"""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script runs without an installation

from dash_trl.rewards import MathAccuracyReward  # noqa: E402
from tests.math_cases import RIGHT, UNSCORED, WRONG  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
# File → for each number, a gold answer is compared with a different one at least so many problems further on.
FILES = {"gsm8k/train.jsonl": (1,), "gsm8k/test.jsonl": (1,), "math500/test.jsonl": (1, 7, 33)}


def read_golds(path: Path) -> list[str]:
    """Returns the gold answers of a file, unchanged (GSM8K's with their commas) and read without dash_trl."""
    with path.open() as lines:
        return [json.loads(line)["answer"].split("####")[-1].strip() for line in lines]


def canonical(gold: str) -> str | Fraction:
    r"""Returns the same form for gold answers of the same meaning.

    It removes spacing, thousands separators, units, degrees, `x =` and bases, and writes \frac1 4 as a fraction. Bases
    and units are removed because the reward ignores them if only one side has them.
    """
    text = re.sub(r"\\(?:left|right|!|,|;| )|\s|\\\$|\^\{?\\circ\}?|^[a-z](?:=|\\in)", "", gold)
    text = re.sub(r"(?<=[0-9a-z})])\\(?:text|mbox)\{[^}]*\}(?:\^\d)?$|_\{?\d+\}?$", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    number = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", text)
    if number:
        return Fraction(int(number[2]), int(number[3])) * (-1 if number[1] else 1)
    if re.fullmatch(r"-?\d*\.?\d+", text):
        return Fraction(text)
    if re.fullmatch(r"[-\d.,]+", text.strip("()")):  # "1,-2" and "-2,1" are the same set, and (-2,1) may mean this set
        return ",".join(sorted(text.strip("()").split(",")))
    return text


def in_sentence(gold: str) -> str:
    is_plain = re.fullmatch(r"-?[\d,]*\.?\d+|\\text\{.*\}", gold) and not re.search(r",(?!\d{3}(?!\d))", gold)
    return f"So the answer is {gold}." if is_plain else f"So the answer is ${gold}$."


def in_box(gold: str) -> str:
    return f"So it is $\\boxed{{{gold}}}$."


def in_equation(gold: str) -> str | None:
    """Returns a box with an equation that ends with the gold; None if the gold is an equation, words or a list."""
    has_list = "," in re.sub(r"[(\[].*[)\]]|\\!|,(?=\d{3})", "", gold.replace("\\!", ""))
    return None if "=" in gold or "\\in" in gold or "\\text{" in gold[:6] or has_list else in_box(f"A = {gold}")


def reversed_list(gold: str) -> str | None:
    """Returns a box with the members in reverse order if the gold is a list of numbers such as 1,-2; else None."""
    members = gold.split(",")
    is_list = len(members) > 1 and all(re.fullmatch(r"\s*-?\d+", one) for one in members)
    is_number = re.fullmatch(r"-?\d{1,3}(,\d{3})+", gold)
    return in_box(", ".join(reversed(members))) if is_list and not is_number else None


FORMS: dict[str, Callable[[str], str | None]] = {
    "box": in_box,
    "box twice": lambda gold: f"So it is $\\boxed{{{gold}}}$, or $\\boxed{{ {gold} }}$.",
    "box in display math": lambda gold: f"So it is\n\\[\n\\boxed{{{gold}}}\n\\]",
    "sentence": in_sentence,
    "display math": lambda gold: f"The answer is\n\\[ {gold} \\]",
    "####": lambda gold: f"So it is.\n#### {gold}",
    "behind a thought": lambda gold: f"<think>Perhaps $\\boxed{{104729}}$?</think>{in_box(gold)}",
    "equation": in_equation,
    "reversed": reversed_list,
}
AGAINST_OTHERS = ("sentence", "box", "box twice")


def others(golds: Sequence[str], shift: int) -> list[str]:
    """Returns for each gold the first different gold that is at least `shift` problems further on."""
    forms = [canonical(gold) for gold in golds]
    n = len(golds)
    return [golds[next(j % n for j in range(i + shift, i + n) if forms[j % n] != forms[i])] for i in range(n)]


def check(
    label: str, reward: Callable[..., list[float]], golds: Sequence[str], answers: Sequence[str], form: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Scores answers in one form against gold answers; answers without this form are left out.

    Returns:
        The figures, and the rows with a wrong score.
    """
    texts = [(gold, answer, FORMS[form](answer)) for gold, answer in zip(golds, answers, strict=True)]
    rows = [row for row in texts if row[2] is not None]
    start = time.perf_counter()
    scores = reward(completions=[text for _, _, text in rows], answer=[gold for gold, _, _ in rows])
    seconds = time.perf_counter() - start
    failures = []
    for (gold, answer, text), score in zip(rows, scores, strict=True):
        expected = float(gold == answer)
        if score != expected:  # NaN differs from everything
            reason = "nan" if math.isnan(score) else "self is not 1" if expected else "other is not 0"
            failures.append({"check": label, "gold": gold, "completion": text, "score": str(score), "reason": reason})
    figures = {"check": label, "rows": len(rows), **count(scores), "failed": len(failures)}
    return {**figures, "rows_per_s": len(rows) / seconds}, failures


def count(scores: Sequence[float]) -> dict[str, int]:
    return {"right": scores.count(1.0), "wrong": scores.count(0.0), "unscored": sum(map(math.isnan, scores))}


def run(reward: Callable[..., list[float]], data: Path = DATA) -> dict[str, Any]:
    """Runs all checks on all gold answers; returns scores, failures and rows per second."""
    report: dict[str, Any] = {"golds": 0, "golds_failed": 0, "checks": [], "failures": []}
    for file, shifts in FILES.items():
        golds = read_golds(data / file)
        checks = [(form, "self", golds) for form in FORMS]
        checks += [(form, f"other+{shift}", others(golds, shift)) for shift in shifts for form in AGAINST_OTHERS]
        failed: set[str] = set()
        for form, name, answers in checks:
            figures, failures = check(f"{file} {form}, {name}", reward, golds, answers, form)
            report["checks"].append(figures)
            report["failures"] += failures
            failed |= {failure["gold"] for failure in failures}
        report["golds"] += len(golds)
        report["golds_failed"] += sum(gold in failed for gold in golds)
    return {**report, "reasons": Counter(failure["reason"] for failure in report["failures"])}


def run_cases(reward: Callable[..., list[float]]) -> list[dict[str, Any]]:
    """Scores the cases of the tests; returns for each topic the expected result and the counts of the results."""
    table = []
    for expected, cases in (("right", RIGHT), ("wrong", WRONG), ("unscored", UNSCORED)):
        for topic, rows in cases.items():
            counts = count(reward([completion for completion, _ in rows], [gold for _, gold in rows]))
            table.append({"check": f"{expected}: {topic}", "rows": len(rows), **counts, "expected": expected})
    return table


def main(data: Path, workers: int | None) -> dict[str, Any]:
    with closing(MathAccuracyReward(workers=workers)) as reward:
        _, startup = harness.timed(reward, [in_box("1")] * reward.workers, ["1"] * reward.workers)
        report = run(reward, data)
        report |= {"startup_s": startup, "workers": reward.workers, "cpus": os.cpu_count(), "timeout_s": reward.timeout}
        report["cases"] = run_cases(reward)
    for row in report["checks"] + report["cases"]:
        harness.say(row["check"], row)
    cases_failed = sum(row["rows"] - row[row["expected"]] for row in report["cases"])
    harness.say("all", {**report, "cases_failed": cases_failed})
    return report


if __name__ == "__main__":
    import harness  # here, since the tests import this file

    harness.run(
        main,
        __doc__,
        data={"type": Path, "default": DATA, "help": "the folder with gsm8k/ and math500/"},
        workers={"type": int, "help": "processes; by default, one for each CPU"},
    )
