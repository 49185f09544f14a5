"""`Run`: the objects of one `train()`, and how it begins, continues from a checkpoint, is saved and ends.

    PromptQueue ──► Collector (Sampler, Rewards, LogProbs) ──► MicroSteps (MicroBatches) ──► PassMetrics, …

`Checkpoints` saves the queue and the window.
"""

from typing import Any

from dash_trl.callbacks import dash_callbacks
from dash_trl.checkpoints import Checkpoints
from dash_trl.collect import Collector, DynamicSampling, Rewards, new_sampler
from dash_trl.host import Host, one_ahead, rows_come_early, windows_ahead
from dash_trl.log_probs import LogProbs
from dash_trl.micro_batches import MicroBatches
from dash_trl.micro_steps import MicroSteps
from dash_trl.monitoring import OffPolicyMetrics, PassMetrics
from dash_trl.rollout import new_queue
from dash_trl.tools import Conversations
from dash_trl.update import ModelPasses, SkippedSteps

Position = tuple[int, int]  # in the dataset: (completed epochs, micro-batches that a rank has taken of the next one)


class Run:
    """The objects of one `train()`.

    Each `train()` gets new objects, because an earlier run may have left an incomplete optimizer step (after an
    interrupt) or unused rows of a window (because of `max_steps`).

    Args:
        host: the trainer.
        passes: runs the model passes.
        functions: the watched reward functions.
        names: the name of each function.
        may_score_early: False = a subclass overrides `_calculate_rewards`, so rewards begin only when it is called.
        handler: Transformers' callback handler.
        prompts: number of rows of the training set; `None` for a stream.
        pool: the vLLM servers; used only if they sample.
        conversations: runs tools and environments. `None`: rows have one turn.
    Attributes:
        queue: hands out the prompts. `None`: Transformers reads them.
        rewards: scores the completions.
        collector: collects the windows.
        micro_steps: decides which passes run in a micro-step.
        pass_metrics: combines TRL's figures of the passes of an optimizer step.
        off_policy: measures how far the policy is from the sampler.
        skipped: counts optimizer steps whose gradient is not finite.
        checkpoints: saves the run and continues it.
    """

    def __init__(
        self,
        host: Host,
        passes: ModelPasses,
        functions: list[Any],
        names: list[str],
        *,
        may_score_early: bool,
        handler: Any,
        prompts: int | None,
        pool: Any,
        conversations: Conversations | None,
    ):
        args, ahead = host.args, windows_ahead(host)
        dynamic = (
            DynamicSampling(args.groups_of_rank, host.ranks.count, most=args.max_num_gen_batches, ahead=ahead > 0)
            if args.samples_dynamically
            else None
        )
        self._host, self._dynamic = host, dynamic
        self.queue = new_queue(args, handler, ahead=ahead, first=None if dynamic is None else dynamic.first)
        # Rewards begin early if the main thread has other work meanwhile: later windows, or the work of a callback.
        work = rows_come_early(host) or any(one.overlaps_rewards for one in dash_callbacks(handler))
        self.rewards = Rewards(host, functions, names, in_background=may_score_early and work)
        micro_batches = MicroBatches(host, passes)
        log_probs = LogProbs(host, micro_batches)
        sampler = new_sampler(host, self.rewards, log_probs, pool=pool, conversations=conversations)
        self.collector = Collector(host, self.queue, sampler, self.rewards, log_probs, dynamic)
        self.micro_steps = MicroSteps(host, micro_batches, self.collector)
        self.pass_metrics = PassMetrics(per_row=args.importance_sampling_level == "sequence")
        self.off_policy = OffPolicyMetrics(args.aipo_delta if args.loss_type == "aipo" else None)
        self.skipped = SkippedSteps(loss_scaling=args.fp16)
        self.checkpoints = Checkpoints(host, log_probs.rules, prompts, handler, self.queue, dynamic)

    def begin(self, checkpoint: str | None, start: Position) -> tuple[int, Position]:
        """Begin the run, if possible where a checkpoint was saved.

        Args:
            checkpoint: path of the checkpoint. `None`: a new run.
            start: the position at which Transformers would begin.
        Returns:
            The micro-step and the position with which the run begins. The position is `start` for a new run, if the
            checkpoint cannot be continued, and with `ignore_data_skip`; otherwise that of the checkpoint.
        """
        saved, from_start = None, self._host.args.ignore_data_skip
        self.checkpoints.begin_run(checkpoint)
        if checkpoint is not None:
            saved, self.skipped.total = self.checkpoints.resume(checkpoint, start, ignore_data_skip=from_start)
        if saved is not None:
            self.micro_steps.resume(saved.window)  # `None` if the checkpoint was saved between two windows
            # Transformers miscounts in a stream that is read for several epochs.
            start = start if from_start else saved.position
        if self.queue is not None:
            self.queue.begin(*start)
            if saved is not None and from_start and saved.window is not None:
                self.queue.has_sampled(saved.step)
            elif saved is not None and not from_start and saved.prompts is not None:
                self.queue.load_state_dict(saved.prompts)
                if self._dynamic is not None:
                    self._dynamic.share = saved.prompts.get("share", 1.0)
        return 0 if saved is None else saved.step, start

    def begin_optimizer_step(self, first: int, micro_steps: int) -> None:
        """Begin an optimizer step.

        Args:
            first: its first micro-step.
            micro_steps: number of its micro-steps.
        """
        self.micro_steps.begin_optimizer_step(first, micro_steps, self._host.state.global_step)
        self.checkpoints.begin_optimizer_step()

    def end_optimizer_step(self) -> None:
        """Log the figures of an optimizer step."""
        host = self._host
        host.recorder.end_step()
        for figures in self.pass_metrics.of_step(self.micro_steps.schedule.shares.values()):
            host.recorder.log(figures)
        self.collector.log_probs.log_step()
        if host.args.use_vllm or host.rollout_func is not None or one_ahead(host):  # not the policy itself has sampled
            host.recorder.log(self.off_policy.of_step(host.ranks.sum))

    def save(self, folder: str, micro_step: int) -> None:
        """Save this rank's part of a checkpoint: its survivors with their log-probs, and its position.

        With these, a resumed run continues in the middle of the window. Windows that were sampled ahead are not saved:
        a resumed run samples them again.

        Args:
            folder: folder of the checkpoint.
            micro_step: number of micro-steps that have run.
        """
        schedule = self.micro_steps.schedule
        completed = schedule.completed(micro_step, self._host.state.global_step)  # in whole optimizer steps
        self.checkpoints.save(
            folder,
            micro_step=completed,
            skipped_steps=self.skipped.total,
            window=self.micro_steps.window_to_save(completed),
            samples_again=schedule.samples_again(completed),
        )

    def close(self) -> None:
        """End the run, also after an interrupt: drop work that has not begun, and do not wait for running work."""
        self.collector.close()
        if self.queue is not None:
            self.queue.close()
