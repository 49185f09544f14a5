"""`EarlyRewards`: the rewards of a generation batch that begin while it is still being sampled.

some rows have come ──► take: decoded, their per-sample functions start ──┐
all have come       ──► are_of: they are what TRL asks the rewards of ────┴──► the request, begun
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dash_trl.rewards.agent import RewardTeam
from dash_trl.rewards.forms import ROW


class EarlyRewards:
    """
    Args:
        examples: of all rows. prompt_ids: their tokens.
        group_size: so many adjacent rows are completions of one prompt.
        decode: (prompts, prompt ids, completion ids) of some rows → their completions.
    Attributes:
        request: that has begun.
    """

    def __init__(
        self,
        team: RewardTeam,
        examples: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[list[int]],
        group_size: int,
        decode: Callable[[list[Any], Sequence[list[int]], list[list[int]]], list[Any]],
    ):
        self.request = team.begin(len(examples), group_size)
        self._team, self._examples, self._prompt_ids, self._decode = team, examples, prompt_ids, decode
        self._rows: list[dict[str, Any]] = [{}] * len(examples)

    def take(self, first: int, completion_ids: list[list[int]]) -> None:
        """Rows from `first` on have come; each comes once, in any order."""
        own = slice(first, first + len(completion_ids))
        prompts = [example["prompt"] for example in self._examples[own]]
        completions = self._decode(prompts, self._prompt_ids[own], completion_ids)
        self._rows[own] = reward_rows(self._examples[own], prompts, completions, completion_ids)
        self._team.start(self.request, first, self._rows[own])

    def are_of(self, rows: Sequence[Mapping[str, Any]]) -> bool:
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
