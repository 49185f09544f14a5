"""`Window`: the rows that one or several optimizer steps train on. It fills up while it travels::

                 Collector                                                    MicroSteps
    announced ──► sampled ──► scored ──► credited ──► filtered ──► log-probs ──► passes ──► next window
    (prompts)     └─ GenerationBatch ─┘               └───────── Part, Part, … ─────────┘

A window usually has one part with all of its rows. If rewards are awaited group by group, the groups whose rewards have
come are a part, which is trained on while the other rewards are awaited. A checkpoint saves the window, joined into one
part.

Letters: M rows of a rank in a part, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.rollout.batch import Survivors, joined


@dataclass
class Part:
    """The survivors of some rows of a window on this rank, and the lengths of all ranks' rows.

    Attributes:
        rollouts: this rank's survivors, in the order of `lengths`.
        lengths: [R, M, 4] int64, `RolloutBatch.lengths` of the rows of every rank; all 0 for a dropped row. The rows
            are in the order in which micro-steps get them.
        width: columns that TRL would pad the window to, dropped rows included: the longest prompt plus the longest
            completion that the loss counts, on the widest rank.
        num_items_in_batch: scalar, number of loss tokens of the window's rows on all ranks, dropped rows included.
        ends_step: True = the last part that the running optimizer step uses.
    """

    rollouts: Survivors
    lengths: Tensor
    width: int
    num_items_in_batch: Tensor
    ends_step: bool = True

    def rows(self, rank: int) -> Tensor:
        """Return the index in `rollouts` of each row in `lengths[rank]`, [M] int64.

        For a dropped row, the index has no meaning.

        Args:
            rank: index of this rank.
        """
        return (self.lengths[rank, :, 1] > 0).cumsum(dim=0) - 1

    @classmethod
    def of_parts(cls, used: int, parts: Sequence[Part]) -> Part:
        """Join parts into one, after `used` dropped rows in place of those that earlier optimizer steps used.

        Args:
            used: number of rows of each rank that earlier optimizer steps have used.
            parts: the parts with the other rows, at least one.
        """
        first = parts[0]
        lengths = [first.lengths.new_zeros(len(first.lengths), used, 4), *(part.lengths for part in parts)]
        rollouts = joined([part.rollouts for part in parts])
        return cls(rollouts, torch.cat(lengths, dim=1), first.width, first.num_items_in_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors only, so that `torch.load(weights_only=True)` can read them."""
        return {
            "rollouts": self.rollouts.tensors(),
            "lengths": self.lengths,
            "width": self.width,
            "num_items_in_batch": self.num_items_in_batch,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Part:
        """Build a part from what `state_dict` returned."""
        return cls(Survivors(**state["rollouts"]), state["lengths"], state["width"], state["num_items_in_batch"])


class Window:
    """The window in use. Its parts come one after the other.

    Iterating over the window waits for the next parts, and yields them. The window keeps the parts of the running
    optimizer step, because a checkpoint within the step needs them.

    Args:
        parts: iterator over the parts; it may wait for rewards. Empty if `whole` is given.
        global_step: number of the running optimizer step.
        whole: see below.
    Attributes:
        rows: number of a rank's rows in the yielded parts; 0 if `whole` was given.
        whole: all parts joined, in which rows that earlier optimizer steps used count as dropped. `None`: they are not
            joined yet, see `wait`.
    """

    def __init__(self, parts: Iterator[Part], global_step: int, *, whole: Part | None = None):
        self.rows, self.whole = 0, whole
        self._parts, self._global_step = parts, global_step
        self._kept: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            self._kept.append(part)
            self.rows += part.lengths.shape[1]
            yield part

    def begin_optimizer_step(self, global_step: int) -> None:
        """Drop the parts of the previous optimizer step, unless that step is still running.

        Args:
            global_step: number of the optimizer step.
        """
        if global_step != self._global_step:
            self._global_step, self._kept = global_step, []

    def wait(self) -> Part:
        """Wait for the other parts, and return the window; only while `whole` is `None`."""
        for _ in self:
            pass
        used = self.rows - sum(part.lengths.shape[1] for part in self._kept)
        self.whole, self._kept = Part.of_parts(used, self._kept), []
        return self.whole
