"""Measures how much waiting for slow rewards remains: the experiment of the asynchronous reward agent at 1/100 scale.

    python benchmarks/reward_overlap.py --json reward_overlap.json      # ~2 minutes on 2 cores

The reward of a completion takes 10 to 400 ms, drawn uniformly and the same in every run. (In the original experiment it
takes 1 to 40 s, with GSM8K on 8 H20 GPUs.) The toy model samples 8 groups of 4 completions per window, and all rewards
of a window run at once. These strategies are compared:

    baseline     the update waits for all rewards
    pipeline     `reward_pipeline`: the update begins with the groups that are scored
    one_step     `async_level=1`: the next window is sampled while the rewards of this one are awaited
    both         pipeline and one_step together, with `loss_type="aipo"`; `both_decoupled`: with "decoupled_ppo"

First the trainer's process samples; then ("server") a real vLLM server samples on one core, with the trainer on the
other. Seconds per window are medians. The parts of a window come from the baseline: `generation`, `rewards` (waiting
for rewards), and `training` (the rest).

- `bound`: max(generation + training, rewards) in process, max(generation, training, rewards) with a server.
- `reduction`: (baseline − both) / baseline.
- `hidden_share`: (baseline − both) / (baseline − bound). It exceeds 1 if the rewards of two windows run at the same
  time, which the bound does not consider.
"""

import hashlib
import statistics
import time
from typing import Any

import harness
import torch

from dash_trl import RewardRunner
from dash_trl.toy import arithmetic_reward, toy_model

GROUPS, GROUP = 8, 4
SHORTEST, LONGEST = 0.01, 0.4  # seconds of a reward
FIRST, WINDOWS = 3, 10  # number of windows that are not counted, and of those that are
AIPO = {"loss_type": "aipo", "vllm_importance_sampling_correction": False}
STRATEGIES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "pipeline": {"reward_pipeline": True},
    "one_step": {"async_level": 1, **AIPO},
    "both": {"async_level": 1, "reward_pipeline": True, **AIPO},
    "both_decoupled": {"async_level": 1, "reward_pipeline": True, "loss_type": "decoupled_ppo"},
}


def slow_reward(prompt: Any, completion: Any, answer: str, completion_ids: list[int]) -> float:
    """Returns the reward of the toy task after a time that depends on the completion."""
    drawn = hashlib.sha256(str((prompt, completion_ids)).encode()).digest()
    time.sleep(SHORTEST + (LONGEST - SHORTEST) * int.from_bytes(drawn[:4]) / 2**32)
    return arithmetic_reward([completion], [answer])[0]


def train(strategy: dict[str, Any], url: str | None) -> tuple[Any, list[float]]:
    """Trains; returns the trainer, and the seconds between the ends of successive windows."""
    clock = harness.Clock()
    settings = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "max_steps": FIRST + WINDOWS + 1,
        "vllm_server_urls": [url] if url else None,
        **strategy,
    }
    with RewardRunner(slow_reward) as runner:
        trainer = harness.toy_trainer(settings, reward_funcs=runner, callbacks=[clock])
        trainer.train()
    return trainer, [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def overlap(url: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, strategy in STRATEGIES.items():
        trainer, windows = train(strategy, url)
        found[f"{name}_s"] = statistics.median(windows[FIRST:])
        if name == "baseline":
            for stage, key in (("generation", "time/generate"), ("rewards", "time/reward")):
                logged = [line[key] for line in trainer.state.log_history if key in line]
                found[stage] = statistics.median(logged[FIRST + 1 :])
    baseline, generation, rewards = (found[name] for name in ("baseline_s", "generation", "rewards"))
    found["training"] = training = baseline - generation - rewards
    found["bound"] = max(generation, training, rewards) if url else max(generation + training, rewards)
    found["reduction"] = (baseline - found["both_s"]) / baseline
    found["hidden_share"] = (baseline - found["both_s"]) / (baseline - found["bound"])
    return found


def main() -> dict[str, Any]:
    path = toy_model(progress=False)
    torch.set_num_threads(2)
    results: dict[str, Any] = overlap(None)
    harness.say("in process", results)
    with harness.server_beside(path) as url:
        results["server"] = overlap(url)
    harness.say("server", results["server"])
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
