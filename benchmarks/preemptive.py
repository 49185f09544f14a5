"""Compares the paper's GRPO baseline, which samples in every micro-step, with DASH, which samples once per step.

    python benchmarks/preemptive.py --json preemptive.json          # ~5 minutes on 2 cores
    python benchmarks/preemptive.py --accumulations 32 --steps 2    # a part of it

All runs train the toy model with 8 rows per micro-step and 16 or 32 accumulation steps; the other settings are
identical. The baseline is TRL's GRPOTrainer with `steps_per_generation=1`. The table also has TRL's default, which
samples once per optimizer step, as DASH does. Transformers' `generate` samples (no vLLM), and every completion runs to
its end or to 64 tokens. `ms_per_token` is the time of one decoding step of a whole batch. If it grows with the batch,
the machine is at capacity, and larger batches gain nothing more. The figures are medians over the optimizer steps after
the first one.
"""

from typing import Any

import harness
from trl import GRPOTrainer

from dash_trl import DASHTrainer

ROWS = 8
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO, samples per micro-step": (GRPOTrainer, {"steps_per_generation": 1}),
    "GRPO, samples per step (TRL)": (GRPOTrainer, {}),
    "DASH": (DASHTrainer, {}),
}


def step_times(trainer_class: Any, accumulation: int, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """Trains; returns the median seconds of a step and of its generation, and milliseconds of a decoding step."""
    generation, decoded = [0.0] * (1 + steps), [0] * (1 + steps)

    class Timed(trainer_class):
        def _generate_single_turn(self, *args: Any) -> tuple:
            output, seconds = harness.timed(super()._generate_single_turn, *args)
            generation[self.state.global_step] += seconds
            decoded[self.state.global_step] += max(map(len, output[0]))
            return output

    clock = harness.Clock()
    settings = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1 + steps,
        "logging_strategy": "no",
        **settings,
    }
    harness.toy_trainer(settings, kind=Timed, callbacks=[clock]).train()
    per_token = [1000 * seconds / tokens for seconds, tokens in zip(generation, decoded, strict=True)]
    parts = {"step_s": clock.seconds, "generate_s": generation, "ms_per_token": per_token}
    return harness.medians({name: values[1:] for name, values in parts.items()})


def main(accumulations: list[int], steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for accumulation in accumulations:
        totals: dict[str, float] = {}
        for name, (trainer_class, settings) in RUNS.items():
            row = step_times(trainer_class, accumulation, steps, settings)
            totals[name] = row["step_s"]
            row["ratio"] = next(iter(totals.values())) / totals[name]
            results[f"{name}, {accumulation}"] = row
            harness.say(f"{name}, {accumulation}", row)
        results[f"ratio_{accumulation}"] = totals["GRPO, samples per micro-step"] / totals["DASH"]
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        accumulations={"type": int, "nargs": "+", "default": [16, 32], "help": "numbers of micro-steps"},
        steps={"type": int, "default": 5, "help": "number of counted steps; one more step precedes them"},
    )
