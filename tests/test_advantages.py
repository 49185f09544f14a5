"""Advantages against the definition in floats, against TRL, and the properties that must hold for any input."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_trl import DASHTrainer
from dash_trl.advantages import checked_advantages, group_advantages, weighted_rewards
from tests import reference
from tests.tiny import run

ROOT = Path(__file__).parents[1]

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


class OnMPS(torch.Tensor):
    """A tensor on a device without float64, which refuses it in PyTorch's words."""

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_a_device_without_float64():
    rewards, weights = torch.randn(8, 2), torch.tensor([1.0, 0.5])
    ours = group_advantages(rewards.as_subclass(OnMPS), weights.as_subclass(OnMPS), 4)
    assert ours.equal(group_advantages(rewards, weights, 4))


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


def python_blocks(path: Path) -> list[str]:
    """The code of a Markdown file or a notebook."""
    if path.suffix == ".md":
        return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("document", ["README.md", "notebooks/quickstart.ipynb"])
def test_the_documented_estimator_is_leave_one_out(document):
    """Against loops, with weights, functions that do not apply, unscored rows, and a group with one scored row."""
    (code,) = [block for block in python_blocks(ROOT / document) if "class LeaveOneOutTrainer" in block]
    names = {"torch": torch, "DASHTrainer": object}
    exec(code, names)
    rewards = random_rewards(0, 6, 4, 2) + [[None, None]] * 3 + [[1.0, 0.5]] + [[None, None]] * 4
    weights = [2.0, 0.5]
    trainer = SimpleNamespace(reward_weights=torch.tensor(weights), num_generations=4)
    found = names["LeaveOneOutTrainer"].compute_advantages(trainer, to_tensor(rewards))
    found = checked_advantages(found, to_tensor(rewards), "it").tolist()
    for start in range(0, len(rewards), 4):
        group = {
            row: sum(w * value for w, value in zip(weights, rewards[row], strict=True) if value is not None)
            for row in range(start, start + 4)
            if any(value is not None for value in rewards[row])
        }
        for row in range(start, start + 4):
            others = [value for other, value in group.items() if other != row]
            expected = group[row] - sum(others) / len(others) if row in group and others else 0.0
            assert found[row] == pytest.approx(expected, abs=1e-5), row


def test_a_weighted_reward_is_missing_only_for_unscored_rows():
    rewards = to_tensor([[1.0, 2.0], [None, 2.0], [None, None]])
    assert weighted_rewards(rewards, torch.tensor([10.0, 1.0])).tolist()[:2] == [12.0, 2.0]
    assert weighted_rewards(rewards, torch.tensor([10.0, 1.0]))[2].isnan()


REWARDS = to_tensor([[1.0], [0.0], [None], [1.0]])


@pytest.mark.parametrize(
    "returned, said",
    [
        ([0.0] * 4, "returned list, not a tensor"),
        (torch.zeros(4, 1), r"shape \(4, 1\) for 4 rows"),
        (torch.zeros(3), r"shape \(3,\) for 4 rows"),
        (torch.zeros(4, dtype=torch.long), "torch.int64; advantages are floats"),
        (torch.tensor([0.0, float("nan"), 0.0, 0.0]), r"nan for row 1, whose rewards are \[0.0\] \(1 such rows\)"),
        (torch.tensor([0.0, 0.0, 0.0, -float("inf")]), "-inf for row 3"),
    ],
    ids=str,
)
def test_advantages_that_cannot_be_used_name_the_estimator(returned, said):
    with pytest.raises(ValueError, match=f"^Mine.compute_advantages gave advantages .*{said}"):
        checked_advantages(returned, REWARDS, "Mine.compute_advantages")


def test_usable_advantages_are_float32_and_0_where_there_is_no_reward():
    one = checked_advantages(torch.tensor([1.0, -1.0, float("nan"), 0.5], dtype=torch.float64), REWARDS, "it")
    assert one.dtype == torch.float32 and one.tolist() == [1.0, -1.0, 0.0, 0.5]


def test_an_estimator_that_divides_by_0_is_stopped_before_the_update(tiny_model, tmp_path):
    class Standardised(DASHTrainer):
        def compute_advantages(self, rewards):
            group = rewards.view(-1, self.num_generations)
            return ((group - group.mean(dim=1, keepdim=True)) / group.std(dim=1, keepdim=True)).flatten()

    with pytest.raises(ValueError, match="Standardised.compute_advantages gave .* spread of a constant group"):
        run(Standardised, tiny_model, tmp_path, constant=1.0)
