"""Compares the update phase of TRL's GRPOTrainer and of DASHTrainer on the same completions and rewards.

    python benchmarks/update_phase.py --json update_phase.json            # ~7 minutes on one core

Rollouts are scripted (`rollout_func`), so only scoring, packing, passes and the optimizer are timed. For each share of
constant groups and each beta, each trainer makes three counted steps after one that is not counted. `ratio` is the
seconds of TRL over those of DASH. `limit` is the number of tokens that TRL processes, with padding, over the number of
the survivors' tokens. `ratio` may exceed `limit`, since the cost of attention grows faster than the padded length.
`rel_grad_diff` is the largest difference of a gradient of the first step, relative to the largest gradient.

    python benchmarks/update_phase.py --prompts 32 256 768                # ~10 minutes more

With `--prompts`, groups of 8 have prompts with this many tokens, and all rows have signal. Shared prompts
(`share_prompts=True`) are compared with plain packing and with TRL. `tokens` is the number of tokens of plain packing
over that of shared prompts. `--family` takes a model with windows of 128 tokens (mistral) or with the gated delta rule
(qwen3.5) instead.
"""

import random
import statistics
from itertools import product
from typing import Any

import harness
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from dash_trl import DASHTrainer

ROWS = 64
GROUP = 4
SHARES = (0.0, 0.5, 0.75)
BETAS = (0.0, 0.04)
COUNTED_STEPS = 3
PROMPT = 16  # tokens
LONGEST = 512
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"model_type": "mistral", "sliding_window": 128},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def updated(kind: Any, path: str, workload: harness.Scripted, own: dict[str, Any]) -> harness.Clock:
    """Makes the steps of a trainer; returns their clock."""
    clock = harness.Clock()
    settings = {"max_steps": 1 + COUNTED_STEPS, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, **own}
    model = AutoModelForCausalLM.from_pretrained(path)
    harness.scripted_trainer(kind, model, workload, settings, callbacks=[clock]).train()
    return clock


def compare(path: str, share: float, beta: float) -> dict[str, float]:
    workload = harness.Scripted(constant=share, rows=ROWS, group=GROUP, longest=LONGEST, prompt_tokens=PROMPT)
    kinds = {"trl": GRPOTrainer, "dash": DASHTrainer}
    clocks = {name: updated(kind, path, workload, {"beta": beta}) for name, kind in kinds.items()}
    limits = []
    for step in range(1, 1 + COUNTED_STEPS):
        real = [PROMPT + length for length in workload.lengths(random.Random(step))]
        limits.append(ROWS * max(real) / sum(real[round(share * ROWS) :]))
    return {**harness.against_trl(clocks), "limit": statistics.median(limits)}


def compare_shared(path: str, prompt: int) -> dict[str, float]:
    group = 8
    rows = 32
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "trl": (GRPOTrainer, {}),
        "plain": (DASHTrainer, {"share_prompts": False}),
        "dash": (DASHTrainer, {"share_prompts": True}),
    }
    workload = harness.Scripted(constant=0.0, rows=rows, group=group, longest=LONGEST, prompt_tokens=prompt)
    clocks: dict[str, harness.Clock] = {}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for name in (*kinds, "dash", "plain"):  # dash and plain are close, so each runs before and after the other
        kind, own = kinds[name]
        clock = updated(kind, path, workload, own)
        clocks.setdefault(name, clock)
        seconds[name] += clock.seconds[1:]
    plain = sum(workload.lengths(random.Random(COUNTED_STEPS))) + rows * prompt
    tokens = plain / (plain - rows // group * (group - 1) * (prompt - 1))
    found = harness.against_trl(clocks)
    found |= {f"{name}_s": statistics.median(of) for name, of in seconds.items()}
    ratios = {"ratio": found["trl_s"] / found["dash_s"], "against_plain": found["plain_s"] / found["dash_s"]}
    return {**found, **ratios, "tokens": tokens}


def main(threads: int, betas: list[float], prompts: list[int], family: str) -> dict[str, Any]:
    torch.set_num_threads(threads)
    path = harness.OUTPUT.name
    shape = SHAPE | FAMILIES[family]
    if prompts:
        harness.qwen2(**{**shape, "max_position_embeddings": 2048}).save_pretrained(path)
        shared = {str(prompt): compare_shared(path, prompt) for prompt in prompts}
        for prompt, row in shared.items():
            harness.say(f"groups of 8, prompts of {prompt} tokens", row)
        return {"shared": shared}
    harness.qwen2(**shape).save_pretrained(path)
    results: dict[str, Any] = {}
    for beta, share in product(betas, SHARES):
        row = compare(path, share, beta)
        results.setdefault("beta" if beta else "share", {})[f"{share:g}"] = row
        harness.say(f"beta {beta:g}, {share:.0%} constant", row)
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        threads={"type": int, "default": 1, "help": "number of threads"},
        betas={"type": float, "nargs": "+", "default": list(BETAS)},
        family={"choices": FAMILIES, "default": "qwen2"},
        prompts={"type": int, "nargs": "+", "default": [], "help": "compare shared prompts of so many tokens"},
    )
