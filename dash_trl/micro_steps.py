"""`MicroSteps`: which model passes each micro-step runs. `MicroBatches`: the inputs of these passes.

    Collector ──► parts of a window ──► MicroSteps ──► Schedule: the rows of each pass ──► MicroBatches ──► inputs

Letters: R ranks, M rows of a rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dash_trl.collect import Part
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import GenerationWindow, Window
from dash_trl.update import MicroBatch, ModelPasses, Pass, Schedule, loss_scale, plan_segment


class MicroBatches:
    """Makes the inputs of model passes from the rows of a window.

    Args:
        passes: padding-free or padded. rank: this one.
        max_rows, max_tokens: of a pass, see `plan_segment`.
        loss_type, filter_denominator: see `loss_scale`.
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
        """The micro-batches of each micro-step, made of the rows that have a length in `lengths` [R, M, 4]."""
        return plan_segment(
            lengths,
            micro_steps,
            last_must_run,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            padding_free=self.passes.padding_free,
            min_shared=self.passes.min_shared,
        )

    def metrics(self, planned: list[MicroBatch], lengths: Tensor) -> dict[str, float]:
        """See `packing_metrics`."""
        passes = self.passes
        return packing_metrics(planned, lengths, padding_free=passes.padding_free, min_shared=passes.min_shared)

    def without_gradient(self, window: GenerationWindow, lengths: Tensor) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """For each pass over the rows with a length in `lengths` [R, M, 4]: this rank's rows, and its inputs."""
        for micro_batch in self.plan(lengths, 1)[0]:
            yield self._of(window, micro_batch)

    def with_gradient(self, window: GenerationWindow, one: Pass) -> dict[str, Any]:
        """The inputs of a pass, and its weight in the optimizer step; on the CPU."""
        _, inputs = self._of(window, one.micro_batch)
        scale = loss_scale(
            self._loss_type,
            self._filter_denominator,
            rows=one.micro_batch.size,
            tokens=one.tokens[self._rank],
            segment=one.segment,
        )
        return {**inputs, "num_items_in_batch": window.num_items_in_batch, "loss_scale": scale, "pass": one}

    def _of(self, window: GenerationWindow, micro_batch: MicroBatch) -> tuple[list[int], dict[str, Any]]:
        """This rank's rows of `window.rollouts`, and the model inputs and layout made of them."""
        rows = window.rows(self._rank)[list(micro_batch.rows[self._rank])].tolist()
        inputs = self.passes.inputs(window.rollouts, rows, size=micro_batch.size, pad_token_id=self._pad_token_id)
        return rows, inputs


class MicroSteps:
    """Collects a window where one is due, keeps it while it is in use, and hands out the passes of each micro-step.

    Every method that takes a step is called on every rank at the same point.

    Args:
        collect: see `Collector.window`.
        by_group: `reward_pipeline`.
        log: takes one more value of each figure.
        to_training: sets the model to training mode, which an evaluation may have left.
    Attributes:
        schedule: which rows run in which micro-step.
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
        self._window: Window | None = None  # in use

    def begin_optimizer_step(self, step: int, micro_steps: int, global_step: int) -> None:
        """See `Schedule.begin_optimizer_step`."""
        self.schedule.begin_optimizer_step(step, micro_steps, global_step)
        if self._window is not None:
            self._window.begin_optimizer_step(global_step)

    def inputs(
        self, step: int, global_step: int, examples: list[dict[str, Any]]
    ) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """The inputs of the passes of micro-step `step`, on the CPU; collects a new window where one is due.

        Args:
            global_step: optimizer steps taken. examples: of this micro-step, see `Collector.window`.
        Yields:
            Some of the inputs, and whether these are the last ones.
        """
        by_group = self._by_group and self.schedule.has_whole_share(step)
        if not by_group:
            self.wait_for_rest()
        if self._window is None or self._window.whole is not None and self.schedule.window_due(step):
            self._begin_window(step, global_step, examples, by_group=by_group)
        assert self._window is not None, "it has begun now, if not before"
        if (window := self._window.whole) is not None:
            passes, planned = self.schedule.passes(step, window.lengths, window.num_items_in_batch.item())
            yield self._inputs(window, passes, planned), True
        elif step + 1 < self.schedule.share(step).stop:
            yield [], True  # the groups that come first run in the last micro-step of the optimizer step's share
        else:
            yield from self._inputs_of_parts(step, self._window)

    def groups_of_step(self, step: int) -> int:
        """This rank's groups that the optimizer step of micro-step `step` takes of the window in use."""
        return len(self.schedule.share(step)) * self.schedule.rows_per_step // self._num_generations

    def wait_for_rest(self) -> None:
        """Waits for the parts of the window in use that have not come."""
        window = self._window
        if window is not None and window.whole is None:
            self._to_training()
            ran = window.rows
            self.schedule.window_is_whole(ran, window.wait().lengths)

    def window_to_save(self, step: int) -> GenerationWindow | None:
        """The window in use, if a run that goes on at micro-step `step` uses it; it has come as a whole."""
        if self._window is None or self.schedule.sampled_after(step):
            return None
        return self._window.whole

    def resume(self, window: GenerationWindow | None) -> None:
        """Go on with the window of a checkpoint."""
        self._window = None if window is None else Window.of(window)

    def _begin_window(self, step: int, global_step: int, examples: list[dict[str, Any]], *, by_group: bool) -> None:
        one_step = len(self.schedule.share(step)) == self.schedule.steps_per_generation
        parts = self._collect(examples, by_group=by_group, serves_one_step=one_step)
        self._window = Window(((part.window, part.ends_step) for part in parts), global_step)
        if not by_group:
            self._window.wait()
        self.schedule.window_sampled(step)

    def _inputs_of_parts(self, step: int, window: Window) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """The inputs of an optimizer step's share of a window, as its parts come."""
        for part, last in window:
            items = part.num_items_in_batch.item()
            passes, planned = self.schedule.plan_part(step, part.lengths, items, last=last)
            yield self._inputs(part, passes, planned), last
            if last:
                break
        if self.schedule.ends_window(step):
            self.wait_for_rest()  # nothing is left: the window becomes whole

    def _inputs(self, window: GenerationWindow, passes: list[Pass], planned: list[MicroBatch]) -> list[dict[str, Any]]:
        if planned:
            self._log(self._micro_batches.metrics(planned, window.lengths))
        return [self._micro_batches.with_gradient(window, one) for one in passes]
