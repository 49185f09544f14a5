"""`MicroSteps` decides which model passes a micro-step runs::

    Collector ──► a window, part by part ──► MicroSteps ──► Schedule: the rows of each pass ──► MicroBatches ──► inputs

A *share* is the rows of a window that one optimizer step uses: all of them, or some of them (Mini).
"""

import logging
from collections.abc import Iterable, Iterator

from dash_trl.collect import Collector
from dash_trl.host import Host, on_servers
from dash_trl.micro_batches import Inputs, MicroBatches
from dash_trl.rollout import Part, Rows, Window
from dash_trl.update import ROW_MEAN_LOSSES, Schedule, first_reason

logger = logging.getLogger(__name__)


class MicroSteps:
    """Collects a window when it is due, keeps the window in use, and makes the inputs of each micro-step's passes.

    All ranks call `wait_for_rest`, and every method with an argument `micro_step`, at the same point.
    """

    def __init__(self, host: Host, micro_batches: MicroBatches, collector: Collector):
        self.schedule = Schedule(host.args, micro_batches.plan)
        self._host = host
        self._micro_batches = micro_batches
        self._collector = collector
        self._window: Window | None = None  # the window in use
        self._micro_step = 0  # the micro-step that runs
        self._has_said = False  # why windows are not streamed
        self.rescale = 1.0  # factor for the gradients and the loss of the optimizer step, after its last pass

    def begin_optimizer_step(self, first: int, micro_steps: int) -> None:
        has_stepped = self.schedule.begin_optimizer_step(first, micro_steps, self._host.state.global_step)
        if has_stepped and self._window is not None:
            self._window.begin_optimizer_step()

    def inputs(self, micro_step: int, examples: Rows) -> Iterator[tuple[Inputs, bool]]:
        """Collect a new window if one is due, and make the inputs of a micro-step's passes, on the CPU.

        All passes of a share run in its last micro-step, because they may have to wait for rewards. `examples` are the
        micro-step's dataset rows; see `Collector.window`.

        Yields:
            The inputs of a pass, and whether it is the last pass of the micro-step.
        """
        self._micro_step = micro_step
        self.rescale = 1.0
        by_group = self._host.args.reward_pipeline and self.schedule.has_whole_share(micro_step)
        if not by_group:
            self.wait_for_rest()
        begins = micro_step % self._host.args.window_batches == 0 and self.schedule.sampled_at != micro_step
        if self._window is None or self._window.whole is not None and begins:
            self._window = self._collector.window(
                examples,
                micro_step=micro_step,
                groups_of_step=self._groups_of_step if by_group else None,
                shares=self.schedule.shares_of_window(micro_step),
                streamed=by_group and self._streams(micro_step),
            )
            self.schedule.sampled_at = micro_step
        share = self.schedule.micro_steps_of_share(micro_step)
        if micro_step + 1 < share.stop:
            return
        parts: Iterable[Part] = self._window
        if (window := self._window.whole) is not None:
            steps = self._host.args.steps_per_generation
            first = share.start % steps
            parts = [window.of_steps(range(first, first + len(share)), steps, self._host.ranks.rank)[1]]
        for part in parts:
            passes = self.schedule.plan(micro_step, part)
            yield from self._micro_batches.with_gradient(part, passes)
            if part.ends_step:
                if self._host.args.loss_type not in ROW_MEAN_LOSSES:
                    self.rescale = part.rescale
                break
        if (micro_step + 1) % self._host.args.steps_per_generation == 0:
            self.wait_for_rest()  # no part is left, so this waits for nothing and only marks the window as whole

    def _streams(self, micro_step: int) -> bool:
        """Whether passes may run before the window's number of loss tokens is known. If not, say once why."""
        schedule = self.schedule
        takes_one = schedule.micro_steps_of_share(micro_step) == schedule.optimizer_step
        reason = first_reason(
            {
                "no vLLM servers sample": not on_servers(self._host),
                "an optimizer step takes several windows": not takes_one,
                "several optimizer steps take a window": len(schedule.shares_of_window(micro_step)) > 1,
                "the model's passes need the window's width": self._micro_batches.passes.full_width,
                # Gradients could not be multiplied.
                "DeepSpeed makes its step in the last backward pass": self._host.ranks.steps_in_backward,
            }
        )
        if reason is not None and not self._has_said and self._host.ranks.rank == 0:
            logger.info(f"reward_pipeline: training on a window begins when all of it is sampled, because {reason}.")
        self._has_said = True
        return reason is None

    def _groups_of_step(self) -> int:
        """Return this rank's number of groups in the running optimizer step's share of the window in use."""
        args = self._host.args
        micro_steps = self.schedule.micro_steps_of_share(self._micro_step)
        return len(micro_steps) * args.per_device_train_batch_size // args.num_generations

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
        self._window = None if window is None else Window(whole=window)
