"""`Request`: outcomes of functions for many rows. `RunnerReward`: a function as TRL calls it with a batch."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_trl.rewards.failures import Outcome, WatchedReward, has_failed, number
from dash_trl.rewards.forms import RewardForm, scored, scored_async
from dash_trl.workers import cancel_all, outcome_of


class Request:
    """Collects the outcomes of F functions for N rows, and returns groups of rows as soon as they are complete.

    A group of `group_size` adjacent rows is complete when all functions are done with it; the last may be smaller.

    Attributes:
        outcomes: for each function, its N outcomes; None = this outcome has not come. A function that is given twice is
            called once.
        by_function: the same lists by their functions.
        groups: number of groups.
    """

    def __init__(self, functions: Sequence[RunnerReward], rows: int, group_size: int = 1):
        self.by_function: dict[RunnerReward, list[Any]] = {one: [None] * rows for one in functions}
        self.outcomes = [*self.by_function.values()]
        self._group_size = group_size
        self._rows = range(rows)
        self.groups = len(self._rows[::group_size])
        # For each group, the number of outcomes that have not come.
        self._left = [len(self.outcomes) * len(self.rows_of(group)) for group in range(self.groups)]
        self._calls: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._complete = queue.SimpleQueue[int | BaseException]()
        self._error: BaseException | None = None

    def start(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Start all functions on adjacent rows, see `RewardRunner.submit`, from the index `first` on; do not wait.

        When a call ends, on any thread, its outcome is stored; `cancel` cancels it.
        """
        for one in self.by_function:
            for row, call in enumerate(one.start(rows), first):
                self._calls.append(call)
                call.add_done_callback(partial(self._put, one, row))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let the functions return these outcomes, and start no calls, within the `with` block."""
        for one in self.by_function:
            one.known = self
        try:
            yield
        finally:
            for one in self.by_function:
                one.known = None

    def rewards(self, functions: Sequence[RunnerReward], rows: Sequence[int]) -> Tensor:
        """Return the rewards of F functions on R rows whose groups are complete.

        Returns:
            [R, F] float32. NaN = the function does not apply, or a function failed on the row.
        """
        outcomes = [[self.by_function[one][row] for one in functions] for row in rows]
        return torch.tensor(
            [[math.nan] * len(row) if any(map(has_failed, row)) else [*map(number, row)] for row in outcomes]
        )

    def rows_of(self, group: int) -> range:
        return self._rows[group * self._group_size : (group + 1) * self._group_size]

    def _put(self, function: RunnerReward, row: int, call: Future[Any]) -> None:
        group = row // self._group_size
        with self._lock:
            self.by_function[function][row] = outcome_of(call)
            self._left[group] -= 1
            if not self._left[group]:
                self._complete.put(group)

    def fail(self, error: BaseException) -> None:
        """Record that some rows will never come. Then `next_groups` does not wait. Any thread may call this."""
        self._complete.put(error)

    def check(self) -> None:
        """Raise the error of `fail`, after `next_groups` has met it."""
        if self._error is not None:
            raise self._error

    def next_groups(self, *, wait: bool = True) -> list[int]:
        """Return the numbers of complete groups that were not returned before; with `wait=True`, at least one."""
        found: list[int] = []
        while self._error is None and (not self._complete.empty() or wait and not found):
            group = self._complete.get()
            if isinstance(group, BaseException):
                self._error = group
            else:
                found.append(group)
        return found

    def wait(self) -> None:
        """Wait until all groups are complete. An interrupt cancels the calls."""
        try:
            while any(self._left):
                self.next_groups()
                self.check()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        cancel_all(self._calls)


class RunnerReward(WatchedReward):
    """A function of a `RewardRunner`. TRL's call waits for the outcomes of the batch.

    Attributes:
        known: the request with the outcomes of the next batch. None = a call starts this function alone.
    """

    def __init__(self, form: RewardForm, runner: Any):
        super().__init__(form.function, form.name)
        self.form = form
        self.runner = runner
        self.score = partial(scored_async if form.asynchronous else scored, form.function)
        self.known: Request | None = None
        # Names of the text notes so far; each is a column of the table of completions. All columns must have the same
        # length, so after the first batch with a text note, its column is written for every later batch, too.
        self._texts = set[str]()

    # ------------------------------------------------------------------------------------------------ calls

    def start(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Future[Any]]:
        """Start the function on each row, and yield its call."""
        kind = "asyncio" if self.form.asynchronous else "thread"
        backend = self.runner.backend_of(self.runner.backend or kind, self.form.max_concurrency)
        for row in rows:
            try:
                arguments = self.form.arguments(row)
            except ValueError as error:  # this row lacks a column that the function requires
                call = Future[Any]()
                call.set_exception(error)
            else:
                call = backend.submit(self.score, arguments, timeout=self.runner.timeout)
            yield call

    # --------------------------------------------------------------------------------------------- for TRL

    def __call__(self, /, *, log_extra: Any = None, log_metric: Any = None, **batch: Any) -> list[float | None]:
        request = self.known
        if request is None:
            columns = {name: values for name, values in batch.items() if isinstance(values, list)}
            columns["completion"] = columns.pop("completions")
            columns["prompt"] = columns.pop("prompts")
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            request = Request([self], len(rows))
            request.start(0, rows)
        request.wait()
        outcomes = request.by_function[self]
        self._log(outcomes, log_extra, log_metric)
        return self._keep(outcomes)

    def _log(self, outcomes: Sequence[Outcome], log_extra: Any, log_metric: Any) -> None:
        """Log the notes: numbers as metrics, strings as columns of the table of completions."""
        notes = [{} if isinstance(one, BaseException) else one.notes for one in outcomes]
        for name, value in (note for one in notes for note in one.items()):
            if isinstance(value, str):
                self._texts.add(name)
            elif log_metric is not None:
                log_metric(f"rewards/{self.name}/{name}", value)
        if log_extra is not None:
            for name in sorted(self._texts):
                log_extra(f"{self.name}/{name}", [str(one.get(name, "")) for one in notes])
