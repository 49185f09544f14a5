"""`PromptHistory`: which prompts an epoch passes over, since their groups had no signal the last times.

A prompt's groups have signal or not, by the filter's verdict: a chance p that changes as the policy learns. Its Beta
posterior is counted with forgetting (GRESO, arXiv 2506.02177, skips by the number of silent groups in a row):

    chance = (1 + groups with signal) / (2 + groups)        each group counts `FORGETTING` times less with each epoch
    P(passed over) = max(0, 1 − chance / (1/2))             1/2 is the chance of a prompt that nothing is known of
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORGETTING = 0.8


class PromptHistory:
    """The verdicts on all prompts of a dataset; the same on every rank.

    Args:
        prompts: of the dataset. most: epochs in a row that may pass a prompt over.
        batch: prompts of a generation batch on all ranks; an epoch keeps whole ones, at least one.
        order: an epoch → all prompts in their order. seed: of the draws, beside the epoch.
    Attributes:
        skipped: prompts that epochs have passed over so far.
    """

    def __init__(self, prompts: int, *, most: int, batch: int, order: Callable[[int], list[int]], seed: int):
        self.skipped = 0
        self._most, self._batch, self._order, self._seed = most, batch, order, seed
        self._counts = torch.zeros(prompts, 2)  # groups without signal, groups with it
        self._in_a_row = torch.zeros(prompts, dtype=torch.int32)  # epochs that have passed a prompt over since its last
        self._kept: dict[int, Tensor] = {}  # epoch → [prompts] bool
        self._prompts: dict[int, list[int]] = {}

    def note(self, prompts: Tensor, signal: Tensor) -> None:
        """
        Args:
            prompts: [K] int64, rows of the dataset. signal: [K] bool, a group of this prompt had signal.
        """
        self._counts.index_put_((prompts, signal.long()), torch.ones(len(prompts)), accumulate=True)

    def chance(self) -> Tensor:
        """[prompts]: that the next group has signal."""
        return (1 + self._counts[:, 1]) / (2 + self._counts.sum(dim=1))

    def prompts(self, epoch: int) -> list[int]:
        """The prompts that the epoch does not pass over, in their order; as in TRL, whole generation batches only.

        Drawn when the epoch is first asked for, by the verdicts until then.
        """
        if epoch not in self._prompts:
            kept = self._drawn(epoch)
            order = [prompt for prompt in self._order(epoch) if kept[prompt]]
            self._prompts[epoch] = order[: len(order) // self._batch * self._batch]
        return self._prompts[epoch]

    def _drawn(self, epoch: int) -> Tensor:
        """[prompts] bool: those that are not passed over."""
        if epoch not in self._kept:
            draw = torch.Generator().manual_seed(self._seed + epoch)
            skip = torch.rand(len(self._counts), generator=draw) < 1 - 2 * self.chance()
            skip &= self._in_a_row < self._most
            # Those that were passed over longest fill the last generation batch, which would be left out otherwise.
            kept = int((~skip).sum())
            longest = skip.nonzero().flatten()
            longest = longest[self._in_a_row[longest].argsort(descending=True, stable=True)]
            skip[longest[: -kept % self._batch or self._batch * (kept == 0)]] = False
            self._in_a_row = (self._in_a_row + 1) * skip
            self._counts *= FORGETTING
            self._kept[epoch] = ~skip
            self.skipped += int(skip.sum())
        return self._kept[epoch]

    def forget(self, epoch: int) -> None:
        """Let go of the epochs before this one."""
        self._prompts = {one: prompts for one, prompts in self._prompts.items() if one >= epoch}
        self._kept = {one: kept for one, kept in self._kept.items() if one >= epoch}

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": self._counts.clone(),
            "in_a_row": self._in_a_row.clone(),
            "kept": dict(self._kept),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts, self._in_a_row = state["counts"].clone(), state["in_a_row"].clone()
        self._kept, self.skipped, self._prompts = dict(state["kept"]), state["skipped"], {}
