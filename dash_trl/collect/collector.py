"""`Collector`: the way from prompts to the parts of a window::

    announce ──► sample ──► reward ──► credit ──► filter ──► log-probs ──► part
       ▲            └── meanwhile: the next window is sampled, and its rewards begin
       └── with dynamic sampling: more groups, while too few have signal ──┘

Letters: B rows of this rank, M of them in a part, N rows of all ranks, R ranks, K groups of a rank, F reward functions.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """How sampled tokens become rows, and which rows are kept.

    Attributes:
        num_generations: rows of a group.
        end_ids: a completion whose last token is none of these is truncated.
        mask_truncated: no token of a truncated completion counts in the loss.
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
    truncated: Tensor  # [B] bool
    rollouts: RolloutBatch
    batch: RewardBatch
    awaited: Awaited


@dataclass(frozen=True)
class _Round:
    """A generation batch with its credit.

    Attributes:
        begun: the batch.
        credited: this rank's rows with their credit.
        outcome: see `Part`.
        keep: [B] bool, this rank's rows that the filter keeps.
        signal: [R, K] bool, the groups of all ranks with at least one kept row.
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
        rows: [M] int64, indices of the rows in the window.
        rollouts: these rows with their credit, dropped rows included.
        outcome: [R · M], the advantages of all ranks' rows before callbacks change them; 0 in a silent group.
        window: the survivors, for the optimizer.
        ends_step: the running optimizer step needs no further part of this window.
    """

    rows: Tensor
    rollouts: CreditedRollouts
    outcome: Tensor
    window: GenerationWindow
    ends_step: bool


