"""Packing: nothing lost, nothing twice, budgets kept, ranks in step, rows of a prompt together."""

import random
from itertools import groupby, pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_trl.monitoring import packing_metrics
from dash_trl.update import MicroBatch, Schedule, plan_share


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
    lengths = table(ranks, rows, kept, seed, group)
    least = 32 if layout == "shared" else None
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
    survivors = lengths[..., 1].gt(0).sum(dim=1).max()
    longest = lengths[..., :2].sum(dim=(1, 2)).max()
    if tokens is None:  # never more passes than by rows, and one where it has room for all
        assert len(plan) <= -(-int(survivors) // most)
        assert longest > most * width or layout == "padded" or len(plan) <= 1
    else:
        assert len(plan) <= len(plan_share(lengths, **options)) + 1


def test_a_long_row_does_not_make_a_pass_of_many_short_ones_wide():
    """The tables of a pass are rows × longest row, though only tokens are computed."""
    lengths = torch.tensor([[[5, 800, 800, 0], *[[5, 3, 3, 1]] * 2047]])
    plan = plan_share(lengths, max_rows=8, width=805)
    assert max(one.size * sum(lengths[0, list(one.rows[0]), :2].amax(dim=0)) for one in plan) <= 16 * 8 * 805


def test_the_last_optimizer_step_of_a_stream_may_have_less_than_a_share():
    for accumulation, rest in ((2, 1), (8, 3)):
        walk = Schedule(SimpleNamespace(steps_per_generation=4, gradient_accumulation_steps=accumulation), list)
        for micro_steps, is_whole in ((accumulation, True), (rest, False)):
            walk.begin_optimizer_step(8, micro_steps, micro_steps)
            assert walk.has_whole_share(8) == is_whole, (accumulation, micro_steps)


def test_figures_of_packing():
    """Two rows share 33 of 34 tokens, two have 32 tokens each; the planner keeps its budget by what is computed."""
    table = torch.tensor([[[34, 10, 10, 1], [34, 20, 20, 1], [32, 10, 10, 2], [32, 20, 20, 2]]])
    found = packing_metrics([MicroBatch(((0, 1, 2, 3),))], table, padding_free=True, min_shared=32, width=0)
    assert found["packing/max_tokens"] == 192 - 33 and found["packing/shared_tokens"] == pytest.approx(33 / 192)
    assert found["packing/padding_share"] == 0
    micro_batches = plan_share(table[:, :2], max_rows=1, max_tokens=34 + 10 + 21, min_shared=32)
    assert [one.rows for one in micro_batches] == [((0, 1),)]


def test_where_rows_of_a_group_go():
    short = [32, 10, 10]
    long = [33, 10, 10]
    for rows, budget, passes in (
        # Four groups of three rows of the longest length. A pass has room for one, so rows are taken in their order.
        ([[33, 99, 99, number // 3] for number in range(12)], None, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]),
        # A group of four in three parts, of which two fit into one pass, where another row has come between them.
        ([[33, tokens, tokens, 0] for tokens in (78, 109, 58, 20)] + [[5, 50, 50, 1]], 220, [(1, 2), (0, 3, 4)]),
        # Only prompts of more than 32 tokens are kept together.
        ([[*short, 0], [*long, 1], [*short, 0], [*long, 1]], 60, [(1, 3), (0,), (2,)]),
    ):
        found = plan_share(torch.tensor([rows]), max_rows=4, max_tokens=budget, width=100, min_shared=32)
        assert [one.rows[0] for one in found] == passes, rows
