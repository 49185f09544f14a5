"""Checks the code reward on MBPP+ and measures its speed: each solution must pass its own tests and no others.

    python benchmarks/code_reward.py --json code_reward.json          # about 4 minutes on 2 cores

Each of the 378 solutions is scored by its own tests, and by the tests of the next problem; for these, its function
gets the name that they call. The benchmark also measures the cost of the sandbox, by one-line programs, and the
CPU time of the solutions.

Programs that return a constant or their first argument should get the reward 0. Each is scored by the tests of every
problem, and by the comparison function of the hub's MBPP+ with the same inputs. `constant_passes` counts the programs
that pass although the solution returns another value for some input; `constants_right` counts those that pass because
the solution returns the same values.
"""

import ast
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

from dash_trl import CodeReward, load_code_dataset
from dash_trl.sandbox import Sandbox

DATA = harness.ROOT.parent / "shared" / "data" / "mbppplus"
TRIVIAL = "def f(x): return x + 1"
TRIVIAL_TEST = ["assert f(1) == 2"]
TRIALS = 200

CONSTANTS = ("[]", "None", "0", "True", "''", "x")  # x is the first argument
# The comparison in the test scripts of the hub's `evalplus/mbppplus`, copied.
HUB = """
import numpy as np
from math import inf, nan
def is_floats(x):
    if isinstance(x, float): return True
    if isinstance(x, (list, tuple)): return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray): return x.dtype == np.float64 or x.dtype == np.float32
    return False
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp): atol = 1e-6
    if out != exp and atol != 0: assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else: assert out == exp
"""


def hub_test(test: str, name: str) -> str | None:
    """Return a test with the hub's comparison; None if the test has no lists of inputs and results (Mbpp/88)."""
    lists = {
        ast.unparse(one.targets[0]): ast.unparse(one) for one in ast.parse(test).body if isinstance(one, ast.Assign)
    }
    if not {"inputs", "results"} <= lists.keys():
        return None
    loop = f"for inp, exp in zip(inputs, results):\n    assertion({name}(*inp), exp, 0)"
    return "\n".join([HUB, lists["inputs"], lists["results"], loop])


def per_second(pool: ThreadPoolExecutor, function: Callable[[int], Any], count: int) -> tuple[list[Any], float]:
    """Return (results, calls per second) of function(0), …, function(count - 1)."""
    results, seconds = harness.timed(lambda: list(pool.map(function, range(count))))
    return results, count / seconds


def constant_passes(box: Sandbox, solution: str, problem: dict[str, Any]) -> tuple[int, int]:
    """Counts the constant programs that pass a problem's tests.

    Returns:
        (number of programs with the same values as the solution, number of the others).
    """
    name = problem["entry_point"]
    right = 0
    wrong = 0
    test = hub_test(problem["tests"][0], name)
    tests = [problem["tests"], *([[test]] if test else [])]
    for constant in CONSTANTS:
        program = f"def {name}(x=None, *others): return {constant}"
        if any(box.run(program, one, name).right for one in tests):
            same = f"for inp in inputs:\n    x = inp[0]\n    assert {name}(*inp) == {constant}"
            if test and box.run(solution, [test.rpartition("for inp, exp")[0] + same], name).right:
                right += 1
            else:
                wrong += 1
    return right, wrong


def main(data: Path, workers: int) -> dict[str, Any]:
    problems = list(load_code_dataset(data, split="all", prompt_template="plain", solution=True))
    codes = [one["solution"] for one in problems]
    count = len(problems)
    box, start = harness.timed(Sandbox)
    reward = CodeReward(box)
    with ThreadPoolExecutor(workers) as pool:

        def score(code: int, problem: int) -> float:
            name = problems[problem]["entry_point"]
            own = problems[code]["entry_point"]
            program = f"{codes[code]}\n{name} = {own}" if name != own else codes[code]
            return reward(f"```python\n{program}\n```", problems[problem]["tests"], name)[0]

        box.run(TRIVIAL, TRIVIAL_TEST)
        _, trivial = per_second(pool, lambda _: box.run(TRIVIAL, TRIVIAL_TEST), TRIALS)
        own, rate = per_second(pool, lambda i: score(i, i), count)
        other, other_rate = per_second(pool, lambda i: score(i, (i + 1) % count), count)
        constants = list(pool.map(lambda i: constant_passes(box, codes[i], problems[i]), range(count)))
    figures = {
        "isolation": box.kind,
        "start_s": start,
        "solutions": count,
        "pass_own_tests": own.count(1.0),
        "pass_other_tests": other.count(1.0),
        "constants_right": sum(right for right, _ in constants),
        "constant_passes": sum(wrong for _, wrong in constants),
        "solutions_per_s": rate,
        "other_tests_per_s": other_rate,
        "one_line_per_s": trivial,
        "sandbox_share": rate / trivial,
    }
    harness.say(f"isolation {box.kind}", figures)
    return figures


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        data={"type": Path, "default": DATA, "help": "the folder of MBPP+"},
        workers={"type": int, "default": 2, "help": "threads that run programs, one per CPU"},
    )
