"""Advantages against the definition in floats, and the properties that must hold for any input."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_trl import DASHTrainer
from dash_trl.update import ESTIMATORS, checked_advantages, group_advantages, outcome_advantages, weighted_rewards
from tests import reference
from tests.tiny import refused

NAN = float("nan")
SCALES = ["group", "batch", "none"]


def random_rewards(seed: int, groups: int, size: int, functions: int) -> list[list[float | None]]:
    """Some groups are constant; with every other seed most rewards are missing, with every third there are ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(groups * size, functions, generator=generator)
    gone = torch.rand(groups * size, functions, generator=generator) < (0.7 if seed % 2 else 0.2)
    constant = torch.rand(groups, generator=generator) < 0.3
    for group in constant.nonzero().flatten().tolist():
        values[group * size : (group + 1) * size] = values[group * size]
    values = values.round() if seed % 3 == 0 else values
    return [[None if gone[row, k] else float(values[row, k]) for k in range(functions)] for row in range(groups * size)]


def to_tensor(rewards: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor([[NAN if value is None else value for value in row] for row in rewards])


def in_groups(values: list, size: int) -> list[list]:
    return [values[start : start + size] for start in range(0, len(values), size)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_equals_the_definition(scale, aggregation):
    shapes = [(1, 2, 1), (3, 4, 1), (5, 8, 3), (16, 4, 2)]
    for seed, (groups, size, functions) in product(range(5), shapes):
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
        assert ours.tolist() == pytest.approx(expected, abs=2e-6), (seed, groups, size, functions)
        assert not ours[torch.tensor(expected) == 0].any(), "not even rounding is left of a constant group"


class OnMPS(torch.Tensor):
    """A tensor on a device without float64. It raises PyTorch's error for float64."""

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("advantages", [group_advantages, partial(outcome_advantages, "rloo")])
def test_a_device_without_float64(advantages):
    rewards = torch.randn(8, 2)
    weights = torch.tensor([1.0, 0.5])
    ours = advantages(rewards.as_subclass(OnMPS), weights.as_subclass(OnMPS), 4)
    assert ours.equal(advantages(rewards, weights, 4))


NAMES = [name for name, estimator in ESTIMATORS.items() if estimator.outcome]


@pytest.mark.parametrize("name", NAMES)
def test_named_estimators_are_their_definitions(name):
    for seed, (count, size) in product(range(12), [(1, 2), (3, 4), (6, 5), (1, 8)]):
        rewards = random_rewards(seed, count, size, 2)
        weights = [1.0, 0.5]
        totals = in_groups([reference.total(row, weights) for row in rewards], size)
        expected = getattr(reference, name)(totals)
        ours = outcome_advantages(name, to_tensor(rewards), torch.tensor(weights), size).tolist()
        for found, group in zip(in_groups(ours, size), expected, strict=True):
            assert found == pytest.approx([a or 0.0 for a in group], abs=1e-5), (seed, count, size)


def by_name(name: str, rewards: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    """Computes advantages with a `scale_rewards`, or with an advantage estimator."""
    if name in SCALES:
        return group_advantages(rewards, weights, size, scale_rewards=name)
    return outcome_advantages(name, rewards, weights, size)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0]), min_size=2, max_size=9), st.sampled_from(SCALES + NAMES))
def test_a_constant_group_has_a_signal_if_the_baseline_is_the_mean_of_all_rows(values, name):
    """Equal totals of different float32 parts: TRL divides their rounding errors by 1e-4."""
    size = len(values)
    weights = torch.ones(2)
    rewards = torch.tensor([[value, 1.0 - value] for value in values])  # the sums differ by rounding only
    both = by_name(name, torch.cat([rewards, torch.randn(size, 2)]), weights, size)
    assert both.dtype == torch.float32 and both[size:].any()
    assert both[:size].any() == (name == "single_path")
    assert not by_name(name, rewards, weights, size).any()


REWARDS = to_tensor([[1.0], [0.0], [None], [1.0]])


def test_advantages_that_cannot_be_used_name_the_estimator():
    for returned, said in (
        ([0.0] * 4, "returned is a list"),
        (torch.zeros(4, 1), r"returned has the shape \[4, 1\], which is not \[N=4\]"),
        (torch.zeros(4, dtype=torch.long), r"returned \[N=4\] has the dtype torch.int64. Pass floats"),
        (torch.tensor([0.0, NAN, 0.0, 0.0]), r"returned nan for row 1, whose rewards are \[0.0\] \(1 such rows\)"),
    ):
        refused(f"Mine.compute_advantages {said}", checked_advantages, returned, REWARDS, "Mine.compute_advantages")


def test_usable_advantages_are_float32_and_0_where_there_is_no_reward():
    one = checked_advantages(torch.tensor([1.0, -1.0, NAN, 0.5], dtype=torch.float64), REWARDS, "it")
    assert one.dtype == torch.float32 and one.tolist() == [1.0, -1.0, 0.0, 0.5]


def test_an_estimator_that_divides_by_0_is_stopped_before_the_update(train):
    class Standardised(DASHTrainer):
        def compute_advantages(self, rewards):
            group = rewards.view(-1, self.num_generations)
            return ((group - group.mean(dim=1, keepdim=True)) / group.std(dim=1, keepdim=True)).flatten()

    refused(
        "Standardised.compute_advantages returned nan .* spread of a constant group", train, Standardised, constant=1.0
    )


REWARDS_OF_TWO = torch.zeros(4, 2)
WEIGHTS = torch.zeros(2)


def test_the_wrong_argument_is_named():
    """One of another rank or length: broadcast, it would train on something else."""
    for rewards, weights, said in (
        (torch.zeros(4), WEIGHTS, r"rewards has the shape \[4\], which is not \[N, F\]"),
        (REWARDS_OF_TWO, torch.zeros(4, 1), r"weights has the shape \[4, 1\], which is not \[F=2\]"),
        (REWARDS_OF_TWO, [1.0, 1.0], r"weights is a list. Pass a tensor \[F=2\]"),
    ):
        refused(said, weighted_rewards, rewards, weights)
    refused("4 rewards do not split into groups of 3", group_advantages, REWARDS_OF_TWO, WEIGHTS, 3)
