"""A tensor of another rank, length or dtype is an error that names it: broadcast, it would train on something else."""

import re

import torch

from dash_trl.update import group_advantages, outcome_advantages, weighted_rewards
from tests.tiny import refusal

N, T, F = 4, 3, 2


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


# what is called → its arguments as they should be
RIGHT = {
    group_advantages: dict(rewards=floats(N, F), weights=floats(F), group_size=2),
    outcome_advantages: dict(estimator="rloo", rewards=floats(N, F), weights=floats(F), group_size=2),
    weighted_rewards: dict(rewards=floats(N, F), weights=floats(F)),
}

WRONG = [
    (group_advantages, dict(rewards=floats(N)), r"rewards has the shape \[4\], which is not \[N, F\]"),
    (group_advantages, dict(weights=floats(1)), r"weights has the shape \[1\], which is not \[F=2\]"),
    (group_advantages, dict(group_size=3), "4 rewards do not split into groups of 3"),
    (outcome_advantages, dict(group_size=3), "4 rewards do not split into groups of 3"),
    (outcome_advantages, dict(rewards=floats(N)), r"rewards has the shape \[4\], which is not \[N, F\]"),
    (weighted_rewards, dict(rewards=floats(N)), r"rewards has the shape \[4\]"),
    (weighted_rewards, dict(weights=[1.0, 1.0]), r"weights is a list. Pass a tensor \[F=2\]"),
    (weighted_rewards, dict(weights=floats(N, 1)), r"weights has the shape \[4, 1\], which is not \[F=2\]"),
]


def test_the_wrong_argument_is_named():
    for function, right in RIGHT.items():
        function(**right)
    for function, wrong, said in WRONG:
        found = refusal(function, **{**RIGHT[function], **wrong})
        assert re.search(said, found), (function.__name__, said, found)
