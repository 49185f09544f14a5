"""`RewardRunner`: runs reward functions in parallel and scores each completion on its own.

::

    RewardRunner([f, g]) ──► .rewards, which TRL calls one after another
       the first call    ──► submit: all rows of all functions ──► backends (threads, an event loop, processes, Ray)
                                          outcomes, in any order ──► Request, at their rows ──► complete groups
       each call         ──► waits for the request, returns its function's column

Each call ends with a score, or with an exception that explains why there is no score. A call that fails affects no
other call. Calls run on other threads or in other processes; only TRL's logs are written on the main thread.
"""

from __future__ import annotations

import importlib.util
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dash_trl.rewards.failures import has_failed, unscored
from dash_trl.rewards.forms import RewardForm, form_of
from dash_trl.rewards.outcomes import Returned, note_call, outcome_of, processed_outcomes, processed_scores, score_of
from dash_trl.rewards.runner_reward import LOGS, RunnerReward
from dash_trl.workers import (
    LAST_SECONDS,
    ROWS_AHEAD,
    AsyncCalls,
    Backend,
    Call,
    Pace,
    ProcessCalls,
    RayCalls,
    Request,
    RetriedCalls,
    ThreadCalls,
    default_workers,
)

BACKENDS = ("thread", "asyncio", "process", "ray")
# Limit in seconds for a whole batch of a function of TRL's form. It is less than the 30 minutes for which other ranks
# wait in a collective before it fails.
BATCH_SECONDS = 1200.0
ON_ERROR = ("unscore", "raise")
Lane = tuple[str, int | None]  # kind of backend, and `max_concurrency`; functions with the same lane share a backend