class Collector:
    """Collects one window after the other.

    All ranks call `window` at the same point, and wait for its parts together.

    Args:
        ranks: the ranks of the run.
        settings: returns the current settings; a callback may change some during a run.
        sampler: samples completions.
        rewards: scores them.
        log_probs: computes the log-probs that the loss needs.
        recorder: logs figures and seconds.
        log: writes what TRL logs of a window.
        tokenize: prompts → what TRL's `_tokenize_prompts` returns. `None`: prompts are tokenized later, by a
            `rollout_func` or after environments are reset.
        upcoming: returns this rank's rows of the windows after the one that begins, as far as their prompts may be
            known.
        ahead: decides how far sampling runs ahead of training.
        log_staleness: log how old the weights are that sampled a window.
        step: returns the number of optimizer steps taken.
        dispatch: (name of an event, rollouts) → calls the callbacks.
        advantages: (rewards [N, F], loss tokens [N]) → [N], advantages by outcome.
        draw_order: number of rows → the order in which micro-steps get them, [rows] int64. It draws random numbers.
        dynamic: decides how many groups a window samples. `None`: those of its examples.
        more: number of prompts → this rank's next rows of the dataset.
        verdicts: called on every rank with the examples of the window's generation batches, and which of this rank's
            groups had signal and which were scored, [K] bool each.
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
        verdicts: Callable[[list[Any], Tensor, Tensor], None] | None = None,
    ):
        self.log_probs = log_probs
        self._ranks, self._settings, self._recorder, self._log = ranks, settings, recorder, log
        self._sampler, self._rewards = sampler, rewards
        self._tokenize, self._upcoming, self._ahead, self._step = tokenize, upcoming, ahead, step
        self._dispatch, self._advantages, self._draw_order = dispatch, advantages, draw_order
        self._dynamic, self._more, self._verdicts = dynamic, more, verdicts
        self._numbers = count()  # of generation batches
        self._announced: dict[int, Prompts] = {}  # of windows that have not begun
        self._log_staleness = log_staleness
        self._empty_windows, self._unfilled_windows = EmptyWindows(settings().threshold), UnfilledWindows()

    def window(self, examples: list[dict[str, Any]], *, by_group: bool, serves_one_step: bool) -> Iterator[Part]:
        """Sample the next window and begin its rewards. Iterating over the result waits for the rewards.

        Args:
            examples: B rows of the dataset, one per completion; the rows of a group are adjacent.
            by_group: await rewards group by group instead of together.
            serves_one_step: one optimizer step uses the whole window.
        Returns:
            The parts of the window. Its figures are logged just before the last part.
        """
        prompts = self._announce(examples)
        find_log_probs: Callable[[GenerationWindow], None]
        find_log_probs = partial(self.log_probs.of_window, serves_one_step=serves_one_step)
        if self._dynamic is not None:
            return self._in_rounds(self._dynamic, prompts, find_log_probs)
        begun = self._begin(prompts, by_group=by_group)
        self._log_sampled(begun.sampled, begun.truncated)
        rollouts = begun.rollouts
        num_items = self._ranks.sum(rollouts.loss_mask.sum())  # the normaliser must be known before the first part
        draw_order = self._draw_order
        if by_group:
            # Groups run as they come, without a shuffle. Its random numbers are drawn all the same, so that later
            # samples do not depend on `reward_pipeline`.
            draw_order(len(rollouts))
            draw_order = torch.arange
        if by_group and not serves_one_step:
            # Later optimizer steps use the window, too. Old log-probs must be those of the weights before the first.
            rollouts, find_log_probs = self.log_probs.of_all(rollouts), _are_known
        return self._parts(begun, rollouts, num_items, draw_order, find_log_probs)

    def first_prompts(self, prompts: int) -> int:
        """Return the number of a rank's prompts with which the next window begins.

        Args:
            prompts: a rank's prompts in one generation batch.
        """
        return prompts if self._dynamic is None else self._dynamic.first()

    def look(self) -> None:
        """Between model passes, begin the rewards of rows of later windows that have come."""
        self._sampler.look()

    def close(self) -> None:
        """Drop what was sampled or scored ahead, because the run is over or interrupted."""
        self._forget()
        self._rewards.cancel()

    # ------------------------------------------------------------------ from prompts to rows

    def _announce(self, examples: list[dict[str, Any]]) -> Prompts:
        """Tell the sampler the prompts of the window that begins, and of those that may be sampled ahead.

        Each prompt is tokenized only once, because a chat template may depend on the time.
        """
        number, windows = self._ahead.window + 1, [examples, *self._upcoming()]
        # The reader hands out the same list objects that it announced, so comparing identity is enough on all ranks.
        has_changed = number in self._announced and self._announced[number].examples is not examples
        if has_changed:
            if self._ranks.rank == 0:
                logger.warning(
                    f"Window {number} has other prompts than were read ahead for it, for example because a callback "
                    "ended an epoch. The samples for the prompts read ahead are thrown away."
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
        """Sample a generation batch, and begin its rewards."""
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
        """For each part that comes: credit, filter, and find log-probs.

        Args:
            begun: the batch.
            rollouts: the batch's rows, possibly with log-probs already.
            num_items: loss tokens of the window's rows on all ranks, dropped rows included.
            draw_order: M → the order in which micro-steps get the rows of a part, [M] int64.
            find_log_probs: adds to a part's survivors the log-probs that the loss needs; see `LogProbRules`. If one
                optimizer step uses the window and beta is 0, there are none.
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
        """Sample rounds until the window has enough groups with signal, and return it as one part."""
        rounds = [self._round(prompts)]
        with self._recorder.timed("dynamic_sampling"):
            while groups := dynamic.next([one.signal for one in rounds]):
                assert self._more is not None, "`more` is given with `dynamic`"
                prompts = self._prompts(self._more(groups))
                self._sampler.begin(prompts.number, [prompts])
                rounds.append(self._round(prompts))
        begun = [one.begun for one in rounds]
        self._log_sampled(joined([one.sampled for one in begun]), torch.cat([one.truncated for one in begun]))
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

    def _round(self, prompts: Prompts) -> _Round:
        begun = self._begin(prompts, by_group=False)
        ((_, rewards, _),) = begun.awaited.parts()
        credited, outcome = self._credited(begun.rollouts.with_rewards(rewards))
        filtered = self._filtered(credited)
        signal = self._ranks.gather(self._groups_with(filtered.keep).long()).view(self._ranks.count, -1).bool()
        return _Round(begun, credited, outcome, filtered.keep, signal)

    def _groups_with(self, rows: Tensor) -> Tensor:
        """Return which groups have at least one of these rows, [K] bool."""
        return rows.view(-1, self._settings().num_generations).any(dim=1)

    def _own_rows(self, groups: Sequence[Tensor]) -> Tensor:
        """Return the rows of this rank in the chosen groups ([R, K] of each round), [B] bool over all rounds."""
        own = torch.cat([one[self._ranks.rank] for one in groups])
        return own.repeat_interleave(self._settings().num_generations)

    def _by_rank(self, rows: Sequence[Tensor]) -> Tensor:
        """Concatenate [R · B, …] of each round, so that the rows of a rank, of all rounds, are adjacent."""
        return torch.cat([one.unflatten(0, (self._ranks.count, -1)) for one in rows], dim=1).flatten(0, 1)

    def _placed(self, rollouts: CreditedRollouts, rows: Tensor, *, least: int) -> tuple[Survivors, Tensor]:
        """As `_kept`, for survivors whose number differs between ranks.

        Each rank gets as many places as the rank with the most survivors needs.

        Args:
            rollouts: this rank's rows of all rounds.
            rows: [K] int64, indices of the survivors.
            least: the smallest number of places.
        """
        places = max(-self._ranks.least(-len(rows)), least)
        lengths = torch.zeros(places, 4, dtype=torch.long)
        lengths[: len(rows)] = rollouts.lengths()[rows]
        order = self._draw_order(places)
        lengths, order = lengths[order], order[order < len(rows)]
        return rollouts.survivors(rows[order]), self._ranks.gather(lengths).view(-1, places, 4)

    def _credited(self, rollouts: ScoredRollouts) -> tuple[CreditedRollouts, Tensor]:
        """Return the rows with their advantages after callbacks, and `Part.outcome`, the advantages before
        callbacks.
        """
        self._dispatch("on_rewards", rollouts)
        unscored = ~rollouts.scored.unsqueeze(1)  # a callback may have unscored a row, too
        rewards = self._ranks.gather(rollouts.rewards.masked_fill(unscored, torch.nan))
        outcome = self._advantages(rewards, self._ranks.gather(rollouts.loss_mask.sum(dim=1)))
        credited = rollouts.with_advantages(outcome[self._ranks.own(len(rollouts))].clone())
        self._dispatch("on_advantages", credited)
        return credited, outcome

    def _kept(self, rollouts: CreditedRollouts, order: Tensor) -> tuple[Survivors, Tensor]:
        """Filter the rows and put them in the given order.

        Returns:
            This rank's survivors, and `GenerationWindow.lengths` of all ranks, [R, M, 4], with 0 for a dropped row.
        """
        lengths = rollouts.lengths() * self._filtered(rollouts).keep.unsqueeze(1)
        lengths = lengths[order]
        survivors = order[lengths[:, 1] > 0]  # a masked row (TRL masks truncated ones) has no completion token
        return rollouts.survivors(survivors), self._ranks.gather(lengths).view(-1, len(rollouts), 4)

    def _filtered(self, rollouts: CreditedRollouts) -> Filtered:
        return filter_rows(rollouts.advantages, rollouts.loss_mask, rollouts.scored, self._settings().threshold)

    def _log_whole(self, begun: Sequence[_Begun], rewards: Tensor, parts: Sequence[Part]) -> None:
        """Log a window whose parts have all come.

        Args:
            begun: its generation batches.
            rewards: [N, F], see `Awaited.report`.
            parts: its parts.
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
        if self._verdicts is not None:
            examples = [one.prompts.examples for one in begun]
            self._verdicts(examples, self._groups_with(filtered.keep), self._groups_with(~filtered.unscored))
        if self._ranks.rank == 0:
            self._empty_windows.note(metrics)
        self.log_probs.log(joined([part.window.rollouts for part in parts]))


def _are_known(window: GenerationWindow) -> None:
    """Find nothing: the rows have their log-probs already."""
