"""Starts the reward functions on the rows of a window, and waits for the rewards, together or group by group::

    announce: prompts ──► start: some rows are sampled ──► begin: all rows are sampled ──► GenerationBatch.scored

A *request* (`workers.Request`) collects the results of the reward functions while they run in the background.

Letters: B rows of this rank, N rows of all ranks, F reward functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled
from dash_trl.host import Host, rows_come_early
from dash_trl.rewards import (
    ROW,
    FailureWatch,
    RewardTeam,
    RunnerReward,
    raise_reward_error,
    unscored,
)
from dash_trl.rollout import RolloutBatch, ScoredRollouts
from dash_trl.tools import EnvironmentReward
from dash_trl.workers import Request


class GenerationBatch:
    """Rows that are sampled at once, and their rewards, which come in one or several parts.

    A generation batch is a window or, with dynamic sampling, one round of a window. A part has the same number of
    groups on every rank.

    Args:
        rewards: the rewards of the run.
        sampled: the B rows, as they were sampled.
        rollouts: the B rows.
        request: the results of the reward functions. `None`: the functions are called when `scored` waits for them.
    Attributes:
        sampled: as above.
        rollouts: as above; a callback or the collector may add to them before the rewards are awaited.
    """

    def __init__(
        self,
        rewards: "Rewards",
        sampled: Sampled,
        rollouts: RolloutBatch,
        request: Request | None,
    ):
        self.sampled, self.rollouts = sampled, rollouts
        self._rewards, self._request = rewards, request
        self._failed = None if sampled.turns is None else sampled.turns.failed
        self._known: Tensor | None = None

    def scored(self) -> ScoredRollouts:
        """Wait for all rewards, and return the rows."""
        # A copy, because callbacks may change the rewards, and the log must show the original ones.
        own = self.rewards()[self._rewards.host.ranks.own(len(self.rollouts))].to("cpu", copy=True)
        return self.rollouts.with_rewards(own)

    def scored_groups(self, groups_of_step: Callable[[], int]) -> Iterator[tuple[Tensor, ScoredRollouts, bool]]:
        """Wait for the rewards, and yield whole groups as their rewards come.

        All ranks yield the same number of groups at a time, because they have to run the same collectives and model
        passes. Before each yield, every rank waits until it has at least one complete group that it has not yielded.
        The rank with the fewest such groups determines how many groups all ranks yield. Groups of different optimizer
        steps (Mini) are not yielded together.

        Args:
            groups_of_step: function that returns the number of this rank's groups that the running optimizer step takes
                from the window. It is called when the optimizer step begins. Its result is clipped to the range from 1
                to the number of groups that are left.
        Yields:
            The indices of the rows in the batch, the rows, and True if the running optimizer step needs no further rows
            of the window, else False (`Part.ends_step`).
        """
        rewards, request, timed = self._rewards, self._request, self._rewards.host.recorder.timed
        assert request is not None, "`Rewards.begin` started the functions"
        groups = len(self.rollouts) // rewards.host.args.num_generations
        here: list[int] = []
        while groups:
            left = min(max(groups_of_step(), 1), groups)
            groups -= left
            while left:
                with timed("reward"), timed("wait_for_rewards"):
                    here += request.next_groups(wait=not here)
                    with timed("wait_for_ranks"):
                        count = min(-rewards.host.ranks.largest(-len(here)), left)
                now, here = here[:count], here[count:]
                left -= count
                rows = torch.tensor([row for group in now for row in request.rows_of(group)])
                own = rewards.team.rewards(request, rewards.functions, rows.tolist())
                own = own if self._failed is None else unscored(own, self._failed[rows])
                yield rows, self.rollouts.rows(rows).with_rewards(own), not left

    def rewards(self) -> Tensor:
        """Return the rewards of all ranks' rows, [N, F]. If they are awaited by group, call it after the last group.

        A reward is NaN if the function does not apply to the row. If a function failed on a row, all rewards of the row
        are NaN.
        """
        if self._known is None:
            host, sampled = self._rewards.host, self.sampled
            self._rewards.started = self._request
            rows = self.rollouts.examples, sampled.prompts, sampled.completions, sampled.completion_ids
            known = host._calculate_rewards(*rows)
            self._known = known if self._failed is None else unscored(known, host.ranks.gather(self._failed))
        return self._known


class Rewards:
    """Scores the windows of a run with its reward functions, and counts the failures of each function over the run.

    For every window, the trainer's `_calculate_rewards` is called. It calls `of_all`, which calls TRL's
    `_calculate_rewards`. So an override of `_calculate_rewards` in a subclass, TRL's logs and the count of failures see
    every window. If rewards are awaited by group, this call comes after the last group.

    Args:
        host: the trainer.
        functions: the F reward functions, in the order of the columns; see `rewards.watch`.
        names: the names of the reward functions.
        in_background: True = start the functions before the rewards are awaited, if every function scores each
            completion by itself. Rewards of environments do not count here, because they are known when a row ends. The
            functions start when all rows of a generation batch are sampled; if the sampler looks ahead, they start on
            rows as soon as these are sampled.

    Attributes:
        run_in_background: whether the functions run while the main thread does other work, until it awaits rewards.
        start_early: whether they also start on rows as soon as these are sampled.
        host: as above.
        functions: as above.
        names: as above.
        started: the request of the rows that `of_all` gets next. None = `of_all` starts the functions.
    """

    def __init__(self, host: Host, functions: Sequence[Any], names: Sequence[str], *, in_background: bool):
        self.host, self.functions, self.names = host, functions, names
        self._ranks = host.ranks
        self.team = RewardTeam([func for func in functions if isinstance(func, RunnerReward)], self._ranks.count)
        others = [func for func in functions if not isinstance(getattr(func, "func", None), EnvironmentReward)]
        self.run_in_background = in_background and bool(others) and all(isinstance(one, RunnerReward) for one in others)
        self.start_early = self.run_in_background and rows_come_early(host)
        self.started: Request | None = None
        self._early: dict[int, Request] = {}  # number of a generation batch → the request of its rewards
        self._failures = FailureWatch(functions, names)

    def announce(self, prompts: Prompts) -> None:
        """Prepare the request of a generation batch that is going to be sampled, if rewards start early.

        Args:
            prompts: the prompts of the generation batch.
        """
        if self.start_early:
            self._early[prompts.number] = self.team.begin(len(prompts.examples), self.host.args.num_generations)

    def start(self, prompts: Prompts, first: int, sampled: Sampled) -> None:
        """Start the reward functions on adjacent rows that have been sampled.

        Pass each row of a generation batch exactly once, in any order. Do nothing if rewards do not start early.

        Args:
            prompts: the prompts of the generation batch.
            first: index of the first row within the batch.
            sampled: the rows.
        """
        if (request := self._early.get(prompts.number)) is not None:
            own = prompts.examples[first : first + len(sampled.completions)]
            completions = deepcopy(sampled.completions)
            self.team.start(request, first, reward_rows(own, sampled.prompts, completions, sampled.completion_ids))

    def begin(self, number: int, sampled: Sampled, rollouts: RolloutBatch, *, by_group: bool) -> GenerationBatch:
        """Return the generation batch of rows that are all sampled. The batch, not this call, waits for their rewards.

        All ranks call this method at the same point. If the functions were not started early, they start in this call
        if the rewards are awaited by group or `run_in_background` is True, and otherwise in `GenerationBatch.scored`.

        Args:
            number: number of the generation batch; see `Prompts.number`.
            sampled: the B rows, as they were sampled.
            rollouts: the B rows.
            by_group: True = the rewards are awaited group by group, False = together.
        """
        request = self._early.pop(number, None)
        if request is None and (self.run_in_background or by_group):
            rows = rollouts.examples, sampled.prompts, sampled.completions, sampled.completion_ids
            request = self._started(rows, self.host.args.num_generations)
        return GenerationBatch(self, sampled, rollouts, request)

    def _started(self, rows: Sequence[Any], group_size: int) -> Request:
        """Start the functions on all rows of a batch; see `of_all` for `rows`."""
        request = self.team.begin(len(rows[0]), group_size)
        self._ranks.agree(self.team.start, request, 0, reward_rows(*rows))
        return request

    def of_all(
        self,
        call_functions: Callable[..., Tensor],
        *rows: Sequence[Any],
        training: bool,
        group_size: int | None = None,
        failed: Tensor | None = None,
    ) -> Tensor:
        """Call the reward functions, and unscore the rows on which a function failed.

        The trainer's `_calculate_rewards` and `MonteCarloValue` call it.

        Args:
            call_functions: TRL's `_calculate_rewards`. It returns [N, F]; NaN = the function does not apply, or failed.
            rows: the arguments of TRL's `_calculate_rewards`: examples, prompts, completions and completion ids.
            training: True = the rows are trained on. False = the rows belong to an evaluation, or to the Monte Carlo
                estimate of a value; failures on these rows do not end the run.
            group_size: the group size of these rows. `None`: the group size in the current mode.
            failed: [B] bool, True = a tool or the environment of the row failed, so the row is unscored whatever the
                functions return. `None`: there are no tools and no environments.
        Returns:
            [N, F]. If a function failed on a row, all F rewards of the row are NaN.
        Raises:
            RuntimeError: on all ranks, if a function is broken; see `FailureWatch`. A mistake of the user, such as a
                function that returns no list of rewards, raises a `RewardError` instead.
        """
        args = self.host.args
        size = group_size or (not training and args.num_generations_eval) or args.num_generations
        request, self.started = self.started, None
        with self.host.recorder.timed("reward", counts=training):
            request = request or self._started(rows, size)
            with self.team.answering(request):
                rewards = call_functions(*rows)
        self._ranks.agree(raise_reward_error, self.functions)
        rewards = self._failures.unscore(
            rewards, lambda rows: self._ranks.gather(rows).to(rows.device), counts=training
        )
        if training:
            self.host.recorder.log({f"rewards/{name}/failed": share for name, share in self._failures.failed.items()})
        return rewards if failed is None else unscored(rewards, self._ranks.gather(failed))

    def cancel(self) -> None:
        """Cancel all rewards that were announced or have begun."""
        self.team.cancel()
        self._early.clear()


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """Build one dict per row, from which per-sample functions get their arguments.

    Args:
        examples: for each row, the columns of the dataset.
        known: three lists: the prompts, the completions and the completion ids of the same rows.

    Returns:
        One dict per row: the row's columns of the dataset, and the keys `prompt`, `completion` and `completion_ids`.
    """
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]
