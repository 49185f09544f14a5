"""Credit: every estimator against loops and floats, also with the posts' own scale."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Barrier

import pytest
import torch

from dash_trl.process_rewards import ESTIMATORS, CreditSettings, Rewards, batch_figures, place_rewards
from tests import process_reference

CHOSEN = CreditSettings(process_weight=1.3, scale_floor=0.1, lam=0.8)


def make_rows(seed: int, count: int, *, missing: float = 0.2, scale: float = 1.0, gone: float = math.nan) -> list[dict]:
    """Rows with random episodes; values may be missing; rows may be empty (masked), unscored or without an episode."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        length = generator.choice([0, 1, generator.randint(2, 12)])
        # Nothing comes after the last boundary of some rows.
        inner = sorted(generator.sample(range(1, length + 1), generator.randint(0, length - 1))) if length > 1 else []
        boundaries = [0, *inner]
        values = [gone if generator.random() < missing else scale * generator.random() for _ in boundaries]
        outcome = generator.choice([0.0, 1.0, math.nan])
        rows.append({"length": length, "boundaries": boundaries, "values": values, "outcome": outcome})
    return rows


def as_rewards(rows: list[dict], group_size: int) -> Rewards:
    boundaries, values = ([row[name] for row in rows] for name in ("boundaries", "values"))
    lengths, outcome = (torch.tensor([row[name] for row in rows]) for name in ("length", "outcome"))
    advantages = outcome.nan_to_num() - 0.25
    return place_rewards(boundaries, values, lengths, outcome, advantages, group_size=group_size)


def as_floats(rows: list[dict], rewards: Rewards) -> list[list[dict]]:
    """Converts rows for the reference, which merges episodes and looks up values by itself."""
    plain = []
    for row, advantage in zip(rows, rewards.outcome_advantages.tolist(), strict=True):
        at = row["boundaries"]
        values = row["values"]
        known = [(b, v) for b, v in zip(at, values, strict=True) if math.isfinite(v)]
        complete = math.isfinite(values[0]) and math.isfinite(values[-1]) and row["length"] > 0
        valued = complete and not math.isnan(row["outcome"])
        utilities = [(b - 1, v - known[i][1]) for i, (b, v) in enumerate(known[1:])] if complete else []
        per_token = [max(((b, v) for b, v in known if b <= t), default=(0, 0.0))[1] for t in range(row["length"])]
        outcome = 0.0 if math.isnan(row["outcome"]) else row["outcome"]
        plain.append(
            {"length": row["length"], "utilities": utilities, "values": per_token, "outcome": outcome}
            | {"advantage": advantage, "valued": valued, "boundaries": at, "at_boundaries": values}
        )
    size = rewards.group_size
    return [plain[i : i + size] for i in range(0, len(plain), size)]


CREDIT = [name for name, estimator in ESTIMATORS.items() if estimator.credit]


@pytest.mark.parametrize("name", CREDIT)
def test_estimators_are_their_definitions(name):
    """With V of about 1 and, with the defaults, with the U of about 0.03 of the post."""
    shapes = [(0, 2, 3), (1, 4, 4), (2, 5, 1), (3, 8, 5)]
    ways = [
        (CHOSEN, {"process": 1.3, "floor": 0.1, "lambda": 0.8}, 1.0, math.nan),
        # The defaults. Their floor is far below the spread of U here, which is that of the posts.
        (CreditSettings(), {"process": 1.0, "floor": 1e-4, "lambda": 0.95}, 0.1, -math.inf),
    ]
    for (seed, group_size, groups), (settings, plain, scale, gone) in product(shapes, ways):
        rows = make_rows(seed, group_size * groups, scale=scale, gone=gone)
        rewards = as_rewards(rows, group_size)
        credit = ESTIMATORS[name](rewards, settings)
        expected = process_reference.credit(getattr(process_reference, name), as_floats(rows, rewards), plain)
        for i, floats in enumerate(expected):
            case = (seed, group_size, i, rows[i])
            assert credit[i, : len(floats)].tolist() == pytest.approx(floats, abs=1e-9), case
            assert not credit[i, len(floats) :].any() and torch.isfinite(credit[i]).all(), case


def test_estimators_say_truly_whether_a_group_depends_on_others():
    rows = make_rows(5, 12, missing=0.1)
    for name in CREDIT:
        estimator = ESTIMATORS[name]
        together, alone = (estimator(as_rewards(rows[:n], 4), CHOSEN)[:4, :1] for n in (12, 4))
        assert torch.allclose(together, alone, atol=1e-12) == estimator.per_group, name


def on_two_ranks(rewards: Rewards, work) -> list:
    """Runs `work(rewards, rows)` on each half of the rows, as two ranks: two threads that meet in every sum."""
    meeting = Barrier(2, timeout=60)
    sums = {}
    half = len(rewards.process) // 2

    def rank(number: int):
        def summed(values):
            sums[number] = values
            meeting.wait()
            total = sums[0] + sums[1]
            meeting.wait()
            return total

        rows = slice(number * half, (number + 1) * half)
        own = {name: value[rows] for name, value in vars(rewards).items() if isinstance(value, torch.Tensor)}
        return work(replace(rewards, **own, sum_over_ranks=summed), rows)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


@pytest.mark.parametrize(("name", "seed"), [("grpo_process", 0), ("grpo", 1), ("grpo", 2), ("grpo_process", 4)])
def test_credit_and_figures_are_their_definitions_over_the_rows_of_all_ranks(name, seed):
    rows = make_rows(seed, 16, missing=[0.1, 0.5, 1.0][seed % 3])
    if seed == 4:  # a rank that has no valued row
        rows[8:] = [{**row, "values": [math.nan] * len(row["values"])} for row in rows[8:]]
    if seed == 1:  # a rank without a token
        rows[:8] = [{**row, "length": 0, "boundaries": [0], "values": [0.5]} for row in rows[:8]]
    rewards = as_rewards(rows, 4)
    for one in CREDIT:
        of_ranks = torch.cat(on_two_ranks(rewards, lambda own, rows, one=one: ESTIMATORS[one](own, CHOSEN)))
        assert torch.allclose(of_ranks, ESTIMATORS[one](rewards, CHOSEN), atol=1e-12, rtol=1e-12), one  # no NaN
    credit = ESTIMATORS[name](rewards, CHOSEN)
    values = [row["values"] for row in rows]
    skipped = rewards.outcome.isnan() | torch.tensor([seed % 4 == 0] * 8 + [False] * 8)

    def figures(own, rows):
        return batch_figures(own, values[rows], credit[rows], skipped=skipped[rows])

    plain = process_reference.flat(as_floats(rows, rewards))
    for row, is_skipped, values_of_row in zip(plain, skipped.tolist(), credit.tolist(), strict=True):
        row |= {"skipped": is_skipped, "credit": values_of_row[: row["length"]]}
    expected = process_reference.figures(plain)
    for found in (figures(rewards, slice(None)), *on_two_ranks(rewards, figures)):
        assert found.keys() == expected.keys()
        for figure, number in expected.items():
            assert found[figure] == pytest.approx(number, abs=1e-12), figure
