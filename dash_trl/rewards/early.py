"""Starts the rewards of a window early, and yields groups in the order in which their rewards come.

`EarlyRewards` starts the reward functions on rows of a window while other rows of the window are still sampled, or
while the window waits for an earlier window::

    begin: a window is going to be sampled ──► take: rows have been sampled, functions start ──► claim: the request

`arrivals` yields the groups of a window as their rewards come, so that the trainer can use the first groups while the
others are still scored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_trl.rewards.forms import ROW
from dash_trl.rewards.runner import RewardTeam
from dash_trl.workers import Request


class EarlyRewards:
    """Starts the reward functions on each row as soon as the row is sampled. Each window has one `Request`.

    Args:
        team: the reward functions of the trainer.
        group_size: number of adjacent rows that are completions of one prompt.
        wanted: True = rewards begin early. False = all methods do nothing.
    """

    def __init__(self, team: RewardTeam, group_size: int, *, wanted: bool):
        self.wanted = wanted
        self._team, self._group_size = team, group_size
        self._windows: dict[int, tuple[Request, Sequence[Mapping[str, Any]]]] = {}  # request, and rows of the dataset

    def begin(self, window: int, examples: Sequence[Mapping[str, Any]]) -> None:
        """Prepares the request of a window that is going to be sampled.

        Args:
            window: the number of the window.
            examples: for each row of the window, the columns of the dataset.
        """
        if self.wanted:
            self._windows[window] = self._team.begin(len(examples), self._group_size), examples

    def take(
        self, window: int, first: int, prompts: list[Any], completion_ids: list[list[int]], completions: list[Any]
    ) -> None:
        """Starts the reward functions on adjacent rows that have been sampled.

        Pass each row of a window exactly once, in any order. Does nothing if `begin` was not called for the window.

        Args:
            window: the number of the window.
            first: index of the first row within the window.
            prompts: the prompts of the rows.
            completion_ids: the token ids of the rows' completions.
            completions: the decoded completions of the rows.
        """
        if window in self._windows:
            request, examples = self._windows[window]
            own = examples[first : first + len(completion_ids)]
            self._team.start(request, first, reward_rows(own, prompts, completions, completion_ids))

    def claim(self, window: int) -> Request | None:
        """Returns the request of a window, and forgets the window.

        Args:
            window: the number of the window.

        Returns:
            The request; its functions may still run. None if `begin` was not called for the window, or `wanted` is
            False.
        """
        return self._windows.pop(window, (None,))[0]

    def forget(self) -> None:
        """Cancels the rewards of all windows that are not claimed, and forgets these windows."""
        for request, _ in self._windows.values():
            request.cancel()
        self._windows.clear()


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """Builds one dict per row, from which per-sample functions get their arguments.

    Args:
        examples: for each row, the columns of the dataset.
        known: three lists: the prompts, the completions and the completion ids of the same rows.

    Returns:
        One dict per row: the row's columns of the dataset, and the keys `prompt`, `completion` and `completion_ids`.
    """
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]


def arrivals(
    request: Request, groups: int, least: Callable[[int], int], share: Callable[[], int]
) -> Iterator[tuple[Tensor, bool]]:
    """Yields the rows of a window group by group, as their rewards come.

    All ranks yield the same number of groups at a time, because they have to run the same collectives and model passes.
    Before each yield, every rank waits until it has at least one complete group that it has not yielded. The rank with
    the fewest such groups determines how many groups all ranks yield.

    A share is the part of a window that one optimizer step uses: the whole window, or some of its groups (Mini). Groups
    of different shares are not yielded together.

    Args:
        request: the request of this rank's rows.
        groups: number of groups of this rank in the window; the same on all ranks.
        least: collective function that takes a number and returns the smallest number of all ranks.
        share: function that returns the number of groups in the next share. It is called when the share begins. Its
            result is clipped to the range from 1 to the number of groups that are left.

    Yields:
        Two values: a tensor with the indices of the groups' rows in the window; and True if these rows complete the
        share, else False.
    """
    here: list[int] = []
    while groups:
        left = min(max(share(), 1), groups)
        groups -= left
        while left:
            here += request.next_groups(wait=not here)
            count = min(least(len(here)), left)
            now, here = here[:count], here[count:]
            left -= count
            yield torch.tensor([row for group in now for row in request.rows_of(group)]), not left
