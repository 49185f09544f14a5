"""Starts the rewards of a window and waits for them: all together, or group by group::

    some rows have come ──► EarlyRewards ──┐
    all rows are there ────────────────────┴──► begin ──► the request ──► Together, ByGroup ──► parts ──► report

Letters: B rows of this rank, N rows of all ranks, F reward functions.
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
    """The rows that reward functions are asked to score, in the form of TRL's `_calculate_rewards`.

    Attributes:
        examples: B rows of the dataset.
        prompts: B texts or conversations.
        completions: B texts or lists of messages.
        completion_ids: B lists of token ids.
        failed: [B] bool, rows that are unscored whatever the functions return; see `TurnCounts`. `None`: no row.
    """

    examples: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    failed: Tensor | None = None


class Awaited(Protocol):
    """The rewards of a window that have begun. Every rank gets the same number of groups at a time.

    NaN = the function does not apply. All rewards of a row are NaN if a function failed on it.
    """

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Wait for the rewards, and hand them out as they come.

        Yields:
            Rows of this rank (indices of whole groups), their rewards [rows, F], and `Part.ends_step`.
        """

    def report(self) -> Tensor:
        """Return the rewards of all ranks' rows, [N, F]. Call it only after all parts have come."""


class Together:
    """Awaits all rewards of a window together, as one part.

    Args:
        report: asks all functions and waits for them; returns [N, F].
        own: this rank's rows among those of all ranks.
    """

    def __init__(self, report: Callable[[], Tensor], own: slice):
        self._report, self._own = report, own
        self._rewards: Tensor | None = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        # A copy: callbacks may change it, while the log has the originals.
        rewards = self.report()[self._own].to("cpu", copy=True)
        yield torch.arange(len(rewards)), rewards, True  # the part is the whole window

    def report(self) -> Tensor:
        if self._rewards is None:
            self._rewards = self._report()
        return self._rewards


class ByGroup:
    """Awaits the rewards of a window group by group.

    Args:
        arriving: yields the rows whose rewards have come since the last time, and `Part.ends_step`; see `arrivals`.
        rewards: returns the rewards of such rows, [rows, F].
        report: as in `Together`. When it is called, all rewards have come.
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
    """The reward functions of a run. They score one window after the other; failures are counted over the run.

    To wait for a window's rewards, this class calls the trainer's `_calculate_rewards`, which a subclass may override.
    That method calls `of_all`, which calls TRL's. So an override, TRL's logs and the count of failures see every
    window.

    Args:
        ranks: the ranks of the run.
        recorder: logs figures and seconds.
        functions: the F reward functions, in the order of the columns; see `rewards.watch`.
        names: their names.
        num_generations: rows of a group in training.
        group_size: returns the group size of the rows that the functions score at the moment.
        early: begin to score rows as they are sampled, if every function scores each completion by itself. Rewards of
            environments do not count here: they are known when a row ends.
        calculate: the trainer's `_calculate_rewards`, on this rank's rows; returns [N, F].
        groups_of_step: returns how many of this rank's groups the running optimizer step takes from the window.
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
        """Begin to score a window after all its rows have been sampled, unless scoring began earlier.

        All ranks call it at the same point. If the rewards are awaited together and did not begin early, the functions
        are called only when someone waits for them.

        Args:
            window: number of the generation batch.
            batch: its rows.
            by_group: await the rewards group by group.
        """
        arguments = batch.examples, batch.prompts, batch.completions, batch.completion_ids
        request = self.early.claim(window)
        if request is None and by_group:
            request = self._ranks.agree(lambda: self._start(reward_rows(*arguments)))

        def report() -> Tensor:
            if request is not None:  # the functions that TRL calls then return the request's results
                self.team.hand_over(request, batch.completions)
            rewards = self._calculate(*arguments)
            return rewards if batch.failed is None else _without(self._ranks.gather(batch.failed), rewards)

        if not by_group:
            return Together(report, self._ranks.own(len(batch.examples)))
        assert request is not None, "the request was started above"
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
        """Call the reward functions and unscore the rows on which one failed.

        The trainer's `_calculate_rewards` and the values of process rewards call it.

        Args:
            call_functions: TRL's `_calculate_rewards`. It returns [N, F], with NaN where a function does not apply or
                failed.
            training: False in an evaluation. Failures then do not count towards ending the run.
            group_size: of these rows, if it differs from the run's.
            failed: see `RewardBatch`.
        Returns:
            [N, F], with a row of NaN for each row on which a function failed.
        Raises:
            RuntimeError: on all ranks, if a function fails all the time. A mistake in the use of a function raises that
                function's own error.
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
        """Return the smallest number of groups that has come on any rank."""
        with self._recorder.timed("wait_for_ranks"):
            return self._ranks.least(groups)


def _without(failed: Tensor, rewards: Tensor) -> Tensor:
    """Unscore the rows [rows, F] on which a tool or an environment failed."""
    return rewards.masked_fill(failed.to(rewards.device).unsqueeze(1), torch.nan)
