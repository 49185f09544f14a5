"""Starts the reward functions on the rows of a window, and waits for the rewards, together or group by group::

    start: some rows are sampled ──► begin: all rows are sampled ──► scored

A *request* (`workers.Request`) collects the results of the reward functions while they run in the background.

Letters: B rows of this rank, N rows of all ranks, F reward functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
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


@dataclass(eq=False)
class GenerationBatch:
    """Rows that are sampled at once, and their rewards: a window or, with dynamic sampling, one round of a window.

    Attributes:
        rollouts: the B rows; callbacks may change them before the rewards are awaited.
        request: the results of the reward functions. `None`: `Rewards.of_batch` calls the functions.
        rewards: [N, F], the rewards of all ranks' rows. `None`: they are not known yet.
    """

    sampled: Sampled
    rollouts: RolloutBatch
    request: Request | None
    rewards: Tensor | None = None

    @property
    def rows(self) -> tuple[Sequence[Any], ...]:
        """The arguments of TRL's `_calculate_rewards`: examples, prompts, completions and completion ids."""
        return self.rollouts.examples, self.sampled.prompts, self.sampled.completions, self.sampled.completion_ids


@dataclass(eq=False)
class Rewards:
    """Scores the windows of a run with its reward functions, and counts the failures of each function over the run.

    Every window goes through the trainer's `_calculate_rewards`, which calls `of_all`, which calls TRL's
    `_calculate_rewards`. So overrides in a subclass, TRL's logs and the count of failures see every window. If rewards
    are awaited by group, this call comes after the last group.

    Attributes:
        functions: the F reward functions, in the order of the columns; see `rewards.watch`.
        in_background: True = start the functions before the rewards are awaited, if every function scores each
            completion by itself. Rewards of environments are known when a row ends, so they do not matter here.
        run_in_background: whether the functions run while the main thread does other work.
        start_early: whether they start on rows as soon as these are sampled.
        started: the request of the rows that `of_all` gets next. `None`: `of_all` starts the functions.
    """

    host: Host
    functions: Sequence[Any]
    names: Sequence[str]
    in_background: bool

    def __post_init__(self) -> None:
        self._ranks = self.host.ranks
        runner_rewards = [func for func in self.functions if isinstance(func, RunnerReward)]
        self.team = RewardTeam(runner_rewards, self._ranks.count)
        others = [func for func in self.functions if not isinstance(getattr(func, "func", None), EnvironmentReward)]
        all_run = bool(others) and all(isinstance(one, RunnerReward) for one in others)
        self.run_in_background = self.in_background and all_run
        self.start_early = self.run_in_background and rows_come_early(self.host)
        self.started: Request | None = None
        self._early: dict[int, Request] = {}  # number of a generation batch → the request of its rewards
        self._failures = FailureWatch(self.functions, self.names)

    def start(self, prompts: Prompts, first: int, sampled: Sampled) -> None:
        """Start the reward functions on adjacent sampled rows, from index `first` of the batch on, if rewards start
        early.

        Pass each row of a generation batch exactly once, in any order.
        """
        if not self.start_early:
            return
        request = self._early.get(prompts.number)
        if request is None:
            request = self.team.begin(len(prompts.examples), self.host.args.num_generations)
            self._early[prompts.number] = request
        own = prompts.examples[first : first + len(sampled.completions)]
        completions = deepcopy(sampled.completions)
        self.team.start(request, first, reward_rows(own, sampled.prompts, completions, sampled.completion_ids))

    def begin(self, number: int, sampled: Sampled, rollouts: RolloutBatch, *, by_group: bool) -> GenerationBatch:
        """Return the generation batch of rows that are all sampled, without waiting for their rewards.

        All ranks call this at the same point. The functions start now if they run in the background or the rewards are
        awaited by group; otherwise `of_batch` starts them.

        Args:
            number: see `Prompts.number`.
            by_group: True = the rewards are awaited group by group.
        """
        batch = GenerationBatch(sampled, rollouts, self._early.pop(number, None))
        if batch.request is None and (self.run_in_background or by_group):
            batch.request = self._started(batch.rows, self.host.args.num_generations)
        return batch

    def scored(self, batch: GenerationBatch) -> ScoredRollouts:
        """Wait for all rewards of a batch, and return its rows."""
        # A copy, because callbacks may change the rewards, and the log must show the original ones.
        own = self.of_batch(batch)[self._ranks.own(len(batch.rollouts))].to("cpu", copy=True)
        return batch.rollouts.with_rewards(own)

    def scored_groups(
        self, batch: GenerationBatch, groups_of_step: Callable[[], int]
    ) -> Iterator[tuple[Tensor, ScoredRollouts, bool]]:
        """Wait for the rewards of a batch, and yield whole groups as their rewards come.

        All ranks yield the same number of groups at a time, because they run the same collectives and model passes:
        every rank waits for a complete group, and the rank with the fewest determines the number. Groups of different
        optimizer steps (Mini) are not yielded together.

        Args:
            groups_of_step: function that returns the number of this rank's groups that the running optimizer step
                takes. It is called when the step begins; its result is clipped to 1 … the groups that are left.
        Yields:
            The indices of the rows in the batch, the rows, and `Part.ends_step`.
        """
        request = batch.request
        failed = batch.sampled.failed
        timed = self.host.recorder.timed
        assert request is not None, "`begin` started the functions"
        groups = len(batch.rollouts) // self.host.args.num_generations
        here: list[int] = []
        while groups:
            left = min(max(groups_of_step(), 1), groups)
            groups -= left
            while left:
                with timed("reward"), timed("wait_for_rewards"):
                    here += request.next_groups(wait=not here)
                    with timed("wait_for_ranks"):
                        count = min(-self._ranks.largest(-len(here)), left)
                rows = torch.tensor([row for group in here[:count] for row in request.rows_of(group)])
                here = here[count:]
                left -= count
                own = self.team.rewards(request, self.functions, rows.tolist())
                own = own if failed is None else unscored(own, failed[rows])
                yield rows, batch.rollouts.rows(rows).with_rewards(own), not left

    def of_batch(self, batch: GenerationBatch) -> Tensor:
        """Return the rewards of all ranks' rows, [N, F]. If they are awaited by group, call it after the last group.

        NaN = the function does not apply to the row, or any function failed on it.
        """
        if batch.rewards is None:
            failed = batch.sampled.failed
            self.started = batch.request
            known = self.host._calculate_rewards(*batch.rows)
            batch.rewards = known if failed is None else unscored(known, self._ranks.gather(failed))
        return batch.rewards

    def _started(self, rows: Sequence[Any], group_size: int) -> Request:
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
        """Call the reward functions, and unscore the rows on which a function failed. `MonteCarloValue` calls it, too.

        Args:
            call_functions: TRL's `_calculate_rewards`. It returns [N, F]; NaN = the function does not apply, or failed.
            rows: the arguments of TRL's `_calculate_rewards`: examples, prompts, completions and completion ids.
            training: False = the rows belong to an evaluation or a Monte Carlo estimate, so failures do not end the
                run.
            group_size: the group size of these rows. `None`: the group size in the current mode.
            failed: [B] bool, True = a tool or the environment of the row failed, so the row is unscored.
        Returns:
            [N, F]; NaN in all F columns if a function failed on the row.
        Raises:
            RuntimeError: on all ranks, if a function is broken; see `FailureWatch`. A mistake of the user, such as a
                function that returns no list, raises a `RewardError`.
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
        self.team.cancel()
        self._early.clear()


def reward_rows(examples: Sequence[Mapping[str, Any]], *known: Sequence[Any]) -> list[dict[str, Any]]:
    """Build the dicts from which per-sample functions get their arguments.

    Args:
        examples: for each row, the columns of the dataset.
        known: the prompts, the completions and the completion ids of the same rows.

    Returns:
        For each row, its columns and the keys `prompt`, `completion` and `completion_ids`.
    """
    return [{**example, **dict(zip(ROW, row, strict=True))} for example, *row in zip(examples, *known, strict=True)]
