"""Outcomes of reward calls: a `Score`, what a batch function `Returned`, or the exception that explains its failure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash_trl.rewards.forms import Score, read_score
from dash_trl.workers import Call


@dataclass(frozen=True)
class Returned:
    """Result of one call of a function of TRL's form.

    Attributes:
        output: what the function returned for the whole batch.
        logged: its calls of `log_extra` and `log_metric`, as (name, arguments), in their order.
    """

    output: Any
    logged: Sequence[tuple[str, tuple]]


def note_call(logged: list[tuple[str, tuple]], name: str, *arguments: Any) -> None:
    """Records a call of one of TRL's log functions, which only the main thread may make.

    Args:
        logged: the record is appended here.
        name: `log_extra` or `log_metric`.
        arguments: of the call.
    """
    logged.append((name, arguments))


def scored(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Calls a per-sample function and reads its score.

    Both happen within the call's time limit, since reading the returned object may block or raise, too.

    Args:
        function: a per-sample reward function.
        arguments: of the call.

    Returns:
        The score with its notes.

    Raises:
        ValueError: the function returned something that `read_score` cannot read.
    """
    return read_score(function(**arguments))


async def scored_async(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Calls a per-sample coroutine function and reads its score, like `scored`.

    Args:
        function: a per-sample reward function, defined by `async def`.
        arguments: of the call.

    Returns:
        The score with its notes.

    Raises:
        ValueError: the function returned something that `read_score` cannot read.
    """
    return read_score(await function(**arguments))


def scored_elsewhere(function: Callable[..., Any], /, **arguments: Any) -> Score | float | None:
    """Calls a per-sample function in a worker process and reads its score, like `scored`.

    Args:
        function: a per-sample reward function.
        arguments: of the call.

    Returns:
        The score; without notes only its value, which takes a third of the time to send back.

    Raises:
        ValueError: the function returned something that `read_score` cannot read.
    """
    score = read_score(function(**arguments))
    return score if score.notes else score.value


def outcome_of(call: Call) -> Score | BaseException:
    """Returns the outcome of a finished per-sample call.

    Args:
        call: a call of `scored`, `scored_async` or `scored_elsewhere` that is done.

    Returns:
        Its score, or the exception that explains why it has none.
    """
    if call.error is not None:
        return call.error
    return call.value if isinstance(call.value, Score) else Score(call.value)


def score_of(outcome: Score | BaseException) -> float | None:
    """Returns the number of an outcome.

    Args:
        outcome: a score or an exception.

    Returns:
        None if the function does not apply to the completion; NaN or ±inf if it failed on it.
    """
    return math.nan if isinstance(outcome, BaseException) else outcome.value


def processed_scores(function: Callable[[Any], Any], scores: list[float]) -> list[float]:
    """Calls `post_process_scores` of a stateful reward.

    Args:
        function: the method `post_process_scores`.
        scores: [G], the scores of a group; NaN for a completion without a score.

    Returns:
        [G], the new scores.

    Raises:
        ValueError: the method returned another number of scores.
    """
    processed = [float(value) for value in function(scores)]
    if len(processed) != len(scores):
        raise ValueError(f"post_process_scores returned {len(processed)} scores for {len(scores)}")
    return processed


def processed_outcomes(call: Call, outcomes: Sequence[Any]) -> list[Any]:
    """Puts the new scores of `processed_scores` into the outcomes of a group.

    Args:
        call: the finished call of `processed_scores`. If it failed, its exception becomes every outcome.
        outcomes: [G], the outcomes of the group before.

    Returns:
        [G], the new outcomes. An outcome that had no score, and gets NaN again, stays as it was.
    """
    if call.error is not None:
        return [call.error] * len(outcomes)
    return [
        old
        if math.isnan(value) and (isinstance(old, BaseException) or old.value is None)
        else Score(value, {} if isinstance(old, BaseException) else old.notes)
        for value, old in zip(call.value, outcomes, strict=True)
    ]
