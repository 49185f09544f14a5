"""Which rows survive, and what the loss divides by."""

import pytest
import torch

from dash_trl.update.filtering import filter_rows
from dash_trl.update.losses import loss_scale
from dash_trl.update.schedule import Segment

MASK = torch.ones(5, 3, dtype=torch.long)
ALL = torch.ones(5, dtype=torch.bool)


def test_per_row_advantages():
    advantages = torch.tensor([0.0, 0.05, -0.05, 0.1, -2.0])
    filtered = filter_rows(advantages, MASK, ALL, 0.1)
    assert filtered.keep.tolist() == [False, False, False, True, True]  # the threshold itself is kept
    assert filtered.constant.tolist() == [True, False, False, False, False]
    assert filtered.threshold.tolist() == [False, True, True, False, False]
    assert not filtered.unscored.any()


def test_zero_is_under_every_threshold():
    advantages = torch.tensor([0.0, 1e-9, -1e-9, 1.0, 0.0])
    assert filter_rows(advantages, MASK, ALL, 0.0).keep.tolist() == [False, True, True, True, False]


def test_none_turns_filtering_off():
    filtered = filter_rows(torch.zeros(5), MASK, ~ALL, None)
    assert filtered.keep.all()
    assert not (filtered.constant | filtered.threshold | filtered.unscored).any()


def test_per_token_advantages_count_by_their_largest_token_in_the_loss():
    advantages = torch.zeros(3, 4)
    advantages[0, 2] = -0.5  # one strong token keeps the row
    advantages[1, 3] = 9.0  # beyond the row's end
    advantages[2] = 0.05
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    filtered = filter_rows(advantages, mask, torch.ones(3, dtype=torch.bool), 0.1)
    assert filtered.keep.tolist() == [True, False, False]
    assert filtered.constant.tolist() == [False, True, False]


def test_unscored_rows_are_dropped_whatever_their_advantage():
    scored = torch.tensor([True, False, True, True, True])
    filtered = filter_rows(torch.ones(5), MASK, scored, 0.1)
    assert filtered.keep.tolist() == scored.tolist()
    assert filtered.unscored.tolist() == (~scored).tolist()
    assert not (filtered.constant | filtered.threshold).any()


SEGMENT = Segment(micro_steps=4, passes=8, all_rows=32, all_tokens=1000.0, kept_rows=10, kept_tokens=250)


@pytest.mark.parametrize(
    "loss_type, denominator, expected",
    [
        ("grpo", "all", 3 * 8 / 32),
        ("grpo", "kept", 3 * 8 / 10),
        ("dr_grpo", "all", 3 * 8 / 32),
        ("luspo", "kept", 3 * 8 / 10),
        ("bnpo", "all", 50 * 8 / 1000),
        ("bnpo", "kept", 50 * 8 / 250),
        ("dapo", "all", 1.0),
        ("dapo", "kept", 4.0),
        ("cispo", "all", 1.0),
        ("vespo", "kept", 4.0),
    ],
)
def test_loss_scale(loss_type, denominator, expected):
    assert loss_scale(loss_type, denominator, rows=3, tokens=50, segment=SEGMENT) == pytest.approx(expected)
