"""`RunnerReward`: a function of a `RewardRunner`, in the form in which TRL calls it on the main thread with a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dash_trl.rewards.failures import Outcome, WatchedReward, number
from dash_trl.rewards.forms import RewardForm, Score, scored, scored_async
from dash_trl.workers import Call, Request

Result = Score | BaseException  # of a call


class RunnerReward(WatchedReward):
    """A function of a `RewardRunner`, in the form in which TRL calls it: a call waits for the outcomes of the batch.

    Attributes:
        score: what the runner calls for one row.
        known: the request with the outcomes of the next batch, and this function's index in it. None = a call starts
            this function alone, with the batch as one group.
    """

    def __init__(self, form: RewardForm, runner: Any):
        super().__init__(form.function, form.name)
        self.form = form
        self.runner = runner
        self.score = partial(scored_async if form.asynchronous else scored, form.function)
        self.known: tuple[Request, int] | None = None
        # Names of the text notes so far; each is a column of the table of completions. All columns must have the same
        # length, so after the first batch with a text note, its column is written for every later batch, too.
        self._texts: set[str] = set()

    # ------------------------------------------------------------------------------------------------ calls

    def start(self, request: Request, index: int, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Start the function on rows and do not wait.

        Args:
            request: the request that gets the outcomes.
            index: index of this function in the request.
            first: index of the first row in the request.
            rows: see `RewardRunner.submit`.
        """
        calls: list[Call] = []
        size = request.group_size
        is_whole = len(request.outcomes[index]) % size == 0  # False = ranks share groups
        for row, known in enumerate(rows, first):
            group = {"group_uid": f"{request.uid}-{row // size}", "group_size": size} if is_whole else {}
            call = Call(self.score, {}, timeout=self.runner.timeout)
            try:
                call.arguments = self.form.arguments(known, group)
            except ValueError as error:  # this row lacks a column that the function requires
                call.finish(error=error)
            calls.append(request.add(call, partial(self._row_ended, request, index, row)))
        kind = "asyncio" if self.form.asynchronous else "thread"
        self.runner.backend_of(self.runner.backend or kind, self.form.max_concurrency).submit(calls)

    def _row_ended(self, request: Request, index: int, row: int, call: Call) -> None:
        """Store an outcome. The last one of a group finishes the group, after `post_process_scores`."""
        if request.put(index, row, call.value or call.error):
            group = row // request.group_size
            if self.form.post_process is None or request.cancelled:
                request.complete(group)
            else:
                self._post_process(request, index, group)

    def _post_process(self, request: Request, index: int, group: int) -> None:
        rows = request.rows_of(group)
        column = request.outcomes[index]

        def ended(call: Call) -> None:
            column[rows.start : rows.stop] = call.value or [call.error] * len(rows)
            request.complete(group)

        arguments = {"function": self.form.post_process, "outcomes": [column[row] for row in rows]}
        call = Call(post_processed, arguments, timeout=self.runner.timeout)
        self.runner.backend_of("thread").submit([request.add(call, ended)])

    # --------------------------------------------------------------------------------------------- for TRL

    def __call__(self, /, *, log_extra: Any = None, log_metric: Any = None, **batch: Any) -> list[float | None]:
        """Return the rewards of a batch of TRL's, see `WatchedReward`, and log the function's notes."""
        request, index = self.known or self._begun(batch)
        request.wait()
        outcomes = request.outcomes[index]
        self._log(outcomes, log_extra, log_metric)
        return self._keep([outcome_of(one) for one in outcomes])

    def _begun(self, batch: Mapping[str, Any]) -> tuple[Request, int]:
        count = len(batch["completions"])
        columns = {name: values for name, values in batch.items() if isinstance(values, list) and len(values) == count}
        columns["completion"] = columns.pop("completions")
        columns["prompt"] = columns.pop("prompts")
        request = Request(1, count, count)
        self.start(request, 0, 0, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        return request, 0

    def _log(self, outcomes: Sequence[Result], log_extra: Any, log_metric: Any) -> None:
        """Log the notes: numbers as metrics, strings as columns of the table of completions."""
        notes: list[Mapping[str, Any]] = [{} if isinstance(one, BaseException) else one.notes for one in outcomes]
        for name, value in (note for one in notes for note in one.items()):
            if isinstance(value, str):
                self._texts.add(name)
            elif log_metric is not None:
                log_metric(f"rewards/{self.name}/{name}", value)
        if log_extra is not None:
            for name in sorted(self._texts):
                log_extra(f"{self.name}/{name}", [str(one.get(name, "")) for one in notes])


def outcome_of(outcome: Result) -> Outcome:
    return outcome.value if isinstance(outcome, Score) else outcome


def post_processed(function: Callable[[Any], Any], outcomes: Sequence[Result]) -> list[Result]:
    """Call `post_process_scores` with the scores of a group, NaN for a row without one; return the G new outcomes.

    A row that had no score keeps its outcome if its new score is NaN.

    Raises:
        ValueError: if the method does not return G scores.
    """
    scores = [number(outcome_of(one)) for one in outcomes]
    processed = [float(value) for value in function(scores.copy())]
    if len(processed) != len(scores):
        raise ValueError(f"post_process_scores returned {len(processed)} scores for {len(scores)}")
    return [
        old if math.isnan(before) and math.isnan(after) else Score(after, old.notes if isinstance(old, Score) else {})
        for old, before, after in zip(outcomes, scores, processed, strict=True)
    ]
