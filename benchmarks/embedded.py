"""The demo's learning: the embedded model before and after, for 3 seeds, with DASH and with TRL's own trainer.

    python benchmarks/embedded.py --json embedded.json          # ~10 minutes on 2 cores

Accuracy on 256 held-out problems; sampled: two completions each at temperature 1. `after` and `seconds` are DASH's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model
from dash_trl.evaluation import accuracy

SEEDS = (0, 1, 2)


def measure(model: Any, tokenizer: Any, length: int) -> tuple[float, float]:
    """(sampled, greedy) accuracy."""
    sampled, greedy = (
        accuracy(
            model,
            tokenizer,
            arithmetic_dataset("test"),
            arithmetic_reward,
            num_samples=samples,
            temperature=temperature,
            max_new_tokens=length,
        )
        for samples, temperature in ((2, 1.0), (1, 0.0))
    )
    return sampled, greedy


def train(trainer_class: Any, path: str, seed: int) -> tuple[Any, float]:
    """(trained model, seconds of reinforcement learning)."""
    config = DASHConfig if trainer_class is DASHTrainer else GRPOConfig
    with tempfile.TemporaryDirectory() as output:
        settings = {**embedded_defaults(), "output_dir": output, "seed": seed, "disable_tqdm": True}
        settings |= {"logging_strategy": "no"}
        trainer = trainer_class(
            model=path,
            reward_funcs=arithmetic_reward,
            args=config(**settings),
            train_dataset=arithmetic_dataset("train", seed=seed),
        )
        started = time.perf_counter()
        trainer.train()
        return trainer.model, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    path = embedded_model()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(path)
    length = embedded_defaults()["max_completion_length"]
    before = measure(AutoModelForCausalLM.from_pretrained(path), tokenizer, length)
    results: dict[str, list[float]] = {}
    print(f"seed {'':6} {'sampled':>15} {'greedy':>15} {'seconds':>8}")
    for seed in SEEDS:
        for name, trainer_class in (("DASH", DASHTrainer), ("TRL", GRPOTrainer)):
            model, seconds = train(trainer_class, path, seed)
            sampled, greedy = measure(model, tokenizer, length)
            suffix = "" if name == "DASH" else "_trl"
            row = {"before": before[0], "after": sampled, "greedy_before": before[1], "greedy_after": greedy}
            for key, value in {**row, "seconds": seconds}.items():
                results.setdefault(key + suffix, []).append(value)
            print(
                f"{seed:4d} {name:6} {before[0]:6.3f} → {sampled:6.3f} {before[1]:6.3f} → {greedy:6.3f} {seconds:8.1f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
