r"""Does the accuracy reward know the gold answers of GSM8K and MATH-500, and how fast is it?

    python benchmarks/math_reward.py --json math_reward.json        # ~30 s on 2 cores
    python benchmarks/math_reward.py --all-pairs                    # + all pairs of MATH-500's golds, ~5 min

Every gold answer X (7,473 + 1,319 + 500) is put into a completion and scored against itself, which must give 1, and
against a different gold answer of another problem, which must give 0:

- sentence: "So the answer is X." (GSM8K) or "So the answer is $X$." (MATH-500; words without dollars). math-verify has
  to find, read and compare it: there is no shortcut. (Lists need their dollars: in prose math-verify takes the comma of
  "the answer is -2,1." for a decimal comma, the one gold of 9,292 that fails without them.)
- box: "So it is $\boxed{X}$.". Against itself it is the same text, which needs no math-verify; against others it does.

Two golds are different if `canonical` differs, which shares no code with the reward or with math-verify.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs without an installation

from dash_trl.rewards.math import MathAccuracyReward  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
FILES = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "math500/test.jsonl")
GSM8K_SHIFTS = (1,)
MATH_SHIFTS = (1, 7, 33)  # how many problems further the other gold answer is looked for


def read_golds(path: Path) -> list[str]:
    """The gold answers of a file as they stand there (GSM8K's with their commas), read without dash_trl."""
    with path.open() as lines:
        return [json.loads(line)["answer"].split("####")[-1].strip() for line in lines]


def canonical(gold: str) -> str | Fraction:
    r"""One form for golds that mean the same: spacing, \frac1 4, thousands, units, degrees, `x =` and bases removed.

    Bases and units are removed since the reward does not compare them when only one side has them.
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
    if re.fullmatch(r"[-\d.,]+", text.strip("()")):  # "1,-2" and "-2,1" are one set, and (-2,1) may be meant so
        return ",".join(sorted(text.strip("()").split(",")))
    return text


def in_sentence(gold: str) -> str:
    is_plain = re.fullmatch(r"-?[\d,]*\.?\d+|\\text\{.*\}", gold) and not re.search(r",(?!\d{3}(?!\d))", gold)
    return f"So the answer is {gold}." if is_plain else f"So the answer is ${gold}$."


def in_box(gold: str) -> str:
    return f"So it is $\\boxed{{{gold}}}$."


def others(golds: Sequence[str], shift: int) -> list[str]:
    """For each gold, the first different one at least `shift` problems further on."""
    forms = [canonical(gold) for gold in golds]
    n = len(golds)
    return [golds[next(j % n for j in range(i + shift, i + n) if forms[j % n] != forms[i])] for i in range(n)]


def check(
    reward: Callable[..., list[float]], golds: Sequence[str], answers: Sequence[str], write: Callable[[str], str]
) -> tuple[list[dict[str, Any]], float]:
    """Scores write(answer) against gold; returns the rows whose score is not what it must be, and the seconds."""
    start = time.perf_counter()
    scores = reward(completions=[write(answer) for answer in answers], answer=list(golds))
    seconds = time.perf_counter() - start
    failures = []
    for gold, answer, score in zip(golds, answers, scores, strict=True):
        expected = float(gold == answer)
        if score != expected:  # NaN differs from everything
            reason = "nan" if math.isnan(score) else "self is not 1" if expected else "other is not 0"
            failures.append({"gold": gold, "completion": write(answer), "score": str(score), "reason": reason})
    return failures, seconds


def run(reward: Callable[..., list[float]], data: Path = DATA, files: Iterable[str] = FILES) -> dict[str, Any]:
    """All checks on all golds: failures, counts and rows per second."""
    report: dict[str, Any] = {"golds": 0, "golds_failed": 0, "reasons": Counter(), "checks": [], "failures": []}
    for file in files:
        golds = read_golds(data / file)
        shifts = GSM8K_SHIFTS if file.startswith("gsm8k") else MATH_SHIFTS
        against = {"self": golds} | {f"other+{shift}": others(golds, shift) for shift in shifts}
        failed: set[str] = set()
        for name, answers in against.items():
            for write in (in_sentence, in_box):
                failures, seconds = check(reward, golds, answers, write)
                label = f"{file} {write.__name__} {name}"
                report["checks"].append(
                    {"check": label, "rows": len(golds), "failed": len(failures), "rows_per_s": len(golds) / seconds}
                )
                report["failures"] += [{"check": label, **failure} for failure in failures]
                report["reasons"].update(failure["reason"] for failure in failures)
                failed |= {failure["gold"] for failure in failures}
        report["golds"] += len(golds)
        report["golds_failed"] += sum(gold in failed for gold in golds)
    return report


def run_all_pairs(reward: Callable[..., list[float]], data: Path = DATA) -> list[dict[str, Any]]:
    """MATH-500's distinct golds that are not integers, each against each different one."""
    golds = sorted({gold for gold in read_golds(data / FILES[-1]) if not gold.lstrip("-").isdigit()})
    form = {gold: canonical(gold) for gold in golds}
    pairs = [(gold, answer) for gold in golds for answer in golds if form[gold] != form[answer]]
    failures, seconds = check(reward, [g for g, _ in pairs], [a for _, a in pairs], in_box)
    print(f"all pairs of MATH-500: {len(failures)} of {len(pairs):,} failed, {len(pairs) / seconds:,.0f} rows/s")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with gsm8k/ and math500/")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument(
        "--all-pairs", action="store_true", help="also compare every pair of MATH-500's golds but integers"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    missing = [file for file in FILES if not (args.data / file).exists()]
    if missing:
        parser.error(f"{args.data} lacks {', '.join(missing)}: give the folder that holds them with --data")

    with MathAccuracyReward(timeout=args.timeout, workers=args.workers) as reward:
        start = time.perf_counter()
        reward([in_box("1")] * reward.workers, ["1"] * reward.workers)
        startup = time.perf_counter() - start
        report = run(reward, args.data)
        report |= {"startup_s": startup, "workers": reward.workers, "cpus": os.cpu_count(), "timeout_s": args.timeout}
        if args.all_pairs:
            report["all_pairs_failures"] = run_all_pairs(reward, args.data)

    for row in report["checks"]:
        print(f"{row['check']:45s} {row['failed']:4d} of {row['rows']:5d} failed {row['rows_per_s']:9,.0f} rows/s")
    for failure in report["failures"] + report.get("all_pairs_failures", []):
        print(f"  {failure['reason']}: gold {failure['gold']!r}, completion {failure['completion']!r}")
    print(
        f"{report['golds_failed']} of {report['golds']:,} golds failed {dict(report['reasons'])}; "
        f"start-up {startup:.1f} s, {report['workers']} workers"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
