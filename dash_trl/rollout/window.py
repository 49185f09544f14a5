"""`Window`: the rows that one or several optimizer steps train on::

                 Collector                                                    MicroSteps
    announced ──► sampled ──► scored ──► credited ──► filtered ──► log-probs ──► passes
    (prompts)     └─ GenerationBatch ─┘               └───────── Part, Part, … ─────────┘

Usually, a window is one part. If rewards are awaited group by group, a part holds groups whose rewards have come, and
is trained on while the other rewards are awaited. In a *streamed* window, other groups are still sampled then. If
several optimizer steps use a window in parts, its log-probs are computed as soon as it is sampled.

Letters: M rows of a rank in a part, R ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dash_trl.rollout.batch import COMPLETION, RolloutBatch, concatenated


@dataclass
class Part:
    """Some rows of a window: this rank's survivors (the rows to train on), and the lengths of all ranks' rows.

    Attributes:
        rollouts: this rank's survivors, in the order of `lengths`.
        lengths: [R, M, 4] int64, see `RolloutBatch.lengths`, in the order in which micro-steps get the rows. All 0 for
            a dropped row; 0 completion tokens for a masked row.
        width: longest prompt plus longest unmasked completion, among all rows sampled for the window, on the widest
            rank. By default, a pass has at most `per_device_train_batch_size` × `width` tokens.
        num_items_in_batch: scalar, number of loss tokens of the whole window on all ranks, dropped rows included.
        by_group: True = a pass has all rows of a group, because log-probs were computed before rewards were known. The
            loss mask of a dropped row is 0.
        ends_step: True = the last part that the running optimizer step uses.
        rescale: with the last part of a streamed window, the factor for the gradients of all its parts, because
            `num_items_in_batch` is provisional: this number / the window's number of loss tokens.
    """

    rollouts: RolloutBatch
    lengths: Tensor
    width: int
    num_items_in_batch: Tensor
    by_group: bool = False
    ends_step: bool = True
    rescale: float = 1.0

    def of_steps(self, steps: range, count: int, rank: int, needed: Tensor | None = None) -> tuple[Tensor, Self]:
        """Return the rows that some micro-steps use: their indices in `rollouts` of this rank, and a part.

        Args:
            steps: the micro-steps, counted from the first of the window.
            count: number of micro-steps of the window.
            needed: [R, M] bool, False = the row is left out, too. The lengths of rows that are left out are 0.
        """
        columns = self.lengths.shape[1]
        # Rows of a micro-step; more than usual if dynamic sampling has left one rank more than another.
        step = torch.arange(columns) // max(-(-columns // count), 1)
        keep = ((step >= steps.start) & (step < steps.stop)).expand(self.lengths.shape[:2])
        if needed is not None:
            keep = keep & needed
        survivors = self.lengths[rank, :, COMPLETION] > 0
        rows = keep[rank][survivors].nonzero().squeeze(1)
        return rows, replace(self, rollouts=self.rollouts.rows(rows), lengths=self.lengths * keep.unsqueeze(2))

    @classmethod
    def of_parts(cls, used: int, parts: Sequence[Self]) -> Self:
        """Join parts into one, after `used` rows of 0 in `lengths` for the rows that earlier optimizer steps used."""
        last = parts[-1]  # of a streamed window, only this part knows the widest row and the number of loss tokens
        lengths = [last.lengths.new_zeros(len(last.lengths), used, 4), *(part.lengths for part in parts)]
        return cls(
            # In a streamed window, the rows of the parts differ in width.
            concatenated([part.rollouts for part in parts], 0),
            torch.cat(lengths, dim=1),
            last.width,
            (last.num_items_in_batch / last.rescale).round().long(),
            last.by_group,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers only, so that `torch.load(weights_only=True)` can read them."""
        return {**vars(self), "rollouts": self.rollouts.tensors()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        return cls(**{**state, "rollouts": RolloutBatch(**state["rollouts"])})


class Window:
    """The window in use: either whole, or a sequence of parts that come one after the other.

    Iterating yields each part when it comes, and continues where the last iteration stopped. The parts of the running
    optimizer step are kept, because a checkpoint within the step needs their rows.

    Args:
        parts: the parts; iterating over them waits for rewards.
        whole: the whole window, unless it comes in parts.
    Attributes:
        rows: number of a rank's rows in the yielded parts.
        whole: the whole window as one part; `None` until `wait` has joined the parts.
    """

    def __init__(self, parts: Iterable[Part] = (), *, whole: Part | None = None):
        self.rows = 0
        self.whole = whole
        self._parts = iter(parts)
        self._kept: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            self._kept.append(part)
            self.rows += part.lengths.shape[1]
            yield part

    def begin_optimizer_step(self) -> None:
        """Drop the parts of the previous optimizer step."""
        self._kept = []

    def wait(self) -> None:
        """Wait for the other parts, and join all kept parts to the whole window. `whole` must be `None`."""
        for _ in self:
            pass
        used = self.rows - sum(part.lengths.shape[1] for part in self._kept)
        self.whole = Part.of_parts(used, self._kept)
        self._kept = []
