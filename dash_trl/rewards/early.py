"""Rewards that begin before their window is needed, and groups in the order in which their rewards come.

`EarlyRewards` starts the reward functions of a window while the window is sampled, or waits to be trained on::

    begin: a window is going to be sampled ──► take: rows have come, their functions start ──► claim: the request

`arrivals` returns the groups of a window as they are scored, the same number at a time on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.rewards.forms import ROW
from dash_trl.rewards.runner import RewardTeam
from dash_trl.workers import Request


@dataclass(frozen=True)
class _Window:
    request: Request
    examples: Sequence[Mapping[str, Any]]


class EarlyRewards:
    """Starts the rewards of windows as their rows come, and keeps the requests until they are claimed.

    Args:
        team: the reward functions of the trainer.
        group_size: number of adjacent rows that are completions of one prompt.
        wanted: False: no reward begins early, and all methods do nothing.
    """

    def __init__(self, team: RewardTeam, group_size: int, *, wanted: bool):
        self.wanted = wanted
        self._team, self._group_size = team, group_size
        self._windows: dict[int, _Window] = {}

    def __len__(self) -> int:
        """Returns the number of windows whose rewards have begun and are not claimed."""
        return len(self._windows)

    def begin(self, window: int, examples: Sequence[Mapping[str, Any]]) -> None:
        """Prepares the request of a window that is going to be sampled.

        Args:
            window: its number.
            examples: the data set's columns of each of its rows.
        """
        if self.wanted:
            self._windows[window] = _Window(self._team.begin(len(examples), self._group_size), examples)

    def take(
        self, window: int, first: int, prompts: list[Any], completion_ids: list[list[int]], completions: list[Any]
    ) -> None:
        """Starts the reward functions on rows that have come. Each row comes once; the rows come in any order.

        Args:
            window: the number of their window.
            first: the index of the first of these adjacent rows in the window.
            prompts: their prompts.
            completion_ids: the token ids of their completions.
            completions: their completions, decoded.
        """
        if (one := self._windows.get(window)) is None:
            return
        examples = one.examples[first : first + len(completion_ids)]
        self._team.start(one.request, first, reward_rows(examples, prompts, completions, completion_ids))

    def claim(self, window: int) -> Request | None:
        """Hands out the request of a window, once.

        Args:
            window: its number.

        Returns:
            The request, whose functions may still run; None if no rewards of this window have begun.
        """
        one = self._windows.pop(window, None)
        return None if one is None else one.request

    def forget(self) -> None:
        """Cancels the rewards that have begun and are not claimed."""
        for one in self._windows.values():
            one.request.cancel()
        self._windows.clear()


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """Builds the rows that per-sample functions take their arguments from.

    Args:
        examples: the data set's columns of each row.
        known: the prompts, completions and completion ids of the same rows, in this order.

    Returns:
        One dict per row with its columns, `prompt`, `completion` and `completion_ids`.
    """
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]


def arrivals(
    request: Request, groups: int, least: Callable[[int], int], share: Callable[[], int]
) -> Iterator[tuple[Tensor, bool]]:
    """Yields the rows of a window group by group, as their rewards come.

    Each step waits until at least one further group is scored on every rank. All ranks then take the same number of
    groups: the number that the rank with the fewest scored groups has. So all ranks run the same collectives and model
    passes, and each rank waits for the slowest.

    A share is what one optimizer step takes of a window: all of it, or a part of it (Mini). The groups of one step
    belong to one share.

    Args:
        request: the request of this rank's batch.
        groups: number of groups in the batch; the same on all ranks.
        least: returns the smallest of the numbers that the ranks call it with.
        share: returns the number of groups in the next share; called when the share begins. The result is limited to
            at least 1 and at most the groups that are left.

    Yields:
        The indices of the rows, and whether they are the last rows of their share.
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
