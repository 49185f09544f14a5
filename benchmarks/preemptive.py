"""End to end: the paper's GRPO baseline, which samples in every micro-step, against DASH, which samples once per step.

    python benchmarks/preemptive.py --json preemptive.json          # ~5 minutes on 2 cores

Both train the embedded arithmetic model at 8 rows per micro-step, with 16 and 32 accumulation steps and identical
settings otherwise. The baseline is TRL's GRPOTrainer with `steps_per_generation=1`: by default TRL samples once per
optimizer step, as DASH does, so the table has that row, too; and one with a token budget, as large as TRL's largest
micro-batch of 8 padded rows, in place of 8 rows. Sampling is transformers' `generate` (no vLLM), every completion runs
to its end or to 64 tokens. `ms/token` is the time of one decoding step of a whole batch: where it grows with the batch,
the machine computes to capacity and larger batches gain no more. Medians of the counted optimizer steps after one that
is not counted.
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

ROWS, COUNTED_STEPS = 8, 5
PADDED_ROW = 80  # tokens of the longest prompt and completion
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO, samples per micro-step": (GRPOTrainer, {"steps_per_generation": 1}),
    "GRPO, samples per step (TRL)": (GRPOTrainer, {}),
    "DASH": (DASHTrainer, {}),
    "DASH, token budget": (DASHTrainer, {"max_tokens_per_microbatch": ROWS * PADDED_ROW}),
}


def step_times(trainer_class: Any, accumulation: int, settings: dict[str, Any]) -> dict[str, float]:
    """Medians of an optimizer step's seconds, its generation's, and the milliseconds of a decoding step."""
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
    decoded: list[int] = []

    class Timed(trainer_class):
        def _generate(self, prompts: list) -> tuple:
            started = time.perf_counter()
            output = super()._generate(prompts)
            generation[-1] += time.perf_counter() - started
            decoded[-1] += max(map(len, output[1]))
            return output

    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            generation.append(0.0)
            decoded.append(0)
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
    per_token = [1000 * seconds / tokens for seconds, tokens in zip(generation, decoded, strict=True)]
    medians = {"step_s": steps, "generate_s": generation, "ms_per_token": per_token}
    return {name: statistics.median(values[1:]) for name, values in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    results: dict[str, Any] = {}
    print(f"{'steps':>5} {'':30} {'step s':>7} {'generate':>8} {'ms/token':>8} {'rest':>7} {'ratio':>6}")
    for accumulation in (16, 32):
        totals = {}
        for name, (trainer_class, settings) in RUNS.items():
            row = step_times(trainer_class, accumulation, settings)
            totals[name] = total = row["step_s"]
            row["ratio"] = next(iter(totals.values())) / total
            results[f"{name}, {accumulation}"] = row
            print(
                f"{accumulation:5d} {name:30} {total:7.2f} {row['generate_s']:8.2f} {row['ms_per_token']:8.1f} "
                f"{total - row['generate_s']:7.2f} {row['ratio']:6.1f}",
                flush=True,
            )
        results[f"ratio_{accumulation}"] = totals["GRPO, samples per micro-step"] / totals["DASH"]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
