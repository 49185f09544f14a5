"""Packing: nothing lost, nothing twice, budgets kept, ranks in step."""

import random
from itertools import groupby, pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_trl.rollout import Part
from dash_trl.update import Schedule, plan_share


def table(ranks: int, rows: int, kept: float, seed: int, group: int = 1) -> torch.Tensor:
    """[R, M, 4] of random prompt, completion and loss lengths, and the prompt; 0 for dropped rows."""
    generator = random.Random(seed)
    lengths = torch.zeros(ranks, rows, 4, dtype=torch.long)
    for rank, row in product(range(ranks), range(rows)):
        if row % group == 0:
            prompt = generator.randint(1, 90)
        if generator.random() < kept:
            lengths[rank, row] = torch.tensor([prompt, length := generator.randint(1, 200), length, row // group])
    return lengths


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 64),
    most=st.integers(1, 8),
    group=st.integers(1, 8),
    kept=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    tokens=st.sampled_from([None, 1, 100, 400]),
    layout=st.sampled_from(["padded", "packed", "shared"]),
)
def test_invariants(seed, ranks, rows, most, group, kept, tokens, layout):
    """If shared, prompts of more than 32 tokens are computed once per pass, but for their last token."""
    lengths, least = table(ranks, rows, kept, seed, group), 32 if layout == "shared" else None
    options = {"max_rows": most, "max_tokens": tokens, "padding_free": layout != "padded"}
    width = 290  # of the longest row, before dropped rows were left out
    plan = plan_share(lengths, min_shared=least, width=width, **options)
    for rank in range(ranks):
        ran = [row for micro_batch in plan for row in micro_batch.rows[rank]]
        assert layout != "padded" or ran == sorted(ran, key=lambda row, rank=rank: -lengths[rank, row, 1])
        assert sorted(ran) == [row for row in range(rows) if lengths[rank, row, 1] > 0]
    for micro_batch, rank in product(plan, range(ranks)):
        members = micro_batch.rows[rank]
        assert len(micro_batch.rows) == ranks and micro_batch.size >= max(1, len(members))
        prompt, completion, _, prompt_of = lengths[rank].T.tolist()
        families = [prompt_of[row] if least and prompt[row] > least else -row - 1 for row in members]
        runs = [len(list(run)) for _, run in groupby(families)]
        assert len(runs) == len(set(families)), "rows that share a prompt are adjacent"
        size = sum(prompt[row] + completion[row] for row in members)
        size -= sum(
            prompt[row] - 1 for row, (one, other) in zip(members, pairwise(families), strict=False) if one == other
        )
        if layout == "padded" and members:
            size = len(members) * (max(prompt[row] for row in members) + max(completion[row] for row in members))
        # a single row may exceed the budget
        assert size <= (most * width if tokens is None else tokens) or len(members) <= 1
    assert bool(plan) == bool((lengths[..., 1] > 0).any())
    survivors, longest = lengths[..., 1].gt(0).sum(dim=1).max(), lengths[..., :2].sum(dim=(1, 2)).max()
    if tokens is None:  # never more passes than by rows, and one where it has room for all
        assert len(plan) <= -(-int(survivors) // most)
        assert longest > most * width or layout == "padded" or len(plan) <= 1
    else:
        assert len(plan) <= len(plan_share(lengths, **options)) + 1


def test_a_long_row_does_not_make_a_pass_of_many_short_ones_wide():
    """The tables of a pass are rows × longest row, though only tokens are computed."""
    lengths = torch.tensor([[[5, 800], *[[5, 3]] * 2047]])
    plan = plan_share(lengths, max_rows=8, width=805)
    assert max(one.size * sum(lengths[0, list(one.rows[0])].amax(dim=0)) for one in plan) <= 16 * 8 * 805


def schedule(steps_per_generation: int, num_iterations: int = 1, rows: int = 2, accumulation: int = 4) -> Schedule:
    return Schedule(
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        accumulation=accumulation,
        rows_per_step=rows,
        pack=lambda part: plan_share(part.lengths[..., :2], max_rows=rows),
    )


def part(lengths: torch.Tensor) -> Part:
    return Part(None, lengths, 0, lengths[..., 2].sum())


def test_what_an_optimizer_step_takes_of_its_window():
    for said, per_generation, accumulation, begins, taken, share, whole in (
        ("all of it", 4, 4, 4, 4, range(4, 8), True),
        ("two windows", 4, 8, 8, 8, range(8, 12), True),
        ("Mini", 4, 2, 6, 2, range(6, 8), True),
        ("a stream's last one", 4, 2, 6, 1, range(6, 7), False),
        ("a stream's last one of two windows", 4, 8, 8, 3, range(8, 11), False),
    ):
        walk = schedule(per_generation, accumulation=accumulation)
        walk.begin_optimizer_step(begins, taken, 1)
        assert walk.micro_steps_of_share(begins) == share and walk.has_whole_share(begins) == whole, said


def test_the_last_share_of_a_step_runs_if_an_earlier_one_did():
    walk = schedule(steps_per_generation=2)
    walk.begin_optimizer_step(0, 4, 0)
    walk.window_sampled(0)
    signal = torch.tensor([[[5, 9, 9]] + [[0, 0, 0]] * 3])
    assert len(walk.plan(1, part(signal))) == 1
    walk.window_sampled(2)
    silent = torch.zeros(1, 4, 3, dtype=torch.long)
    (dummy,) = walk.plan(3, part(silent))
    assert dummy.micro_batch.rows == ((),)


def test_an_epochs_short_last_step():
    walk = schedule(steps_per_generation=4)
    walk.begin_optimizer_step(4, 2, 1)  # two micro-steps are left of the epoch
    assert walk.shares_of_window(4) == [range(2), range(2, 4)]
    lengths = table(1, 8, 1.0, seed=0)
    share = walk.plan(5, part(lengths))[0].share
    assert share.all_rows == 4 and share.all_tokens == int(lengths[..., 2].sum()) / 2  # 2 of the 4 micro-steps
