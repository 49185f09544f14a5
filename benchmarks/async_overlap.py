"""Measures what overlaps sampling and training gain: a real vLLM server on one core, the trainer on another.

    python benchmarks/async_overlap.py --json async_overlap.json          # ~5 minutes on 2 cores
    python benchmarks/async_overlap.py --at_once 32                       # the server samples a quarter of a window
    python benchmarks/async_overlap.py --at_once 32 --hidden 192 --remote 0.009     # on a machine of its own, simulated

The server samples windows of 16 groups of 8 completions. The length of a group's completions is lognormal, at most 6
times the median, and the same in every run. The trainer learns from all rows. The gain is largest if sampling and
training take equally long. On a machine where sampling takes much longer, `--hidden` (a wider model with random
weights) makes training longer. With `--remote`, the server only gets weights: completions are made up after the seconds
that they would take on another machine, since a server on this one takes caches and memory from the trainer.

Runs with k = 0, 1, 2 (`async_level`), and with k = 0 and `reward_pipeline`, alternate. `k0`, `k1`, `k2` and `streamed`
are the seconds between the ends of two windows: medians, without the first k + 2 windows. The other figures come from
the runs with k = 0, in which generation, weight sync and training follow each other:

- `generation`: seconds for which the trainer waits for the rollouts of a window.
- `weights`: seconds of a weight sync.
- `training`: seconds of the rest of the window.
- `streamed_gain`: `k0` / `streamed`.

TRL's experimental AsyncGRPOTrainer is not compared, since it does not run on a CPU: it needs FlashAttention 3 kernels
and NCCL.
"""

import asyncio
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import harness

from dash_trl import RewardRunner
from dash_trl.sampling import Completion, ServerGeneration, ServerPool
from dash_trl.toy import arithmetic_dataset, arithmetic_tokenizer, toy_model

GROUPS = 16
GROUP = 8
# Tokens of a completion: exp(N(ln MEDIAN, SPREAD)), at most LONGEST.
MEDIAN = 40
SPREAD = 0.8
LONGEST = 240
WINDOWS = 10
ROUNDS = 2
RUNS: dict[str, tuple[int, bool]] = {  # name → `async_level`, `reward_pipeline`
    "k0": (0, False),
    "k1": (1, False),
    "k2": (2, False),
    "streamed": (0, True),
}


def length(prompt: list[int]) -> int:
    """Return the length in tokens of the completions of a prompt: lognormal, and the same in every run."""
    return max(2, min(LONGEST, round(math.exp(random.Random(str(prompt)).gauss(math.log(MEDIAN), SPREAD)))))


class LongTailed(ServerGeneration):
    """Server pool that samples completions of the `length` of their prompt."""

    def requests(self, prompts: list[list[int]], num_generations: int) -> Iterator[Any]:
        for ids, n, sampling in super().requests(prompts, num_generations):
            yield ids, n, sampling | {"max_tokens": length(ids)}


class Elsewhere(ServerPool):
    """Pool whose completions take `seconds` per token, some `groups` at a time, and no CPU of this machine."""

    seconds: float
    groups: asyncio.Semaphore

    async def complete(self, prompt_ids: Any, n: int, sampling: Any, *, order: int = 0, number: int = 0) -> Any:
        tokens = sampling["max_tokens"]
        async with self.groups:
            await asyncio.sleep(self.seconds * tokens)
        return [Completion([100] * tokens, [-1.0] * tokens)] * n, [self.fleet.version] * 2


def random_reward(completion: Any) -> float:
    """Return a random reward, so that every group has signal and no row is dropped."""
    return random.random()


def windows(model: str, level: int, pipeline: bool, url: str, at_once: int, remote: float) -> dict[str, list[float]]:
    """Trains a model; returns the seconds of each counted window and of its stages."""
    clock = harness.Clock()
    settings = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "max_steps": WINDOWS + level + 2,
        "gradient_filter_threshold": None,
        "vllm_server_urls": [url],
        "generation_kwargs": {"ignore_eos": True},
        "loss_type": "aipo",
        "vllm_importance_sampling_correction": False,
        "async_level": level,
        "reward_pipeline": pipeline,
    }
    train = arithmetic_dataset("train", 512)
    trainer = harness.toy_trainer(
        settings, path=model, train=train, reward_funcs=RewardRunner(random_reward), callbacks=[clock]
    )
    trainer.vllm_generation.__class__ = LongTailed
    if remote:
        pool = trainer.vllm_generation.pool
        pool.__class__ = Elsewhere
        pool.seconds = remote
        pool.groups = asyncio.Semaphore(at_once // GROUP)
    trainer.train()
    found = {"window": [after - before for before, after in pairwise(clock.ends)]}
    for name in ("wait_for_rollouts", "wait_for_weights"):
        logged = [log[f"time/{name}"] for log in trainer.state.log_history if f"time/{name}" in log]
        found[name] = logged[1:]
    return {name: values[level + 1 :] for name, values in found.items()}


def wide_model(hidden: int) -> str:
    """Return the folder of a model of the toy model's depth with random weights and the toy model's tokenizer."""
    folder = f"{harness.OUTPUT.name}/wide"
    heads = hidden // 32
    harness.qwen2(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=280,
    ).save_pretrained(folder)
    arithmetic_tokenizer().save_pretrained(folder)
    return folder


def main(at_once: int, hidden: int, remote: float) -> dict[str, float]:
    model = wide_model(hidden) if hidden else toy_model()
    seconds: dict[str, dict[str, list[float]]] = {run: {} for run in RUNS}
    with harness.server_beside(model, options=["--max-num-seqs", str(at_once)]) as url:
        for run in [*RUNS] * ROUNDS:  # they alternate
            for name, values in windows(model, *RUNS[run], url, at_once, remote).items():
                seconds[run].setdefault(name, []).extend(values)
    rows = {run: harness.medians(found) for run, found in seconds.items()}
    results = {run: row["window"] for run, row in rows.items()}
    results |= {"generation": rows["k0"]["wait_for_rollouts"], "weights": rows["k0"]["wait_for_weights"]}
    results["training"] = results["k0"] - results["generation"] - results["weights"]
    results["streamed_gain"] = results["k0"] / results["streamed"]
    for name, row in {**rows, "all": results}.items():
        harness.say(f"{name}: seconds", row)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        hidden={"type": int, "default": 0, "help": "width of a model with random weights; 0 = the toy model"},
        at_once={"type": int, "default": GROUPS * GROUP, "help": "rows that the server samples at once"},
        remote={"type": float, "default": 0.0, "help": "seconds of a token on another machine; 0 = a server here"},
    )
