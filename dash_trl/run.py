"""`Run`: the objects of one `train()`, and how it ends.

    PromptQueue ──► Collector (Sampler, Rewards, LogProbs) ──► MicroSteps (MicroBatches) ──► PassMetrics, …

`Checkpoints` saves the queue and the window, and continues them.
"""

from dash_trl.checkpoints import Checkpoints
from dash_trl.collect import Collector, DynamicSampling, Rewards, new_sampler
from dash_trl.host import Host, rows_come_early
from dash_trl.log_probs import LogProbs
from dash_trl.micro_batches import MicroBatches
from dash_trl.micro_steps import MicroSteps
from dash_trl.monitoring import OffPolicyMetrics, PassMetrics
from dash_trl.rollout import new_queue
from dash_trl.tools import Conversations
from dash_trl.update import ModelPasses, SkippedSteps


class Run:
    """The objects of one `train()`.

    Each `train()` gets new objects, because an earlier run may have left an incomplete optimizer step (after an
    interrupt) or unused rows of a window (because of `max_steps`).

    Args:
        may_score_early: False = a subclass overrides `_calculate_rewards`, so rewards begin only when it is called.
        prompts: number of rows of the training set; `None` for a stream.
        conversations: runs tools and environments. `None`: rows have one turn.
    Attributes:
        queue: hands out the prompts. `None`: Transformers reads them.
    """

    def __init__(
        self,
        host: Host,
        passes: ModelPasses,
        functions: list[object],
        names: list[str],
        *,
        may_score_early: bool,
        prompts: int | None,
        conversations: Conversations | None,
    ):
        args = host.args
        dynamic = (
            DynamicSampling(
                groups=args.groups_of_rank,
                ranks=host.ranks.count,
                most=args.max_num_gen_batches,
                ahead=args.async_level > 0,
            )
            if args.samples_dynamically
            else None
        )
        self._host = host
        self.queue = new_queue(args, host.callback_handler, None if dynamic is None else dynamic.first)
        self.rewards = Rewards(host, functions, names, start_early=may_score_early and rows_come_early(host))
        micro_batches = MicroBatches(host, passes)
        log_probs = LogProbs(host, micro_batches)
        sampler = new_sampler(host, self.rewards, log_probs, conversations)
        self.collector = Collector(host, self.queue, sampler, self.rewards, log_probs, dynamic)
        self.micro_steps = MicroSteps(host, micro_batches, self.collector)
        self.pass_metrics = PassMetrics(per_row=args.importance_sampling_level == "sequence")
        self.off_policy = OffPolicyMetrics(args.aipo_delta if args.loss_type == "aipo" else None)
        self.skipped = SkippedSteps(loss_scaling=args.fp16)
        self.checkpoints = Checkpoints(
            host, log_probs.rules, prompts, self.queue, dynamic, self.micro_steps, self.skipped
        )

    def end_optimizer_step(self) -> None:
        host = self._host
        host.recorder.end_step()
        for figures in self.pass_metrics.of_step(self.micro_steps.schedule.shares.values()):
            host.recorder.log(figures)
        self.collector.log_probs.log_step()
        host.recorder.log(self.off_policy.of_step(host.ranks.sum))

    def close(self) -> None:
        """End the run, also after an interrupt: drop work that has not begun, and do not wait for running work."""
        self.collector.close()
        if self.queue is not None:
            self.queue.close()
