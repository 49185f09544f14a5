"""Decides which model passes each micro-step runs: a state machine without a clock, a model or a collective.

Transformers counts micro-steps and steps the optimizer after `gradient_accumulation_steps` of them (fewer at the end of
an epoch). A new window is sampled every `steps_per_generation × num_iterations` micro-steps. A *segment* is a run of
micro-steps within one optimizer step that use one window; its survivors are packed together::

    steps_per_generation = 4, gradient_accumulation_steps = 2        steps_per_generation = 2, … = 4
    window     |---------------|---------------|                     |-------|-------|-------|-------|
    optimizer  |-------|-------|-------|-------|                     |---------------|---------------|
    segments   |-------|-------|-------|-------|                     |-------|-------|-------|-------|

Letters: R ranks, B rows of a rank in a window, M rows of a rank in a part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_trl.update.packing import MicroBatch


@dataclass(frozen=True)
class Segment:
    """The counts that a pass needs for its weight in the loss, over all ranks.

    If the segment comes in parts, `kept_rows` and `kept_tokens` are those of a part, because those of the segment are
    not known before its last part.

    Attributes:
        micro_steps: micro-steps of the segment.
        passes: micro-steps × ranks.
        all_rows: rows, dropped ones included.
        all_tokens: loss tokens, those of dropped rows included.
        kept_rows: survivors.
        kept_tokens: loss tokens of survivors.
    """

    micro_steps: int
    passes: int
    all_rows: int
    all_tokens: float
    kept_rows: int
    kept_tokens: int


@dataclass(frozen=True)
class Pass:
    """A micro-batch and its segment.

    Attributes:
        micro_batch: its rows are positions in the generation window.
        segment: the segment that it belongs to.
        tokens: the loss tokens that each rank has in it.
    """

    micro_batch: MicroBatch
    segment: Segment
    tokens: tuple[int, ...]


class Schedule:
    """Walks through optimizer steps and generation windows, one micro-step at a time.

    Args:
        steps_per_generation: TRL's option.
        num_iterations: TRL's option.
        accumulation: `gradient_accumulation_steps`.
        rows_per_step: rows of a rank in a micro-step; `per_device_train_batch_size`.
        pack: (lengths [R, M, 4], micro-steps, last must run) → the micro-batches of each micro-step.
    Attributes:
        generate_every: micro-steps from one window to the next.
        optimizer_step: the micro-steps of the running optimizer step.
        ran_model: some rank has run a pass in this optimizer step.
        segments: the segments of this optimizer step by their first micro-step, silent ones included.
    """

    def __init__(
        self,
        *,
        steps_per_generation: int,
        num_iterations: int,
        accumulation: int,
        rows_per_step: int,
        pack: Callable[[Tensor, int, bool], list[list[MicroBatch]]],
    ):
        self.steps_per_generation = steps_per_generation
        self.generate_every = steps_per_generation * num_iterations
        self.accumulation = accumulation
        self.rows_per_step = rows_per_step
        self.pack = pack
        self.optimizer_step = range(0)
        self._uncut = 0  # where `optimizer_step` would begin if no callback had cut it
        self.ran_model = False
        self.segments: dict[int, Segment] = {}
        self._global_step, self._completed = -1, 0
        self._sampled_at: int | None = None
        self._planned: dict[int, list[Pass]] = {}
        self._ran = torch.zeros(0, 0, dtype=torch.bool)  # [R, B], rows that have run in this use of the window

    def begin_optimizer_step(self, step: int, micro_steps: int, global_step: int) -> None:
        """Begin an optimizer step.

        If no optimizer step was taken since the last call, gradients keep accumulating: Transformers takes no step for
        the rest of a stream, or for the micro-steps before a callback ended the epoch. The new micro-steps then run the
        rows that the earlier ones did not run, wherever in the window they lie. (If the earlier micro-steps were to
        form a shorter optimizer step at the end of an epoch, these rows weigh less than in TRL, which divides by the
        micro-steps of a row's own step.)

        Args:
            step: its first micro-step.
            micro_steps: number of its micro-steps.
            global_step: optimizer steps taken before it.
        """
        cut = global_step == self._global_step and step < self.optimizer_step.stop
        if not cut:
            self._uncut = step
        if global_step != self._global_step:
            self._global_step, self._completed = global_step, step
            self.ran_model = False
            self.segments = {}
        self.optimizer_step = range(step, step + micro_steps)
        self._planned.clear()

    def is_last(self, step: int) -> bool:
        """Whether gradients are synchronised and the optimizer steps after this micro-step."""
        return step == self.optimizer_step.stop - 1

    def completed(self, step: int, global_step: int) -> int:
        """Return how many micro-steps belong to optimizer steps that were taken.

        Just before an optimizer step is taken, these are fewer than have run.

        Args:
            step: number of micro-steps that have run.
            global_step: optimizer steps taken.
        """
        return self._completed if global_step == self._global_step else step

    def sampled_after(self, step: int) -> bool:
        """Whether the window in use begins after micro-step `step`, so that a run that continues at `step` cannot use
        it.
        """
        return self._sampled_at is not None and self._sampled_at > step

    def samples_again(self, step: int) -> bool:
        """Whether a run that continues at micro-step `step` samples the window in use again, because it begins there or
        later.
        """
        return self._sampled_at is not None and self._sampled_at >= step

    def window_due(self, step: int) -> bool:
        """Whether a new window begins at this micro-step; False again after `window_sampled`."""
        return step % self.generate_every == 0 and self._sampled_at != step

    def window_sampled(self, step: int) -> None:
        """Record that a window was sampled at this micro-step."""
        self._sampled_at = step
        self._planned.clear()

    def window_is_whole(self, ran: int, lengths: Tensor) -> None:
        """Record that a window whose parts came one by one is whole.

        Args:
            ran: number of a rank's first rows, which have run already.
            lengths: see `passes`.
        """
        self._ran = torch.arange(lengths.shape[1]).expand(len(lengths), -1) < ran

    def passes(self, step: int, lengths: Tensor, num_items_in_batch: float) -> tuple[list[Pass], list[MicroBatch]]:
        """Return the passes of a micro-step.

        Args:
            step: the micro-step.
            lengths: [R, B, 4] of the window, see `RolloutBatch.lengths`; 0 for a dropped row.
            num_items_in_batch: loss tokens of the window, dropped rows included.
        Returns:
            The passes, and the micro-batches that this call has planned for the log (for several micro-steps, or none).
        """
        planned: list[MicroBatch] = []
        if step not in self._planned:
            share = self.share(step)
            steps = range(step, share.stop)
            left = self._left(step, lengths, micro_steps=len(steps))
            columns = self._columns_of_step(lengths)
            first = share.start % self.steps_per_generation * columns
            whole = lengths[:, first : first + len(share) * columns]
            plan = self._plan(step, left, num_items_in_batch, micro_steps=len(steps), whole=whole)
            self._planned.update(zip(steps, plan, strict=True))
            planned = [one.micro_batch for passes in plan for one in passes]
        for one in self._planned[step]:
            for rank, rows in enumerate(one.micro_batch.rows):
                self._ran[rank, list(rows)] = True
        return self._planned[step], planned

    def _left(self, step: int, lengths: Tensor, micro_steps: int) -> Tensor:
        """Return `lengths` up to the end of these micro-steps' rows, with 0 for rows that have run in this use of the
        window.
        """
        columns = self._columns_of_step(lengths)
        first = step % self.steps_per_generation * columns
        if not self._ran.numel() or first == 0:  # a use begins, or a run continues in a checkpoint's window
            self.window_is_whole(first, lengths)
        left = lengths * ~self._ran.unsqueeze(2)
        return left[:, : first + micro_steps * columns]

    def _columns_of_step(self, lengths: Tensor) -> int:
        """Return how many columns of `lengths` a micro-step has: `rows_per_step`, or more if some rank has more
        rows.
        """
        return -(-lengths.shape[1] // self.steps_per_generation)

    def has_whole_share(self, step: int) -> bool:
        """Whether the optimizer step takes exactly its share of the window.

        It takes less at the end of a stream. It takes more if it was cut and also runs rows of other optimizer steps.
        """
        return len(self.share(step)) == min(self.accumulation, self.steps_per_generation)

    def share(self, step: int) -> range:
        """Return the micro-steps of the optimizer step that use the window in use, those before a cut included."""
        begin = step - step % self.steps_per_generation
        return range(max(begin, self._uncut), min(begin + self.steps_per_generation, self.optimizer_step.stop))

    def ends_window(self, step: int) -> bool:
        """Whether this is the last micro-step of the window in use."""
        return (step + 1) % self.steps_per_generation == 0

    def plan_part(
        self, step: int, lengths: Tensor, num_items_in_batch: float, *, last: bool
    ) -> tuple[list[Pass], list[MicroBatch]]:
        """Plan the passes of a part of an optimizer step's share of a window. They all run in the share's last
        micro-step.

        Args:
            step: the last micro-step of the share.
            lengths: [R, M, 4] of the part.
            num_items_in_batch: loss tokens of the window, dropped rows included.
            last: no other part of the share follows.
        Returns:
            As `passes`.
        """
        (passes,) = self._plan(step, lengths, num_items_in_batch, micro_steps=1, whole=lengths, last=last)
        return passes, [one.micro_batch for one in passes]

    def _plan(
        self,
        step: int,
        lengths: Tensor,
        num_items_in_batch: float,
        *,
        micro_steps: int,
        whole: Tensor,
        last: bool = True,
    ) -> list[list[Pass]]:
        """Plan the passes of each of `micro_steps` micro-steps, over the rows with a length.

        Args:
            whole: the lengths of the segment, including rows that ran before a cut.
        """
        share, ranks = self.share(step), len(lengths)
        segment = Segment(
            micro_steps=len(share),
            passes=len(share) * ranks,
            all_rows=len(share) * ranks * self.rows_per_step,
            all_tokens=num_items_in_batch * len(share) / self.steps_per_generation,
            kept_rows=int((whole[..., 1] > 0).sum()),
            kept_tokens=int(whole[..., 2].sum()),
        )
        ends_step = last and share.stop == self.optimizer_step.stop
        plan = self.pack(lengths, micro_steps, ends_step and self.ran_model)
        if last:
            self.segments[share.start] = segment  # set again after a cut within the segment
        self.ran_model |= any(plan)
        return [_passes(micro_batches, segment, lengths) for micro_batches in plan]


def _passes(micro_batches: list[MicroBatch], segment: Segment, lengths: Tensor) -> list[Pass]:
    table = lengths[..., 2].tolist()
    return [
        Pass(
            one,
            segment,
            tokens=tuple(sum(table[rank][row] for row in rows) for rank, rows in enumerate(one.rows)),
        )
        for one in micro_batches
    ]
