"""Compares ways to compute V(prefix) at N boundaries: a pass per prefix (naive) and a tree pass; also a plain pass.

    python benchmarks/values.py --json values.json          # ~2 minutes on 2 cores

The model is a Qwen2 with hidden size 256 and 6 layers, fp32, 2 threads. One response has L tokens. At each boundary, 12
tokens of force prompt and answer follow, of which the last 4 are scored. The plain pass is a forward pass over the
response alone. Logits are computed only at scored positions, and at the same number of positions in the plain pass.
Times are the best of 5; the ways alternate. `ratio` = naive / tree, `forwards` = tree / plain, `max_error` = the
largest `|tree − naive|` of V.
"""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import harness
import torch

from dash_trl.process_rewards import Branch, Tree, loop_log_probs, tree_log_probs

LENGTHS, BOUNDARIES = (512, 1024), (8, 16)
BRANCH, SCORED, VOCABULARY, REPEATS = 12, 4, 512, 5


def best(functions: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the least seconds and the last result of each function; the functions alternate."""
    seconds: dict[str, float] = {}
    results = {name: function() for name, function in functions.items()}
    for _ in range(REPEATS):
        for name, function in functions.items():
            results[name], took = harness.timed(function)
            seconds[name] = min(seconds.get(name, took), took)
    return seconds, results


@torch.no_grad()
def compare(model: Any, length: int, count: int) -> dict[str, float]:
    generator = random.Random(0)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(generator.randrange(VOCABULARY) for _ in range(number))

    attach = [length * (i + 1) // count for i in range(count)]
    tree = Tree(ids(length), tuple(Branch(at, ids(BRANCH), BRANCH - SCORED) for at in attach))
    plain = torch.tensor([tree.trunk])
    keep = torch.arange(length - count * SCORED, length)
    seconds, results = best(
        {
            "naive": lambda: loop_log_probs(model, [tree])[0],
            "tree": lambda: tree_log_probs(model, model, [tree])[0],
            "plain": lambda: model(input_ids=plain, logits_to_keep=keep, use_cache=False).logits.log_softmax(-1),
        }
    )
    means = {name: [sum(branch) / len(branch) for branch in results[name]] for name in ("naive", "tree")}
    return {
        **{f"{name}_ms": 1000 * value for name, value in seconds.items()},
        "ratio": seconds["naive"] / seconds["tree"],
        "forwards": seconds["tree"] / seconds["plain"],
        "max_error": max(abs(a - b) for a, b in zip(means["naive"], means["tree"], strict=True)),
    }


def main() -> dict[str, dict[str, float]]:
    torch.set_num_threads(2)
    model = harness.qwen2(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    ).eval()
    results = {}
    for length, count in product(LENGTHS, BOUNDARIES):
        results[f"L{length}_N{count}"] = row = compare(model, length, count)
        harness.say(f"L = {length}, N = {count}", row)
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
