"""Which model passes each micro-step runs: a state machine without a clock, a model or a collective.

Transformers counts micro-steps and steps the optimizer after `gradient_accumulation_steps` of them (fewer at the end of
an epoch). TRL samples every `steps_per_generation × num_iterations` of them. A *segment* is a run of micro-steps
that lies within one optimizer step and one use of the generation batch: its survivors are packed together.

    steps_per_generation = 4, gradient_accumulation_steps = 2        steps_per_generation = 2, … = 4
    window     |---------------|---------------|                     |-------|-------|-------|-------|
    optimizer  |-------|-------|-------|-------|                     |---------------|---------------|
    segments   |-------|-------|-------|-------|                     |-------|-------|-------|-------|
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_trl.update.packing import MicroBatch


@dataclass(frozen=True)
class Segment:
    """The counts that a pass needs for its share of the loss; rows and tokens are those of all ranks.

    `passes` counts micro-steps × ranks; `all_*` includes dropped rows, `kept_*` does not; tokens are loss tokens. If
    the segment comes in parts, `kept_*` are those of a part: those of the segment are not known before its last part.
    """

    micro_steps: int
    passes: int
    all_rows: int
    all_tokens: float
    kept_rows: int
    kept_tokens: int


@dataclass(frozen=True)
class Pass:
    """A micro-batch whose rows are positions in the generation window, and the segment that it belongs to.

    `tokens`: the loss tokens that each rank has in it.
    """

    micro_batch: MicroBatch
    segment: Segment
    tokens: tuple[int, ...]


class Schedule:
    """Walks through optimizer steps and generation windows, one micro-step at a time.

    Args:
        rows_per_step: rows of a rank in a micro-step, `per_device_train_batch_size`.
        pack: (lengths [R, M, 4], micro-steps, last must run) → the micro-batches of each micro-step.
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
        self._uncut = 0  # where `optimizer_step` would begin, had no callback cut it
        self.ran_model = False  # on any rank, in this optimizer step
        self.segments: dict[int, Segment] = {}  # of this optimizer step, by their first micro-step; silent ones, too
        self._global_step, self._completed = -1, 0
        self._sampled_at: int | None = None
        self._planned: dict[int, list[Pass]] = {}
        self._ran = torch.zeros(0, 0, dtype=torch.bool)  # [R, B], rows that passes have run in this use of the window

    def begin_optimizer_step(self, step: int, micro_steps: int, global_step: int) -> None:
        """The next `micro_steps` micro-steps, from `step` on, accumulate into one optimizer step.

        If no optimizer step ran since the last call, gradients keep accumulating: Transformers makes no step of the
        rest of a stream, or of what ran before a callback ended the epoch. These micro-steps then run the rows that
        the earlier ones did not, wherever in the window they lie. (If the earlier ones were to be a shorter step, at an
        epoch's end, these rows weigh less than TRL's: TRL divides by the micro-steps of a row's own step.)

        Args:
            global_step: optimizer steps before it.
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
        """Gradients are synchronised and the optimizer steps after this micro-step."""
        return step == self.optimizer_step.stop - 1

    def completed(self, step: int, global_step: int) -> int:
        """The micro-steps whose optimizer step was taken, of the `step` that have run: not all just before it is."""
        return self._completed if global_step == self._global_step else step

    def sampled_after(self, step: int) -> bool:
        """The window in use begins after micro-step `step`, so that a run that goes on at `step` cannot use it."""
        return self._sampled_at is not None and self._sampled_at > step

    def samples_again(self, step: int) -> bool:
        """A run that goes on at micro-step `step` samples the window in use anew, which begins there or later."""
        return self._sampled_at is not None and self._sampled_at >= step

    def window_due(self, step: int) -> bool:
        """A new generation window starts at this micro-step; False when asked again after `window_sampled`."""
        return step % self.generate_every == 0 and self._sampled_at != step

    def window_sampled(self, step: int) -> None:
        self._sampled_at = step
        self._planned.clear()

    def window_is_whole(self, ran: int, lengths: Tensor) -> None:
        """A window that came in parts is complete. `ran`: its first rows, which have run. `lengths`: see `passes`."""
        self._ran = torch.arange(lengths.shape[1]).expand(len(lengths), -1) < ran

    def passes(self, step: int, lengths: Tensor, num_items_in_batch: float) -> tuple[list[Pass], list[MicroBatch]]:
        """The passes of micro-step `step`, and the micro-batches that were planned for it to be known, if any.

        Args:
            lengths: [R, B, 4] of the window, see `RolloutBatch.lengths`; 0 for a dropped row.
            num_items_in_batch: loss tokens of the window, dropped rows included.
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
        """`lengths` up to the end of these micro-steps' rows, 0 for rows that have run in this use of the window."""
        columns = self._columns_of_step(lengths)
        first = step % self.steps_per_generation * columns
        if not self._ran.numel() or first == 0:  # a use begins; or a run goes on in the window of a checkpoint
            self.window_is_whole(first, lengths)
        left = lengths * ~self._ran.unsqueeze(2)
        return left[:, : first + micro_steps * columns]

    def _columns_of_step(self, lengths: Tensor) -> int:
        """Columns of `lengths` of a micro-step: `rows_per_step`, more where a rank has more rows than others."""
        return -(-lengths.shape[1] // self.steps_per_generation)

    def has_whole_share(self, step: int) -> bool:
        """The optimizer step takes as much of the window as it should.

        It takes less at the end of a stream, and more if it was cut and rows that other steps should take come with it.
        """
        return len(self.share(step)) == min(self.accumulation, self.steps_per_generation)

    def share(self, step: int) -> range:
        """The micro-steps of the optimizer step in which the window in use is used, those before a cut, too."""
        begin = step - step % self.steps_per_generation
        return range(max(begin, self._uncut), min(begin + self.steps_per_generation, self.optimizer_step.stop))

    def ends_window(self, step: int) -> bool:
        """The last micro-step of the window in use."""
        return (step + 1) % self.steps_per_generation == 0

    def plan_part(
        self, step: int, lengths: Tensor, num_items_in_batch: float, *, last: bool
    ) -> tuple[list[Pass], list[MicroBatch]]:
        """As `passes`, for a part of an optimizer step's share of a window, all in the share's last micro-step.

        Args:
            lengths: [R, M, 4] of the part. last: no other part of the share follows.
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
        """The passes of each of `micro_steps` micro-steps over the rows with a length.

        Args:
            whole: the lengths of the segment, those of rows that ran before a cut, too.
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
            self.segments[share.start] = segment  # once more after a cut within it
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
