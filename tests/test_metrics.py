"""What is counted over the ranks."""

from __future__ import annotations

import pytest
import torch

from dash_trl.filtering import filter_rows
from dash_trl.metrics import filter_metrics
from tests.test_rollouts import rollouts


def test_counts_beyond_float32_are_exact():
    """Rows of 3, 1 and 5 tokens, the first kept; the other ranks together have 2^25 of everything."""
    batch = rollouts()
    batch.advantages = torch.tensor([0.5, 0.05, 0.0])
    filtered = filter_rows(batch.advantages, batch.loss_mask, torch.ones(3, dtype=torch.bool), 0.1)
    asked = []

    def reduce_sum(local):
        asked.append(local.dtype)
        return local + 2**25

    metrics = filter_metrics(batch, filtered, reduce_sum)
    assert metrics["filter/kept_tokens"] == (3 + 2**25) / (9 + 2**25)
    assert metrics["filter/dropped_threshold"] == (1 + 2**25) / (3 + 4 * 2**25)
    assert asked == [torch.int64, torch.float32]  # MPS lacks float64
    own = filter_metrics(batch, filtered, lambda local: local)
    assert own["advantage/abs_mean"] == 0.5 and own["filter/dropped_constant"] == pytest.approx(1 / 3)
