"""`Collector` turns prompts into a window of one or several parts::

    announce ──► sample ──► reward ──► credit ──► filter ──► log-probs ──► part
       ▲                                            │
       └─ dynamic sampling: too few groups are kept ┘

A generation batch is sampled at once: the rows of a window or, with dynamic sampling, of one round.

Letters: B rows of this rank, M of them in a part, R ranks, K groups of a rank.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled, is_truncated, to_rollouts
from dash_trl.collect.dynamic_sampling import DynamicSampling, rows_of_window
from dash_trl.collect.log import WindowLog
from dash_trl.collect.samplers import OnServers, Sampler
from dash_trl.collect.scoring import GenerationBatch, Rewards
from dash_trl.host import Host, rows_come_early
from dash_trl.log_probs import LogProbs
from dash_trl.monitoring import EmptyWindows, filter_metrics, staleness_metrics
from dash_trl.rewards import unscored
from dash_trl.rollout import (
    COMPLETION,
    PROMPT,
    Part,
    PromptQueue,
    RolloutBatch,
    Rows,
    RunAhead,
    Window,
    concatenated,
)
from dash_trl.seams import shuffled
from dash_trl.update import KEPT, checked_advantages, filter_rows


@dataclass(eq=False)
class Collector:
    """Collects the windows of a run. All ranks call `window` at the same point, and wait together for its parts.

    Attributes:
        queue: hands out the prompts of later windows and further rounds, if there are any.
        log_probs: computes the log-probs that the loss needs.
        dynamic: decides how many groups a window samples. `None`: no dynamic sampling.
    """

    host: Host
    queue: PromptQueue | None
    sampler: Sampler
    rewards: Rewards
    log_probs: LogProbs
    dynamic: DynamicSampling | None

    def __post_init__(self) -> None:
        self._args = self.host.args
        self._ranks = self.host.ranks
        self._recorder = self.host.recorder
        self._log = WindowLog(self.host, self.rewards.names)
        self._pad_token_id = self.host._tokenizer.pad_token_id
        self._end_ids = {*self.host.eos_token_ids, self._pad_token_id}
        self._ahead = RunAhead(self.host.args.async_level)
        self._numbers = count()  # the numbers of generation batches
        self._announced = deque[Prompts]()  # for each window that has not begun: the prompts of its first round
        self._empty_windows = EmptyWindows()

    def window(
        self,
        examples: Rows,
        *,
        micro_step: int,
        groups_of_step: Callable[[], int] | None,
        shares: Sequence[range],
        streamed: bool,
    ) -> Window:
        """Return the next window. It is whole unless its rewards are awaited group by group.

        Args:
            examples: B rows of the dataset, one per completion; the rows of a group are adjacent.
            groups_of_step: function that returns the number of this rank's groups that the running optimizer step
                takes. `None`: rewards are awaited together.
            shares: see `LogProbs.added`.
            streamed: True = on servers, groups may come while others are sampled.
        """
        windows = [examples, *([] if self.queue is None else self.queue.upcoming(micro_step))]
        # `begin` gives the windows to announce, by index: this one (0) if it is new, and those to sample ahead.
        indices = self._ahead.begin(self.host.state.global_step, known=len(windows) - 1)
        new = [self._announce(windows[index]) for index in indices]
        self._announced.extend(new)
        prompts = self._announced.popleft()
        if groups_of_step is None:
            return Window(whole=self._together(prompts, new, shares))
        source: GenerationBatch | OnServers
        if streamed:
            assert isinstance(self.sampler, OnServers)
            self._ranks.agree(self.sampler.begin, prompts, new)
            source = self.sampler
        else:
            source = self._sample(prompts, new, by_group=True)
            self._log_sampled([source])
            if len(shares) > 1:
                # Old log-probs belong to the weights before the window's first optimizer step, so compute them now.
                source.rollouts = self.log_probs.of_all(source.rollouts)
        # Groups are trained on in the order in which they come. The order drawn here is not used: drawing it leaves the
        # same random state as `_together`, so that later samples do not depend on `reward_pipeline`.
        shuffled(len(prompts.examples))
        return Window(self._by_group(source, prompts, groups_of_step, shares))

    def close(self) -> None:
        """Cancel all rewards, and drop everything that was announced or sampled ahead."""
        self._announced.clear()
        self.sampler.forget()  # first, because rows that are being sampled begin rewards
        self.rewards.cancel()

    # ------------------------------------------------------------------ from prompts to rows

    def _announce(self, examples: Rows) -> Prompts:
        """Number the prompts of a generation batch, and tokenize them once: a chat template may depend on the time."""
        tokenized: tuple = ()
        if self.sampler.needs_token_ids:
            with self._recorder.timed("generate"):
                tokenized = self.host._tokenize_prompts([example["prompt"] for example in examples])
        return Prompts(next(self._numbers), examples, tokenized)

    def _sample(self, prompts: Prompts, new: Sequence[Prompts], *, by_group: bool = False) -> GenerationBatch:
        """Sample a generation batch and ahead, start its rewards, and call `on_rollouts_sampled`."""
        sampled = self._ranks.agree(self.sampler.sample, prompts, new)  # decoding may fail on one rank
        rollouts = self._rollouts(prompts, torch.arange(len(prompts.examples)), sampled)
        batch = self.rewards.begin(prompts.number, sampled, rollouts, by_group=by_group)
        self.host.dispatch("on_rollouts_sampled", rollouts)
        return batch

    def _rollouts(self, prompts: Prompts, rows: Tensor, sampled: Sampled) -> RolloutBatch:
        """Build the rows, by index, of a generation batch, and check that they are not too old."""
        self._ranks.agree(self._ahead.check, int(sampled.policy_version.min()))
        first = self._ranks.own(len(prompts.examples)).start
        masks = self._args.mask_truncated_completions
        return self._ranks.agree(  # a `rollout_func` may have returned other things than numbers
            to_rollouts,
            sampled,
            sampled.examples([prompts.examples[row] for row in rows.tolist()]),
            group=(first + rows) // self._args.num_generations,
            pad_token_id=self._pad_token_id,
            masked=is_truncated(sampled.completion_ids, self._end_ids) if masks else None,
            pad_to_multiple_of=self._args.pad_to_multiple_of,
        )

    def _log_sampled(self, batches: Sequence[GenerationBatch]) -> None:
        if rows_come_early(self.host):
            versions = torch.cat([one.rollouts.policy_version for one in batches])
            now = self.host.state.global_step
            self._recorder.log(staleness_metrics(versions, now, self._ranks.gather))
        sampled = [batch.sampled for batch in batches]
        self._log.sampled(sampled, torch.cat([is_truncated(one.completion_ids, self._end_ids) for one in sampled]))
        self.sampler.log()

    # ------------------------------------------------------------------ from rewards to parts

    def _together(self, prompts: Prompts, new: Sequence[Prompts], shares: Sequence[range]) -> Part:
        """Collect a whole window as one part, with dynamic sampling in several rounds."""
        batches: list[GenerationBatch] = []
        credited: list[RolloutBatch] = []
        # Dynamic sampling: [R, K] bool, True = the group has a kept row.
        signal = torch.zeros(self._ranks.count, 0, dtype=torch.bool)
        while True:
            batch = self._sample(prompts, new)
            # A copy, because callbacks may change the rewards, and the log must show the original ones.
            rewards = self.rewards.of_batch(batch)[self._ranks.own(len(batch.rollouts))].to("cpu", copy=True)
            batches.append(batch)
            credited.append(self._credited(replace(batch.rollouts, rewards=rewards)))
            if self.dynamic is None:
                break
            # Callbacks may have logged columns. Fill up those that an earlier round lacks.
            self._log.end_round(sum(map(len, credited[:-1])), len(credited[-1]))
            groups = (credited[-1].dropped == KEPT).view(-1, self._args.num_generations).any(dim=1)
            groups = self._ranks.gather(groups).view(len(signal), -1)
            signal = torch.cat([signal, groups], dim=1)
            if not (more := self.dynamic.next(signal)):
                break
            assert self.queue is not None, "dynamic sampling has a queue"
            prompts = self._announce(self.queue.take(more))
            new = [prompts]
        self._log_sampled(batches)
        rollouts = concatenated(credited, self._pad_token_id)
        keep = rollouts.dropped == KEPT
        num_items = rollouts.loss_mask.sum()
        order = torch.arange(len(rollouts))
        if self.dynamic is not None:
            # Rounds may sample more rows than a window has. `chosen`: the rows of the window, whose tokens the loss
            # divides by. `trained`: those of them whose group has a kept row.
            size = self._args.num_generations
            chosen, trained = rows_of_window(signal, self.dynamic.room, self._ranks.rank, size)
            keep = keep & trained
            num_items = rollouts.loss_mask[chosen].sum()
            # Each rank takes its survivors, then dropped rows until all ranks have the same number of rows.
            rows = max(self._ranks.largest(int(keep.sum())), self.dynamic.groups * size)
            order = (~keep).long().argsort(stable=True)[:rows]
            self._recorder.log(self.dynamic.note(signal, len(batches)))
        order = order[shuffled(len(order))]
        survivors, lengths = self._survivors(rollouts, keep, order)
        part = Part(survivors, lengths, self._width(rollouts), num_items_in_batch=self._ranks.sum(num_items))
        part = self.log_probs.added(part, shares)
        self._log_whole(batches, rollouts, part.rollouts)
        return part

    def _by_group(
        self,
        source: GenerationBatch | OnServers,
        prompts: Prompts,
        groups_of_step: Callable[[], int],
        shares: Sequence[range],
    ) -> Iterator[Part]:
        """Yield the parts of a window as its groups are scored.

        Losses may divide by the window's number of loss tokens. Of a streamed window, it is known with the last part
        only, so they divide by a provisional number; see `Part.rescale`.

        Args:
            source: the sampled window, which has log-probs if several optimizer steps use it; or the sampler of a
                streamed window, whose groups are being sampled.
        """
        arrived: list[Tensor] = []
        credited: list[RolloutBatch] = []
        survivors: list[RolloutBatch] = []
        by_group = len(shares) > 1
        width = 0
        items = torch.tensor(0)
        if isinstance(source, OnServers):
            request = self.rewards.of_prompts(prompts)
        else:
            assert source.request is not None, "`begin` started the functions"
            request = source.request
            width = self._width(source.rollouts)
            items = self._ranks.sum(source.rollouts.loss_mask.sum())
        num_items = items
        columns = self._recorder.logs.extra
        in_order = {*columns}
        for rows, rewards, ends_step in self.rewards.scored_groups(request, groups_of_step):
            if isinstance(source, OnServers):
                sampled = self._ranks.agree(source.arrived, prompts, rows.tolist())
                rollouts = self._rollouts(prompts, rows, sampled)
                failed = sampled.failed
                self.host.dispatch("on_rollouts_sampled", rollouts)
                width = max(width, self._width(rollouts))
                items = items + self._ranks.sum(rollouts.loss_mask.sum())
                if not arrived:
                    num_items = items.clamp(min=1) * len(prompts.examples) / len(rows)
            else:
                rollouts = source.rollouts.rows(rows)
                failed = source.sampled.failed
                failed = None if failed is None else failed[rows]
            if failed is not None:
                rewards = unscored(rewards, failed)
            arrived.append(rows)
            credited.append(self._credited(replace(rollouts, rewards=rewards)))
            rollouts = credited[-1]
            keep = rollouts.dropped == KEPT
            if by_group:  # a group runs as a whole, as in the passes for its log-probs
                rollouts = replace(rollouts, tool_mask=rollouts.loss_mask * keep.unsqueeze(1))
                size = self._args.num_generations
                keep = keep.view(-1, size).any(dim=1).repeat_interleave(size)
            kept, lengths = self._survivors(rollouts, keep, torch.arange(len(rollouts)))
            part = Part(kept, lengths, width, num_items_in_batch=num_items, by_group=by_group, ends_step=ends_step)
            if not by_group:  # otherwise the rows have their log-probs already
                part = self.log_probs.added(part, shares)
            survivors.append(part.rollouts)
            if sum(map(len, arrived)) == len(prompts.examples):  # log before the optimizer step of the last part
                order = torch.cat(arrived).argsort()
                for name in columns.keys() - in_order:  # callbacks have logged these group by group
                    if len(values := columns[name]) == len(order):
                        columns[name] = [values[row] for row in order.tolist()]
                whole = concatenated(credited, self._pad_token_id).rows(order)
                if isinstance(source, OnServers):
                    part = replace(part, rescale=float(num_items / items.clamp(min=1)))
                    sampled = self._ranks.agree(source.finish, prompts)
                    source = self.rewards.begin(prompts.number, sampled, whole, by_group=True)
                    self._log_sampled([source])
                self._log_whole([source], whole, concatenated(survivors, self._pad_token_id))
            yield part

    def _credited(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Call `on_rewards`, compute the advantages of rows, call `on_advantages`, and filter."""
        self.host.dispatch("on_rewards", rollouts)
        unscored = ~rollouts.scored.unsqueeze(1)  # after the callbacks, which may change rewards
        rewards = self._ranks.gather(rollouts.rewards.masked_fill(unscored, torch.nan)).to(self._args.device)
        advantages = self.host.compute_advantages(rewards)
        advantages = checked_advantages(advantages, rewards, f"{type(self.host).__name__}.compute_advantages")
        size = self._args.num_generations
        silent = (advantages.view(-1, size) == 0).all(dim=1).repeat_interleave(size)
        own = self._ranks.own(len(rollouts))
        credited = replace(rollouts, advantages=advantages[own].cpu(), silent=silent[own].cpu())
        self.host.dispatch("on_advantages", credited)
        tables = credited.advantages, credited.loss_mask, credited.scored
        return replace(credited, dropped=filter_rows(*tables, self._args.gradient_filter_threshold))

    def _survivors(self, rollouts: RolloutBatch, keep: Tensor, order: Tensor) -> tuple[RolloutBatch, Tensor]:
        """Return this rank's rows to train on, in `order`, and `Part.lengths` of all ranks, with 0 for a dropped row.

        `order` has M indices, and M is the same on all ranks.
        """
        lengths = (rollouts.lengths() * keep.unsqueeze(1))[order]
        # The number of completion tokens is 0 for dropped and for masked rows. So a masked row
        # (`mask_truncated_completions`) is no survivor, even if the filter keeps it (`gradient_filter_threshold=None`).
        survivors = order[lengths[:, COMPLETION] > 0]
        return rollouts.rows(survivors), self._ranks.gather(lengths).view(-1, len(order), 4)

    def _width(self, rollouts: RolloutBatch) -> int:
        return self._ranks.largest(int(rollouts.lengths()[:, [PROMPT, COMPLETION]].amax(dim=0).sum()))

    # ------------------------------------------------------------------ logs

    def _log_whole(self, batches: Sequence[GenerationBatch], whole: RolloutBatch, survivors: RolloutBatch) -> None:
        """Log a window whose rewards have all come; `whole` has the rows of `batches`, in the same order."""
        # Order the rewards by rank, then by round, as the advantages are.
        rewards = self._ranks.gather(
            torch.cat([self.rewards.of_batch(one)[self._ranks.own(len(one.rollouts))] for one in batches])
        )
        advantages = self._ranks.gather(whole.mean_advantages())
        prompts = [prompt for one in batches for prompt in one.sampled.prompts]
        completions = [completion for one in batches for completion in one.sampled.completions]
        self._log.rewarded(prompts, completions, rewards, advantages, self._ranks.gather(whole.silent))
        metrics = filter_metrics(whole, self._ranks.sum)
        self._recorder.log(metrics)
        if self.dynamic is not None and self.queue is not None:
            self._recorder.total("prompts/epoch", self.queue.place[0])
        if self._ranks.rank == 0:
            self._empty_windows.note(metrics, self._args.gradient_filter_threshold)
        self.log_probs.log(survivors)
