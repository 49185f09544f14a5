"""`MicroSteps` decides which model passes a micro-step runs::

    Collector ──► a window, part by part ──► MicroSteps ──► Schedule: the rows of each pass ──► MicroBatches ──► inputs

A *share* is the rows of a window that one optimizer step uses: all of them, or some of them (Mini).
"""

from collections.abc import Iterable, Iterator
from typing import Any

from dash_trl.collect import Collector
from dash_trl.host import Host
from dash_trl.micro_batches import MicroBatches
from dash_trl.rollout import Part, Window
from dash_trl.update import Schedule


class MicroSteps:
    """Collects a window when it is due, keeps the window in use, and makes the inputs of each micro-step's passes.

    All ranks call `wait_for_rest`, and every method with an argument `micro_step`, at the same point.
    """

    def __init__(self, host: Host, micro_batches: MicroBatches, collector: Collector):
        args = host.args
        self.schedule = Schedule(
            steps_per_generation=args.steps_per_generation,
            num_iterations=args.num_iterations,
            accumulation=args.gradient_accumulation_steps,
            rows_per_step=args.per_device_train_batch_size,
            pack=micro_batches.plan,
        )
        self._host, self._micro_batches, self._collector = host, micro_batches, collector
        self._window: Window | None = None  # the window in use
        self._micro_step = 0  # the micro-step that runs

    def begin_optimizer_step(self, first: int, micro_steps: int, global_step: int) -> None:
        self.schedule.begin_optimizer_step(first, micro_steps, global_step)
        if self._window is not None:
            self._window.begin_optimizer_step(global_step)

    def inputs(self, micro_step: int, examples: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Collect a new window if one is due, and make the inputs of a micro-step's passes, on the CPU.

        All passes of a share run in its last micro-step, because they may have to wait for rewards. `examples` are the
        micro-step's dataset rows; see `Collector.window`.

        Yields:
            The inputs of a pass, and whether it is the last pass of the micro-step.
        """
        self._micro_step = micro_step
        by_group = self._host.args.reward_pipeline and self.schedule.has_whole_share(micro_step)
        if not by_group:
            self.wait_for_rest()
        if self._window is None or self._window.whole is not None and self.schedule.window_due(micro_step):
            self._window = self._collector.window(
                examples,
                micro_step=micro_step,
                groups_of_step=self._groups_of_step if by_group else None,
                shares=self.schedule.shares_of_window(micro_step),
            )
            self.schedule.window_sampled(micro_step)
        share = self.schedule.micro_steps_of_share(micro_step)
        if micro_step + 1 < share.stop:
            return
        parts: Iterable[Part] = self._window
        if (window := self._window.whole) is not None:
            first = share.start % self.schedule.steps_per_generation
            used = window.used_by(range(first, first + len(share)), self.schedule.steps_per_generation)
            parts = [window.where(used, self._host.ranks.rank)[1]]
        for part in parts:
            passes = self.schedule.plan(micro_step, part)
            yield from self._micro_batches.with_gradient(part, passes)
            if part.ends_step:
                break
        if self.schedule.ends_window(micro_step):
            self.wait_for_rest()  # no part is left, so this waits for nothing and only marks the window as whole

    def _groups_of_step(self) -> int:
        """Return this rank's number of groups in the running optimizer step's share of the window in use."""
        return (
            len(self.schedule.micro_steps_of_share(self._micro_step))
            * self.schedule.rows_per_step
            // self._host.args.num_generations
        )

    def wait_for_rest(self) -> None:
        """Wait for all remaining parts of the window in use, which is whole afterwards."""
        window = self._window
        if window is not None and window.whole is None:
            self._host.model.train()  # an evaluation may have changed the mode
            window.wait()

    def window_to_save(self, micro_step: int) -> Part | None:
        """Return the window in use, which must be whole, if a run that is resumed at `micro_step` can use it.

        It cannot if the window begins after `micro_step`, because later weights than those of the resumed run sampled
        it.
        """
        if self._window is None or self.schedule.samples_again(micro_step + 1):
            return None
        return self._window.whole

    def resume(self, window: Part | None) -> None:
        """Continue with the window of a checkpoint; `None` = begin with a new window."""
        self._window = None if window is None else Window(self._host.state.global_step, whole=window)
