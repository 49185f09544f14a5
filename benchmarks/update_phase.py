"""The update phase of TRL's GRPOTrainer and of DASHTrainer on the same completions and rewards.

    python benchmarks/update_phase.py --json update_phase.json            # ~10 minutes on one core

Rollouts are scripted (`rollout_func`), so that only scoring, packing, passes and the optimizer are timed. Each share of
constant groups and each beta gets three counted steps of each trainer, in turn, after one that is not counted. `limit`
is the ratio of tokens: those that TRL processes, padding included, to the real ones of the survivors. Attention costs
more than linearly in the padded length, so the limit can be exceeded. `rel_param_diff` is the largest parameter
difference after one step of SGD (learning rate 1, no clipping), relative to the largest update.
"""

import math
import statistics
from itertools import product
from typing import Any

import harness
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHTrainer

ROWS, GROUP, ROWS_PER_DEVICE, MICRO_STEPS = 64, 4, 4, 16
SHARES, BETAS = (0.0, 0.5, 0.75), (0.0, 0.04)
COUNTED_STEPS = 3
MEDIAN, LONGEST = math.exp(4.787), 512
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # transformers' 0.02 gives updates of 6e-3: one unit in the last place of a norm weight (1.0) is 1e-5 of that.
    "initializer_range": 0.1,
}


class TokenLimit(TrainerCallback):
    """Padded tokens that TRL processes over the real tokens of the survivors, in each step."""

    def __init__(self, workload: harness.Scripted):
        self.workload, self.limits = workload, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        prompts, lengths = [len(ids) for ids in self.workload.prompt_ids], self.workload.lengths
        real = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
        self.limits.append(ROWS * (max(prompts) + max(lengths)) / sum(real[self.workload.constant_groups * GROUP :]))


def compare(path: str, share: float, beta: float) -> dict[str, float]:
    settings = {
        "per_device_train_batch_size": ROWS_PER_DEVICE,
        "gradient_accumulation_steps": MICRO_STEPS,
        "max_steps": 1 + COUNTED_STEPS,
        "beta": beta,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    clocks = {}
    for name, kind in (("trl", GRPOTrainer), ("dash", DASHTrainer)):
        workload = harness.Scripted(share, ROWS, GROUP, median=MEDIAN, longest=LONGEST, vocabulary=280)
        clocks[name], limit = harness.Clock(), TokenLimit(workload)
        model = AutoModelForCausalLM.from_pretrained(path)
        harness.scripted_trainer(kind, model, workload, settings, callbacks=[clocks[name], limit]).train()
    start = AutoModelForCausalLM.from_pretrained(path).state_dict()
    return {**harness.against_trl(clocks, start), "limit": statistics.median(limit.limits[1:])}


def main(threads: list[int], betas: list[float]) -> dict[str, Any]:
    path = harness.OUTPUT.name
    harness.qwen2(**SHAPE).save_pretrained(path)
    results: dict[str, Any] = {}
    for number, beta, share in product(threads, betas, SHARES):
        torch.set_num_threads(number)
        row = compare(path, share, beta)
        table = results if number == threads[0] else results.setdefault(f"threads_{number}", {})
        table.setdefault("beta" if beta else "share", {})[f"{share:g}"] = row
        harness.say(f"{number} threads, beta {beta:g}, {share:.0%} constant", row)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        threads={"type": int, "nargs": "+", "default": [1, 2], "help": "the first one is written as `share`"},
        betas={"type": float, "nargs": "+", "default": list(BETAS)},
    )
