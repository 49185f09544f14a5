"""`EarlyRewards`: rewards of generation batches that begin while these are sampled, or wait to be trained on.

`arrivals`: the groups of a batch in the order in which their rewards come, in step on all ranks.

some rows have come ──► take: decoded, their per-sample functions start ──┐
TRL asks for rewards ─► claim: of these rows, and of nothing else? ───────┴──► the request, begun
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_trl.rewards.agent import RewardTeam
from dash_trl.rewards.forms import ROW
from dash_trl.workers import Request


class EarlyRewards:
    """
    Args:
        group_size: so many adjacent rows are completions of one prompt.
        wanted: rewards begin early; else `begin` does nothing.
    Attributes:
        wanted: False, too, once other rows were asked for than had been sampled.
    """

    def __init__(self, team: RewardTeam, group_size: int, *, wanted: bool):
        self.wanted = wanted
        self._team, self._group_size = team, group_size
        self._windows: dict[int, _Window] = {}

    def __len__(self) -> int:
        """Windows whose rewards have begun and are not claimed."""
        return len(self._windows)

    def begin(
        self, window: int, examples: Sequence[Mapping[str, Any]], prompt_ids: Sequence[list[int]], decoder: Any = None
    ) -> None:
        """
        Args:
            examples: of all rows. prompt_ids: their tokens.
            decoder: `completions(prompts, prompt_ids, completion_ids)` makes the completions of some rows. None: they
                come with the rows.
        """
        if self.wanted:
            request = self._team.begin(len(examples), self._group_size)
            self._windows[window] = _Window(request, examples, prompt_ids, decoder)

    def take(
        self, window: int, first: int, completion_ids: list[list[int]], completions: list[Any] | None = None
    ) -> None:
        """Rows from `first` on have come; each comes once, in any order. `completions`: of them, where known."""
        if window in self._windows:
            one = self._windows[window]
            self._team.start(one.request, first, one.complete(first, completion_ids, completions))

    def decoder(self, window: int) -> Any:
        """That made the window's completions; None where no rewards have begun."""
        return self._windows[window].decoder if window in self._windows else None

    def claim(self, window: int, rows: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> Request | None:
        """The window's request, begun, if it is of these rows; None if there is none. Each is claimed once."""
        one = self._windows.pop(window, None)
        if one is None or one.has(rows):
            return None if one is None else one.request
        one.request.cancel()
        if self.wanted:
            say(
                "The rows that rewards are asked of are not those that were sampled, as where a subclass changes "
                "them. From now on rewards begin when all rows of a window are there; those of this one, anew."
            )
        self.wanted = False
        return None

    def forget(self) -> None:
        """Nobody waits for what has begun."""
        for one in self._windows.values():
            one.request.cancel()
        self._windows.clear()


class _Window:
    def __init__(
        self, request: Request, examples: Sequence[Mapping[str, Any]], prompt_ids: Sequence[list[int]], decoder: Any
    ):
        self.request, self.decoder = request, decoder
        self._examples, self._prompt_ids = examples, prompt_ids
        self._rows: list[dict[str, Any]] = [{}] * len(examples)

    def complete(self, first: int, ids: list[list[int]], completions: list[Any] | None) -> list[dict[str, Any]]:
        """What functions get of the rows that have come."""
        own = slice(first, first + len(ids))
        prompts = [example["prompt"] for example in self._examples[own]]
        if completions is None:
            completions = self.decoder.completions(prompts, self._prompt_ids[own], ids)
        self._rows[own] = reward_rows(self._examples[own], prompts, completions, ids)
        return self._rows[own]

    def has(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the functions were asked of these, and of nothing else."""
        return len(rows) == len(self._rows) and all(map(_same, self._rows, rows))


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """What per-sample functions get of each row: its columns, prompt, completion and completion ids."""
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """The columns by identity: an array has no one answer to ==."""
    return one.keys() == other.keys() and all(
        value is other[name] or name in ROW and value == other[name] for name, value in one.items()
    )


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
