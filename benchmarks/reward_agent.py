"""What the reward agent costs: scores per second of a function that takes no time, by each backend, and one alone.

    python benchmarks/reward_agent.py --json reward_agent.json          # ~1 minute on 2 cores

`per_second`: 100,000 scores in one batch, groups of 8. `latency_ms`: the median of 100 single ones, workers warm.
`memory_mb`: by which the process has grown from the first batch to the fifth, its peak resident set; it counts what a
batch itself holds only where the first was smaller. `waiting`: 2,000 scores that each wait for 0.1 s, at 256 at a time:
seconds over 0.1 s × 2,000 / 256, which is the least.
"""

import asyncio
import os
import resource
import statistics
import time
from typing import Any

import harness

from dash_trl import RewardAgent

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

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


def score(agent: RewardAgent, count: int) -> float:
    """Seconds for so many completions, each of which gets its own score."""
    rows = [{"prompt": "", "completion": "x" * (i % 97), "completion_ids": ()} for i in range(count)]
    began = time.perf_counter()
    request = agent.submit(rows, group_size=GROUP)
    request.wait()
    seconds = time.perf_counter() - began
    wrong = [i for i, one in enumerate(request.outcomes[0]) if one.value not in (i % 97, 1.0)]
    assert not wrong, f"rows {wrong[:5]} have other scores than theirs"
    return seconds


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(backend: str, rows: int) -> dict[str, float]:
    function = free_async if backend == "asyncio" else free
    with RewardAgent(function, backend=backend) as agent:
        score(agent, 1000)  # starts the workers
        seconds, grown = [score(agent, rows)], peak_mb()
        seconds += [score(agent, rows) for _ in range(BATCHES - 1)]
        grown = peak_mb() - grown
        latency = statistics.median(score(agent, 1) for _ in range(100))
    return {
        "per_second": rows / statistics.median(seconds),
        "latency_ms": 1000 * latency,
        "memory_mb": grown,
    }


def overhead_of_waiting(backend: str) -> float:
    function = waits_async if backend == "asyncio" else waits
    with RewardAgent(function, backend=backend, max_concurrency=CONCURRENT) as agent:
        score(agent, CONCURRENT)
        return score(agent, WAITING) / (SECONDS * WAITING / CONCURRENT)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--backends", nargs="+", default=["thread", "asyncio", "process", "ray"])
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()

    result: dict[str, Any] = {}
    for backend in arguments.backends:
        result[backend] = measure(backend, arguments.rows)
        if backend in ("thread", "asyncio"):
            result[backend]["waiting"] = overhead_of_waiting(backend)
        harness.say(backend, result[backend])
    harness.write(arguments.json, result)


if __name__ == "__main__":
    main()
