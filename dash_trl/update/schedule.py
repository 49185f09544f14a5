"""Decides which model passes run in which micro-step, as a state machine without a clock, a model or a collective.

Transformers steps the optimizer after `gradient_accumulation_steps` micro-steps (fewer at the end of an epoch). A new
window is sampled every `steps_per_generation × num_iterations` micro-steps. A *share* is the rows of a window that one
optimizer step uses; its survivors are packed together, and run in its last micro-step::

    steps_per_generation = 4, gradient_accumulation_steps = 2        steps_per_generation = 2, … = 4
    window     |---------------|---------------|                     |-------|-------|-------|-------|
    optimizer  |-------|-------|-------|-------|                     |---------------|---------------|
    shares     |-------|-------|-------|-------|                     |-------|-------|-------|-------|

Letters: R ranks, B rows of a rank in a window, M rows of a rank in a part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dash_trl.rollout import COMPLETION, LOSS, Part
from dash_trl.update.packing import MicroBatch


@dataclass(frozen=True)
class Share:
    """Counts of a share over all ranks, from which `loss_scale` computes the weight of a pass.

    If rewards come in several parts, `kept_rows` and `kept_tokens` count one part, because later survivors are unknown.

    Attributes:
        first: the first micro-step.
        micro_steps: number of micro-steps.
        passes: micro-steps × ranks.
        all_rows: number of rows, dropped rows included.
        all_tokens: number of loss tokens, dropped rows included: the window's number, divided evenly among its
            micro-steps.
        kept_rows: number of survivors.
        kept_tokens: number of the survivors' loss tokens.
    """

    first: int
    micro_steps: int
    passes: int
    all_rows: int
    all_tokens: float
    kept_rows: int
    kept_tokens: int


@dataclass(frozen=True)
class Pass:
    """A model pass over one micro-batch.

    Attributes:
        micro_batch: the rows, as positions in the planned share or part.
        share: the share; its counts determine the weight of the pass in the loss.
        tokens: for each rank, its number of loss tokens.
    """

    micro_batch: MicroBatch
    share: Share
    tokens: tuple[int, ...]


class Schedule:
    """Plans the passes of each micro-step.

    Args:
        args: the `DASHConfig`.
        pack: function that takes a part and returns its micro-batches; see `plan_share`.
    Attributes:
        optimizer_step: the micro-steps of the running optimizer step.
        ran_model: True = a pass of this optimizer step has been planned.
        sampled_at: the micro-step at which the window in use was sampled; `None` at first.
        shares: first micro-step → share of this optimizer step, also without survivors.
    """

    def __init__(self, args: Any, pack: Callable[[Part], list[MicroBatch]]):
        self._args = args
        self._pack = pack
        self.optimizer_step = range(0)
        self.ran_model = False
        self.shares: dict[int, Share] = {}
        self._global_step = -1
        self._completed = 0
        self.sampled_at: int | None = None

    def begin_optimizer_step(self, first: int, micro_steps: int, global_step: int) -> bool:
        """Begin an optimizer step of `micro_steps` micro-steps, from `first` on.

        Return whether the optimizer has stepped since the last call. If not (at the end of a stream), gradients keep
        accumulating.

        Raises:
            ValueError: if the previous optimizer step has micro-steps left. (At the end of the last epoch, there is no
                later call, and these micro-steps do not run, as in TRL.)
        """
        has_stepped = global_step != self._global_step
        if not has_stepped and first < self.optimizer_step.stop:
            raise ValueError(
                f"A callback ended the epoch after micro-step {first} of the run, within an optimizer step, so rows of "
                "this step would never be trained on. Set control.should_epoch_stop in on_step_end only."
            )
        if has_stepped:
            self._global_step = global_step
            self._completed = first
            self.ran_model = False
            self.shares = {}
        self.optimizer_step = range(first, first + micro_steps)
        return has_stepped

    def completed(self, micro_step: int, global_step: int) -> int:
        """Return the number of micro-steps of all completed optimizer steps, at which a resumed run continues."""
        return self._completed if global_step == self._global_step else micro_step

    def samples_again(self, micro_step: int) -> bool:
        """Whether a run resumed at `micro_step` samples the window in use again, because it begins there or later."""
        return self.sampled_at is not None and self.sampled_at >= micro_step

    def has_whole_share(self, micro_step: int) -> bool:
        """Whether the optimizer step runs a full share of the window. At the end of a stream, it runs fewer rows."""
        return len(self.micro_steps_of_share(micro_step)) == min(
            self._args.gradient_accumulation_steps, self._args.steps_per_generation
        )

    def micro_steps_of_share(self, micro_step: int) -> range:
        """Return the micro-steps of this optimizer step that use the window of a micro-step; their rows are a share."""
        begin = micro_step - micro_step % self._args.steps_per_generation
        step = self.optimizer_step
        return range(max(begin, step.start), min(begin + self._args.steps_per_generation, step.stop))

    def shares_of_window(self, micro_step: int) -> list[range]:
        """Return the micro-steps of each share of a new window, counted from the window's first, `micro_step`."""
        window = self._args.steps_per_generation
        step = self._args.gradient_accumulation_steps
        ends = range(self.optimizer_step.stop - micro_step, window, step)
        return [range(*one) for one in pairwise([0, *ends, window])]

    def plan(self, micro_step: int, part: Part) -> list[Pass]:
        """Plan the passes over a share or a part of it, which run in the last micro-step of the share, `micro_step`."""
        lengths = part.lengths
        steps = self.micro_steps_of_share(micro_step)
        ranks = len(lengths)
        share = Share(
            first=steps.start,
            micro_steps=len(steps),
            passes=len(steps) * ranks,
            all_rows=len(steps) * ranks * self._args.per_device_train_batch_size,
            all_tokens=part.num_items_in_batch.item() * len(steps) / self._args.steps_per_generation,
            kept_rows=int((lengths[..., COMPLETION] > 0).sum()),
            kept_tokens=int(lengths[..., LOSS].sum()),
        )
        micro_batches = self._pack(part)
        if self.ran_model and part.ends_step and steps.stop == self.optimizer_step.stop:
            # DDP synchronises gradients, and DeepSpeed steps the optimizer, in the last pass of the optimizer step.
            micro_batches = micro_batches or [MicroBatch(((),) * ranks)]
        if part.ends_step:
            self.shares[steps.start] = replace(share, all_tokens=share.all_tokens / part.rescale)
        self.ran_model |= bool(micro_batches)
        passes = []
        for one in micro_batches:
            tokens = (int(own[list(rows), LOSS].sum()) for own, rows in zip(lengths, one.rows, strict=True))
            passes.append(Pass(one, share, tuple(tokens)))
        return passes
