"""`MicroSteps` decides which model passes a micro-step runs; `MicroBatches` makes the inputs of these passes::

    Collector ──► parts of a window ──► MicroSteps ──► Schedule: the rows of each pass ──► MicroBatches ──► inputs

The *share* of an optimizer step is the rows that it uses of a window: all of them, or some of them (Mini).

Letters: R ranks, M rows of a rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dash_trl.collect import Part
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import GenerationWindow, Window
from dash_trl.update import MicroBatch, ModelPasses, Pass, Schedule, loss_scale, plan_segment, regularizer_weight


class MicroBatches:
    """Makes the inputs of model passes from the rows of a window.

    Args:
        passes: builds the inputs, padding-free or padded.
        rank: index of this rank.
        pad_token_id: token id of padding.
        max_rows: row budget of a pass; see `plan_segment`.
        max_tokens: token budget of a pass; see `plan_segment`.
        loss_type: see `loss_scale`.
        filter_denominator: see `loss_scale`.
    """

    def __init__(
        self,
        passes: ModelPasses,
        rank: int,
        *,
        pad_token_id: int,
        max_rows: int,
        max_tokens: int | None,
        loss_type: str,
        filter_denominator: str,
    ):
        self.passes = passes
        self._rank, self._pad_token_id = rank, pad_token_id
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._loss_type, self._filter_denominator = loss_type, filter_denominator

    def plan(self, lengths: Tensor, micro_steps: int, last_must_run: bool = False) -> list[list[MicroBatch]]:
        """Plan the micro-batches of each micro-step; see `plan_segment`.

        Args:
            lengths: [R, M, 4], see `RolloutBatch.lengths`. Rows with completion length 0 are left out.
            micro_steps: number of micro-steps.
            last_must_run: True = the last micro-step runs a pass even if there is no survivor.
        """
        return plan_segment(
            lengths,
            micro_steps,
            last_must_run,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            padding_free=self.passes.padding_free,
            min_shared=self.passes.min_shared,
        )

    def without_gradient(self, window: GenerationWindow, lengths: Tensor) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Make the inputs of passes without gradient, over the rows whose length in `lengths` is not 0.

        Args:
            window: the window of the rows.
            lengths: [R, M, 4].
        Yields:
            For each pass, the indices of this rank's rows in `window.rollouts`, and the inputs on the CPU.
        """
        for micro_batch in self.plan(lengths, 1)[0]:
            yield self._of(window, micro_batch)

    def with_gradient(self, window: GenerationWindow, one: Pass) -> dict[str, Any]:
        """Make the inputs of a training pass on the CPU, including the weight of its loss in the optimizer step.

        The whole loss of the pass is multiplied by `loss_scale`. A regularizer, which should have the weight of
        `regularizer_weight`, is therefore multiplied by `regularizer_scale`, the ratio of the two weights.

        Args:
            window: the window of the rows.
            one: the pass.
        """
        _, inputs = self._of(window, one.micro_batch)
        tokens, segment = one.tokens[self._rank], one.segment
        scale = loss_scale(
            self._loss_type, self._filter_denominator, rows=one.micro_batch.size, tokens=tokens, segment=segment
        )
        weights = {
            "loss_scale": scale,
            "regularizer_scale": regularizer_weight(tokens, segment) / scale if scale else 0.0,
        }
        return {**inputs, **weights, "num_items_in_batch": window.num_items_in_batch, "pass": one}

    def _of(self, window: GenerationWindow, micro_batch: MicroBatch) -> tuple[list[int], dict[str, Any]]:
        """Return this rank's rows of a micro-batch, as indices in `window.rollouts`, and the inputs of their pass."""
        rows = window.rows(self._rank)[list(micro_batch.rows[self._rank])].tolist()
        inputs = self.passes.inputs(window.rollouts, rows, size=micro_batch.size, pad_token_id=self._pad_token_id)
        return rows, inputs


