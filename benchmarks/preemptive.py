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

import statistics
import time
from typing import Any

import harness
from trl import GRPOTrainer

from dash_trl import DASHTrainer

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
    generation: list[float] = []
    decoded: list[int] = []

    class Timed(trainer_class):
        def _generate(self, prompts: list) -> tuple:
            started = time.perf_counter()
            output = super()._generate(prompts)
            generation[-1] += time.perf_counter() - started
            decoded[-1] += max(map(len, output[1]))
            return output

    class Steps(harness.Clock):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control)
            generation.append(0.0)
            decoded.append(0)

    clock = Steps()
    settings = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1 + COUNTED_STEPS,
        "logging_strategy": "no",
        **settings,
    }
    harness.embedded_trainer(settings, kind=Timed, callbacks=[clock]).train()
    per_token = [1000 * seconds / tokens for seconds, tokens in zip(generation, decoded, strict=True)]
    medians = {"step_s": clock.seconds, "generate_s": generation, "ms_per_token": per_token}
    return {name: statistics.median(values[1:]) for name, values in medians.items()}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    results: dict[str, Any] = {}
    for accumulation in (16, 32):
        totals = {}
        for name, (trainer_class, settings) in RUNS.items():
            row = step_times(trainer_class, accumulation, settings)
            totals[name] = total = row["step_s"]
            row["ratio"] = next(iter(totals.values())) / total
            results[f"{name}, {accumulation}"] = row
            harness.say(f"{name}, {accumulation}", row)
        results[f"ratio_{accumulation}"] = totals["GRPO, samples per micro-step"] / totals["DASH"]
    harness.write(arguments.json, results)


if __name__ == "__main__":
    main()
