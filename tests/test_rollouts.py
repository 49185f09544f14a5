"""Rows on their way: selected, trimmed, filled with dummies."""

import torch
from trl import GRPOTrainer

from dash_trl.rollout import Survivors


def rollouts() -> Survivors:
    prompt_mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    return Survivors(
        prompt_ids=torch.arange(12).view(3, 4) * prompt_mask,
        prompt_mask=prompt_mask,
        completion_ids=torch.arange(15).view(3, 5) * completion_mask,
        completion_mask=completion_mask,
        group=torch.zeros(3, dtype=torch.long),
        policy_version=torch.zeros(3, 2, dtype=torch.long),
        rewards=torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")], [float("inf"), 1.0]]),
        advantages=torch.tensor([0.5, -0.5, 1.0]),
        importance_sampling_ratio=torch.ones(3, 1),
    )


def test_a_micro_batch():
    its_own_rows = {
        "prompt_ids": [[5, 6, 7], [0, 2, 3]],
        "completion_ids": [[5, 0, 0], [0, 1, 2]],
        "advantages": [-0.5, 0.5],
        "importance_sampling_ratio": [[1.0], [1.0]],
    }
    dummies = {  # without token and weight
        "prompt_mask": [[1, 1, 1], [0, 0, 0], [0, 0, 0]],
        "completion_ids": [[5, 0], [99, 99], [99, 99]],
        "completion_mask": [[1, 0], [0, 0], [0, 0]],
        "advantages": [-0.5, 0.0, 0.0],
    }
    no_rows = {"prompt_mask": [[1, 1], [0, 0]], "completion_mask": [[0, 0], [0, 0]]}
    for rows, size, expected in (([1, 0], 2, its_own_rows), ([1], 3, dummies), ([], 2, no_rows)):
        inputs = rollouts().micro_batch(rows, size=size, pad_token_id=99)
        assert {name: inputs[name].tolist() for name in expected} == expected
        assert "rewards" not in inputs and "group" not in inputs


def test_completions_have_two_columns_at_least():
    """TRL takes one column for a figure per sequence, and would average it over dummies, too."""
    batch = rollouts()
    for field in ("completion_ids", "completion_mask"):
        setattr(batch, field, getattr(batch, field)[:, :1])
    for rows in ([0], []):
        inputs = batch.survivors(torch.arange(len(batch))).micro_batch(rows, size=2, pad_token_id=99)
        assert inputs["completion_ids"].shape == inputs["completion_mask"].shape == (2, 2)
        assert inputs["completion_mask"].sum() == len(rows) and inputs["completion_ids"][:, 1].tolist() == [99, 99]


def test_a_padded_ratio_leaves_the_weights_of_vespo_as_they_are():
    """TRL multiplies the ratios of all columns, without a mask."""
    batch = rollouts()
    for field in ("completion_ids", "completion_mask"):
        setattr(batch, field, getattr(batch, field)[:, :1])
    inputs = batch.micro_batch([0, 1], size=2, pad_token_id=99)
    mask, ratio = inputs["completion_mask"], inputs["importance_sampling_ratio"]
    weights = GRPOTrainer.get_gamma_weights(inputs["advantages"][:, None], torch.zeros(2, 2), mask, ratio)
    torch.testing.assert_close(weights, torch.ones(2, 1))  # φ(1) = 1
