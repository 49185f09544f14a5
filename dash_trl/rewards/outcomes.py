"""Makes and reads the outcomes of reward calls.

An outcome is a `Score` (per-sample functions), a `Returned` (functions of TRL's form), or the exception of a call that
failed.
"""

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
        output: the return value of the function, for the whole batch.
        logged: the function's calls of `log_extra` and `log_metric`, in order, each as (name, arguments). The main
            thread makes these calls later.
    """

    output: Any
    logged: Sequence[tuple[str, tuple]]


def note_call(logged: list[tuple[str, tuple]], name: str, *arguments: Any) -> None:
    """Records a call of one of TRL's log functions, because only the main thread may call these functions.

    Args:
        logged: the list to which the call is appended.
        name: `log_extra` or `log_metric`.
        arguments: the arguments of the call.
    """
    logged.append((name, arguments))


def scored(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Calls a per-sample function and reads its score.

    The time limit of the call also covers the reading, because user code may run when a returned object is converted
    to a number.

    Args:
        function: a per-sample reward function.
        arguments: the arguments of the call.

    Returns:
        The score with its notes.

    Raises:
        ValueError: if `read_score` cannot read the return value of the function.
    """
    return read_score(function(**arguments))


async def scored_async(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Calls a per-sample coroutine function and reads its score, like `scored`.

    Args:
        function: a per-sample reward function, defined by `async def`.
        arguments: the arguments of the call.

    Returns:
        The score with its notes.

    Raises:
        ValueError: if `read_score` cannot read the return value of the function.
    """
    return read_score(await function(**arguments))


def scored_elsewhere(function: Callable[..., Any], /, **arguments: Any) -> Score | float | None:
    """Calls a per-sample function in a worker process and reads its score, like `scored`.

    Args:
        function: a per-sample reward function.
        arguments: the arguments of the call.

    Returns:
        The score. If it has no notes, only its value, because sending a number back takes a third of the time.

    Raises:
        ValueError: if `read_score` cannot read the return value of the function.
    """
    score = read_score(function(**arguments))
    return score if score.notes else score.value


def outcome_of(call: Call) -> Score | BaseException:
    """Returns the outcome of a finished per-sample call.

    Args:
        call: a finished call of `scored`, `scored_async` or `scored_elsewhere`.

    Returns:
        The score, or the exception with which the call failed.
    """
    if call.error is not None:
        return call.error
    return call.value if isinstance(call.value, Score) else Score(call.value)


def score_of(outcome: Score | BaseException) -> float | None:
    """Returns an outcome as a number.

    Args:
        outcome: a score or an exception.

    Returns:
        The reward. None if the function does not apply to the completion; NaN or ±inf if the function failed on the
        completion.
    """
    return math.nan if isinstance(outcome, BaseException) else outcome.value


def processed_scores(function: Callable[[Any], Any], scores: list[float]) -> list[float]:
    """Calls `post_process_scores` of a stateful reward, and checks the number of scores that it returns.

    Args:
        function: the method `post_process_scores`.
        scores: [G], the scores of a group; NaN for a completion without a score.

    Returns:
        [G], the new scores.

    Raises:
        ValueError: if the method does not return G scores.
    """
    processed = [float(value) for value in function(scores)]
    if len(processed) != len(scores):
        raise ValueError(f"post_process_scores returned {len(processed)} scores for {len(scores)}")
    return processed


def processed_outcomes(call: Call, outcomes: Sequence[Any]) -> list[Any]:
    """Puts the new scores of `processed_scores` into the outcomes of a group.

    Args:
        call: the finished call of `processed_scores`. If the call failed, its exception becomes the outcome of each
            completion.
        outcomes: [G], the outcomes of the group before the call.

    Returns:
        [G], the new outcomes. A completion that had no score keeps its outcome if its new score is NaN.
    """
    if call.error is not None:
        return [call.error] * len(outcomes)
    return [
        old
        if math.isnan(value) and (isinstance(old, BaseException) or old.value is None)
        else Score(value, {} if isinstance(old, BaseException) else old.notes)
        for value, old in zip(call.value, outcomes, strict=True)
    ]