class MicroSteps:
    """Collects a window when it is due, keeps the window in use, and makes the inputs of each micro-step's passes.

    All ranks call `wait_for_rest`, and every method with an argument `step`, at the same point.

    Args:
        schedule: decides which rows run in which micro-step.
        micro_batches: makes the inputs of passes.
        collect: function that collects a window; see `Collector.window`.
        by_group: True = rewards are awaited group by group (`reward_pipeline`).
        num_generations: number of rows of a group.
        log: function that adds one value to each figure; see `Recorder.log`.
        to_training: function that puts the model into training mode. It is called before waiting for rewards, because
            an evaluation may have changed the mode.
    Attributes:
        schedule: as above.
    """

    def __init__(
        self,
        schedule: Schedule,
        micro_batches: MicroBatches,
        collect: Callable[..., Iterator[Part]],
        *,
        by_group: bool,
        num_generations: int,
        log: Callable[[dict[str, float]], None],
        to_training: Callable[[], Any],
    ):
        self.schedule = schedule
        self._micro_batches, self._collect, self._by_group = micro_batches, collect, by_group
        self._num_generations, self._log, self._to_training = num_generations, log, to_training
        self._window: Window | None = None  # the window in use

    def begin_optimizer_step(self, step: int, micro_steps: int, global_step: int) -> None:
        """Begin an optimizer step, with the arguments of `Schedule.begin_optimizer_step`."""
        self.schedule.begin_optimizer_step(step, micro_steps, global_step)
        if self._window is not None:
            self._window.begin_optimizer_step(global_step)

    def inputs(
        self, step: int, global_step: int, examples: list[dict[str, Any]]
    ) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Collect a new window if one is due, and make the inputs of a micro-step's passes, on the CPU.

        Args:
            step: the micro-step.
            global_step: number of optimizer steps taken so far.
            examples: the dataset rows of the micro-step; see `Collector.window`.
        Yields:
            A list with the inputs of some passes, and a bool, True = they are the last passes of the micro-step.
        """
        by_group = self._by_group and self.schedule.has_whole_share(step)
        if not by_group:
            self.wait_for_rest()
        if self._window is None or self._window.whole is not None and self.schedule.window_due(step):
            self._begin_window(step, global_step, examples, by_group=by_group)
        assert self._window is not None, "a window has begun above, if not before"
        if (window := self._window.whole) is not None:
            passes, planned = self.schedule.passes(step, window.lengths, window.num_items_in_batch.item())
            yield self._inputs(window, passes, planned), True
        elif step + 1 < self.schedule.share(step).stop:
            yield [], True  # the passes of all parts run in the last micro-step of the share
        else:
            yield from self._inputs_of_parts(step, self._window)

    def groups_of_step(self, step: int) -> int:
        """Return the number of groups that this rank has in an optimizer step's share of the window in use.

        Args:
            step: a micro-step of the optimizer step.
        """
        return len(self.schedule.share(step)) * self.schedule.rows_per_step // self._num_generations

    def wait_for_rest(self) -> None:
        """Wait for all remaining parts of the window in use.

        The window is then whole, as if all of its rewards had been awaited together.
        """
        window = self._window
        if window is not None and window.whole is None:
            self._to_training()
            ran = window.rows
            self.schedule.window_is_whole(ran, window.wait().lengths)

    def window_to_save(self, step: int) -> GenerationWindow | None:
        """Return the window in use if a run that is resumed from a checkpoint can use it.

        Call it only when the window in use is whole.

        Args:
            step: the micro-step at which a resumed run continues.
        Returns:
            The window in use. `None`: no window is in use, or it begins after `step`, so that later weights than
            those of the resumed run have sampled it.
        """
        if self._window is None or self.schedule.sampled_after(step):
            return None
        return self._window.whole

    def resume(self, window: GenerationWindow | None) -> None:
        """Continue with the window of a checkpoint.

        Args:
            window: the window of the checkpoint. `None`: begin with a new window.
        """
        self._window = None if window is None else Window.of(window)

    def _begin_window(self, step: int, global_step: int, examples: list[dict[str, Any]], *, by_group: bool) -> None:
        one_step = len(self.schedule.share(step)) == self.schedule.steps_per_generation
        parts = self._collect(examples, by_group=by_group, serves_one_step=one_step)
        self._window = Window(((part.window, part.ends_step) for part in parts), global_step)
        if not by_group:
            self._window.wait()
        self.schedule.window_sampled(step)

    def _inputs_of_parts(self, step: int, window: Window) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Make the inputs of an optimizer step's share of a window, part by part as the rewards come."""
        for part, last in window:
            items = part.num_items_in_batch.item()
            passes, planned = self.schedule.plan_part(step, part.lengths, items, last=last)
            yield self._inputs(part, passes, planned), last
            if last:
                break
        if self.schedule.ends_window(step):
            self.wait_for_rest()  # no part is left, so this waits for nothing and only marks the window as whole

    def _inputs(self, window: GenerationWindow, passes: list[Pass], planned: list[MicroBatch]) -> list[dict[str, Any]]:
        if planned:
            made_by = self._micro_batches.passes
            free, shared = made_by.padding_free, made_by.min_shared
            self._log(packing_metrics(planned, window.lengths, padding_free=free, min_shared=shared))
        return [self._micro_batches.with_gradient(window, one) for one in passes]
