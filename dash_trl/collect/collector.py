"""`Collector` turns prompts into the parts of a window, which are then trained on::

    announce ──► sample ──► reward ──► credit ──► filter ──► log-probs ──► part
       ▲            └── meanwhile: the next window is sampled, and its rewards begin
       └── with dynamic sampling: more groups, while too few groups have signal ──┘

In this package, a *generation batch* is the rows that are sampled at once: a window or, with dynamic sampling, one
round of a window.

Letters: B rows of this rank, M of them in a part, N rows of all ranks, R ranks, K groups of a rank, F reward functions.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.awaited import Awaited, Rewards
from dash_trl.collect.decode import Prompts, Sampled, is_truncated, to_rollouts
from dash_trl.collect.dynamic_sampling import DynamicSampling, places_in_window
from dash_trl.collect.log import WindowLog
from dash_trl.collect.samplers import Sampler
from dash_trl.host import Host, looks_ahead
from dash_trl.log_probs import LogProbs
from dash_trl.monitoring import EmptyWindows, UnfilledWindows, filter_metrics, staleness_metrics
from dash_trl.rollout import (
    CreditedRollouts,
    GenerationWindow,
    PromptQueue,
    PromptReader,
    RolloutBatch,
    RunAhead,
    ScoredRollouts,
    Survivors,
    joined,
    widened,
)
from dash_trl.seams import shuffled
from dash_trl.update import Filtered, filter_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Begun:
    """A generation batch whose rows are sampled and whose rewards have begun."""

    sampled: Sampled
    truncated: Tensor  # [B] bool, True = the completion is truncated
    rollouts: RolloutBatch
    awaited: Awaited


@dataclass(frozen=True)
class _Round:
    """One round of a window (dynamic sampling), whose credit is computed and whose rows are filtered.

    Attributes:
        begun: the generation batch of the round.
        credited: this rank's rows with their credit.
        outcome: see `Part`.
        keep: [B] bool, True = the filter keeps this row of this rank.
        signal: [R, K] bool for the groups of all ranks, True = the filter keeps at least one row of the group.
    """

    begun: _Begun
    credited: CreditedRollouts
    outcome: Tensor
    keep: Tensor
    signal: Tensor


@dataclass(frozen=True)
class Part:
    """Groups of a window whose rewards came together. If rewards are awaited together, these are all groups.

    Attributes:
        rows: [M] int64, indices of this rank's rows in the window.
        rollouts: these rows with their credit, dropped rows included.
        outcome: [R · M], the advantages of all ranks' rows before callbacks change them.
        window: the survivors among these rows, in the order in which micro-steps get them.
        ends_step: True = the running optimizer step needs no further part of this window.
    """

    rows: Tensor
    rollouts: CreditedRollouts
    outcome: Tensor
    window: GenerationWindow
    ends_step: bool


class Collector:
    """Collects the windows of a run: samples rows, waits for their rewards, computes advantages and filters rows.

    All ranks call `window` at the same point, and wait together for the parts of the window.

    Args:
        host: the trainer.
        prompts: reads the prompts of later windows and, with dynamic sampling, of further rounds.
        sampler: samples completions.
        rewards: scores the completions.
        log_probs: computes the log-probs that the loss needs.
        dynamic: decides how many groups a window samples. `None`: no dynamic sampling.

    Attributes:
        log_probs: as above.
    """

    def __init__(
        self,
        host: Host,
        prompts: PromptReader | PromptQueue,
        sampler: Sampler,
        rewards: Rewards,
        log_probs: LogProbs,
        dynamic: DynamicSampling | None = None,
    ):
        self._host, self._reader, self._sampler, self._rewards = host, prompts, sampler, rewards
        self.log_probs, self._dynamic, self._log = log_probs, dynamic, WindowLog(host, rewards.names)
        self._args, self._ranks, self._recorder = host.args, host.ranks, host.recorder
        self._pad_token_id = host.processing_class.pad_token_id
        self._ahead = RunAhead(self._args.async_level if looks_ahead(host) else 0)
        self._numbers = count()  # the numbers of generation batches
        self._announced: dict[int, Prompts] = {}  # number of a window that has not begun → its prompts
        self._empty_windows, self._unfilled_windows = EmptyWindows(), UnfilledWindows()

    def window(
        self,
        examples: list[dict[str, Any]],
        *,
        step: int,
        groups_of_step: Callable[[], int] | None,
        serves_one_step: bool,
    ) -> Iterator[Part]:
        """Sample the next window and start its rewards. Iterating over the result waits for the rewards.

        With dynamic sampling, this method only announces the prompts. Sampling and rewards follow when the caller
        iterates over the result.

        Args:
            examples: B rows of the dataset, one per completion; the rows of a group are adjacent.
            step: the micro-step with which the window begins.
            groups_of_step: see `Rewards.begin`. `None`: await rewards together, not group by group.
            serves_one_step: True = one optimizer step uses the whole window; False = several steps use it.
        Returns:
            An iterator over the parts of the window. Before it yields the last part, it logs the figures of the window.
        """
        prompts = self._announce(examples, step)
        if self._dynamic is not None:
            return self._in_rounds(self._dynamic, prompts, serves_one_step=serves_one_step)
        begun, by_group = self._begin(prompts, groups_of_step), groups_of_step is not None
        self._log_sampled(begun.sampled, begun.truncated)
        rollouts = begun.rollouts
        # TRL's losses divide by this number. So it must be known before the first part is trained on.
        num_items = self._ranks.sum(rollouts.loss_mask.sum())
        if by_group:
            # Groups are trained on in the order in which their rewards come. A random order is drawn and dropped, so
            # that the random state, and with it later samples, do not depend on `reward_pipeline`.
            shuffled(len(rollouts))
            if not serves_one_step:
                # Old log-probs belong to the weights before the first of these steps, so they are computed now, for all
                # rows.
                rollouts = self.log_probs.of_all(rollouts)
        return self._parts(begun, rollouts, num_items, by_group=by_group, serves_one_step=serves_one_step)

    def look(self) -> None:
        """Start the rewards of later windows' rows that were sampled since the last call.

        For callbacks that watch groups, `on_group_sampled` is called for the groups of these rows.

        The trainer calls this method between model passes.
        """
        self._sampler.look()

    def close(self) -> None:
        """Drop everything that was sampled or scored ahead, because the run is over or interrupted."""
        self._forget()
        self._rewards.cancel()

    # ------------------------------------------------------------------ from prompts to rows

    def _announce(self, examples: list[dict[str, Any]], step: int) -> Prompts:
        """Begin the next window: give the sampler its prompts, and the prompts of windows that may be sampled ahead.

        Each prompt is tokenized only once, because a chat template may depend on the time.
        """
        number, windows = self._ahead.window + 1, [examples, *self._reader.upcoming(step)]
        # The dataset reader returns the same list objects that it announced, so it is enough to compare identity.
        has_changed = number in self._announced and self._announced[number].examples is not examples
        if has_changed:
            if self._ranks.rank == 0:
                logger.warning(
                    f"Window {number} has other prompts than were read ahead for it, for example because a callback "
                    "ended an epoch. The samples for the prompts that were read ahead are thrown away."
                )
            self._forget()
        new = []
        not_announced = self._ahead.begin(self._host.state.global_step, known=len(windows) - 1, anew=has_changed)
        for window in not_announced:
            self._announced[window] = self._prompts(windows[window - number])
            new.append(self._announced[window])
        prompts = self._announced.pop(number)
        self._sampler.begin(prompts.number, new)
        return prompts

    def _prompts(self, examples: list[dict[str, Any]]) -> Prompts:
        with self._recorder.timed("generate"):
            tokenized = self._host.tokenize(examples)
        prompts = Prompts(next(self._numbers), examples, tokenized)
        self._rewards.early.begin(prompts.number, examples)
        return prompts

    def _forget(self) -> None:
        """Drop all prompts, samples and rewards of windows ahead."""
        self._announced.clear()
        self._rewards.early.forget()
        self._sampler.forget()

    def _begin(self, prompts: Prompts, groups_of_step: Callable[[], int] | None = None) -> _Begun:
        """Sample a generation batch, start its rewards, and call the callbacks' `on_rollouts_sampled`."""
        sampled = self._ranks.agree(partial(self._sampler.take, prompts))  # decoding may fail on one rank
        self._ranks.agree(partial(self._ahead.check, int(sampled.policy_version.min())))
        truncated = is_truncated(sampled.completion_ids, {*self._host.eos_token_ids, self._pad_token_id})
        rollouts = self._rollouts(prompts, sampled, truncated)
        awaited = self._rewards.begin(prompts.number, rollouts.examples, sampled, groups_of_step)
        self._ranks.agree(self._sampler.meanwhile)
        self._host.dispatch("on_rollouts_sampled", rollouts)
        return _Begun(sampled, truncated, rollouts, awaited)

    def _log_sampled(self, sampled: Sampled, truncated: Tensor) -> None:
        if looks_ahead(self._host):
            step = self._host.state.global_step
            self._recorder.log(staleness_metrics(sampled.policy_version, step, self._ranks.gather))
        self._log.sampled(sampled, truncated)
        self._sampler.log()

    def _rollouts(self, prompts: Prompts, sampled: Sampled, truncated: Tensor) -> RolloutBatch:
        """Build this rank's rows, in CPU memory."""
        own = self._ranks.own(len(prompts.examples))
        return to_rollouts(
            sampled,
            sampled.examples(prompts.examples),
            group=torch.arange(own.start, own.stop) // self._args.num_generations,
            pad_token_id=self._pad_token_id,
            masked=truncated if self._args.mask_truncated_completions else None,
            pad_to_multiple_of=self._args.pad_to_multiple_of,
        )

    # ------------------------------------------------------------------ from rewards to parts

    def _parts(
        self, begun: _Begun, rollouts: RolloutBatch, num_items: Tensor, *, by_group: bool, serves_one_step: bool
    ) -> Iterator[Part]:
        """Yield the parts of a window as their rewards come: compute credit, filter the rows, and add log-probs.

        Args:
            begun: the generation batch.
            rollouts: the rows of the batch. If their rewards come by group and several steps use the window, they have
                their log-probs already.
            num_items: number of loss tokens of the window on all ranks, dropped rows included.
            by_group: True = the rewards come by group.
            serves_one_step: see `window`.
        """
        parts: list[Part] = []
        for rows, rewards, ends_step in begun.awaited.parts():
            credited, outcome = self._credited(rollouts.rows(rows).with_rewards(rewards))
            order = torch.arange(len(rows)) if by_group else shuffled(len(rows))
            window = GenerationWindow(*self._kept(credited, order), num_items)
            if serves_one_step or not by_group:
                self.log_probs.of_window(window, serves_one_step=serves_one_step)
            parts.append(Part(rows, credited, outcome, window, ends_step))
            if sum(len(part.rows) for part in parts) == len(rollouts):
                self._log_whole([begun], begun.awaited.report(), parts)
            yield parts[-1]

    def _in_rounds(self, dynamic: DynamicSampling, prompts: Prompts, *, serves_one_step: bool) -> Iterator[Part]:
        """Sample rounds until the window has enough groups with signal or reaches its limit; yield it as one part."""
        rounds = [self._round(prompts, before=0)]
        with self._recorder.timed("dynamic_sampling"):
            while groups := dynamic.next([one.signal for one in rounds]):
                assert isinstance(self._reader, PromptQueue), "dynamic sampling reads from a queue"
                prompts = self._prompts(self._reader.take(groups))
                self._sampler.begin(prompts.number, [prompts])
                rounds.append(self._round(prompts, before=sum(len(one.keep) for one in rounds)))
        begun = [one.begun for one in rounds]
        sampled = [one.sampled for one in begun]
        if any(one.own_tokens is not None for one in sampled):  # a `rollout_func` may return a mask in some rounds only
            sampled = [
                replace(one, own_tokens=[[1] * len(ids) for ids in one.completion_ids])
                if one.own_tokens is None
                else one
                for one in sampled
            ]
        self._log_sampled(joined(sampled), torch.cat([one.truncated for one in begun]))
        signal = [one.signal for one in rounds]
        trained, whole = places_in_window(signal, dynamic.room)
        rollouts = joined(widened([one.credited for one in rounds], self._pad_token_id))
        survivors = self._own_rows(trained) & torch.cat([one.keep for one in rounds])
        num_items = self._ranks.sum(rollouts.loss_mask[self._own_rows(whole)].sum())
        least = dynamic.room * self._args.num_generations // self._ranks.count
        window = GenerationWindow(*self._placed(rollouts, survivors.nonzero().flatten(), least=least), num_items)
        self.log_probs.of_window(window, serves_one_step=serves_one_step)
        outcome = self._by_rank([one.outcome for one in rounds])
        part = Part(torch.arange(len(rollouts)), rollouts, outcome, window, ends_step=True)
        metrics = dynamic.metrics(signal)
        self._recorder.log(metrics)
        if self._ranks.rank == 0:
            self._unfilled_windows.note(metrics)
        self._log_whole(begun, self._by_rank([one.awaited.report() for one in begun]), [part])
        dynamic.note(signal)
        yield part

    def _round(self, prompts: Prompts, before: int) -> _Round:
        """Sample, score and filter a round; `before` is the number of this rank's rows in the earlier rounds."""
        begun = self._begin(prompts)
        ((_, rewards, _),) = begun.awaited.parts()
        credited, outcome = self._credited(begun.rollouts.with_rewards(rewards))
        self._log.end_round(before, len(rewards))  # callbacks have logged their columns, too
        filtered = self._filtered(credited)
        in_groups = filtered.keep.view(-1, self._args.num_generations).any(dim=1)
        signal = self._ranks.gather(in_groups.long()).view(self._ranks.count, -1).bool()
        return _Round(begun, credited, outcome, filtered.keep, signal)

    def _own_rows(self, groups: Sequence[Tensor]) -> Tensor:
        """Return which of this rank's rows are in chosen groups: [B] bool, where B counts the rows of all rounds.

        Args:
            groups: for each round, [R, K] bool, True = the group is chosen.
        """
        own = torch.cat([one[self._ranks.rank] for one in groups])
        return own.repeat_interleave(self._args.num_generations)

    def _by_rank(self, rows: Sequence[Tensor]) -> Tensor:
        """Concatenate a tensor [R · B, …] of each round. In the result, the rows of a rank are adjacent, in round
        order.
        """
        return torch.cat([one.unflatten(0, (self._ranks.count, -1)) for one in rows], dim=1).flatten(0, 1)

    def _placed(self, rollouts: CreditedRollouts, rows: Tensor, *, least: int) -> tuple[Survivors, Tensor]:
        """Put the survivors of all rounds in a random order. The result has the form of `_kept`'s result.

        `GenerationWindow.lengths` must have the same number M of places for every rank, but ranks may have different
        numbers of survivors. So M is the largest of these numbers, but at least `least`. Places without a survivor get
        the lengths 0, like dropped rows.

        Args:
            rollouts: this rank's rows of all rounds.
            rows: int64, indices of this rank's survivors.
            least: lower bound of M: the number of rows of a window on a rank.
        """
        places = max(-self._ranks.least(-len(rows)), least)
        lengths = torch.zeros(places, 4, dtype=torch.long)
        lengths[: len(rows)] = rollouts.lengths()[rows]
        order = shuffled(places)
        lengths, order = lengths[order], order[order < len(rows)]
        return rollouts.survivors(rows[order]), self._ranks.gather(lengths).view(-1, places, 4)

    def _credited(self, rollouts: ScoredRollouts) -> tuple[CreditedRollouts, Tensor]:
        """Compute the advantages of rows, and call the callbacks that may change rewards and advantages.

        Returns:
            The rows with their advantages after the callbacks, and `Part.outcome`, the advantages before the callbacks.
        """
        self._host.dispatch("on_rewards", rollouts)
        unscored = ~rollouts.scored.unsqueeze(1)  # a callback may have changed rewards, and with them `scored`
        rewards = self._ranks.gather(rollouts.rewards.masked_fill(unscored, torch.nan))
        outcome = self._host.advantages(rewards, self._ranks.gather(rollouts.loss_mask.sum(dim=1)))
        credited = rollouts.with_advantages(outcome[self._ranks.own(len(rollouts))].clone())
        self._host.dispatch("on_advantages", credited)
        return credited, outcome

    def _kept(self, rollouts: CreditedRollouts, order: Tensor) -> tuple[Survivors, Tensor]:
        """Filter the rows, and put the survivors in the given order.

        Returns:
            This rank's survivors, and `GenerationWindow.lengths` of all ranks, [R, M, 4], with 0 for a dropped row.
        """
        lengths = rollouts.lengths() * self._filtered(rollouts).keep.unsqueeze(1)
        lengths = lengths[order]
        # Column 1 counts completion tokens. It is also 0 for a masked row (`mask_truncated_completions`), so such a row
        # is no survivor, even if the filter keeps it.
        survivors = order[lengths[:, 1] > 0]
        return rollouts.survivors(survivors), self._ranks.gather(lengths).view(-1, len(rollouts), 4)

    def _filtered(self, rollouts: CreditedRollouts) -> Filtered:
        return filter_rows(
            rollouts.advantages, rollouts.loss_mask, rollouts.scored, self._args.gradient_filter_threshold
        )

    def _log_whole(self, begun: Sequence[_Begun], rewards: Tensor, parts: Sequence[Part]) -> None:
        """Log a window whose parts have all come.

        Args:
            begun: the generation batches of the window.
            rewards: [N, F], see `Awaited.report`.
            parts: the parts of the window.
        """
        order = torch.cat([part.rows for part in parts]).argsort()
        rollouts = joined([part.rollouts for part in parts]).rows(order)
        silent = (torch.cat([part.outcome for part in parts]).view(-1, self._args.num_generations) == 0).all(dim=1)
        advantages = self._ranks.gather(rollouts.mean_advantages())
        prompts = [prompt for one in begun for prompt in one.sampled.prompts]
        completions = [completion for one in begun for completion in one.sampled.completions]
        self._log.rewarded(prompts, completions, rewards, advantages, silent)
        filtered = self._filtered(rollouts)
        metrics = filter_metrics(rollouts, filtered, self._ranks.sum)
        self._recorder.log(metrics)
        if isinstance(self._reader, PromptQueue):
            self._recorder.total("prompts/epoch", self._reader.epochs)
        if self._ranks.rank == 0:
            self._empty_windows.note(metrics, self._args.gradient_filter_threshold)
        self.log_probs.log(joined([part.window.rollouts for part in parts]))
