"""Decides which model passes run in which micro-step, as a state machine without a clock, a model or a collective.

Transformers steps the optimizer after `gradient_accumulation_steps` micro-steps (after fewer at the end of an epoch). A
new window is sampled every `steps_per_generation × num_iterations` micro-steps. A *share* is the rows of a
window that one optimizer step uses; its survivors are packed together, and run in its last micro-step::

    steps_per_generation = 4, gradient_accumulation_steps = 2        steps_per_generation = 2, … = 4
    window     |---------------|---------------|                     |-------|-------|-------|-------|
    optimizer  |-------|-------|-------|-------|                     |---------------|---------------|
    shares     |-------|-------|-------|-------|                     |-------|-------|-------|-------|

Letters: R ranks, B rows of a rank in a window, M rows of a rank in a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from dash_trl.rollout import Part
from dash_trl.update.packing import MicroBatch


@dataclass(frozen=True)
class Share:
    """Counts of a share over all ranks, from which `loss_scale` computes the weight of a pass.

    If the rewards of the share's rows come in several parts, `kept_rows` and `kept_tokens` count only the rows of one
    part, because the survivors of the whole share are not known before the last part.

    Attributes:
        first: the first micro-step of the share.
        micro_steps: number of micro-steps of the share.
        passes: micro-steps × ranks.
        all_rows: number of rows, dropped rows included.
        all_tokens: the share's portion of the window's loss tokens, dropped rows included. It is not counted: each
            micro-step of the window is given the same number of tokens.
        kept_rows: number of survivors.
        kept_tokens: number of loss tokens of the survivors.
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
        micro_batch: the rows of the pass, as positions in the share or the part of it that was planned.
        share: the share of the micro-batch; the weight of the pass in the loss depends on its counts.
        tokens: for each rank, the number of loss tokens that the rank has in the micro-batch.
    """

    micro_batch: MicroBatch
    share: Share
    tokens: tuple[int, ...]


class Schedule:
    """Plans the passes of each micro-step.

    Args:
        steps_per_generation: TRL's option.
        num_iterations: TRL's option.
        accumulation: `gradient_accumulation_steps`.
        rows_per_step: `per_device_train_batch_size`, the number of rows of a rank in a micro-step.
        pack: function that takes a part and returns its micro-batches; see `plan_share`.
    Attributes:
        generate_every: number of micro-steps from one window to the next.
        optimizer_step: range of the micro-steps of the running optimizer step.
        ran_model: True = this optimizer step has had at least one pass; set when the pass is planned.
        shares: the shares of this optimizer step, also those without survivors, by their first micro-step.
    """

    def __init__(
        self,
        *,
        steps_per_generation: int,
        num_iterations: int,
        accumulation: int,
        rows_per_step: int,
        pack: Callable[[Part], list[MicroBatch]],
    ):
        self.steps_per_generation = steps_per_generation
        self.generate_every = steps_per_generation * num_iterations
        self.accumulation = accumulation
        self.rows_per_step = rows_per_step
        self.pack = pack
        self.optimizer_step = range(0)
        self.ran_model = False
        self.shares: dict[int, Share] = {}
        self._global_step, self._completed = -1, 0
        self._sampled_at: int | None = None

    def begin_optimizer_step(self, first: int, micro_steps: int, global_step: int) -> None:
        """Begin an optimizer step.

        If `global_step` has not changed since the last call, Transformers has not stepped the optimizer, as at the end
        of a stream. Then the gradients of the previous micro-steps keep accumulating.

        Args:
            first: the first micro-step of the optimizer step.
            micro_steps: the number of micro-steps of the optimizer step.
            global_step: the number of optimizer steps taken before.
        Raises:
            ValueError: if the previous optimizer step was cut short with micro-steps left to run. (At the end of the
                last epoch, there is no later call, and the run ends without these micro-steps, as in TRL.)
        """
        if global_step == self._global_step and first < self.optimizer_step.stop:
            raise ValueError(
                f"A callback ended the epoch after micro-step {first} of the run, within an optimizer step, so rows of "
                "this step would never be trained on. Set control.should_epoch_stop in on_step_end only."
            )
        if global_step != self._global_step:
            self._global_step, self._completed = global_step, first
            self.ran_model = False
            self.shares = {}
        self.optimizer_step = range(first, first + micro_steps)

    def completed(self, micro_step: int, global_step: int) -> int:
        """Return the number of micro-steps of all completed optimizer steps.

        A resumed run continues at this micro-step. Within an optimizer step, the number is smaller than the number of
        micro-steps that have run.

        Args:
            micro_step: the number of micro-steps that have run.
            global_step: the number of completed optimizer steps.
        """
        return self._completed if global_step == self._global_step else micro_step

    def samples_again(self, micro_step: int) -> bool:
        """Whether a run that is resumed at micro-step `micro_step` samples the window in use again.

        It does if the window begins at `micro_step` or later.
        """
        return self._sampled_at is not None and self._sampled_at >= micro_step

    def window_due(self, micro_step: int) -> bool:
        """Whether a new window begins at this micro-step; False again after `window_sampled`."""
        return micro_step % self.generate_every == 0 and self._sampled_at != micro_step

    def window_sampled(self, micro_step: int) -> None:
        """Record that a window was sampled at this micro-step."""
        self._sampled_at = micro_step

    def has_whole_share(self, micro_step: int) -> bool:
        """Whether the optimizer step runs a full share of the window: neither fewer nor more rows than usual.

        At the end of a stream, an optimizer step runs fewer rows.
        """
        return len(self.micro_steps_of_share(micro_step)) == min(self.accumulation, self.steps_per_generation)

    def micro_steps_of_share(self, micro_step: int) -> range:
        """Return the micro-steps of this optimizer step that use the window of a micro-step; their rows are a share."""
        begin = micro_step - micro_step % self.steps_per_generation
        step = self.optimizer_step
        return range(max(begin, step.start), min(begin + self.steps_per_generation, step.stop))

    def ends_window(self, micro_step: int) -> bool:
        """Whether this is the last micro-step of an iteration over the window in use (see `num_iterations`)."""
        return (micro_step + 1) % self.steps_per_generation == 0

    def shares_of_window(self, micro_step: int) -> list[range]:
        """Return the micro-steps of each share of a window when it is used first, counted from its first micro-step.

        Args:
            micro_step: the micro-step with which the window begins.
        """
        ends = range(self.optimizer_step.stop - micro_step, self.steps_per_generation, self.accumulation)
        return [range(*one) for one in pairwise([0, *ends, self.steps_per_generation])]

    def plan(self, micro_step: int, part: Part) -> list[Pass]:
        """Plan the passes over a share, or over a part of it. They run in the last micro-step of the share.

        Args:
            micro_step: the last micro-step of the share.
            part: the share, or the part.
        """
        lengths = part.lengths
        steps, ranks = self.micro_steps_of_share(micro_step), len(lengths)
        share = Share(
            first=steps.start,
            micro_steps=len(steps),
            passes=len(steps) * ranks,
            all_rows=len(steps) * ranks * self.rows_per_step,
            all_tokens=part.num_items_in_batch.item() * len(steps) / self.steps_per_generation,
            kept_rows=int((lengths[..., 1] > 0).sum()),
            kept_tokens=int(lengths[..., 2].sum()),
        )
        micro_batches = self.pack(part)
        if self.ran_model and part.ends_step and steps.stop == self.optimizer_step.stop:
            # DDP synchronises gradients, and DeepSpeed steps the optimizer, in the last pass of the optimizer step.
            micro_batches = micro_batches or [MicroBatch(((),) * ranks)]
        if part.ends_step:
            self.shares[steps.start] = share
        self.ran_model |= bool(micro_batches)
        passes = []
        for one in micro_batches:
            tokens = (int(own[list(rows), 2].sum()) for own, rows in zip(lengths, one.rows, strict=True))
            passes.append(Pass(one, share, tuple(tokens)))
        return passes
