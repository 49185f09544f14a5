"""Distinguishes "this reward function does not apply" from "this reward function failed", which are both NaN for TRL.

Training leaves out the rows on which a function failed (exception, time-out, NaN, ±inf).
"""

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_trl.rewards.forms import Score

logger = logging.getLogger(__name__)

# If a function only fails, and gives no score, in this number of batches in a row, the run ends. If it fails in fewer
# batches, the cause may be a temporary outage.
BROKEN_AFTER = 10


# Of a function for a row. The value None: it does not apply. NaN, ±inf or an exception: it has failed.
Outcome = Score | BaseException


def number(outcome: Outcome) -> float:
    """Return the reward; NaN if the function does not apply or has failed."""
    value = outcome.value if isinstance(outcome, Score) else None
    return math.nan if value is None or math.isinf(value) else value


def has_failed(outcome: Outcome) -> bool:
    return isinstance(outcome, BaseException) or outcome.value is not None and math.isnan(number(outcome))


def failure_of(outcomes: Sequence[Outcome]) -> tuple[str, BaseException | None]:
    """Describe the failures among outcomes, to follow "it" in a message; also return the first failure's exception."""
    failures = list(filter(has_failed, outcomes))
    if not failures:
        return "failed on another rank", None
    first = failures[0]
    error = None
    if isinstance(first, Score):
        why = f"returned {first.value}"
    else:  # its own `__str__` may fail
        error = first
        trace = error.__traceback__  # of which those of the call, in `forms`, are of interest
        while trace is not None and trace.tb_frame.f_globals["__name__"] != Score.__module__:
            trace = trace.tb_next
        error.__traceback__ = trace or error.__traceback__
        why = f"raised {type(error).__name__}: {traceback.TracebackException.from_exception(error)}"
    return f"failed on {len(failures)} of {len(outcomes)} completions; on the first of them it {why}", error


def unscored(rewards: Tensor, failed: Tensor) -> Tensor:
    """Set all rewards of a row to NaN if a function, a tool or the environment failed on the row.

    Args:
        rewards: [N, F], N rows and F reward functions.
        failed: [N, F] or [N] bool, True = failed.

    Returns:
        [N, F].
    """
    on_row = failed.to(rewards.device).unsqueeze(-1).flatten(1).any(dim=1, keepdim=True)
    return rewards.masked_fill(on_row, torch.nan)


class RewardError(ValueError):
    """A reward function did not return a list with one reward per row."""


class WatchedReward:
    """Calls a reward function of TRL's form, and keeps the outcomes of the last call, one per row.

    A `RewardError` among them ends the run after TRL's method, in which the other ranks would wait for this one.
    """

    def __init__(self, func: Callable[..., Any], name: str):
        self.func = func
        self.name = self.__name__ = name
        self.outcomes: Sequence[Outcome] = []

    def __call__(self, **kwargs: Any) -> list[float | None]:
        """Call the function with a batch of TRL's; return one reward per row, None = not applicable or failed."""
        rows = len(kwargs["completions"])
        try:
            outcomes = self._read(self.func(**kwargs), rows)
        except Exception as error:  # a user's function, and what it returns, may raise anything
            outcomes = [error] * rows
        return self._keep(outcomes)

    def _read(self, output: Any, rows: int) -> list[Outcome]:
        try:
            outcomes: list[Outcome] = [Score(None if value is None else float(value)) for value in output]
            if len(outcomes) != rows:
                raise ValueError(f"{len(outcomes)} rewards for {rows} completions")
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(
                f"The reward function '{self.name}' returned {output!r:.200}, but it has to return exactly one "
                f"float (or None for 'not applicable') per completion: {error}."
            ) from error
        return outcomes

    def _keep(self, outcomes: Sequence[Outcome]) -> list[float | None]:
        self.outcomes = outcomes
        return [None if math.isnan(reward := number(one)) else reward for one in outcomes]


