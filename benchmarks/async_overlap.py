"""Measures the gain of `async_level`: a real vLLM server on one core, the trainer on another, long-tailed lengths.

    python benchmarks/async_overlap.py --json async_overlap.json          # ~4 minutes on 2 cores

The server samples windows of 16 groups of 8 completions. The length of a group's completions is lognormal, at most 6
times the median, and the same in every run. The trainer learns from all rows. The gain is largest if sampling and
training take equally long. On a machine where sampling takes much longer, `--iterations` makes training longer.

Runs with k = 0, 1, 2 (`async_level`) alternate. `k0`, `k1`, `k2` are the seconds between the ends of two windows:
medians, without the first k + 2 windows. The other figures come from the runs with k = 0, in which generation, weight
sync and training follow each other:

- `generation`: seconds for which the trainer waits for the rollouts of a window.
- `weights`: seconds of a weight sync.
- `training`: seconds of the rest of the window.
- `max_stage`: the larger of `generation` and `training` + `weights`. A window takes so long if everything overlaps.
- `over_limit`: `k1` / `max_stage`.

TRL's experimental AsyncGRPOTrainer is not compared, since it does not run on a CPU: it needs FlashAttention 3 kernels
and NCCL.
"""

import math
import random
from typing import Any

import harness

from dash_trl.sampling import ServerGeneration
from dash_trl.toy import arithmetic_dataset, toy_model

GROUPS, GROUP = 16, 8
MEDIAN, SPREAD, LONGEST = 40, 0.8, 240  # tokens: exp(N(ln MEDIAN, SPREAD)), at most LONGEST
LEVELS, WINDOWS, ROUNDS = (0, 1, 2), 10, 2


def length(prompt: list[int]) -> int:
    """Returns the length in tokens of the completions of a prompt: lognormal, and the same in every run."""
    return max(2, min(LONGEST, round(math.exp(random.Random(str(prompt)).gauss(math.log(MEDIAN), SPREAD)))))


class LongTailed(ServerGeneration):
    """Server pool that samples completions of the `length` of their prompt."""

    def _room(self, prompts: list[list[int]]) -> list[int | None]:
        return [length(prompt) for prompt in prompts]


def random_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Returns random rewards, so that every group has signal and no row is dropped."""
    return [random.random() for _ in completions]


def windows(level: int, url: str, iterations: int) -> dict[str, list[float]]:
    """Trains with `async_level=level`; returns the seconds of each counted window and of its stages."""
    clock = harness.Clock()
    settings = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "num_iterations": iterations,
        "max_completion_length": LONGEST,
        "max_steps": (WINDOWS + level + 2) * iterations,
        "gradient_filter_threshold": None,
        "vllm_server_urls": [url],
        "generation_kwargs": {"ignore_eos": True},
        "loss_type": "aipo",
        "vllm_importance_sampling_correction": False,
        "async_level": level,
        "logging_steps": iterations,
    }
    train = arithmetic_dataset("train", 512)
    trainer = harness.toy_trainer(settings, train=train, reward_funcs=random_reward, callbacks=[clock])
    trainer.vllm_generation.__class__ = LongTailed
    trainer.train()
    ends = clock.ends[iterations - 1 :: iterations]
    found = {"window": [after - before for before, after in zip(ends, ends[1:], strict=False)]}
    for name in ("wait_for_rollouts", "wait_for_weights"):
        logged = [log[f"time/{name}"] * iterations for log in trainer.state.log_history if f"time/{name}" in log]
        found[name] = logged[1:]
    return {name: values[level + 1 :] for name, values in found.items()}


def main(iterations: int) -> dict[str, float]:
    seconds: dict[int, dict[str, list[float]]] = {level: {} for level in LEVELS}
    with harness.server_beside(toy_model()) as url:
        for level in LEVELS * ROUNDS:  # the levels alternate
            for name, values in windows(level, url, iterations).items():
                seconds[level].setdefault(name, []).extend(values)
    rows = {level: harness.medians(found) for level, found in seconds.items()}
    results = {f"k{level}": row["window"] for level, row in rows.items()}
    results |= {"generation": rows[0]["wait_for_rollouts"], "weights": rows[0]["wait_for_weights"]}
    results["training"] = results["k0"] - results["generation"] - results["weights"]
    results["max_stage"] = max(results["generation"], results["training"] + results["weights"])
    results["over_limit"] = results["k1"] / results["max_stage"]
    for name, row in [*((f"k = {level}: seconds", row) for level, row in rows.items()), ("all: seconds", results)]:
        harness.say(name, row)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        iterations={"type": int, "default": 1, "help": "optimizer steps per window; more steps make training longer"},
    )
