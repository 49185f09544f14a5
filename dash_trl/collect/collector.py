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

from dash_trl.collect.awaited import Awaited, RewardBatch, Rewards
from dash_trl.collect.decode import Prompts, Sampled, is_truncated, to_rollouts
from dash_trl.collect.dynamic_sampling import DynamicSampling, places_in_window
from dash_trl.collect.log import WindowLog
from dash_trl.collect.samplers import Sampler
from dash_trl.distributed import Ranks
from dash_trl.log_probs import LogProbs
from dash_trl.monitoring import EmptyWindows, Recorder, UnfilledWindows, filter_metrics, staleness_metrics
from dash_trl.rollout import (
    CreditedRollouts,
    GenerationWindow,
    RolloutBatch,
    RunAhead,
    ScoredRollouts,
    Survivors,
    joined,
    widened,
)
from dash_trl.update import Filtered, filter_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowSettings:
    """Settings for building rows from sampled tokens, and for the filter.

    Attributes:
        num_generations: number of rows of a group.
        end_ids: token ids. A completion is truncated if its last token is not one of these.
        mask_truncated: True = no token of a truncated completion counts in the loss.
        pad_token_id: see `to_rollouts`.
        pad_to_multiple_of: see `to_rollouts`.
        threshold: `gradient_filter_threshold`.
    """

    num_generations: int
    end_ids: frozenset[int]
    mask_truncated: bool
    pad_token_id: int
    pad_to_multiple_of: int | None
    threshold: float | None


