"""`PromptHistory` decides which prompts an epoch skips because their recent groups had no signal.

A group has signal if the filter keeps at least one of its rows. The chance of signal differs between prompts and
changes as the policy learns. For each prompt, it is estimated by the mean of a Beta posterior in which old groups count
less::

    chance = (1 + groups with signal) / (2 + groups)      each epoch multiplies the weight of a group by `FORGETTING`
    P(skipped) = max(0, 1 − chance / (1/2))               1/2 is the chance of a prompt without history

GRESO (arXiv 2506.02177) instead decides by the number of consecutive silent groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORGETTING = 0.8


class PromptHistory:
    """Counts each prompt's groups with and without signal, and draws from the counts which prompts an epoch skips.

    All ranks have the same counts and draw the same prompts.

    Args:
        prompts: number of prompts in the dataset.
        most: the largest number of consecutive epochs that may skip a prompt.
        batch: number of prompts in a generation batch, over all ranks. An epoch consists of whole generation batches,
            at least one.
        order: function that takes the number of an epoch and returns all prompts in the order of this epoch.
        seed: seed of the random draws; the number of the epoch is added to it.
    Attributes:
        skipped: number of prompts that epochs have skipped so far.
    """

    def __init__(self, prompts: int, *, most: int, batch: int, order: Callable[[int], list[int]], seed: int):
        self.skipped = 0
        self._most, self._batch, self._order, self._seed = most, batch, order, seed
        self._counts = torch.zeros(prompts, 2)  # groups without signal, groups with signal
        self._in_a_row = torch.zeros(prompts, dtype=torch.int32)  # consecutive epochs that have skipped a prompt
        self._kept: dict[int, Tensor] = {}  # epoch → [prompts] bool, True = not skipped
        self._prompts: dict[int, list[int]] = {}  # epoch → its prompts, in their order

    def note(self, prompts: Tensor, signal: Tensor) -> None:
        """Count the groups of a window.

        Args:
            prompts: [K] int64, indices of the prompts in the dataset.
            signal: [K] bool, True = the group of this prompt had signal.
        """
        self._counts.index_put_((prompts, signal.long()), torch.ones(len(prompts)), accumulate=True)

    def chance(self) -> Tensor:
        """Return each prompt's chance that its next group has signal, [prompts]."""
        return (1 + self._counts[:, 1]) / (2 + self._counts.sum(dim=1))

    def prompts(self, epoch: int) -> list[int]:
        """Return the prompts that an epoch does not skip, in their order.

        The first call for an epoch draws the prompts from the current counts. Later calls return the same prompts. As
        in TRL, prompts that do not fill a generation batch are left out at the end.

        Args:
            epoch: number of the epoch.
        """
        if epoch not in self._prompts:
            kept = self._drawn(epoch)
            order = [prompt for prompt in self._order(epoch) if kept[prompt]]
            self._prompts[epoch] = order[: len(order) // self._batch * self._batch]
        return self._prompts[epoch]

    def _drawn(self, epoch: int) -> Tensor:
        """Draw which prompts the epoch does not skip, [prompts] bool."""
        if epoch not in self._kept:
            draw = torch.Generator().manual_seed(self._seed + epoch)
            skip = torch.rand(len(self._counts), generator=draw) < 1 - 2 * self.chance()
            skip &= self._in_a_row < self._most
            # An incomplete last generation batch would be dropped. So some prompts are not skipped after all and fill
            # it up: the prompts that were skipped in the most consecutive epochs.
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
        """Drop the draws of epochs before the given one.

        Args:
            epoch: the first epoch to keep.
        """
        self._prompts = {one: prompts for one, prompts in self._prompts.items() if one >= epoch}
        self._kept = {one: kept for one, kept in self._kept.items() if one >= epoch}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "counts": self._counts.clone(),
            "in_a_row": self._in_a_row.clone(),
            "kept": dict(self._kept),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._counts, self._in_a_row = state["counts"].clone(), state["in_a_row"].clone()
        self._kept, self.skipped, self._prompts = dict(state["kept"]), state["skipped"], {}
