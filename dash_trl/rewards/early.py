"""`EarlyRewards`: begins the rewards of a window while it is sampled, or waits to be trained on.

`arrivals`: the groups of a window in the order in which their rewards come, in step on all ranks.

    begin: a window is going to be sampled ──► take: rows have come, their functions start ──► claim: the request
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
    """Rewards of windows whose rows come before they are needed.

    Args:
        group_size: so many adjacent rows are completions of one prompt.
        wanted: rewards begin early; else all methods do nothing.
    """

    def __init__(self, team: RewardTeam, group_size: int, *, wanted: bool):
        self.wanted = wanted
        self._team, self._group_size = team, group_size
        self._windows: dict[int, _Window] = {}

    def __len__(self) -> int:
        """Windows whose rewards have begun and are not claimed."""
        return len(self._windows)

    def begin(self, window: int, examples: Sequence[Mapping[str, Any]]) -> None:
        """A window is going to be sampled. `examples`: of all its rows."""
        if self.wanted:
            self._windows[window] = _Window(self._team.begin(len(examples), self._group_size), examples)

    def take(
        self, window: int, first: int, prompts: list[Any], completion_ids: list[list[int]], completions: list[Any]
    ) -> None:
        """Rows from `first` on have come; each comes once, in any order."""
        if (one := self._windows.get(window)) is None:
            return
        examples = one.examples[first : first + len(completion_ids)]
        self._team.start(one.request, first, reward_rows(examples, prompts, completions, completion_ids))

    def claim(self, window: int) -> Request | None:
        """The window's request, which has begun; None if there is none. Each is claimed once."""
        one = self._windows.pop(window, None)
        return None if one is None else one.request

    def forget(self) -> None:
        """Cancel the rewards that have begun and are not claimed."""
        for one in self._windows.values():
            one.request.cancel()
        self._windows.clear()


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """What per-sample functions get of each row: its columns, prompt, completion and completion ids."""
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]


def arrivals(
    request: Request, groups: int, least: Callable[[int], int], share: Callable[[], int]
) -> Iterator[tuple[Tensor, bool]]:
    """The rows of the groups that have come since the last time, and whether they are the last of their share.

    Waits for the first. A share is what one optimizer step takes: the batch, or a part of it (Mini).

    All ranks hand out the same number of groups at a time, as many as the rank has that has the fewest, so that what
    is done with them, collectives and model passes, is the same everywhere. So each waits for the slowest.

    Args:
        request: of this rank's batch, of so many groups, no fewer than on any other rank.
        least: the least of the numbers that all ranks call it with.
        share: the groups of the next share, asked when it begins. It is at least one, and at most what is left.
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
