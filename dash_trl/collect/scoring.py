"""Starts the reward functions on the rows of a window, and waits for the rewards, together or group by group::

    start: some rows are sampled ──► begin: all rows are sampled ──► of_batch, or scored_groups

A *request* (`rewards.Request`) collects the results of the reward functions while they run in the background.

Letters: B rows of this rank, N rows of all ranks, F reward functions.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled
from dash_trl.host import Host
from dash_trl.rewards import (
    ROW,
    FailureWatch,
    Request,
    RunnerReward,
    raise_reward_error,
    unscored,
)
from dash_trl.rollout import RolloutBatch
from dash_trl.tools import EnvironmentReward


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
        return (
            self.rollouts.examples,
            self.sampled.prompts,
            self.sampled.completions,
            deepcopy(self.sampled.completion_ids),  # functions may change them
        )


@dataclass(eq=False)
class Rewards:
    """Scores the windows of a run with its reward functions, and counts the failures of each function over the run.

    Every window goes through the trainer's `_calculate_rewards`, which calls `of_all`, which calls TRL's
    `_calculate_rewards`. So overrides in a subclass, TRL's logs and the count of failures see every window. If rewards
    are awaited by group, this call comes after the last group.

    Attributes:
        functions: the F reward functions, in the order of the columns; see `rewards.watch`.
        start_early: True = start the functions on rows as soon as these are sampled, if every function scores each
            completion by itself. Rewards of environments are known when a row ends, so they do not matter here.
        started: the request of the rows that `of_all` gets next. `None`: `of_all` starts or calls the functions.
    """

    host: Host
    functions: Sequence[Any]
    names: Sequence[str]
    start_early: bool

    def __post_init__(self) -> None:
        self._ranks = self.host.ranks
        self._own = [func for func in self.functions if isinstance(func, RunnerReward)]
        for func in self._own:
            func.runner.ranks = self._ranks.count
        self._begun = weakref.WeakSet[Request]()
        others = [func for func in self.functions if not isinstance(getattr(func, "func", None), EnvironmentReward)]
        all_run = bool(others) and all(isinstance(one, RunnerReward) for one in others)
        self.start_early &= all_run
        self.started: Request | None = None
        self._early: dict[int, Request] = {}  # number of a generation batch → the request of its rewards
        self._failures = FailureWatch(self.functions, self.names)

    def of_prompts(self, prompts: Prompts) -> Request:
        """Return the request of a generation batch whose rewards start early. Any thread may call this."""
        if prompts.number not in self._early:
            self._early.setdefault(prompts.number, self._new_request(len(prompts.examples)))
        return self._early[prompts.number]

    def start(self, prompts: Prompts, first: int, sampled: Sampled) -> None:
        """Start the reward functions on adjacent sampled rows, from index `first` of the batch on, if rewards start
        early.

        Pass each row of a generation batch exactly once, in any order.
        """
        if not self.start_early:
            return
        request = self.of_prompts(prompts)
        own = prompts.examples[first : first + len(sampled.completions)]
        known = deepcopy((sampled.completions, sampled.completion_ids))  # functions may change them
        request.start(first, reward_rows(own, sampled.prompts, *known))

    def begin(self, number: int, sampled: Sampled, rollouts: RolloutBatch, *, by_group: bool) -> GenerationBatch:
        """Return the generation batch of rows that are all sampled, without waiting for their rewards.

        All ranks call this at the same point. If the functions have not started early, they start now if the rewards
        are awaited by group; otherwise `of_batch` starts them.

        Args:
            number: see `Prompts.number`.
            by_group: True = the rewards are awaited group by group.
        """
        batch = GenerationBatch(sampled, rollouts, self._early.pop(number, None))
        if batch.request is None and by_group:
            batch.request = self._started(batch.rows)
        return batch

    def scored_groups(
        self, request: Request, groups_of_step: Callable[[], int]
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Wait for the rewards of a generation batch, and yield whole groups as their rewards come.

        All ranks yield the same number of groups at a time, because they run the same collectives and model passes:
        every rank waits for a complete group, and the rank with the fewest determines the number. Groups of different
        optimizer steps (Mini) are not yielded together.

        Args:
            groups_of_step: function that returns the number of this rank's groups that the running optimizer step
                takes. It is called when the step begins; its result is clipped to 1 … the groups that are left.
        Yields:
            The indices of the rows in the batch, their rewards [·, F], and `Part.ends_step`.
        """
        timed = self.host.recorder.timed
        groups = request.groups
        here: list[int] = []
        while groups:
            left = min(max(groups_of_step(), 1), groups)
            groups -= left
            while left:
                with timed("reward"), timed("wait_for_rewards"):
                    here += request.next_groups(wait=not here)
                    self._ranks.agree(request.check)
                    count = min(-self._ranks.largest(-len(here)), left)
                rows = torch.tensor([row for group in here[:count] for row in request.rows_of(group)])
                here = here[count:]
                left -= count
                yield rows, request.rewards(self.functions, rows.tolist()), not left

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

    def _started(self, rows: Sequence[Any]) -> Request:
        request = self._new_request(len(rows[0]))
        self._ranks.agree(request.start, 0, reward_rows(*rows))
        return request

    def _new_request(self, rows: int) -> Request:
        request = Request(self._own, rows, self.host.args.num_generations)
        self._begun.add(request)
        return request

    def of_all(self, call_functions: Callable[..., Tensor], *rows: Sequence[Any], training: bool) -> Tensor:
        """Call the reward functions, and unscore the rows on which a function failed. `MonteCarloValue` calls it, too.

        Args:
            call_functions: TRL's `_calculate_rewards`. It returns [N, F]; NaN = the function does not apply, or failed.
            rows: the arguments of TRL's `_calculate_rewards`: examples, prompts, completions and completion ids.
            training: False = the rows belong to an evaluation or a Monte Carlo estimate, so failures do not end the
                run.
        Returns:
            [N, F]; NaN in all F columns if a function failed on the row.
        Raises:
            RuntimeError: on all ranks, if a function is broken; see `FailureWatch`. A mistake of the user, such as a
                function that returns no list, raises a `RewardError`.
        """
        request = self.started
        self.started = None
        with self.host.recorder.timed("reward", counts=training):
            if request is None and self._own:
                request = self._started(rows)
            with nullcontext() if request is None else request.answering():
                rewards = call_functions(*rows)
        self._ranks.agree(raise_reward_error, self.functions)
        rewards = self._failures.unscore(rewards, self._ranks.gather, counts=training)
        if training:
            self.host.recorder.log({f"rewards/{name}/failed": share for name, share in self._failures.failed.items()})
        return rewards

    def cancel(self) -> None:
        for request in self._begun:
            request.cancel()
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
