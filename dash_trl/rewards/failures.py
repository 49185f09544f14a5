"""Tells a reward that is "not applicable" from one that failed.

TRL turns a returned `None` into NaN, after which it looks like a NaN that the function computed. A watched function
remembers which rows failed (exception, timeout, NaN, ±inf), so that they can be unscored instead of counting as 0 or
being scored by the other functions alone.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.1  # of a window's rows: so many are hardly bad luck, and the others may be another kind of rows
BROKEN_AFTER = 10  # batches in a row without one score: the first few may be an outage


def has_failed(reward: float | None) -> bool:
    """Whether a function failed on a completion, which is NaN or ±inf here. None is "not applicable"."""
    return reward is not None and not math.isfinite(reward)


def unscored(rewards: Tensor, failed: Tensor) -> Tensor:
    """[N, F] rewards, with NaN in every row in which a function failed, even if another one returned a number."""
    return rewards.masked_fill(failed.any(dim=1, keepdim=True), torch.nan)


class WatchedReward:
    """A reward function and what became of its last call.

    Attributes:
        failed: one bool per row of the last call. raised: where by an exception.
        failure: what went wrong in it, in words; empty if nothing did.
        error: its exception, or the first one, if there was any.
        mistake: what ends the run, as that it returned no list of rewards. It waits for `raise_mistakes`: raised within
            TRL's method on one rank, it would leave the others in the collective that follows.
    """

    def __init__(self, func: Callable[..., Any], name: str):
        self.func = func
        self.name = self.__name__ = name
        self.failed: list[bool] = []
        self.raised: list[bool] = []
        self.failure = ""
        self.error: BaseException | None = None
        self.mistake: Exception | None = None
        self._warned = False

    def __call__(self, **kwargs: Any) -> list[float | None]:
        rows = len(kwargs["completions"])
        try:
            output = self.func(**kwargs)
        except Exception as error:  # whatever a user's function may raise
            return self._unscore(error, rows)
        return self._observe(output, rows)

    def _observe(self, output: Any, rows: int) -> list[float | None]:
        self.error, self.failure, self.mistake, self.raised = None, "", None, [False] * rows
        try:
            output = list(output) if isinstance(output, Iterable) else output
        except Exception as error:  # of a generator
            return self._unscore(error, rows)
        try:
            rewards = [None if value is None else float(value) for value in output]
            wrong = "" if len(rewards) == rows else f"{len(rewards)} rewards for {rows} completions"
        except (TypeError, ValueError, OverflowError) as error:
            self.error, wrong = error, f"{output!r:.200}, not a list of numbers ({error})"
        except (Exception, SystemExit) as error:  # a value's own `__float__` may raise anything
            return self._unscore(error, rows)
        if wrong:
            self.failed = [True] * rows
            self.mistake = ValueError(
                f"The reward function '{self.name}' returned {wrong}. Return exactly one float (or None for 'not "
                "applicable') per completion."
            )
            return [None] * rows
        self.failed = [has_failed(value) for value in rewards]
        if any(self.failed):
            self._warn(f"returned {_named(rewards)} for {sum(self.failed)} of {rows} completions")
        return [None if has_failed(value) else value for value in rewards]

    def _unscore(self, error: BaseException, rows: int) -> list[float | None]:
        self.error, self.mistake, self.failed, self.raised = error, None, [True] * rows, [True] * rows
        self._warn(f"{described(error)} on a call with {rows} completions")
        return [None] * rows

    def _warn(self, failure: str) -> None:
        self.failure = failure
        if not self._warned:
            logger.warning(
                f"The reward function '{self.name}' {failure}. These rows are unscored: they leave the batch instead "
                "of counting as 0. The metric filter/dropped_unscored counts them; this is said once.",
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
    """`func` watched; one that is, and a model (which has no way to say "not applicable"), is returned as it is."""
    from trl.trainer.utils import is_async_callable  # here: importing trl takes seconds

    if isinstance(func, (torch.nn.Module, WatchedReward)):
        return func
    return (WatchedAsyncReward if is_async_callable(func) else WatchedReward)(func, name)


def raise_mistakes(funcs: Sequence[Any]) -> None:
    """Raise what a watched function returned in its last call in place of rewards, if it did."""
    for func in funcs:
        if isinstance(func, WatchedReward) and func.mistake is not None:
            raise func.mistake from (None if func.error is func.mistake else func.error)


def failed_rows(funcs: Sequence[Any], rewards: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """[N, F] bool each, the rows of all ranks in the last call: the function failed; it raised.

    Args:
        funcs: watched functions, or reward models (for which NaN and ±inf are failures).
        rewards: [N, F], the rows of all ranks; NaN = not applicable or failed.
        gather: concatenates this rank's rows with those of the others.
    """
    watched = [i for i, func in enumerate(funcs) if isinstance(func, WatchedReward)]
    failed, raised = ~rewards.isfinite(), torch.zeros_like(rewards, dtype=torch.bool)  # as it is for reward models
    if watched:
        local = torch.tensor([*(funcs[i].failed for i in watched), *(funcs[i].raised for i in watched)])
        failed[:, watched], raised[:, watched] = gather(local.T.contiguous().to(rewards.device)).chunk(2, dim=1)
    return failed, raised


class FailureWatch:
    """The failures of all reward functions on all ranks, batch after batch: which rows they unscore, and when to stop.

    A function is broken, not unlucky, that raised on every row of the first batch, or that failed on every row that it
    applied to in `BROKEN_AFTER` batches in a row. A batch in which it applied to no row says nothing.

    Args:
        funcs: as in `failed_rows`. names: TRL's, of each.
    Attributes:
        failed: name → share of the last batch's completions that it failed on; of functions that ever failed.
    """

    def __init__(self, funcs: Sequence[Any], names: Sequence[str]):
        self._funcs, self._names = list(funcs), list(names)
        self.failed: dict[str, float] = {}
        self._first = True
        self._warned: set[str] = set()
        self._in_a_row = torch.zeros(len(self._funcs))  # batches in which a function failed wherever it applied

    def unscore(self, rewards: Tensor, gather: Callable[[Tensor], Tensor], *, counts: bool = True) -> Tensor:
        """The rewards as `unscored` gives them.

        Args:
            rewards, gather: as in `failed_rows`.
            counts: towards a stop; a batch of an evaluation does not, nor does it excuse a function.
        Raises:
            RuntimeError: on all ranks, if a function is broken; its cause is what the function raised last, if it did.
        """
        failed, raised = failed_rows(self._funcs, rewards, gather)
        if counts:
            shares: dict[str, float] = {}
            for name, share in zip(self._names, failed.cpu().double().mean(dim=0).tolist(), strict=True):
                shares[name] = max(share, shares.get(name, 0.0))  # functions may have the same name
            self.failed = {name: share for name, share in shares.items() if share or name in self.failed}
            for name, share in shares.items():
                if share > WARN_ABOVE and name not in self._warned:
                    self._warned.add(name)
                    logger.warning(
                        f"The reward function '{name}' failed on {share:.0%} of a window's completions, which are "
                        f"unscored: the others may be the easy ones. Watch rewards/{name}/failed; this is said once."
                    )
            fails, scores = failed.any(dim=0).cpu(), rewards.isfinite().any(dim=0).cpu()
            self._in_a_row = torch.where(scores, 0, self._in_a_row + fails)
            broken = {
                "of the first batch": raised.all(dim=0).cpu() & self._first,
                f"that it applied to in {BROKEN_AFTER} batches in a row": self._in_a_row == BROKEN_AFTER,
            }
            self._first = False
            for where, functions in broken.items():
                if functions.any():
                    self._stop(int(functions.nonzero()[0]), rewards, where)
        return unscored(rewards, failed)

    def _stop(self, i: int, rewards: Tensor, where: str) -> NoReturn:
        func, error = self._funcs[i], None
        if isinstance(func, WatchedReward):
            failure, error = func.failure or "failed on another rank", func.error
        else:
            failure = f"returned {_named(rewards[:, i].tolist())}"
        raise RuntimeError(
            f"The reward function '{self._names[i]}' failed on every completion {where}; at last it {failure}. Nothing "
            "can be learned from it: correct it, or leave it out of reward_funcs."
        ) from error


def described(error: BaseException) -> str:
    try:
        return f"raised {type(error).__name__}: {error}"
    except Exception:  # its own `__str__` fails
        return f"raised {type(error).__name__}, which cannot be written"


def _named(rewards: Sequence[float | None]) -> str:
    """The failed ones among them, each once."""
    return ", ".join(sorted({str(value) for value in rewards if has_failed(value)}))
