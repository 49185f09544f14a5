"""Measures what DASH computes besides model passes: seconds and memory by the number of rows and of ranks.

    python benchmarks/scaling.py --json scaling.json        # about two minutes

**Filter and pack.** A rank filters its own rows and then plans the passes of all ranks. Half of the rows survive; there
are 32 micro-steps. Measured with a row budget, with a token budget, and in the padded layout.

**Whole way.** All stages from the sampled rows of a rank to the inputs of every pass: process rewards, filter and plan.
A row has 1,024 columns, about 300 tokens and 7 values; there are 32 rows per micro-step and 8,192 tokens per pass.
Memory is the peak of a stage minus the memory before it.

**All ranks.** The stages in which each rank computes for the rows of all ranks: 1,024 rows per rank, half of which
survive. Gathered tables are simulated; the functions are those of the trainer. The other stages of the whole way use
only a rank's own rows.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness
import torch

from dash_trl.process_rewards import ESTIMATORS, CreditSettings, Rewards, batch_figures, place_rewards
from dash_trl.rollout import Part, RolloutBatch
from dash_trl.update import (
    MIN_SHARED,
    PackedLayout,
    Schedule,
    filter_rows,
    group_advantages,
    plan_share,
    same_prompt,
)

RANKS, MICRO_STEPS, REPEATS = 8, 32, 5
SIZES = (1_024, 4_096, 16_384, 65_536)
LAYOUTS = {
    "rows": {},
    "tokens": {"max_tokens": 4096},
    "padded": {"max_tokens": 4096, "padding_free": False},
}
MANY_RANKS, ROWS_OF_RANK = (1, 8, 64, 256, 512), 1_024
OWN_ROWS, PROMPT, COMPLETION, GROUP, VALUES = (1_024, 2_048, 4_096, 8_192), 128, 1_024, 8, 7


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
    plan = plan_share(lengths, MICRO_STEPS, max_rows=max(per_rank // MICRO_STEPS, 1), width=592, **layout)
    elapsed = time.perf_counter() - started
    assert sum(len(mb.rows[0]) for step in plan for mb in step) == int(keep.sum())
    return elapsed


@contextmanager
def stage(name: str, figures: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Measures a block of code and stores its seconds and its GiB in `figures`."""
    before, started = harness.begin_peak(), time.perf_counter()
    yield
    figures[name] = time.perf_counter() - started, (harness.peak() - before) / 2**30


