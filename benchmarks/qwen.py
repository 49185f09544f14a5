"""One optimizer step of a real shape, Qwen2.5-0.5B with random weights: TRL's GRPOTrainer against DASHTrainer.

    python benchmarks/qwen.py --json qwen.json                # on a CPU: 8 rows of ≤ 256 tokens, float32; ~12 minutes
    python benchmarks/qwen.py --shares 0.75 --steps 1         # a part of it

On a GPU: the paper's batch (256 rows of ≤ 2,048 tokens, two to a pass), bfloat16 with FlashAttention where it is
installed.

Completions and rewards are scripted, so that no step samples: hidden size 896, 24 layers, 14 heads, 2 of keys and
values, vocabulary 151,936. Each trainer is a process of its own. `trl_s`, `dash_s`: the medians of its counted steps;
`trl_gb`, `dash_gb`: memory at its highest during these beyond the weights (resident on a CPU, allocated on a GPU).
`rel_param_diff`: the largest difference of a parameter after one step of SGD without clipping, relative to the largest
update, on a CPU in float32.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import harness
import torch
from transformers.utils import is_flash_attn_2_available
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from dash_trl.embedded import arithmetic_tokenizer

ON_GPU = torch.cuda.is_available()
ROWS, GROUP, ROWS_PER_PASS, LONGEST, MEDIAN = (256, 4, 2, 2048, 500) if ON_GPU else (8, 2, 2, 256, 120)
SHARES = (0.0, 0.75)  # of groups without signal
GIGABYTE = 1e9
KINDS = {"trl": GRPOTrainer, "dash": DASHTrainer}
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
    model = harness.qwen2(arithmetic_tokenizer(), attn_implementation=attention, **SHAPE)
    return model.to(torch.bfloat16 if ON_GPU else torch.float32)


class Clock(harness.Clock):
    """Also the memory of all steps but the first."""

    def __init__(self) -> None:
        super().__init__(keep_first=True)
        self.memory = harness.Memory()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.memory.__enter__()
        super().on_step_begin(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.__exit__()


def train(kind: str, share: float, steps: int) -> dict[str, Any]:
    """Seconds of each step but the first, memory, and the parameters after the first."""
    settings = {
        "per_device_train_batch_size": ROWS_PER_PASS,
        "gradient_accumulation_steps": ROWS // ROWS_PER_PASS,
        "max_steps": 1 + steps,
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "gradient_checkpointing": ON_GPU,
    }
    workload = harness.Scripted(share, ROWS, GROUP, median=MEDIAN, longest=LONGEST, vocabulary=150_000)
    clock = Clock()
    harness.scripted_trainer(KINDS[kind], random_model(), workload, settings, callbacks=[clock]).train()
    return {"seconds": clock.seconds[1:], "gigabytes": clock.memory.taken / GIGABYTE, "parameters": clock.first}


def compare(share: float, steps: int) -> dict[str, float]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            arguments = ["--one", kind, "--shares", str(share), "--steps", str(steps), "--json", file.name]
            subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.DEVNULL)
            found[kind] = torch.load(file.name, weights_only=True)
    results = {f"{kind}_s": statistics.median(one["seconds"]) for kind, one in found.items()}
    results |= {f"{kind}_gb": one["gigabytes"] for kind, one in found.items()}
    updates = (found[kind]["parameters"] for kind in ("dash", "trl"))
    difference = harness.relative_difference(random_model().state_dict(), *updates)
    return {**results, "ratio": results["trl_s"] / results["dash_s"], "rel_param_diff": difference}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of groups without signal")
    parser.add_argument("--steps", type=int, default=3, help="counted, after one that is not")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        torch.save(train(arguments.one, *arguments.shares, arguments.steps), arguments.json)
        return
    results: dict[str, Any] = {}
    for share in arguments.shares:
        results[f"{share:g}"] = found = compare(share, arguments.steps)
        harness.say(f"{share:.0%} of the groups constant", found)
    harness.write(arguments.json, results)


if __name__ == "__main__":
    main()
