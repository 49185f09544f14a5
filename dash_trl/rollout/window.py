"""`GenerationWindow`: what one generation batch leaves for the optimizer steps that use it.

Letters: B rows of a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.rollout.batch import Survivors, joined


@dataclass
class GenerationWindow:
    """
    Attributes:
        rollouts: the survivors of this rank, in the order of `lengths`.
        lengths: [R, B, 4] int64, for every row of every rank, in the order in which TRL's shuffle hands them to the
            micro-steps, see `RolloutBatch.lengths`; all 0 for a dropped row.
        num_items_in_batch: scalar, the loss tokens of all rows on all ranks, dropped ones included.
    """

    rollouts: Survivors
    lengths: Tensor
    num_items_in_batch: Tensor

    def rows(self, rank: int) -> Tensor:
        """[B] int64: position in the shuffled batch → row of `rollouts` (meaningless for a dropped row)."""
        return (self.lengths[rank, :, 1] > 0).cumsum(dim=0) - 1

    @classmethod
    def of_parts(cls, used: int, parts: Sequence[GenerationWindow]) -> GenerationWindow:
        """One whose first `used` rows of a rank are used; its others are those of the parts."""
        first = parts[0]
        lengths = [torch.zeros_like(first.lengths[:, :1]).expand(-1, used, -1), *(part.lengths for part in parts)]
        rollouts = joined([part.rollouts for part in parts])
        return cls(rollouts, torch.cat(lengths, dim=1), first.num_items_in_batch)

    def state_dict(self) -> dict[str, Any]:
        """Tensors only, so that `torch.load(weights_only=True)` reads it."""
        return {
            "rollouts": self.rollouts.tensors(),
            "lengths": self.lengths,
            "num_items_in_batch": self.num_items_in_batch,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> GenerationWindow:
        return cls(Survivors(**state["rollouts"]), state["lengths"], state["num_items_in_batch"])


class Window:
    """The window in use: its parts come one by one, until it is whole. Iterates over (part, whether a step ends there).

    It keeps the parts of the optimizer step that runs: a checkpoint from within the step needs them, too.

    Args:
        parts: see `Collector.window`. step: the number of the optimizer step that runs.
    Attributes:
        rows: of a rank, in the parts that have been handed out.
        whole: all parts as one, without the rows of earlier optimizer steps; `None` before `wait`.
    """

    def __init__(self, parts: Iterator[tuple[GenerationWindow, bool]], step: int):
        self.rows = 0
        self.whole: GenerationWindow | None = None
        self._parts, self._step = parts, step
        self._kept: list[GenerationWindow] = []

    @classmethod
    def of(cls, whole: GenerationWindow) -> Window:
        """One that nothing is missing of."""
        window = cls(iter(()), -1)
        window.whole = whole
        return window

    def __iter__(self) -> Iterator[tuple[GenerationWindow, bool]]:
        for part, last in self._parts:
            self._kept.append(part)
            self.rows += part.lengths.shape[1]
            yield part, last

    def begin_optimizer_step(self, step: int) -> None:
        """Let go of the parts of the optimizer step before, unless it is still the same one."""
        if step != self._step and self.whole is None:
            self._step, self._kept = step, []

    def wait(self) -> GenerationWindow:
        """Wait for all parts; then it is whole."""
        for _ in self:
            pass
        used = self.rows - sum(part.lengths.shape[1] for part in self._kept)
        self.whole, self._kept = GenerationWindow.of_parts(used, self._kept), []
        return self.whole
