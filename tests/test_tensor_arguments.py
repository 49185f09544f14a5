"""A tensor of another rank, length or dtype is an error that names it: broadcast, it would train on something else."""

import re
from collections.abc import Callable

import torch

from dash_trl.process_rewards import Rewards, place_rewards
from dash_trl.update import group_advantages, outcome_advantages, weighted_rewards

N, T, F, K = 4, 3, 2, 5


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def bools(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


# what is called → its arguments as they should be
RIGHT = {
    group_advantages: dict(rewards=floats(N, F), weights=floats(F), group_size=2),
    outcome_advantages: dict(
        estimator="opo", rewards=floats(N, F), weights=floats(F), group_size=2, lengths=integers(N)
    ),
    weighted_rewards: dict(rewards=floats(N, F), weights=floats(F)),
    place_rewards: dict(boundaries=integers(N, K), values=floats(N, K), lengths=integers(N), width=T),
    Rewards: dict(
        process=floats(N, T),
        ends=bools(N, T),
        values=floats(N, T),
        mask=bools(N, T),
        outcome=floats(N),
        outcome_advantages=floats(N),
        valued=bools(N),
        group_size=2,
    ),
}

WRONG = [
    (group_advantages, dict(rewards=floats(N)), r"rewards has the shape \[4\], which is not \[N, F\]"),
    (group_advantages, dict(weights=floats(1)), r"weights has the shape \[1\], which is not \[F=2\]"),
    (group_advantages, dict(group_size=3), "4 rewards do not split into groups of 3"),
    (outcome_advantages, dict(group_size=3), "4 rewards do not split into groups of 3"),
    (outcome_advantages, dict(rewards=floats(N)), r"rewards has the shape \[4\], which is not \[N, F\]"),
    (outcome_advantages, dict(lengths=integers(N, T)), r"lengths has the shape \[4, 3\], which is not \[N=4\]"),
    (weighted_rewards, dict(rewards=floats(N)), r"rewards has the shape \[4\]"),
    (weighted_rewards, dict(weights=[1.0, 1.0]), r"weights is a list. Pass a tensor \[F=2\]"),
    (weighted_rewards, dict(weights=floats(N, 1)), r"weights has the shape \[4, 1\], which is not \[F=2\]"),
    (place_rewards, dict(boundaries=floats(N, K)), r"boundaries \[N, K\] has the dtype torch.float32. Pass integers"),
    (place_rewards, dict(values=floats(N, K + 1)), r"values has the shape \[4, 6\], which is not \[N=4, K=5\]"),
    (place_rewards, dict(lengths=integers(1)), r"lengths has the shape \[1\], which is not \[N=4\]"),
    (Rewards, dict(process=floats(N)), r"process has the shape \[4\], which is not \[N, T\]"),
    (Rewards, dict(process=integers(N, T)), r"process \[N, T\] has the dtype torch.int64. Pass floats"),
    (Rewards, dict(values=floats(N, T + 1)), r"values has the shape \[4, 4\], which is not \[N=4, T=3\]"),
    (Rewards, dict(ends=integers(N, T)), r"ends \[N=4, T=3\] has the dtype torch.int64. Pass bools"),
    (Rewards, dict(mask=integers(N, T)), "mask .* Pass bools"),
    (Rewards, dict(outcome=floats(N, 1)), r"outcome has the shape \[4, 1\], which is not \[N=4\]"),
    (Rewards, dict(outcome_advantages=floats(N, T)), r"outcome_advantages has the shape \[4, 3\]"),
    (Rewards, dict(valued=integers(N)), r"valued \[N=4\] has the dtype torch.int64. Pass bools"),
    (Rewards, dict(group_size=3), "4 rows do not split into groups of 3"),
]


def refusal(function: Callable, *given, **arguments) -> str:
    """The text of the `ValueError` that a call raises; empty = it raises none."""
    try:
        function(*given, **arguments)
    except ValueError as error:
        return str(error)
    return ""


def test_the_wrong_argument_is_named():
    for function, right in RIGHT.items():
        function(**right)
    for function, wrong, said in WRONG:
        found = refusal(function, **{**RIGHT[function], **wrong})
        assert re.search(said, found), (function.__name__, said, found)
