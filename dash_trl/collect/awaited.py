"""Starts the reward functions on the rows of a window, and waits for the rewards, together or group by group::

    some rows have been sampled ──► EarlyRewards ──┐
    all rows have been sampled ────────────────────┴──► begin ──► the request ──► Together, ByGroup ──► parts ──► report

A *request* (`workers.Request`) collects the results of the reward functions while they run in the background.

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
    """The rows that reward functions score: the arguments of TRL's `_calculate_rewards`, and the rows that have failed.

    Attributes:
        examples: for each of the B rows, its row of the dataset.
        prompts: B texts or conversations.
        completions: B texts or lists of messages.
        completion_ids: B lists of token ids.
        failed: [B] bool, True = a tool or the environment of the row failed, so the row is unscored whatever the
            functions return. `None`: there are no tools and no environments.
    """

    examples: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    failed: Tensor | None = None


class Awaited(Protocol):
    """Interface with which the collector waits for the rewards of one generation batch, in one or several parts.

    A part has the same number of groups on every rank. A reward is NaN if the function does not apply to the row. If a
    function failed on a row, all rewards of the row are NaN.
    """

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Wait for the rewards, and yield them as they come.

        Yields:
            The indices of this rank's rows in the part (whole groups, or all rows); the rewards of these rows, [rows,
            F]; and True if the running optimizer step needs no further part of this window, else False
            (`Part.ends_step`).
        """

    def report(self) -> Tensor:
        """Return the rewards of all ranks' rows, [N, F]. Call it only after all parts have come."""


class Together:
    """Awaits all rewards of a window together, as one part.

    Args:
        report: function that calls all reward functions, waits for them and returns [N, F].
        own: slice of this rank's rows among the N rows of all ranks.
    """

    def __init__(self, report: Callable[[], Tensor], own: slice):
        self._report, self._own = report, own
        self._rewards: Tensor | None = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        # A copy, because callbacks may change the rewards, and the log must show the original ones.
        rewards = self.report()[self._own].to("cpu", copy=True)
        yield torch.arange(len(rewards)), rewards, True  # the part is the whole window

    def report(self) -> Tensor:
        if self._rewards is None:
            self._rewards = self._report()
        return self._rewards


class ByGroup:
    """Awaits the rewards of a window group by group.

    Args:
        arriving: iterator that waits for rewards. Each item has the indices of the rows whose rewards have come since
            the last item, and a bool, see `Part.ends_step`. `arrivals` makes this iterator.
        rewards: function that takes the indices of rows and returns their rewards, [rows, F].
        report: as in `Together`. It is called after all rewards have come.
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
    """Scores the windows of a run with its reward functions, and counts the failures of each function over the run.

    For every window, the trainer's `_calculate_rewards` is called. It calls `of_all`, which calls TRL's
    `_calculate_rewards`. So an override of `_calculate_rewards` in a subclass, TRL's logs and the count of failures see
    every window. If rewards are awaited by group, this call comes after the last group.

    Args:
        ranks: the ranks of the run.
        recorder: logs figures and seconds.
        functions: the F reward functions, in the order of the columns; see `rewards.watch`.
        names: the names of the reward functions.
        num_generations: number of rows of a group in training.
        group_size: function that returns the group size in the current mode: training or evaluation.
        in_background: True = start the functions when all rows of a generation batch are sampled, before the rewards
            are awaited, if every function scores each completion by itself. Otherwise, `in_background` and `early` have
            no effect. Rewards of environments do not count here, because they are known when a row ends.
        early: True = start the functions on rows as soon as these rows are sampled.
        calculate: the trainer's `_calculate_rewards`. It takes this rank's rows and returns [N, F].
        groups_of_step: function that returns the number of this rank's groups that the running optimizer step takes
            from the window.

    Attributes:
        run_in_background: whether the functions run while the main thread does other work, until it awaits rewards.
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
        in_background: bool,
        early: bool,
        calculate: Callable[..., Tensor],
        groups_of_step: Callable[[], int],
    ):
        self._ranks, self._recorder, self._functions = ranks, recorder, functions
        self._num_generations, self._calculate, self._groups_of_step = num_generations, calculate, groups_of_step
        runners = [func for func in functions if isinstance(func, RunnerReward)]
        self.team = RewardTeam(runners, ranks.count, group_size)
        others = [func for func in functions if not isinstance(getattr(func, "func", None), EnvironmentReward)]
        self.run_in_background = in_background and bool(others) and all(map(scores_alone, others))
        self.early = EarlyRewards(self.team, num_generations, wanted=early and self.run_in_background)
        self._failures = FailureWatch(functions, names)

    def begin(self, window: int, batch: RewardBatch, *, by_group: bool) -> Awaited:
        """Return the object that waits for the rewards of a generation batch whose rows are all sampled.

        All ranks call this method at the same point. If the functions were not started early, they start in this call
        if the rewards are awaited by group or `run_in_background` is True, and otherwise when the caller iterates over
        `Awaited.parts`.

        Args:
            window: number of the generation batch; see `Prompts.number`.
            batch: the rows of the generation batch.
            by_group: True = await the rewards group by group, False = together.
        """
        arguments = batch.examples, batch.prompts, batch.completions, batch.completion_ids
        request = self.early.claim(window)
        if request is None and (by_group or self.run_in_background):
            request = self._ranks.agree(lambda: self._start(reward_rows(*arguments)))

        def report() -> Tensor:
            if request is not None:  # TRL's calls of the functions then return this request's results
                self.team.hand_over(request, batch.completions)
            rewards = self._calculate(*arguments)
            return rewards if batch.failed is None else _without(self._ranks.gather(batch.failed), rewards)

        if not by_group:
            return Together(report, self._ranks.own(len(batch.examples)))
        assert request is not None, "the request was started above"
        groups = len(batch.examples) // self._num_generations
        waiting = arrivals(request, groups, self._least_of_ranks, self._groups_of_step)
        for phase in ("wait_for_rewards", "reward"):
            waiting = self._recorder.timed_each(phase, waiting)

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
        """Call the reward functions, and unscore the rows on which a function failed.

        The trainer's `_calculate_rewards` and `MonteCarloValue` call it.

        Args:
            call_functions: TRL's `_calculate_rewards`, with its arguments. It returns [N, F]; NaN = the function does
                not apply, or failed.
            training: True = the rows are trained on. False = the rows belong to an evaluation, or to the Monte Carlo
                estimate of a value; failures on these rows do not end the run.
            group_size: the group size of these rows. `None`: the group size in the current mode.
            failed: see `RewardBatch.failed`.
        Returns:
            [N, F]. If a function failed on a row, all F rewards of the row are NaN.
        Raises:
            RuntimeError: on all ranks, if a function is broken; see `FailureWatch`. A mistake of the user, such as a
                function that returns no list of rewards, raises `WatchedReward.mistake` instead.
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
        """Return the smallest of all ranks' numbers of groups. `wait_for_ranks` logs the seconds of waiting.

        Args:
            groups: number of this rank's groups that have all rewards and are not yet yielded.
        """
        with self._recorder.timed("wait_for_ranks"):
            return self._ranks.least(groups)


def _without(failed: Tensor, rewards: Tensor) -> Tensor:
    """Set all rewards of a row to NaN if a tool or environment failed on it: failed [rows] bool, rewards [rows, F]."""
    return rewards.masked_fill(failed.to(rewards.device).unsqueeze(1), torch.nan)
