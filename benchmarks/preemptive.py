"""End to end: the paper's GRPO baseline, which samples in every micro-step, against DASH, which samples once per step.

    python benchmarks/preemptive.py --json preemptive.json          # ~5 minutes on 2 cores

Both train the embedded arithmetic model at 8 rows per micro-step, with 16 and 32 accumulation steps and identical
settings otherwise. The baseline is TRL's GRPOTrainer with `steps_per_generation=1`: by default TRL samples once per
optimizer step, as DASH does, so the table has that row, too. Sampling is transformers' `generate` (no vLLM), every
completion runs to its end or to 64 tokens. Medians of the counted optimizer steps after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model

ROWS, COUNTED_STEPS = 8, 3
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO, samples per micro-step": (GRPOTrainer, {"steps_per_generation": 1}),
    "GRPO, samples per step (TRL)": (GRPOTrainer, {}),
    "DASH": (DASHTrainer, {}),
}


def step_times(trainer_class: Any, accumulation: int, settings: dict[str, Any]) -> tuple[float, float]:
    """Median seconds of an optimizer step, and of its generation alone."""
    config = DASHConfig if trainer_class is DASHTrainer else GRPOConfig
    defaults = {
        **embedded_defaults(),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1 + COUNTED_STEPS,
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    generation: list[float] = []

    class Timed(trainer_class):
        def _generate(self, prompts: list) -> tuple:
            started = time.perf_counter()
            output = super()._generate(prompts)
            generation[-1] += time.perf_counter() - started
            return output

    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            generation.append(0.0)
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            steps.append(time.perf_counter() - self.started)

    with tempfile.TemporaryDirectory() as output:
        Timed(
            model=embedded_model(),
            reward_funcs=arithmetic_reward,
            args=config(**{**defaults, "output_dir": output, **settings}),
            train_dataset=arithmetic_dataset("train"),
            callbacks=[Clock()],
        ).train()
    return statistics.median(steps[1:]), statistics.median(generation[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    results: dict[str, Any] = {}
    print(f"{'steps':>5} {'':30} {'step s':>7} {'generate':>8} {'rest':>7} {'ratio':>6}")
    for accumulation in (16, 32):
        totals = {}
        for name, (trainer_class, settings) in RUNS.items():
            total, generate = step_times(trainer_class, accumulation, settings)
            totals[name] = total
            ratio = next(iter(totals.values())) / total
            results[f"{name}, {accumulation}"] = {"step_s": total, "generate_s": generate, "ratio": ratio}
            print(
                f"{accumulation:5d} {name:30} {total:7.2f} {generate:8.2f} {total - generate:7.2f} {ratio:6.1f}",
                flush=True,
            )
        results[f"ratio_{accumulation}"] = totals["GRPO, samples per micro-step"] / totals["DASH"]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
