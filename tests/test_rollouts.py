"""Rows on their way: selected, trimmed, filled with dummies."""

import torch

from dash_trl.rollout import concatenated
from tests.doubles import rollouts


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
        "importance_sampling_ratio": [[1.0], [1.0], [1.0]],  # TRL's VESPO multiplies the ratios of all columns
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
        inputs = batch.micro_batch(rows, size=2, pad_token_id=99)
        assert inputs["completion_ids"].shape == inputs["completion_mask"].shape == (2, 2)
        assert inputs["completion_mask"].sum() == len(rows) and inputs["completion_ids"][:, 1].tolist() == [99, 99]
        assert inputs["importance_sampling_ratio"].tolist() == [[1.0, 1.0]] * 2
    wider = rollouts()
    wider.importance_sampling_ratio = torch.ones(3, 5)
    assert (concatenated([batch, wider], 99).importance_sampling_ratio == 1).all()
