"""A tensor of another rank or length is an error that names it: broadcast, it would train on something else."""

import torch

from dash_trl.update import group_advantages, weighted_rewards
from tests.tiny import refused

REWARDS, WEIGHTS = torch.zeros(4, 2), torch.zeros(2)


def test_the_wrong_argument_is_named():
    for rewards, weights, said in (
        (torch.zeros(4), WEIGHTS, r"rewards has the shape \[4\], which is not \[N, F\]"),
        (REWARDS, torch.zeros(1), r"weights has the shape \[1\], which is not \[F=2\]"),
        (REWARDS, torch.zeros(4, 1), r"weights has the shape \[4, 1\], which is not \[F=2\]"),
        (REWARDS, [1.0, 1.0], r"weights is a list. Pass a tensor \[F=2\]"),
    ):
        refused(said, weighted_rewards, rewards, weights)
    refused("4 rewards do not split into groups of 3", group_advantages, REWARDS, WEIGHTS, 3)
