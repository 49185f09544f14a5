"""Measures the cost of the reward runner: scores per second of a function that takes no time, with each backend.

    python benchmarks/reward_runner.py --json reward_runner.json          # ~1 minute on 2 cores

- `per_second`: scores per second for batches of 100,000 scores in groups of 8.
- `latency_ms`: median time of 100 single scores after the workers have started.
- `memory_mb`: growth of the process's peak memory from the first batch to the fifth. It is above 0 only if memory is
  not released after a batch, or if a later batch needs more.
- `waiting`: time of 2,000 scores that each wait 0.1 s, 256 at a time, relative to the minimum of 0.1 s × 2,000 / 256.
"""

import asyncio
import statistics
import time

import harness

from dash_trl import RewardRunner

ROWS, GROUP, BATCHES = 100_000, 8, 5
CONCURRENT, WAITING, SECONDS = 256, 2_000, 0.1


def free(completion: str) -> float:
    return float(len(completion))


async def free_async(completion: str) -> float:
    return float(len(completion))


def waits(completion: str) -> float:
    time.sleep(SECONDS)
    return 1.0


async def waits_async(completion: str) -> float:
    await asyncio.sleep(SECONDS)
    return 1.0


def score(runner: RewardRunner, count: int) -> float:
    """Returns the seconds for scoring `count` completions, and checks that each gets its own score."""
    rows = [{"prompt": "", "completion": "x" * (i % 97), "completion_ids": ()} for i in range(count)]
    began = time.perf_counter()
    request = runner.submit(rows, group_size=GROUP)
    request.wait()
    seconds = time.perf_counter() - began
    wrong = [i for i, one in enumerate(request.outcomes[0]) if one.value not in (i % 97, 1.0)]
    assert not wrong, f"rows {wrong[:5]} have other scores than theirs"
    return seconds


def measure(backend: str, rows: int) -> dict[str, float]:
    function = free_async if backend == "asyncio" else free
    with RewardRunner(function, backend=backend) as runner:
        score(runner, 1000)  # starts the workers
        seconds, first_peak = [score(runner, rows)], harness.peak()
        seconds += [score(runner, rows) for _ in range(BATCHES - 1)]
        grown = harness.peak() - first_peak
        latency = statistics.median(score(runner, 1) for _ in range(100))
    return {
        "per_second": rows / statistics.median(seconds),
        "latency_ms": 1000 * latency,
        "memory_mb": grown / 2**20,
    }


def overhead_of_waiting(backend: str) -> float:
    function = waits_async if backend == "asyncio" else waits
    with RewardRunner(function, backend=backend, max_concurrency=CONCURRENT) as runner:
        score(runner, CONCURRENT)
        return score(runner, WAITING) / (SECONDS * WAITING / CONCURRENT)


def main(backends: list[str], rows: int) -> dict[str, dict[str, float]]:
    results = {}
    for backend in backends:
        results[backend] = measure(backend, rows)
        if backend in ("thread", "asyncio"):
            results[backend]["waiting"] = overhead_of_waiting(backend)
        harness.say(backend, results[backend])
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        backends={"nargs": "+", "default": ["thread", "asyncio", "process", "ray"]},
        rows={"type": int, "default": ROWS, "help": "number of scores in a batch"},
    )
