"""The code reward on MBPP+: does each solution pass its tests, and no other's; solutions per second.

    python benchmarks/code_reward.py --json code_reward.json          # about a minute on 2 cores

Each of the 378 solutions is scored by its own tests, and by the next problem's, under the name that these call. Beside
it what the sandbox costs: the time for a program of one line and one test, against starting Python twice, as a sandbox
without a waiting process would; and the CPU time of the solutions themselves.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

from dash_trl import CodeReward, load_code_dataset

DATA = harness.ROOT.parent / "shared" / "data" / "mbppplus"
TRIVIAL, TRIVIAL_TEST, TRIALS = "def f(x): return x + 1", ["assert f(1) == 2"], 200


def per_second(pool: ThreadPoolExecutor, function: Callable[[int], Any], count: int) -> tuple[list[Any], float]:
    """(results, calls per second) of function(0), …, function(count - 1)."""
    results, seconds = harness.timed(lambda: list(pool.map(function, range(count))))
    return results, count / seconds


def start_python_twice(_: int) -> None:
    for _ in range(2):
        subprocess.run([os.path.realpath(sys.executable), "-I", "-S", "-c", "import ast, json, random"], check=True)


def main(data: Path, workers: int) -> dict[str, Any]:
    problems = list(load_code_dataset(data, split="all", prompt_template="plain", completion=True))
    codes = [one["completion"] for one in problems]
    count = len(problems)
    with CodeReward() as reward, ThreadPoolExecutor(workers) as pool:
        box = reward.sandbox
        kind, start = harness.timed(lambda: box.kind)

        def score(code: int, problem: int) -> float:
            name, own = problems[problem]["entry_point"], problems[code]["entry_point"]
            program = f"{codes[code]}\n{name} = {own}" if name != own else codes[code]
            return reward(f"```python\n{program}\n```", problems[problem]["tests"], name)[0]

        box.run(TRIVIAL, TRIVIAL_TEST)
        _, trivial = per_second(pool, lambda _: box.run(TRIVIAL, TRIVIAL_TEST), TRIALS)
        own, rate = per_second(pool, lambda i: score(i, i), count)
        other, other_rate = per_second(pool, lambda i: score(i, (i + 1) % count), count)
        cpu = [box.run(codes[i], problems[i]["tests"], problems[i]["entry_point"]).cpu_seconds for i in range(count)]
        _, twice = per_second(pool, start_python_twice, TRIALS)
    figures = {
        "isolation": kind,
        "start_s": start,
        "solutions": count,
        "pass_own_tests": own.count(1.0),
        "pass_other_tests": other.count(1.0),
        "solutions_per_s": rate,
        "other_tests_per_s": other_rate,
        "one_line_per_s": trivial,
        "python_twice_per_s": twice,
        "sandbox_share": rate / trivial,
        "cpu_mean_s": sum(cpu) / count,
        "cpu_most_s": max(cpu),
    }
    harness.say(f"isolation {kind}", figures)
    return figures


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        data={"type": Path, "default": DATA, "help": "the folder of MBPP+"},
        workers={"type": int, "default": 4, "help": "threads that ask; processes are as many as CPUs"},
    )
