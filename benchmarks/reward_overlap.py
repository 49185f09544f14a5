"""What is left of the waiting for slow rewards: the experiment of the asynchronous reward agent, at 1/100 of its scale.

    python benchmarks/reward_overlap.py --json reward_overlap.json                 # ~2 minutes on 2 cores
    python benchmarks/reward_overlap.py --accuracy --json reward_accuracy.json     # + accuracy, 3 seeds: ~15 minutes

Each completion's reward takes 10 to 400 ms, drawn uniformly and the same in every run (in the experiment, 1 to 40 s,
GSM8K, 8 H20). The embedded model; 8 groups of 4 completions, all rewards at once. In one run, in turn:

    baseline     the update waits for all rewards
    pipeline     `reward_pipeline`: it begins on the groups that are scored
    one_step     `async_level=1`: the next window is sampled while the rewards of this one are awaited
    both         and both with `loss_type="decoupled_ppo"`

First with generation in process, then ("server") with a real vLLM server on one core and the trainer on the other.
Seconds per window are medians. From the baseline: `generation`, `training` (the rest), `rewards` (what is waited for).
`bound`: max(generation + training, rewards) in process, max(generation, training, rewards) with a server. `reduction` =
(baseline − both) / baseline; `hidden_share` = (baseline − both) / (baseline − bound), above 1 where the rewards of two
windows are on their way at once, which the bound leaves out. `accuracy`: on held-out problems
after as many samples with each strategy; rewards take no time there, which changes no update.
"""

import hashlib
import statistics
import time
from typing import Any

import harness
import torch

from dash_trl import RewardAgent
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_model
from dash_trl.evaluation import accuracy

GROUPS, GROUP = 8, 4
SHORTEST, LONGEST = 0.01, 0.4  # seconds of a reward
FIRST, WINDOWS, ROUNDS = 3, 10, 1  # windows that are not counted, counted, and how often the strategies take turns
SEEDS, STEPS = 3, 160  # of the accuracy
STRATEGIES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "pipeline": {"reward_pipeline": True},
    "one_step": {"async_level": 1, "loss_type": "aipo"},
    "both": {"async_level": 1, "loss_type": "aipo", "reward_pipeline": True},
    "both_decoupled": {"async_level": 1, "loss_type": "decoupled_ppo", "reward_pipeline": True},
}


def slow_reward(prompt: Any, completion: Any, answer: str, completion_ids: list[int]) -> float:
    """The embedded task's, after a time that the completion decides."""
    drawn = hashlib.sha256(str((prompt, completion_ids)).encode()).digest()
    time.sleep(SHORTEST + (LONGEST - SHORTEST) * int.from_bytes(drawn[:4]) / 2**32)
    return quick_reward(completion, answer)


def quick_reward(completion: Any, answer: str) -> float:
    return arithmetic_reward([completion], [answer])[0]


def train(
    strategy: dict[str, Any], url: str | None, steps: int, *, seed: int = 0, reward: Any = slow_reward
) -> tuple[Any, list[float]]:
    clock = harness.Clock()
    settings = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "max_steps": steps,
        "seed": seed,
        **strategy,
    }
    if url is not None:
        settings["vllm_server_urls"] = [url]
    if settings.get("loss_type") == "aipo":
        settings["vllm_importance_sampling_correction"] = False
    with RewardAgent(reward) as agent:
        trainer = harness.embedded_trainer(settings, reward_funcs=agent, callbacks=[clock])
        trainer.train()
    return trainer, [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def overlap(url: str | None) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    stages: dict[str, list[float]] = {"generate": [], "reward": []}
    for _ in range(ROUNDS):
        for name, strategy in STRATEGIES.items():
            trainer, windows = train(strategy, url, FIRST + WINDOWS + 1)
            seconds[name] += windows[FIRST:]
            if name == "baseline":
                for stage, values in stages.items():
                    logged = [line[f"time/{stage}"] for line in trainer.state.log_history if f"time/{stage}" in line]
                    values += logged[FIRST + 1 :]
    found = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    generation, rewards = (statistics.median(values) for values in stages.values())
    training = found["baseline_s"] - generation - rewards
    bound = max(generation + training, rewards) if url is None else max(generation, training, rewards)
    gained = found["baseline_s"] - found["both_s"]
    found |= {"generation": generation, "training": training, "rewards": rewards, "bound": bound}
    found["reduction"] = gained / found["baseline_s"]
    found["hidden_share"] = gained / (found["baseline_s"] - bound)
    return found


def learned() -> dict[str, dict[str, float]]:
    """Sampled accuracy of each strategy after as many samples: mean, and half of the 95 % interval."""
    results: dict[str, dict[str, float]] = {}
    for name, strategy in STRATEGIES.items():
        values = []
        for seed in range(SEEDS):
            trainer, _ = train(strategy, None, STEPS, seed=seed, reward=quick_reward)
            model, length = trainer.accelerator.unwrap_model(trainer.model), trainer.args.max_completion_length
            problems = (arithmetic_dataset("test"), arithmetic_reward)
            values.append(accuracy(model, trainer.processing_class, *problems, num_samples=2, max_new_tokens=length))
        mean, spread = harness.interval(values)
        results[name] = {"accuracy": mean, "interval": spread}
        harness.say(name, results[name])
    return results


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--no-server", action="store_true", help="only with generation in process")
    parser.add_argument("--accuracy", action="store_true", help="train for longer, too, and measure what was learned")
    arguments = parser.parse_args()
    path = embedded_model(progress=False)
    torch.set_num_threads(2)
    results: dict[str, Any] = overlap(None)
    harness.say("in process", results)
    if not arguments.no_server:
        with harness.server_beside(path) as url:
            results["server"] = overlap(url)
        harness.say("server", results["server"])
    if arguments.accuracy:
        results["accuracy"] = learned()
    harness.write(arguments.json, results)


if __name__ == "__main__":
    main()
