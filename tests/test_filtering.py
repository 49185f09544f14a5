"""Which rows survive, and what the loss divides by."""

import pytest
import torch

from dash_trl.update import Share, filter_rows, loss_scale

WHOLE, SCORED = [[1, 1, 1, 1]] * 5, [True] * 5


def test_which_rows_are_dropped_and_why():
    for said, advantages, mask, scored, threshold, verdicts in (
        (
            "the threshold itself is kept",
            [0.0, 0.05, -0.05, 0.1, -2.0],
            WHOLE,
            SCORED,
            0.1,
            ["constant", "threshold", "threshold", "keep", "keep"],
        ),
        (
            "0 is under every threshold",
            [0.0, 1e-9, -1e-9, 1.0, 0.0],
            WHOLE,
            SCORED,
            0.0,
            ["constant", "keep", "keep", "keep", "constant"],
        ),
        ("nothing is dropped", [0.0] * 5, WHOLE, [False] * 5, None, ["keep"] * 5),
        (
            "one strong token keeps a row, if it is not beyond its end",
            [[0.0, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 9.0], [0.05] * 4],
            [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]],
            [True] * 3,
            0.1,
            ["keep", "constant", "threshold"],
        ),
        (
            "whatever their advantage",
            [1.0] * 5,
            WHOLE,
            [True, False, True, True, True],
            0.1,
            ["keep", "unscored", "keep", "keep", "keep"],
        ),
    ):
        filtered = filter_rows(torch.tensor(advantages), torch.tensor(mask), torch.tensor(scored), threshold)
        for name in ("keep", "constant", "threshold", "unscored"):
            assert getattr(filtered, name).tolist() == [one == name for one in verdicts], said


def test_loss_scale():
    share = Share(first=0, micro_steps=4, passes=8, all_rows=32, all_tokens=1000.0, kept_rows=10, kept_tokens=250)
    for loss_type, denominator, expected in (
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
    ):
        found = loss_scale(loss_type, denominator, rows=3, tokens=50, share=share)
        assert found == pytest.approx(expected), (loss_type, denominator)