@dataclass(frozen=True)
class _Begun:
    """A generation batch whose rows are sampled and whose rewards have begun."""

    prompts: Prompts
    sampled: Sampled
    truncated: Tensor  # [B] bool, True = the completion is truncated
    rollouts: RolloutBatch
    batch: RewardBatch
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
        ranks: the ranks of the run.
        settings: function that returns the current settings. A callback may change settings during a run.
        sampler: samples completions.
        rewards: scores the completions.
        log_probs: computes the log-probs that the loss needs.
        recorder: logs figures and seconds.
        log: writes the figures and tables that TRL logs about a window.
        tokenize: function that takes prompts and returns the tuple of TRL's `_tokenize_prompts`. `None`: prompts are
            tokenized later, by a `rollout_func` or after environments are reset.
        upcoming: function that returns the prompts of the next windows that may be sampled ahead: for each of these
            windows, a list of this rank's rows of the dataset.
        ahead: decides how far sampling runs ahead of training.
        log_staleness: True = log the age of the weights with which a window was sampled.
        step: function that returns the number of optimizer steps taken.
        dispatch: function that calls the callbacks; it takes the name of an event and the rollouts.
        advantages: function that takes rewards [N, F] and numbers of loss tokens [N], and returns the advantages by
            outcome, [N].
        draw_order: function that takes a number of rows and draws the random order in which micro-steps get the rows,
            [rows] int64.
        dynamic: decides how many groups a window samples. `None`: no dynamic sampling.
        more: function that takes a number of prompts and returns this rank's next rows of the dataset. Needed with
            `dynamic`.
        epochs: function that returns the number of epochs whose prompts were all taken; only with `dynamic`.

    Attributes:
        log_probs: as above.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Callable[[], RowSettings],
        sampler: Sampler,
        rewards: Rewards,
        log_probs: LogProbs,
        recorder: Recorder,
        log: WindowLog,
        *,
        tokenize: Callable[[list[Any]], tuple[Any, ...]] | None,
        upcoming: Callable[[], Sequence[list[dict[str, Any]]]],
        ahead: RunAhead,
        log_staleness: bool,
        step: Callable[[], int],
        dispatch: Callable[[str, RolloutBatch], None],
        advantages: Callable[[Tensor, Tensor], Tensor],
        draw_order: Callable[[int], Tensor],
        dynamic: DynamicSampling | None = None,
        more: Callable[[int], list[dict[str, Any]]] | None = None,
        epochs: Callable[[], int] | None = None,
    ):
        self.log_probs = log_probs
        self._ranks, self._settings, self._recorder, self._log = ranks, settings, recorder, log
        self._sampler, self._rewards = sampler, rewards
        self._tokenize, self._upcoming, self._ahead, self._step = tokenize, upcoming, ahead, step
        self._dispatch, self._advantages, self._draw_order = dispatch, advantages, draw_order
        self._dynamic, self._more, self._epochs = dynamic, more, epochs
        self._numbers = count()  # the numbers of generation batches
        self._announced: dict[int, Prompts] = {}  # number of a window that has not begun → its prompts
        self._log_staleness = log_staleness
        self._empty_windows, self._unfilled_windows = EmptyWindows(), UnfilledWindows()

    def window(self, examples: list[dict[str, Any]], *, by_group: bool, serves_one_step: bool) -> Iterator[Part]:
        """Sample the next window and start its rewards. Iterating over the result waits for the rewards.

        With dynamic sampling, this method only announces the prompts. Sampling and rewards follow when the caller
        iterates over the result.

        Args:
            examples: B rows of the dataset, one per completion; the rows of a group are adjacent.
            by_group: True = await rewards group by group, False = await them together.
            serves_one_step: True = one optimizer step uses the whole window; False = several steps use it.
        Returns:
            An iterator over the parts of the window. Before it yields the last part, it logs the figures of the window.
        """
        prompts = self._announce(examples)
        find_log_probs: Callable[[GenerationWindow], None]
        find_log_probs = partial(self.log_probs.of_window, serves_one_step=serves_one_step)
        if self._dynamic is not None:
            return self._in_rounds(self._dynamic, prompts, find_log_probs)
        begun = self._begin(prompts, by_group=by_group)
        self._log_sampled(begun.sampled, begun.truncated)
        rollouts = begun.rollouts
        # TRL's losses divide by this number. So it must be known before the first part is trained on.
        num_items = self._ranks.sum(rollouts.loss_mask.sum())
        draw_order = self._draw_order
        if by_group:
            # Groups are trained on in the order in which their rewards come. A random order is drawn and dropped, so
            # that the random state, and with it later samples, do not depend on `reward_pipeline`.
            draw_order(len(rollouts))
            draw_order = torch.arange
        if by_group and not serves_one_step:
            # Several optimizer steps use the window. Old log-probs belong to the weights before the first of these
            # steps, so they are computed now, for all rows.
            rollouts, find_log_probs = self.log_probs.of_all(rollouts), lambda window: None
        return self._parts(begun, rollouts, num_items, draw_order, find_log_probs)

    def first_prompts(self, prompts: int) -> int:
        """Return the number of prompts that a rank samples first for the next window.

        Args:
            prompts: number of prompts of a window on a rank. Without dynamic sampling, the result is this number.
        """
        return prompts if self._dynamic is None else self._dynamic.first()

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

    def _announce(self, examples: list[dict[str, Any]]) -> Prompts:
        """Begin the next window: give the sampler its prompts, and the prompts of windows that may be sampled ahead.

        Each prompt is tokenized only once, because a chat template may depend on the time.
        """
        number, windows = self._ahead.window + 1, [examples, *self._upcoming()]
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
        not_announced = self._ahead.begin(self._step(), known=len(windows) - 1, anew=has_changed)
        for window in not_announced:
            self._announced[window] = self._prompts(windows[window - number])
            new.append(self._announced[window])
        prompts = self._announced.pop(number)
        self._sampler.begin(prompts.number, new)
        return prompts

    def _prompts(self, examples: list[dict[str, Any]]) -> Prompts:
        with self._recorder.timed("generate"):
            tokenized = () if self._tokenize is None else self._tokenize([row["prompt"] for row in examples])
        prompts = Prompts(next(self._numbers), examples, tokenized)
        self._rewards.early.begin(prompts.number, examples)
        return prompts

    def _forget(self) -> None:
        """Drop all prompts, samples and rewards of windows ahead."""
        self._announced.clear()
        self._rewards.early.forget()
        self._sampler.forget()

    def _begin(self, prompts: Prompts, *, by_group: bool) -> _Begun:
        """Sample a generation batch, start its rewards, and call the callbacks' `on_rollouts_sampled`."""
        sampled = self._ranks.agree(partial(self._sampler.take, prompts))  # decoding may fail on one rank
        self._ranks.agree(partial(self._ahead.check, int(sampled.policy_version.min())))
        truncated = is_truncated(sampled.completion_ids, self._settings().end_ids)
        rollouts = self._rollouts(prompts, sampled, truncated)
        batch = RewardBatch(
            rollouts.examples,
            sampled.prompts,
            rollouts.completions,
            sampled.completion_ids,
            None if sampled.turns is None else sampled.turns.failed,
        )
        awaited = self._rewards.begin(prompts.number, batch, by_group=by_group)
        self._ranks.agree(self._sampler.meanwhile)
        self._dispatch("on_rollouts_sampled", rollouts)
        return _Begun(prompts, sampled, truncated, rollouts, batch, awaited)

    def _log_sampled(self, sampled: Sampled, truncated: Tensor) -> None:
        if self._log_staleness:
            self._recorder.log(staleness_metrics(sampled.policy_version, self._step(), self._ranks.gather))
        self._log.sampled(sampled, truncated)
        self._sampler.log()

    def _rollouts(self, prompts: Prompts, sampled: Sampled, truncated: Tensor) -> RolloutBatch:
        """Build this rank's rows, in CPU memory."""
        own, settings = self._ranks.own(len(prompts.examples)), self._settings()
        return to_rollouts(
            sampled,
            sampled.examples(prompts.examples),
            group=torch.arange(own.start, own.stop) // settings.num_generations,
            pad_token_id=settings.pad_token_id,
            masked=truncated if settings.mask_truncated else None,
            pad_to_multiple_of=settings.pad_to_multiple_of,
        )

    # ------------------------------------------------------------------ from rewards to parts

    def _parts(
        self,
        begun: _Begun,
        rollouts: RolloutBatch,
        num_items: Tensor,
        draw_order: Callable[[int], Tensor],
        find_log_probs: Callable[[GenerationWindow], None],
    ) -> Iterator[Part]:
        """Yield the parts of a window as their rewards come: compute credit, filter the rows, and add log-probs.

        Args:
            begun: the generation batch.
            rollouts: the rows of the batch, possibly with log-probs already.
            num_items: number of loss tokens of the window on all ranks, dropped rows included.
            draw_order: function that takes M and returns the order in which micro-steps get the rows of a part, [M]
                int64.
            find_log_probs: function that computes the log-probs of a part's survivors, as far as the loss needs them
                (`LogProbRules`), and stores them in the part.
        """
        parts: list[Part] = []
        for rows, rewards, ends_step in begun.awaited.parts():
            credited, outcome = self._credited(rollouts.rows(rows).with_rewards(rewards))
            window = GenerationWindow(*self._kept(credited, draw_order(len(rows))), num_items)
            find_log_probs(window)
            parts.append(Part(rows, credited, outcome, window, ends_step))
            if sum(len(part.rows) for part in parts) == len(rollouts):
                self._log_whole([begun], begun.awaited.report(), parts)
            yield parts[-1]

    def _in_rounds(
        self, dynamic: DynamicSampling, prompts: Prompts, find_log_probs: Callable[[GenerationWindow], None]
    ) -> Iterator[Part]:
        """Sample rounds until the window has enough groups with signal or reaches its limit; yield it as one part."""
        rounds = [self._round(prompts, before=0)]
        with self._recorder.timed("dynamic_sampling"):
            while groups := dynamic.next([one.signal for one in rounds]):
                assert self._more is not None, "`more` is given with `dynamic`"
                prompts = self._prompts(self._more(groups))
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
        rollouts = joined(widened([one.credited for one in rounds], self._settings().pad_token_id))
        survivors = self._own_rows(trained) & torch.cat([one.keep for one in rounds])
        num_items = self._ranks.sum(rollouts.loss_mask[self._own_rows(whole)].sum())
        least = dynamic.room * self._settings().num_generations // self._ranks.count
        window = GenerationWindow(*self._placed(rollouts, survivors.nonzero().flatten(), least=least), num_items)
        find_log_probs(window)
        outcome = self._by_rank([one.outcome for one in rounds])
        part = Part(torch.arange(len(rollouts)), rollouts, outcome, window, ends_step=True)
        metrics = dynamic.metrics(signal)
        self._recorder.log(metrics)
        if self._ranks.rank == 0:
            self._unfilled_windows.note(metrics)
        report = self._by_rank([one.awaited.report() for one in begun])
        self._log_whole(begun, report, [part])
        dynamic.note(signal)
        yield part

    def _round(self, prompts: Prompts, before: int) -> _Round:
        """Sample, score and filter a round; `before` is the number of this rank's rows in the earlier rounds."""
        begun = self._begin(prompts, by_group=False)
        ((_, rewards, _),) = begun.awaited.parts()
        credited, outcome = self._credited(begun.rollouts.with_rewards(rewards))
        self._log.end_round(before, len(rewards))  # callbacks have logged their columns, too
        filtered = self._filtered(credited)
        in_groups = filtered.keep.view(-1, self._settings().num_generations).any(dim=1)
        signal = self._ranks.gather(in_groups.long()).view(self._ranks.count, -1).bool()
        return _Round(begun, credited, outcome, filtered.keep, signal)

    def _own_rows(self, groups: Sequence[Tensor]) -> Tensor:
        """Return which of this rank's rows are in chosen groups: [B] bool, where B counts the rows of all rounds.

        Args:
            groups: for each round, [R, K] bool, True = the group is chosen.
        """
        own = torch.cat([one[self._ranks.rank] for one in groups])
        return own.repeat_interleave(self._settings().num_generations)

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
        order = self._draw_order(places)
        lengths, order = lengths[order], order[order < len(rows)]
        return rollouts.survivors(rows[order]), self._ranks.gather(lengths).view(-1, places, 4)

    def _credited(self, rollouts: ScoredRollouts) -> tuple[CreditedRollouts, Tensor]:
        """Compute the advantages of rows, and call the callbacks that may change rewards and advantages.

        Returns:
            The rows with their advantages after the callbacks, and `Part.outcome`, the advantages before the callbacks.
        """
        self._dispatch("on_rewards", rollouts)
        unscored = ~rollouts.scored.unsqueeze(1)  # a callback may have changed rewards, and with them `scored`
        rewards = self._ranks.gather(rollouts.rewards.masked_fill(unscored, torch.nan))
        outcome = self._advantages(rewards, self._ranks.gather(rollouts.loss_mask.sum(dim=1)))
        credited = rollouts.with_advantages(outcome[self._ranks.own(len(rollouts))].clone())
        self._dispatch("on_advantages", credited)
        return credited, outcome

    def _kept(self, rollouts: CreditedRollouts, order: Tensor) -> tuple[Survivors, Tensor]:
        """Filter the rows, and put the survivors in the given order.

        Returns:
            This rank's survivors, and `GenerationWindow.lengths` of all ranks, [R, M, 4], with 0 for a dropped row.
        """
        lengths = rollouts.lengths() * self._filtered(rollouts).keep.unsqueeze(1)
        lengths = lengths[order]
        # Column 1 counts completion tokens. It is also 0 for a masked row (`RowSettings.mask_truncated`), so such a row
        # is no survivor, even if the filter keeps it.
        survivors = order[lengths[:, 1] > 0]
        return rollouts.survivors(survivors), self._ranks.gather(lengths).view(-1, len(rollouts), 4)

    def _filtered(self, rollouts: CreditedRollouts) -> Filtered:
        return filter_rows(rollouts.advantages, rollouts.loss_mask, rollouts.scored, self._settings().threshold)

    def _log_whole(self, begun: Sequence[_Begun], rewards: Tensor, parts: Sequence[Part]) -> None:
        """Log a window whose parts have all come.

        Args:
            begun: the generation batches of the window.
            rewards: [N, F], see `Awaited.report`.
            parts: the parts of the window.
        """
        order = torch.cat([part.rows for part in parts]).argsort()
        rollouts = joined([part.rollouts for part in parts]).rows(order)
        silent = (torch.cat([part.outcome for part in parts]).view(-1, self._settings().num_generations) == 0).all(
            dim=1
        )
        advantages = self._ranks.gather(rollouts.mean_advantages())
        batch = joined([one.batch for one in begun])
        self._log.rewarded(batch.prompts, batch.completions, rewards, advantages, silent)
        filtered = self._filtered(rollouts)
        metrics = filter_metrics(rollouts, filtered, self._ranks.sum)
        self._recorder.log(metrics)
        if self._epochs is not None:
            self._recorder.total("prompts/epoch", self._epochs())
        if self._ranks.rank == 0:
            self._empty_windows.note(metrics, self._settings().threshold)
        self.log_probs.log(joined([part.window.rollouts for part in parts]))
