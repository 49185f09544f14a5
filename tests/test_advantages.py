"""Advantages against the definition in floats, against TRL, and the properties that must hold for any input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_trl.advantages import group_advantages
from tests import reference

SCALES = ["group", "batch", "none"]
AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]


def random_rewards(seed: int, groups: int, size: int, functions: int, missing: float = 0.2) -> list[list[float | None]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(groups * size, functions, generator=generator)
    gone = torch.rand(groups * size, functions, generator=generator) < missing
    constant = torch.rand(groups, generator=generator) < 0.3
    for group in constant.nonzero().flatten().tolist():
        values[group * size : (group + 1) * size] = values[group * size]
    return [[None if gone[row, k] else float(values[row, k]) for k in range(functions)] for row in range(groups * size)]


def to_tensor(rewards: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor([[float("nan") if value is None else value for value in row] for row in rewards])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("groups, size, functions", [(1, 2, 1), (3, 4, 1), (5, 8, 3), (16, 4, 2)])
def test_equals_the_definition(scale, aggregation, groups, size, functions):
    for seed in range(5):
        rewards = random_rewards(seed, groups, size, functions)
        weights = [0.5 + k for k in range(functions)]
        ours = group_advantages(
            to_tensor(rewards),
            torch.tensor(weights),
            size,
            scale_rewards=scale,
            multi_objective_aggregation=aggregation,
        )
        expected = reference.group_advantages(rewards, weights, size, scale, aggregation)
        assert ours.tolist() == pytest.approx(expected, abs=2e-6)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0]), min_size=2, max_size=9), st.sampled_from(SCALES))
def test_a_constant_group_is_exactly_zero(values, scale):
    """Equal totals, made of different float32 parts: TRL's rounding is divided by 1e-4 there."""
    size = len(values)
    rewards = torch.tensor([[value, 1.0 - value] for value in values])  # the sums differ by rounding only
    other = torch.randn(size, 2)
    both = group_advantages(torch.cat([rewards, other]), torch.tensor([1.0, 1.0]), size, scale_rewards=scale)
    assert (both[:size] == 0).all()
    assert both[size:].abs().sum() > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_constant_group_is_exactly_zero_among_others(aggregation):
    rewards = torch.cat([torch.full((4, 3), 0.1), torch.randn(12, 3)])
    ours = group_advantages(rewards, torch.tensor([0.3, 0.3, 0.4]), 4, multi_objective_aggregation=aggregation)
    assert (ours[:4] == 0).all()


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from(SCALES), st.floats(-3, 3))
def test_shift_and_permutation(seed, scale, shift):
    rewards = to_tensor(random_rewards(seed, 3, 4, 1, missing=0.1))
    weights = torch.ones(1)
    ours = group_advantages(rewards, weights, 4, scale_rewards=scale)
    shifted = group_advantages(rewards + shift, weights, 4, scale_rewards=scale)
    torch.testing.assert_close(shifted, ours, atol=2e-3, rtol=1e-3)  # float32 rewards: the shift costs their digits
    order = torch.randperm(4)
    permuted = torch.cat([rewards[:4][order], rewards[4:]])
    torch.testing.assert_close(group_advantages(permuted, weights, 4, scale_rewards=scale)[:4], ours[:4][order])


def test_any_set_of_whole_groups():
    """Without a batch-wide scale, a group's advantages do not depend on which other groups are there."""
    rewards = to_tensor(random_rewards(3, 6, 4, 2, missing=0.0))
    whole = group_advantages(rewards, torch.ones(2), 4)
    for start in range(0, 24, 4):
        assert torch.equal(group_advantages(rewards[start : start + 4], torch.ones(2), 4), whole[start : start + 4])


def test_unscored_rows_are_zero_and_outside_the_baseline():
    rewards = torch.tensor([[1.0], [0.0], [float("nan")], [0.0]])
    ours = group_advantages(rewards, torch.ones(1), 4, scale_rewards="none")
    assert ours.tolist() == pytest.approx([2 / 3, -1 / 3, 0.0, -1 / 3])


def test_incomplete_group_is_an_error():
    with pytest.raises(ValueError, match="7 rewards do not split into groups of 4"):
        group_advantages(torch.zeros(7, 1), torch.ones(1), 4)


@pytest.mark.parametrize("name", ["scale_rewards", "multi_objective_aggregation"])
def test_unknown_option_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name}='other'"):
        group_advantages(torch.zeros(4, 1), torch.ones(1), 4, **{name: "other"})


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_equals_trl(tiny_model, tmp_path, scale, aggregation):
    """TRL's own advantages, taken out of a run, for rewards with spread in every group."""
    from trl import GRPOTrainer

    from tests.tiny import ScriptedReward, run

    seen = {}

    class Recorder(GRPOTrainer):
        def _calculate_rewards(self, *args):
            seen["rewards"] = super()._calculate_rewards(*args)
            return seen["rewards"]

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen["advantages"] = output["advantages"].clone()
            return output

    def graded(completion_ids, **kwargs):
        return [len(ids) / 7 for ids in completion_ids]

    run(
        Recorder,
        tiny_model,
        tmp_path,
        reward=[graded, ScriptedReward(constant=0.0)],
        reward_weights=[1.0, 0.3],
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
    )
    ours = group_advantages(
        seen["rewards"],
        torch.tensor([1.0, 0.3]),
        4,
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
    )
    torch.testing.assert_close(ours, seen["advantages"], atol=1e-5, rtol=1e-5)