class RewardRunner:
    """Runs reward functions of any form in parallel, with time limits and retries.

    Pass a runner as `reward_funcs` of `DASHTrainer`. `dash_trl.rewards.forms` describes the forms of functions.

    Example::

        trainer = DASHTrainer(..., reward_funcs=RewardRunner([right, polite], timeout=20, retry_on=(ConnectionError,)))

    Functions that need different settings get different runners::

        reward_funcs=[
            RewardRunner([judge], rate_limit=50),
            RewardRunner([unit_tests], backend="process"),
            MathAccuracyReward(),
        ]

    Args:
        functions: one reward function, or a list of them. The list may contain reward models (modules, or their names),
            which TRL calls without the runner.
        backend: where calls run. "thread" and "asyncio" are for functions that wait, for example for a server.
            "process" is for functions that compute; if a call takes too long, its worker is killed. "ray" is for a
            cluster. None = coroutine functions run on asyncio, other functions on threads.
        timeout: seconds by the clock for one completion, from the start of the call. The limit for a function of TRL's
            form is `timeout` times the number of completions, but at most the larger of 20 minutes and `timeout`.
        max_concurrency: largest number of calls at a time in the whole run, for each backend that the runner uses. The
            number of worker processes on a rank is also limited to the rank's share of the CPUs, and to 8.
        rate_limit: number of calls that may start per second in the whole run; only for threads and asyncio. None = no
            limit.
        retry_on: exceptions after which a call is made again, such as `(ConnectionError, TimeoutError)`.
        retries: number of further attempts. The pauses between them are random and grow exponentially.
        on_error: "unscore" = if a function fails on a completion, the completion is left out of training; "raise" = the
            first failure ends the run.

    Attributes:
        rewards: the reward functions that TRL calls, in the order of `functions`.

    Raises:
        ValueError: if a function has none of the forms, a setting has no valid value, or the backend cannot run a
            function.
    """

    def __init__(
        self,
        functions: Any,
        *,
        backend: str | None = None,
        timeout: float = 60.0,
        max_concurrency: int = 256,
        rate_limit: float | None = None,
        retry_on: type[Exception] | Sequence[type[Exception]] = (),
        retries: int = 2,
        on_error: str = "unscore",
    ):
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not functions:
            raise ValueError("RewardRunner([]) has no reward function: give at least one.")
        retry_on = tuple(retry_on) if isinstance(retry_on, Iterable) else (retry_on,)
        _check(backend, timeout, max_concurrency, rate_limit, on_error)
        self.backend, self.timeout = backend, timeout
        self.max_concurrency, self.rate_limit = max_concurrency, rate_limit
        self.retry_on, self.retries, self.on_error = retry_on, retries, on_error
        self.rewards: list[Any] = []
        self.own: list[RunnerReward] = []
        for one in functions:
            if not is_reward_model(one):
                one = RunnerReward(form_of(one), self, len(self.own))
                _check_backend(one.form, backend)
                self.own.append(one)
            self.rewards.append(one)
        self.team = RewardTeam(self.own)  # a trainer replaces it by the team of all functions that the trainer uses
        self.ranks = 1  # number of processes of the run, which share the limits
        # The key has the id of the process, because threads do not survive a fork.
        self._backends: dict[tuple[int, Lane], Backend] = {}
        self._closes = dict.fromkeys(one.form.close for one in self.own if one.form.close is not None)
        self._open = dict(self._closes)  # `close` of functions that may have been used since the last `close`
        weakref.finalize(self, _end, self._backends, self._open)  # when the runner or the process ends

    def close(self) -> None:
        """Ends threads and worker processes, and closes stateful functions. A later call starts all of these again."""
        _end(self._backends, self._open)

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ a batch

    def submit(self, rows: Sequence[Mapping[str, Any]], *, group_size: int = 1) -> Request:
        """Starts all functions on all rows and does not wait. Use this method to score completions without a trainer.

        Args:
            rows: one mapping per completion, with `prompt`, `completion`, `completion_ids` and the dataset's columns.
            group_size: number of adjacent rows that are completions of one prompt.

        Returns:
            The request, in which the outcomes are stored. `wait()` of the request waits until all calls have ended.

        Raises:
            ValueError: if a function has TRL's form.
        """
        for one in self.own:
            if one.form.batch:
                raise ValueError(f"'{one.name}' has TRL's form: only a trainer can call it, with the whole batch.")
        request = Request(len(self.own), len(rows), group_size)
        self.start(request, {one: one.number for one in self.own}, 0, rows)
        return request

    def start(
        self, request: Request, functions: Mapping[RunnerReward, int], first: int, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Starts per-sample functions on some rows and does not wait. Functions of TRL's form are skipped.

        Args:
            request: the request in which the outcomes are stored.
            functions: function of this runner → its index in the request.
            first: index of the first row within the request; the rows are adjacent.
            rows: see `submit`.
        """
        calls: dict[Lane, list[Call]] = {}
        timeout = self._timeout(request)
        for one, number in functions.items():
            if one.form.batch:
                continue
            made = calls.setdefault(self._lane(one.form), [])
            row_done = partial(self._row_done, request, one.form, number)  # one bound method for all rows
            for row, known in enumerate(rows, first):
                try:
                    arguments = one.form.arguments(known)
                except ValueError as error:  # this row lacks a column that the function requires
                    self._put(request, one.form, number, row, [error])
                    continue
                done = partial(row_done, row)
                made.append(Call(one.score, arguments, timeout=timeout, done=done, stop=request.stop))
        for lane, made in calls.items():
            self._start(lane, made)

    def start_batch(self, request: Request, functions: Mapping[RunnerReward, int], batch: Mapping[str, Any]) -> None:
        """Starts functions of TRL's form on a whole batch and does not wait. Per-sample functions are skipped.

        Only the main thread may write TRL's logs, but the function runs on another thread. So calls of `log_extra` and
        `log_metric` are recorded, and the main thread makes them later.

        Args:
            request: the request in which the outcomes are stored.
            functions: function of this runner → its index in the request.
            batch: the arguments that TRL passes to a reward function.
        """
        rows = len(batch["completions"])
        for one, number in functions.items():
            if one.form.batch:
                logged: list[tuple[str, tuple]] = []
                later = {name: partial(note_call, logged, name) for name in LOGS}
                done = partial(self._batch_done, request, one.form, number, rows, logged)
                timeout = self._timeout(request, rows)
                call = Call(one.form.function, {**batch, **later}, timeout=timeout, done=done, stop=request.stop)
                self._start(self._lane(one.form), [call])

    def _row_done(self, request: Request, form: RewardForm, number: int, row: int, call: Call) -> None:
        self._put(request, form, number, row, [outcome_of(call)])

    def _batch_done(
        self, request: Request, form: RewardForm, number: int, rows: int, logged: list[tuple[str, tuple]], call: Call
    ) -> None:
        outcome = call.error if call.error is not None else Returned(call.value, logged)
        self._put(request, form, number, 0, [outcome] * rows)

    def _put(self, request: Request, form: RewardForm, number: int, first: int, outcomes: Sequence[Any]) -> None:
        """Stores a function's outcomes of adjacent rows. Finishes each group that now has all outcomes of the function.

        If the object of the function has a method `post_process_scores`, a group is finished after a call of that
        method with the group's scores.
        """
        for group in request.put(number, first, outcomes):
            if form.post_process is None:
                request.complete(number, group)
            else:
                self._post_process(request, form.post_process, number, group)

    def _post_process(self, request: Request, function: Callable[[Any], Any], number: int, group: int) -> None:
        rows = request.rows_of(group)
        outcomes = [request.outcomes[number][row] for row in rows]
        scores = [math.nan if (score := score_of(one)) is None else score for one in outcomes]

        def done(call: Call) -> None:
            if request.stop.is_set():
                return
            for row, new in zip(rows, processed_outcomes(call, outcomes), strict=True):
                request.outcomes[number][row] = new
            request.complete(number, group)

        arguments = {"function": function, "scores": scores}
        call = Call(processed_scores, arguments, timeout=self._timeout(request), done=done, stop=request.stop)
        self._start(("thread", None), [call])

    # ----------------------------------------------------------------------------------------------- backends

    def _lane(self, form: RewardForm) -> Lane:
        return self.backend or ("asyncio" if form.asynchronous else "thread"), form.max_concurrency

    def _timeout(self, request: Request, of: int = 1) -> float:
        """Returns the time limit of a call on `of` completions, and raises the request's `patience` accordingly."""
        timeout = min(self.timeout * of, max(self.timeout, BATCH_SECONDS))
        most = max(ROWS_AHEAD, 1 + self.retries) * timeout  # the longest time until a Ray task or the last attempt ends
        request.patience = max(request.patience, LAST_SECONDS + most)
        return timeout

    def _start(self, lane: Lane, calls: Sequence[Call]) -> None:
        self._open.update(self._closes)
        mine = os.getpid(), lane
        if mine not in self._backends:
            backend = self._make(*lane)
            self._backends[mine] = RetriedCalls(backend, self.retry_on, self.retries) if self.retry_on else backend
        self._backends[mine].submit(calls)

    def _make(self, kind: str, limit: int | None) -> Backend:
        share = max(1, self.max_concurrency // self.ranks)
        share = share if limit is None else min(share, limit)
        pace = None if self.rate_limit is None else Pace(self.rate_limit / self.ranks)
        if kind == "process":
            return ProcessCalls(min(share, default_workers()))
        if kind == "ray":
            return RayCalls(share)
        return (AsyncCalls if kind == "asyncio" else ThreadCalls)(share, pace=pace)


def _end(backends: dict[tuple[int, Lane], Backend], opened: dict[Callable[[], Any], None]) -> None:
    while backends:  # the end of a call may start a further call, on a new backend
        (process, _), backend = backends.popitem()
        if process == os.getpid():
            backend.close()
    while opened:
        opened.popitem()[0]()


class RewardTeam:
    """Starts all runner functions of a trainer together, even if they belong to several runners.

    A group is complete when every function of the team has scored all of its rows, or failed on them. A function that
    is not in the team is not called, even if its runner has other functions in the team.

    Args:
        functions: the functions, in the order in which TRL calls them with a batch. If a function is listed twice, each
            call is made once and its outcome is used for both columns.
        ranks: number of processes of the run.
        group_size: function that returns the number of adjacent rows in TRL's next batch that are completions of one
            prompt.
    """

    def __init__(self, functions: Sequence[RunnerReward], ranks: int = 1, group_size: Callable[[], int] = lambda: 1):
        self._group_size = group_size
        self._numbers: dict[RewardRunner, dict[RunnerReward, int]] = {}  # each function's index in a request
        for number, one in enumerate(dict.fromkeys(functions)):
            self._numbers.setdefault(one.runner, {})[one] = number
        self._calls = [self._number(one) for one in functions]
        self._request: Request | None = None
        self._completions: Any = None  # the completions of the request's batch
        self._left: list[int] = []  # indices of the functions that TRL has not called with this batch yet
        self._ranks = ranks
        self._begun: weakref.WeakSet[Request] = weakref.WeakSet()
        self.join()

    def join(self, group_size: int | None = None) -> None:
        """Attaches the runners to this team again, because another trainer may have attached them to its own team.

        Args:
            group_size: number of adjacent rows in the next batch that are completions of one prompt. None = the number
                that the team's `group_size` returns.
        """
        for runner in self._numbers:
            runner.team, runner.ranks = self, self._ranks
            for one in runner.own:
                one.group_size = self._group_size if group_size is None else lambda: group_size

    def begin(self, rows: int, group_size: int) -> Request:
        """Creates a request, but starts no function.

        `RewardTeam.start` starts the per-sample functions, and `RewardRunner.start_batch` the functions of TRL's form.

        Args:
            rows: number of rows.
            group_size: number of adjacent rows that are completions of one prompt.

        Returns:
            The request.
        """
        request = Request(len(set(self._calls)), rows, group_size)
        self._begun.add(request)
        return request

    def cancel(self) -> None:
        """Cancels all requests of this team that are not complete."""
        for request in self._begun:
            if request.pending:
                request.cancel()

    def start(self, request: Request, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Starts all per-sample functions on some rows of a request and does not wait.

        Args:
            request: the request in which the outcomes are stored.
            first: index of the first row within the request; the rows are adjacent.
            rows: see `RewardRunner.submit`.
        """
        for runner, functions in self._numbers.items():
            runner.start(request, functions, first, rows)

    def rewards(self, request: Request, functions: Sequence[RunnerReward], rows: Sequence[int]) -> Tensor:
        """Reads the rewards of rows whose groups are complete.

        Args:
            request: the request of these rows.
            functions: [F] functions of the team, in the order of the columns.
            rows: [R] indices of rows in the request.

        Returns:
            [R, F] float32. NaN = the function does not apply. If a function failed on a row, all F rewards of the row
            are NaN.
        """
        columns = [request.outcomes[self._number(one)] for one in functions]
        scores = [[score_of(outcomes[row]) for outcomes in columns] for row in rows]
        values = torch.tensor([[math.nan if one is None else one for one in row] for row in scores])
        return unscored(values, torch.tensor([[has_failed(one) for one in row] for row in scores]))

    def hand_over(self, request: Request, completions: Any) -> None:
        """Sets the request of TRL's next batch, so that the functions return its outcomes and start no calls.

        Args:
            request: a request that has begun.
            completions: the completions of the batch. The team recognises the batch by this object, so TRL must pass
                the same object to the functions.
        """
        self._request, self._completions, self._left = request, completions, self._calls.copy()

    def _number(self, one: RunnerReward) -> int:
        return self._numbers[one.runner][one.runner.own[one.number]]  # `one` may be a copy of the runner's own

    def outcomes(self, one: RunnerReward, batch: Mapping[str, Any]) -> list[Any]:
        """Returns the outcomes of one function for a batch. If the batch is new, starts all functions of the team.

        Args:
            one: the function that TRL calls.
            batch: the arguments that TRL passes.

        Returns:
            [N] outcomes: one `Score` or exception per row. The outcome of a function of TRL's form is for the whole
            batch, and is repeated N times.
        """
        if one.runner.own[one.number] not in self._numbers[one.runner]:  # the trainer does not use this function
            return RewardTeam(one.runner.own).outcomes(one, batch)
        request, number = self._request, self._number(one)
        if request is None or self._completions is not batch["completions"] or number not in self._left:
            rows = _rows(batch)
            request = self.begin(len(rows), one.group_size())
            self.hand_over(request, batch["completions"])
            for runner, functions in self._numbers.items():
                runner.start_batch(request, functions, batch)
            self.start(request, 0, rows)
        request.wait()
        self._left.remove(number)
        if not self._left:
            self._request = self._completions = None
        return request.outcomes[number]


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a batch: for each completion its prompt, the completion and the dataset's columns."""
    count = len(batch["completions"])
    columns = {name: values for name, values in batch.items() if isinstance(values, list) and len(values) == count}
    columns["completion"], columns["prompt"] = columns.pop("completions"), columns.pop("prompts")
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def unpack(reward_funcs: Any) -> Any:
    """Turns `reward_funcs` into the list of reward functions that TRL takes.

    Args:
        reward_funcs: a reward function of any form, a reward model, a `RewardRunner`, or a list of these.

    Returns:
        A list in which each runner is replaced by its functions, and each function of another form than TRL's gets a
        runner of its own. Models and functions of TRL's form stay as they are. None for None.
    """
    if reward_funcs is None:
        return None
    found: list[Any] = []
    for one in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        if isinstance(one, RewardRunner):
            found += one.rewards
        elif is_reward_model(one) or form_of(one).batch:
            found.append(one)
        else:
            found += RewardRunner(one).rewards
    return found


def is_reward_model(function: Any) -> bool:
    """Returns whether a reward is a model, which TRL calls on the main thread.

    Args:
        function: one of `reward_funcs`.

    Returns:
        True for a module, and for a string, which is the name of a model.
    """
    return isinstance(function, (nn.Module, str))


def _check(backend: str | None, timeout: float, max_concurrency: int, rate_limit: float | None, on_error: str) -> None:
    for name, value, known in (("backend", backend, (None, *BACKENDS)), ("on_error", on_error, ON_ERROR)):
        if value not in known:
            raise ValueError(f"{name}={value!r} does not exist: choose one of {known}.")
    limits = {"timeout": timeout, "max_concurrency": max_concurrency, "rate_limit": rate_limit}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit} would let no call finish: it must be greater than 0.")
    if rate_limit is not None and backend in ("process", "ray"):
        raise ValueError(
            f"rate_limit={rate_limit} has no effect with backend={backend!r}: leave it out, or use backend='thread'."
        )
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError(
            "backend='ray', but Ray is not installed: pip install 'dash_trl[ray]', or use backend='process'."
        )


def _check_backend(form: RewardForm, backend: str | None) -> None:
    if backend is None:
        return
    if form.asynchronous != (backend == "asyncio"):
        is_it = "a coroutine function, which needs" if form.asynchronous else "not a coroutine function, as needed by"
        raise ValueError(
            f"backend={backend!r}, but '{form.name}' is {is_it} backend='asyncio'. Leave backend out, or give the "
            "function a runner of its own."
        )
    if form.batch and backend in ("process", "ray"):
        raise ValueError(
            f"backend={backend!r} scores completions one by one, but '{form.name}' has TRL's form and gets the whole "
            "batch. Write it per sample: reward(completion, answer, ...)."
        )
