"""Which rows survive. What the loss divides by: `test_equivalence.py`."""

from typing import Any

import torch

from dash_trl.update import filter_rows

VERDICTS = ("keep", "constant", "threshold", "unscored")


def verdicts(advantages: list[Any], threshold: float | None, mask=None, unscored=()) -> list[str]:
    """Of rows of four tokens."""
    mask = torch.ones(len(advantages), 4, dtype=torch.long) if mask is None else torch.tensor(mask)
    scored = torch.tensor([row not in unscored for row in range(len(advantages))])
    return [VERDICTS[one] for one in filter_rows(torch.tensor(advantages), mask, scored, threshold)]


def test_which_rows_are_dropped_and_why():
    of_threshold = verdicts([0.0, 0.05, -0.05, 0.1, -2.0], 0.1)
    assert of_threshold == ["constant", "threshold", "threshold", "keep", "keep"], "the threshold itself is kept"
    assert verdicts([0.0, 1e-9, -1e-9], 0.0) == ["constant", "keep", "keep"], "0 is under every threshold"
    assert verdicts([0.0] * 2, None, unscored=[0, 1]) == ["keep"] * 2, "nothing is dropped"
    per_token = [[0.0, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 9.0], [0.05] * 4]
    ended = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    found = verdicts(per_token, 0.1, mask=ended)
    assert found == ["keep", "constant", "threshold"], "one strong token keeps a row, if it is not beyond its end"
    assert verdicts([1.0] * 3, 0.1, unscored=[1]) == ["keep", "unscored", "keep"], "whatever their advantage"
