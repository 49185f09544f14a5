"""Which model passes each micro-step runs: a state machine without a clock, a model or a collective.

Transformers counts micro-steps and steps the optimizer after `gradient_accumulation_steps` of them (fewer at the end of
an epoch). TRL samples every `steps_per_generation × num_iterations` of them. A *segment* is a run of micro-steps
that lies within one optimizer step and one use of the generation batch: its survivors are packed together.

    steps_per_generation = 4, gradient_accumulation_steps = 2        steps_per_generation = 2, … = 4
    window     |---------------|---------------|                     |-------|-------|-------|-------|
    optimizer  |-------|-------|-------|-------|                     |---------------|---------------|
    segments   |-------|-------|-------|-------|                     |-------|-------|-------|-------|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dash_trl.update.packing import MicroBatch


@dataclass(frozen=True)
class Segment:
    """The counts that a pass needs for its share of the loss; rows and tokens are those of all ranks.

    `passes` counts micro-steps × ranks; `all_*` includes dropped rows, `kept_*` does not; tokens are loss tokens.
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
        pack: (lengths [R, M, 3], micro-steps, last must run) → the micro-batches of each micro-step.
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
        self.ran_model = False  # on any rank, in this optimizer step
        self.segments: list[Segment] = []  # of this optimizer step, with and without survivors
        self._global_step, self._completed = -1, 0
        self._sampled_at: int | None = None
        self._planned: dict[int, list[Pass]] = {}

    def begin_optimizer_step(self, step: int, micro_steps: int, global_step: int) -> None:
        """The next `micro_steps` micro-steps, from `step` on, accumulate into one optimizer step.

        Where there was none since the last call, they add to its gradients: Transformers makes none of the rest of a
        stream, and of what ran before a callback ended the epoch.

        Args:
            global_step: optimizer steps before it.
        """
        if global_step != self._global_step:
            self._global_step, self._completed = global_step, step
            self.ran_model = False
        self.optimizer_step = range(step, step + micro_steps)
        self.segments = []
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

    def passes(self, step: int, lengths: Tensor, num_items_in_batch: float) -> tuple[list[Pass], list[MicroBatch]]:
        """The passes of micro-step `step`, and the micro-batches that were planned for it to be known, if any.

        Args:
            lengths: [R, B, 3] of the window: prompt, completion and loss tokens; 0 for a dropped row.
            num_items_in_batch: loss tokens of the window, dropped rows included.
        """
        planned: list[MicroBatch] = []
        if step not in self._planned:
            planned = self._plan(step, lengths, num_items_in_batch)
        return self._planned[step], planned

    def has_whole_share(self, step: int) -> bool:
        """The optimizer step takes as much of the window as it should; one that the end of a stream cut takes less."""
        return len(self.share(step)) == min(self.accumulation, self.steps_per_generation)

    def share(self, step: int) -> range:
        """The micro-steps of the optimizer step, up to the end of the window in use, in which its rows are used."""
        begin = step - step % self.steps_per_generation
        return range(
            max(begin, self.optimizer_step.start), min(begin + self.steps_per_generation, self.optimizer_step.stop)
        )

    def ends_window(self, step: int) -> bool:
        """The last micro-step of the window in use."""
        return (step + 1) % self.steps_per_generation == 0

    def plan_part(
        self, step: int, lengths: Tensor, num_items_in_batch: float, *, last: bool
    ) -> tuple[list[Pass], list[MicroBatch]]:
        """As `passes`, for a part of an optimizer step's share of a window, all in the share's last micro-step.

        What is kept of the share is not known before its last part: `Segment.kept_*` are 0.

        Args:
            lengths: [R, M, 3] of the part. last: no other part of the share follows.
        """
        (micro_batches,) = self.pack(lengths, 1, last and self.ran_model and self.is_last(step))
        ranks, steps = lengths.shape[0], len(self.share(step))
        segment = Segment(
            micro_steps=steps,
            passes=steps * ranks,
            all_rows=ranks * steps * self.rows_per_step,
            all_tokens=num_items_in_batch * steps / self.steps_per_generation,
            kept_rows=0,
            kept_tokens=0,
        )
        if last:
            self.segments.append(segment)
        self.ran_model |= bool(micro_batches)
        return _passes(micro_batches, segment, lengths), micro_batches

    def _plan(self, step: int, lengths: Tensor, num_items_in_batch: float) -> list[MicroBatch]:
        """Plan from `step` to the end of the optimizer step, or of this use of the window, whichever comes first."""
        in_window = step % self.steps_per_generation
        stop = min(step - in_window + self.steps_per_generation, self.optimizer_step.stop)
        steps, offset = stop - step, in_window * self.rows_per_step
        lengths = lengths[:, offset : offset + steps * self.rows_per_step]
        plan = self.pack(lengths, steps, self.ran_model and stop == self.optimizer_step.stop)
        segment = Segment(
            micro_steps=steps,
            passes=steps * lengths.shape[0],
            all_rows=lengths.shape[0] * lengths.shape[1],
            all_tokens=num_items_in_batch * steps / self.steps_per_generation,
            kept_rows=int((lengths[..., 1] > 0).sum()),
            kept_tokens=int(lengths[..., 2].sum()),
        )
        for here, micro_batches in zip(range(step, stop), plan, strict=True):
            self._planned[here] = _passes(micro_batches, segment, lengths, offset)
        self.segments.append(segment)
        self.ran_model |= any(plan)
        return [one.micro_batch for here in range(step, stop) for one in self._planned[here]]


def _passes(micro_batches: list[MicroBatch], segment: Segment, lengths: Tensor, offset: int = 0) -> list[Pass]:
    """Passes over rows that are counted from `offset` rows earlier than `lengths`, [R, M, 3], does."""
    table = lengths[..., 2].tolist()
    return [
        Pass(
            one.shifted(offset),
            segment,
            tokens=tuple(sum(table[rank][row] for row in rows) for rank, rows in enumerate(one.rows)),
        )
        for one in micro_batches
    ]