class WatchedAsyncReward(WatchedReward):
    """`WatchedReward` for a coroutine function, which TRL runs concurrently with other coroutine functions."""

    async def __call__(self, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        rows = len(kwargs["completions"])
        try:
            outcomes = self._read(await self.func(**kwargs), rows)
        except Exception as error:
            outcomes = [error] * rows
        return self._keep(outcomes)


def distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur again (f, f#2), which TRL would log as one."""
    return [f"{one}#{names[: i + 1].count(one)}" if one in names[:i] else one for i, one in enumerate(names)]


def watch(func: Any, name: str) -> Any:
    """Wrap a reward function in a `WatchedReward`; but not a model: it cannot return None, so its NaN is a failure."""
    from trl.trainer.utils import is_async_callable  # imported here, because importing trl takes seconds

    if isinstance(func, WatchedReward):
        func.name = name
    if isinstance(func, (torch.nn.Module, WatchedReward)):
        return func
    return (WatchedAsyncReward if is_async_callable(func) else WatchedReward)(func, name)


def raise_reward_error(funcs: Sequence[object]) -> None:
    """Raise the first `RewardError` among the outcomes of the watched functions, which ends the run."""
    for func in funcs:
        for outcome in getattr(func, "outcomes", ()):
            if isinstance(outcome, RewardError):
                raise outcome


class FailureWatch:
    """Unscores the rows on which reward functions failed, and ends the run if a function is broken.

    A function is broken if it raised an exception on every row of the first batch, or if in `BROKEN_AFTER` batches in a
    row it failed on every row to which it applied. A batch in which it applied to no row does not count.

    Attributes:
        failed: name → share of the last counted batch on which a function failed.
    """

    def __init__(self, funcs: Sequence[object], names: Sequence[str]):
        self._funcs = funcs
        self._names = names
        self.failed: dict[str, float] = {}
        self._told = set[str]()  # functions whose first failure was logged
        self._first = True
        self._in_a_row = [0] * len(funcs)  # numbers of batches in a row with failures and no score

    def unscore(self, rewards: Tensor, gather: Callable[[Tensor], Tensor], *, counts: bool = True) -> Tensor:
        """Unscore the failed rows of a batch.

        Args:
            rewards: [N, F], the rows of all ranks; NaN = not applicable or failed.
            gather: concatenates the rows of all ranks.
            counts: False = the batch cannot end the run, as in an evaluation.

        Returns:
            [N, F]; all F rewards of a failed row are NaN.

        Raises:
            RuntimeError: on all ranks, if a function is broken.
        """
        failed = ~rewards.isfinite()
        for i, (func, name) in enumerate(zip(self._funcs, self._names, strict=True)):
            has_score = not failed[:, i].all()
            # How each row has failed: 0 = not, 1 = NaN or ±inf, 2 = an exception.
            kinds = failed[:, i].long()
            outcomes: Sequence[Outcome] = [*map(Score, rewards[:, i].tolist())]
            if isinstance(func, WatchedReward):
                outcomes = func.outcomes
                own = [has_failed(one) + isinstance(one, BaseException) for one in outcomes]
                kinds = gather(torch.tensor(own))
                failed[:, i] = kinds > 0
            said, error = failure_of(outcomes)
            share = failed[:, i].cpu().double().mean().item()
            if share and name not in self._told:
                self._told.add(name)
                logger.warning(
                    f"The reward function '{name}' {said}. These completions ({share:.1%} of the batch) are "
                    "unscored: they do not count as 0, and training leaves them out. Others may be easier: watch "
                    f"rewards/{name}/failed. This warning is shown once per function.",
                    exc_info=error,
                )
            if not counts:
                continue
            self.failed[name] = share
            self._in_a_row[i] = 0 if has_score else self._in_a_row[i] + (share > 0)
            where = ""
            if self._first and (kinds == 2).all():
                where = "of the first batch"
            elif self._in_a_row[i] == BROKEN_AFTER:
                where = f"that it applied to in {BROKEN_AFTER} batches in a row"
            if where:
                raise RuntimeError(
                    f"The reward function '{name}' failed on every completion {where}. Its last failure: it {said}. "
                    "Training cannot learn from it: correct it, or remove it from reward_funcs. If it scores a batch, "
                    "let it score one completion, reward(completion, ...): then a failure leaves out its row only."
                ) from error
        self._first &= not counts
        return unscored(rewards, failed)
