"""What comes of a call: a `Score`, what a batch function `Returned`, or the exception that says why there is none."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash_trl.rewards.forms import Score, read_score
from dash_trl.workers import Call


@dataclass(frozen=True)
class Returned:
    """What a function of TRL's form returned for a whole batch, and the calls of TRL's logs that it made meanwhile."""

    output: Any
    logged: Sequence[tuple[str, tuple]]


def note_call(logged: list[tuple[str, tuple]], name: str, *arguments: Any) -> None:
    logged.append((name, arguments))


def scored(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Calls it and reads its score, within the call's time limit: the returned object may block, or raise anything."""
    return read_score(function(**arguments))


async def scored_async(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """As `scored`, for a coroutine function."""
    return read_score(await function(**arguments))


def scored_elsewhere(function: Callable[..., Any], /, **arguments: Any) -> Score | float | None:
    """As `scored`, in another process; without notes only the number, which comes back in a third of the time."""
    score = read_score(function(**arguments))
    return score if score.notes else score.value


def outcome_of(call: Call) -> Score | BaseException:
    if call.error is not None:
        return call.error
    return call.value if isinstance(call.value, Score) else Score(call.value)


def score_of(outcome: Score | BaseException) -> float | None:
    """None where it does not apply; no finite number where it failed."""
    return math.nan if isinstance(outcome, BaseException) else outcome.value


def processed_scores(function: Callable[[Any], Any], scores: list[float]) -> list[float]:
    processed = [float(value) for value in function(scores)]
    if len(processed) != len(scores):
        raise ValueError(f"post_process_scores returned {len(processed)} scores for {len(scores)}")
    return processed


def processed_outcomes(call: Call, outcomes: Sequence[Any]) -> list[Any]:
    """Outcomes with new scores; one that had none, and got none, stays as it was."""
    if call.error is not None:
        return [call.error] * len(outcomes)
    return [
        old
        if math.isnan(value) and (isinstance(old, BaseException) or old.value is None)
        else Score(value, {} if isinstance(old, BaseException) else old.notes)
        for value, old in zip(call.value, outcomes, strict=True)
    ]
