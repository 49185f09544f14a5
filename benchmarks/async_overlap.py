"""What `async_level` buys: a real vLLM server on one core, the trainer on another, long-tailed lengths.

    python benchmarks/async_overlap.py --json async_overlap.json          # ~4 minutes on 2 cores

The server samples windows of 16 groups of 8 completions, whose lengths are lognormal (a group's is the same in every
run; the longest is 6 times the median); the trainer learns from all of their rows. On a machine where one takes much
longer than the other, `--iterations` makes training longer: the gain is largest where they are equal. Runs
with k = 0, 1, 2 take turns; a window's seconds are those between two ends of windows, medians after the first k + 2
windows. From the run with k = 0, where stages follow each other: `generation`: that the trainer waits for a window's
rollouts; `weights`: that a weight sync takes; `training`: the rest of the window. `max_stage`: the longer of generation
and of the trainer's own share, training and weights, to which the sum would shrink if all overlapped;
`over_limit`: k = 1 over it.

TRL's experimental AsyncGRPOTrainer is not beside it: it takes FlashAttention 3 kernels from the hub, and sends weights
by NCCL only, neither of which a CPU has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")

import torch
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.embedded import arithmetic_dataset, embedded_defaults, embedded_model
from dash_trl.sampling import VLLMPool
from dash_trl.serve import Servers

GROUPS, GROUP = 16, 8
MEDIAN, SPREAD, LONGEST = 40, 0.8, 240  # tokens: exp(N(ln MEDIAN, SPREAD)), at most LONGEST
LEVELS, WINDOWS, ROUNDS = (0, 1, 2), 10, 2


def length(prompt: list[int]) -> int:
    """Of a group's completions: long-tailed, and the same in every run."""
    draw = random.Random(str(prompt)).gauss(math.log(MEDIAN), SPREAD)
    return max(2, min(LONGEST, round(math.exp(draw))))


class LongTailed(VLLMPool):
    """Completions of a length that their prompt decides."""

    def _jobs(self, prompts: list[list[int]], num_generations: int, max_tokens: Any = None) -> Any:
        return super()._jobs(prompts, num_generations, [length(prompt) for prompt in prompts])


def random_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A signal in every group: no row is dropped."""
    return [random.random() for _ in completions]


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def windows(level: int, url: str, iterations: int) -> dict[str, list[float]]:
    """Seconds of each counted window, and of its stages."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = DASHTrainer(
            model=embedded_model(),
            reward_funcs=random_reward,
            args=DASHConfig(
                **{
                    **embedded_defaults(),
                    "output_dir": output,
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
                    "disable_tqdm": True,
                }
            ),
            train_dataset=arithmetic_dataset("train", 512),
            callbacks=[clock],
        )
        trainer.vllm_generation.__class__ = LongTailed
        trainer.train()
    ends = clock.ends[iterations - 1 :: iterations]
    found = {"window": [after - before for before, after in zip(ends, ends[1:], strict=False)]}
    for name in ("wait_for_rollouts", "wait_for_weights"):
        found[name] = [log[f"time/{name}"] * iterations for log in trainer.state.log_history if f"time/{name}" in log][
            1:
        ]
    return {name: values[level + 1 :] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--iterations", type=int, default=1, help="optimizer steps on a window: makes training longer")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"This needs 2 cores, one for the server and one for the trainer; there are {len(cores)}.")
    torch.set_num_threads(1)
    path = embedded_model()
    os.sched_setaffinity(0, cores[1:2])  # which the server inherits
    seconds: dict[int, dict[str, list[float]]] = {level: {} for level in LEVELS}
    with Servers(path, 1, port=8800) as servers:
        os.sched_setaffinity(0, cores[:1])
        servers.wait_until_ready()
        for _ in range(ROUNDS):
            for level in LEVELS:
                for name, values in windows(level, servers.urls[0], arguments.iterations).items():
                    seconds[level].setdefault(name, []).extend(values)
    medians = {
        level: {name: statistics.median(values) for name, values in found.items()} for level, found in seconds.items()
    }
    generation, weights = medians[0]["wait_for_rollouts"], medians[0]["wait_for_weights"]
    training = medians[0]["window"] - generation - weights
    results: dict[str, Any] = {f"k{level}": medians[level]["window"] for level in LEVELS}
    results |= {"generation": generation, "weights": weights, "training": training}
    results["max_stage"] = max(generation, training + weights)
    results["over_limit"] = results["k1"] / results["max_stage"]
    for level in LEVELS:
        row = medians[level]
        print(
            f"k = {level}: {row['window']:.2f} s per window ({results['k0'] / row['window']:.2f}x), the trainer waits "
            f"{row['wait_for_rollouts']:.2f} s for rollouts and {row['wait_for_weights']:.2f} s for weights",
            flush=True,
        )
    print(
        f"alone: generation {generation:.2f} s, training {training:.2f} s, weights {weights:.2f} s; k = 1 is "
        f"{results['over_limit']:.2f} x the longer stage"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
