"""How the rewards of a window are begun and awaited: together, or group by group.

some rows have come ──► EarlyRewards ──┐
all rows are there ───────────────────┴──► begin ──► the request ──► Together, ByGroup ──► parts ──► report
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dash_trl.distributed import Ranks
from dash_trl.monitoring import Recorder
from dash_trl.rewards import (
    EarlyRewards,
    FailureWatch,
    RewardTeam,
    RunnerReward,
    arrivals,
    raise_mistakes,
    reward_rows,
    scores_alone,
)
from dash_trl.tools import EnvironmentReward
from dash_trl.workers import Request


@dataclass(frozen=True)
class RewardBatch:
    """What reward functions are asked of: B rows, as TRL's `_calculate_rewards` takes them."""

    examples: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    failed: Tensor | None = None  # [B] bool, rows that are unscored whatever functions say; see `TurnCounts`


class Awaited(Protocol):
    """Every rank gets the same number of groups at a time. NaN = does not apply; a row is NaN if a function failed."""

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Rows of this rank (indices of whole groups), their rewards [rows, F], and `Part.ends_step`."""

    def report(self) -> Tensor:
        """[N, F], the rows of all ranks, once all parts have come."""


class Together:
    """
    Args:
        report: asks all functions and waits for them; [N, F]. own: this rank's rows among those of all.
    """

    def __init__(self, report: Callable[[], Tensor], own: slice):
        self._report, self._own = report, own
        self._rewards: Tensor | None = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        rewards = self.report()[self._own].to("cpu", copy=True)  # callbacks may change them; the log has the functions'
        yield torch.arange(len(rewards)), rewards, True  # the part is the whole window

    def report(self) -> Tensor:
        if self._rewards is None:
            self._rewards = self._report()
        return self._rewards


class ByGroup:
    """
    Args:
        arriving: rows whose rewards have come since the last time, and `Part.ends_step`; see `arrivals`.
        rewards: of such rows, [rows, F]. report: as in `Together`; nothing is left to wait for then.
    """

    def __init__(
        self,
        arriving: Iterator[tuple[Tensor, bool]],
        rewards: Callable[[Sequence[int]], Tensor],
        report: Callable[[], Tensor],
    ):
        self._arriving, self._rewards, self._report = arriving, rewards, report

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        for rows, ends_step in self._arriving:
            yield rows, self._rewards(rows.tolist()), ends_step

    def report(self) -> Tensor:
        return self._report()


class Rewards:
    """The reward functions of a run: what they say of one window after the other, and which of them fail.

    To wait for a window is to call the trainer's `_calculate_rewards`, which a subclass may override. It calls
    `of_all`, and `of_all` calls TRL's: an override, TRL's logs and the watch over failures see every window.

    Args:
        functions, names: F, in the order of the columns; see `rewards.watch`.
        group_size: of the rows that functions are asked of now.
        early: begin the rewards of rows as they are sampled, if all functions score each completion by itself. What an
            environment says of its row is known when the row ends.
        calculate: the trainer's `_calculate_rewards`, on this rank's rows; [N, F].
        groups_of_step: how many of this rank's groups the optimizer step that runs takes of the window.
    """

    def __init__(
        self,
        ranks: Ranks,
        recorder: Recorder,
        functions: Sequence[Any],
        names: Sequence[str],
        *,
        num_generations: int,
        group_size: Callable[[], int],
        early: bool,
        calculate: Callable[..., Tensor],
        groups_of_step: Callable[[], int],
    ):
        self._ranks, self._recorder, self._functions = ranks, recorder, functions
        self._num_generations, self._calculate, self._groups_of_step = num_generations, calculate, groups_of_step
        runners = [func for func in functions if isinstance(func, RunnerReward)]
        self.team = RewardTeam(runners, ranks.count, group_size)
        others = [func for func in functions if not isinstance(getattr(func, "func", None), EnvironmentReward)]
        wanted = early and bool(others) and all(map(scores_alone, others))
        self.early = EarlyRewards(self.team, num_generations, wanted=wanted)
        self._failures = FailureWatch(functions, names)

    def begin(self, window: int, batch: RewardBatch, *, by_group: bool) -> Awaited:
        """Begins the rewards of a window whose rows are all there, unless they began while these were sampled.

        Called on every rank at the same point. Without a request, the functions are called when somebody waits.
        """
        arguments = batch.examples, batch.prompts, batch.completions, batch.completion_ids
        request = self.early.claim(window)
        if request is None and by_group:
            request = self._ranks.agree(lambda: self._start(reward_rows(*arguments)))

        def report() -> Tensor:
            if request is not None:  # TRL calls the functions; they return what the request has
                self.team.hand_over(request, batch.completions)
            rewards = self._calculate(*arguments)
            return rewards if batch.failed is None else _without(self._ranks.gather(batch.failed), rewards)

        if not by_group:
            return Together(report, self._ranks.own(len(batch.examples)))
        assert request is not None, "it was started above"
        groups = len(batch.examples) // self._num_generations
        waiting = arrivals(request, groups, self._least_of_ranks, self._groups_of_step)
        waiting = self._recorder.timed_each("wait_for_rewards", waiting)

        def rewards_of(rows: Sequence[int]) -> Tensor:
            rewards = self.team.rewards(request, self._functions, rows)
            return rewards if batch.failed is None else _without(batch.failed[rows], rewards)

        return ByGroup(waiting, rewards_of, report)

    def of_all(
        self,
        call_functions: Callable[[], Tensor],
        *,
        training: bool,
        group_size: int | None = None,
        failed: Tensor | None = None,
    ) -> Tensor:
        """[N, F], with every row NaN in which a function failed; the trainer's `_calculate_rewards` and values call it.

        Args:
            call_functions: TRL's `_calculate_rewards`, NaN for what does not apply and what failed.
            training: else a failure does not count towards the end of the run.
            group_size: of these rows, if it is another than the run's. failed: see `RewardBatch`.
        """
        self.team.join(group_size)
        with self._recorder.timed("reward", counts=training):
            rewards = call_functions()
        self._ranks.agree(partial(raise_mistakes, self._functions))
        rewards = self._failures.unscore(
            rewards, lambda rows: self._ranks.gather(rows).to(rows.device), counts=training
        )
        if training:
            self._recorder.log({f"rewards/{name}/failed": share for name, share in self._failures.failed.items()})
        return rewards if failed is None else _without(self._ranks.gather(failed), rewards)

    def cancel(self) -> None:
        """Cancel all rewards that have begun."""
        self.early.forget()
        self.team.cancel()

    def _start(self, rows: Sequence[dict[str, Any]]) -> Request:
        request = self.team.begin(len(rows), self._num_generations)
        self.team.start(request, 0, rows)
        return request

    def _least_of_ranks(self, groups: int) -> int:
        """The least number of groups that has come on any rank."""
        with self._recorder.timed("wait_for_ranks"):
            return self._ranks.least(groups)


def _without(failed: Tensor, rewards: Tensor) -> Tensor:
    """The rewards [rows, F], with those rows unscored that a tool or environment has failed."""
    return rewards.masked_fill(failed.to(rewards.device).unsqueeze(1), torch.nan)