def whole_way(rows: int) -> dict[str, tuple[float, float]]:
    """Returns (seconds, GiB) of each stage from the sampled rows to the inputs of passes."""
    generator = torch.Generator().manual_seed(rows)
    completions = torch.randn(RANKS, rows, generator=generator).mul(0.8).exp().mul(240).clamp(8, COMPLETION).long()
    prompts = torch.randint(20, PROMPT, (RANKS, rows // GROUP), generator=generator).repeat_interleave(GROUP, dim=1)
    rewards = (torch.rand(RANKS * rows, 1, generator=generator) < 0.5).float()
    inner = torch.rand(rows, VALUES - 1, generator=generator).sort(dim=1).values * (completions[0, :, None] - VALUES)
    boundaries = torch.nn.functional.pad(inner.long() + torch.arange(1, VALUES), (1, 0))
    values = torch.rand(rows, VALUES, generator=generator)
    completion_mask = (torch.arange(COMPLETION) < completions[0, :, None]).long()
    prompt_mask = (torch.arange(PROMPT) >= PROMPT - prompts[0, :, None]).long()

    stages: dict[str, tuple[float, float]] = {}
    with stage("batch", stages):
        batch = RolloutBatch(
            prompt_ids=prompt_mask * 7,
            prompt_mask=prompt_mask,
            completion_ids=completion_mask * 8,
            completion_mask=completion_mask,
            group=torch.arange(rows) // GROUP,
            policy_version=torch.zeros(rows, 2, dtype=torch.long),
            examples=[{}] * rows,
        ).with_rewards(rewards[:rows])
        batch.validate(like=batch.tensors(), culprit="nobody")
    with stage("advantages of all", stages):
        credited = batch.with_advantages(group_advantages(rewards, torch.ones(1), GROUP)[:rows].clone())
    with stage("credit", stages):
        process, ends, per_token, valued = place_rewards(boundaries, values, completions[0], COMPLETION)
        seen = Rewards(
            process=process,
            ends=ends,
            values=per_token,
            mask=completion_mask.bool(),
            outcome=rewards[:rows, 0].double(),
            outcome_advantages=credited.advantages.double(),
            valued=valued,
            group_size=GROUP,
        )
        credit = ESTIMATORS["grpo_process"](seen, CreditSettings())
        batch_figures(seen, boundaries, values.double(), credit, skipped=~valued)
        credited.advantages = credit.float()
        credited.validate(like=credited.tensors(), culprit="nobody")
        del process, ends, per_token, seen, credit
    with stage("filter", stages):
        keep = filter_rows(credited.advantages, credited.loss_mask, credited.scored, 0.1).keep
        credited.mean_advantages()
    with stage("survivors", stages):
        order = torch.randperm(rows, generator=generator)
        own = credited.lengths()[order] * keep[order].unsqueeze(1)
        survivors = credited.survivors(order[own[:, 1] > 0])
    with stage("plan of all", stages):
        groups = (torch.arange(rows) // GROUP).expand(RANKS, -1)
        lengths = torch.stack([prompts, completions, completions, groups], dim=2)
        lengths[0] = own
        plan = plan_share(lengths, rows // 32, max_rows=32, max_tokens=8192, min_shared=MIN_SHARED)
    with stage("micro-batches", stages):
        position = (own[:, 1] > 0).cumsum(0) - 1
        for micro_batch in (micro_batch for step in plan for micro_batch in step):
            chosen = position[list(micro_batch.rows[0])].tolist()
            inputs = survivors.micro_batch(chosen, size=micro_batch.size, pad_token_id=0)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            PackedLayout.of(mask, inputs["completion_mask"].shape[1], same_prompt(inputs, MIN_SHARED))
    return stages


def of_all_ranks(ranks: int) -> dict[str, tuple[float, float]]:
    """Returns (seconds, GiB) of each stage that computes for the rows of all ranks."""
    generator = torch.Generator().manual_seed(ranks)
    rows = ROWS_OF_RANK
    rewards = (torch.rand(ranks * rows, 1, generator=generator) < 0.5).float()
    stages: dict[str, tuple[float, float]] = {}
    with stage("gathered tables", stages):
        completions = torch.randn(ranks, rows, generator=generator).mul(0.8).exp().mul(240).clamp(8, COMPLETION).long()
        prompts = torch.randint(20, PROMPT, (ranks, rows // GROUP), generator=generator).repeat_interleave(GROUP, dim=1)
        groups = (torch.arange(rows) // GROUP).expand(ranks, -1)
        kept = torch.rand(ranks, rows, 1, generator=generator) < 0.5
        lengths = torch.stack([prompts, completions, completions, groups], dim=2) * kept
    with stage("advantages", stages):
        group_advantages(rewards, torch.ones(1), GROUP)
    for name, layout in LAYOUTS.items():
        options = {"max_rows": 32, **layout, "min_shared": None if name == "padded" else MIN_SHARED}

        def pack(table: torch.Tensor, width: int, micro_steps: int, last: bool, options: dict = options) -> list:
            return plan_share(table, micro_steps, last, width=width, **options)

        schedule = Schedule(
            steps_per_generation=MICRO_STEPS,
            num_iterations=1,
            accumulation=MICRO_STEPS,
            rows_per_step=rows // MICRO_STEPS,
            pack=pack,
        )
        schedule.begin_optimizer_step(0, MICRO_STEPS, global_step=0)
        with stage(f"plan, {name}", stages):
            schedule.window_sampled(0)
            for step in range(MICRO_STEPS):
                schedule.passes(step, Part(None, lengths, PROMPT + COMPLETION, torch.tensor(1.0)))
    return stages


def main() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {"filter and pack": {}, "whole way": {}, "all ranks": {}}
    for rows in SIZES:
        figures = harness.medians(
            {name: [seconds(rows, layout) for _ in range(REPEATS)] for name, layout in LAYOUTS.items()}
        )
        results["filter and pack"][str(rows)] = figures
        harness.say(f"{rows} rows: seconds", figures)
    sizes = [("whole way", own, "rows of a rank", whole_way) for own in OWN_ROWS]
    sizes += [("all ranks", ranks, "ranks", of_all_ranks) for ranks in MANY_RANKS]
    for part, size, what, measure in sizes:
        runs = [measure(size) for _ in range(REPEATS)]
        times = {name: [run[name][0] for run in runs] for name in runs[0]}
        times["all"] = [sum(took for took, _ in run.values()) for run in runs]
        memory_of = {name: max(run[name][1] for run in runs) for name in runs[0]}
        results[part][str(size)] = found = {"seconds": harness.medians(times), "GiB": memory_of}
        for unit, row in found.items():
            harness.say(f"{size} {what}: {unit}", row)
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
