"""Filter and pack: the time against the number of rows, for 8 simulated ranks.

    python benchmarks/scaling.py --json scaling.json        # under a minute

One process does what each of 8 ranks does: filter its own rows, then plan the passes of all ranks. Half of the rows
survive; 32 micro-steps; the row budget, a token budget, and the padded layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dash_trl.update import filter_rows, plan_segment

RANKS, MICRO_STEPS, REPEATS = 8, 32, 5
SIZES = (1_024, 4_096, 16_384, 65_536)
LAYOUTS = {
    "rows": {},
    "tokens": {"max_tokens": 4096},
    "padded": {"max_tokens": 4096, "padding_free": False},
}


def seconds(rows: int, layout: dict) -> float:
    per_rank = rows // RANKS
    generator = torch.Generator().manual_seed(rows)
    advantages = torch.randn(per_rank, generator=generator) * (torch.rand(per_rank, generator=generator) < 0.5)
    completions = torch.randn(RANKS, per_rank, generator=generator).mul(0.8).exp().mul(120).clamp(8, 512).long()
    prompts = torch.randint(20, 80, (RANKS, per_rank), generator=generator)
    mask = torch.ones(per_rank, 1)
    started = time.perf_counter()
    keep = filter_rows(advantages, mask, torch.ones(per_rank, dtype=torch.bool), 0.1).keep
    lengths = torch.stack([prompts, completions], dim=2) * keep[None, :, None]
    plan = plan_segment(lengths, MICRO_STEPS, max_rows=max(per_rank // MICRO_STEPS, 1), **layout)
    elapsed = time.perf_counter() - started
    assert sum(len(mb.rows[0]) for step in plan for mb in step) == int(keep.sum())
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'rows':>7} " + " ".join(f"{name:>9}" for name in LAYOUTS) + "   (seconds, median of 5)")
    for rows in SIZES:
        results[str(rows)] = {
            name: statistics.median(seconds(rows, layout) for _ in range(REPEATS)) for name, layout in LAYOUTS.items()
        }
        print(f"{rows:7d} " + " ".join(f"{value:9.4f}" for value in results[str(rows)].values()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
