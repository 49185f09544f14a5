"""Measures what the demo learns: the toy model before and after, for 3 seeds, with DASH and with TRL's own trainer.

    python benchmarks/toy.py --json toy.json          # ~10 minutes on 2 cores

Accuracy is measured on 256 held-out problems, with two samples each at temperature 1 (`before`, `after`) and with
greedy decoding (`greedy_before`, `greedy_after`). The figures of TRL's trainer end with `_trl`, the others are DASH's.
"""

from typing import Any

import harness
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from dash_trl.toy import toy_defaults, toy_model

SEEDS = (0, 1, 2)


def measure(model: Any, tokenizer: Any) -> list[float]:
    """Returns [sampled, greedy] accuracy."""
    length = toy_defaults()["max_completion_length"]
    return [
        harness.accuracy(model, tokenizer, num_samples=samples, temperature=temperature, max_completion_length=length)
        for samples, temperature in ((2, 1.0), (1, 0.0))
    ]


def main() -> dict[str, list[float]]:
    path = toy_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    before = measure(AutoModelForCausalLM.from_pretrained(path), tokenizer)
    results: dict[str, list[float]] = {}
    for seed in SEEDS:
        for name, suffix, kind in (("DASH", "", DASHTrainer), ("TRL", "_trl", GRPOTrainer)):
            clock = harness.Clock()
            trainer = harness.toy_trainer({"seed": seed, "logging_strategy": "no"}, kind=kind, callbacks=[clock])
            trainer.train()
            after = measure(trainer.model, tokenizer)
            row = {"before": before[0], "after": after[0], "greedy_before": before[1], "greedy_after": after[1]}
            row["seconds"] = sum(clock.seconds)
            harness.say(f"seed {seed}, {name}", row)
            for key, value in row.items():
                results.setdefault(key + suffix, []).append(value)
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
