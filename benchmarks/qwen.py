"""Compares one optimizer step of TRL's GRPOTrainer and DASHTrainer for Qwen2.5-0.5B's shape with random weights.

    python benchmarks/qwen.py --json qwen.json                # on a CPU: 8 rows of ≤ 256 tokens, float32; ~12 minutes
    python benchmarks/qwen.py --shares 0.75 --steps 1         # a part of it
    python benchmarks/qwen.py --shares 0 --steps 1 --prompt_tokens 512    # groups of 4 that share a few-shot prompt

On a GPU the benchmark uses the paper's batch (256 rows of ≤ 2,048 tokens, two per pass), in bfloat16, with
FlashAttention if it is installed. Such passes may be too small for a large GPU. So two more trainers have larger ones:
`trl_wide` runs 32 rows per pass, and `dash_budget` has `max_tokens_per_microbatch=16384`.

Completions and rewards are scripted, so no step samples. The model has hidden size 896, 24 layers, 14 heads, 2
key-value heads and a vocabulary of 151,936. On a CPU, each trainer runs in its own process.

- `trl_s`, `dash_s`: median seconds of a step, without the first step. `ratio` compares these two.
- `trl_gb`, `dash_gb`: peak memory in these steps beyond the memory before them (resident on a CPU, allocated on a GPU).
- `rel_param_diff`: the largest difference of a parameter after one step of SGD without clipping, relative to the
  largest update. Only on a CPU, in float32.

With `--prompt_tokens`, a pass contains one group of 4, and `plain` is DASH without shared prompts.
"""

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import harness
import torch
from transformers.utils import is_flash_attn_2_available
from trl import GRPOTrainer

from dash_trl import DASHTrainer

ON_GPU = torch.cuda.is_available()
ROWS, GROUP, ROWS_PER_PASS, LONGEST, MEDIAN = (256, 4, 2, 2048, 500) if ON_GPU else (8, 2, 2, 256, 120)
SHARES = (0.0, 0.75)  # shares of groups without signal
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trl": (GRPOTrainer, {}),
    "dash": (DASHTrainer, {}),
    "plain": (DASHTrainer, {"share_prompts": False}),
    "trl_wide": (GRPOTrainer, {"per_device_train_batch_size": 32}),
    "dash_budget": (DASHTrainer, {"max_tokens_per_microbatch": 16_384}),
}
SHAPE = {  # Qwen/Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


def random_model() -> Any:
    attention = "flash_attention_2" if ON_GPU and is_flash_attn_2_available() else "sdpa"
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = harness.qwen2(attn_implementation=attention, **SHAPE)
    return model.to(torch.bfloat16 if ON_GPU else torch.float32)


class Clock(harness.Clock):
    """Clock that also records the peak memory of all steps after the first."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.before = harness.begin_peak(ON_GPU)
        super().on_step_begin(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.taken = harness.peak(ON_GPU) - self.before


def train(kind: str, share: float, steps: int, prompt_tokens: int | None) -> Clock:
    trainer, own = KINDS[kind]
    group, rows_per_pass = (GROUP, ROWS_PER_PASS) if prompt_tokens is None else (4, 4)
    settings = {
        "per_device_train_batch_size": rows_per_pass,
        "max_steps": 1 + steps,
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "gradient_checkpointing": ON_GPU,
        **own,
    }
    settings["gradient_accumulation_steps"] = ROWS // settings["per_device_train_batch_size"]
    lengths = {"median": MEDIAN, "longest": LONGEST, "prompt_tokens": prompt_tokens}
    workload = harness.Scripted(share, ROWS, group, vocabulary=150_000, **lengths)
    clock = Clock(parameters=not ON_GPU)
    gc.collect()  # the trainer before this one would count as memory
    harness.scripted_trainer(trainer, random_model(), workload, settings, callbacks=[clock]).train()
    return clock


def main(shares: list[float], steps: int, prompt_tokens: int | None) -> dict[str, dict[str, float]]:
    results = {}
    more = ["plain"] if prompt_tokens else ["trl_wide", "dash_budget"] if ON_GPU else []
    kinds = ["trl", "dash", *more]
    for share in shares:
        # On a CPU, each trainer has a process of its own, whose resident memory is measured.
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=None if ON_GPU else 1) as workers:
            clocks = {}
            for kind in kinds:
                clocks[kind] = workers.submit(train, kind, share, steps, prompt_tokens).result()
                harness.say(f"{kind}, {share:.0%} constant", harness.medians({"seconds": clocks[kind].seconds[1:]}))
        found = harness.against_trl(clocks, None if ON_GPU else random_model().state_dict())
        found |= {f"{kind}_gb": clock.taken / 1e9 for kind, clock in clocks.items()}
        results[f"{share:g}"] = found
        harness.say(f"{share:.0%} of the groups constant", found)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        shares={"type": float, "nargs": "+", "default": list(SHARES), "help": "shares of groups without signal"},
        steps={"type": int, "default": 3, "help": "number of counted steps; one more step precedes them"},
        prompt_tokens={"type": int, "help": "tokens of each prompt; default: about 10"},
    )
