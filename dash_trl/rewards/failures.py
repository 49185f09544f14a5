"""Tells a reward that is "not applicable" from one that failed.

TRL turns a returned `None` into NaN, after which it looks like a NaN that the function computed. A watched function
remembers which rows failed (exception, timeout, NaN, ±inf), so that they can be unscored instead of counting as 0 or
being scored by the other functions alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class WatchedReward:
    """A reward function and what became of its last call.

    Attributes:
        failed: one bool per row of the last call.
        error: the exception of the last call, if it raised.
    """

    def __init__(self, func: Callable[..., Any], name: str):
        self.func = func
        self.name = self.__name__ = name
        self.failed: list[bool] = []
        self.error: Exception | None = None
        self._warned = False

    def __call__(self, **kwargs: Any) -> list[float | None]:
        rows = len(kwargs["completions"])
        try:
            output = self.func(**kwargs)
        except Exception as error:  # whatever a user's function may raise
            return self._unscore(error, rows)
        return self._observe(output, rows)

    def _observe(self, output: Any, rows: int) -> list[float | None]:
        self.error = None
        try:
            rewards = [None if value is None else float(value) for value in output]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The reward function '{self.name}' returned {output!r:.200}, not a list of numbers ({error}). "
                "Return one float (or None for 'not applicable') per completion."
            ) from error
        if len(rewards) != rows:
            raise ValueError(
                f"The reward function '{self.name}' returned {len(rewards)} rewards for {rows} completions, so they "
                "cannot be assigned. Return exactly one float (or None for 'not applicable') per completion."
            )
        self.failed = [value is not None and not math.isfinite(value) for value in rewards]
        if any(self.failed):
            values = sorted({str(value) for value, failed in zip(rewards, self.failed, strict=True) if failed})
            self._warn(f"returned {', '.join(values)} for {sum(self.failed)} of {rows} completions")
        return [None if failed else value for value, failed in zip(rewards, self.failed, strict=True)]

    def _unscore(self, error: Exception, rows: int) -> list[float | None]:
        self.error, self.failed = error, [True] * rows
        self._warn(f"raised {type(error).__name__}: {error} on a call with {rows} completions")
        return [None] * rows

    def _warn(self, what: str) -> None:
        if not self._warned:
            logger.warning(
                f"The reward function '{self.name}' {what}. These rows are unscored: they leave the batch instead of "
                "counting as 0. The metric filter/dropped_unscored counts them; this is said once.",
                exc_info=self.error,
            )
            self._warned = True


class WatchedAsyncReward(WatchedReward):
    """The same around a coroutine function; TRL runs these concurrently."""

    async def __call__(self, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        rows = len(kwargs["completions"])
        try:
            output = await self.func(**kwargs)
        except Exception as error:
            return self._unscore(error, rows)
        return self._observe(output, rows)


def watch(func: Any, name: str) -> Any:
    """`func` watched; a reward model (which has no way to say "not applicable") is returned as it is."""
    from trl.trainer.utils import is_async_callable  # here: importing trl takes seconds

    if isinstance(func, torch.nn.Module):
        return func
    return (WatchedAsyncReward if is_async_callable(func) else WatchedReward)(func, name)


def unscore_failed(
    rewards: Tensor, funcs: list[Any], never_scored: set[int], gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Set every row to NaN in which a function failed, even if another function returned a number.

    Args:
        rewards: [N, F], the rows of all ranks; NaN = not applicable or failed.
        funcs: F functions, watched, or reward models (for which NaN is a failure).
        never_scored: the functions that have not scored a single row since the start; updated.
        gather: concatenates this rank's rows with those of the others.
    Raises:
        RuntimeError: on all ranks, if a function raised on every row since the start: it is broken, not unlucky.
    """
    watched = {i: func for i, func in enumerate(funcs) if isinstance(func, WatchedReward)}
    rows = next((len(func.failed) for func in watched.values()), 0)
    if watched:
        local = torch.zeros(rows, 2 * len(funcs), dtype=torch.bool)
        for i, func in watched.items():
            local[:, i] = torch.tensor(func.failed)
            local[:, len(funcs) + i] = func.error is not None
        failed, raised = gather(local.to(rewards.device)).chunk(2, dim=1)
    else:
        failed = raised = torch.zeros_like(rewards, dtype=torch.bool)
    failed |= torch.stack([~rewards[:, i].isfinite() & (i not in watched) for i in range(len(funcs))], dim=1)
    for i in sorted(never_scored):
        if raised[:, i].all():
            raise RuntimeError(
                f"The reward function '{funcs[i].name}' raised on every completion of the first batch, so there is "
                "nothing to train on. Its exception is above; on the other ranks, see rank by rank."
            ) from funcs[i].error
    never_scored.clear()
    rewards[failed.any(dim=1)] = torch.nan
    return rewards
