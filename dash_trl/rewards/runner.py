"""`RewardRunner`: reward functions that run side by side, each completion on its own, whatever fails.

    RewardRunner([f, g]) ──► .rewards, which TRL calls one after another
       the first call    ──► submit: all rows of all functions ──► backends (threads, an event loop, processes, Ray)
                                          outcomes, in any order ──► Request, at their rows ──► complete groups
       each call         ──► waits for the request, returns its function's column

A call ends with a score, or with the reason why there is none; it never takes another one along. All of it happens
beside the main thread, on which alone TRL's logs are written.
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
BATCH_SECONDS = 1200.0  # at most for a function of TRL's form: less than the 30 minutes for which other ranks wait
ON_ERROR = ("unscore", "raise")
Lane = tuple[str, int | None]  # functions with the same backend and limit share one


class RewardRunner:
    """Reward functions of any form (see `dash_trl.rewards.forms`), for `reward_funcs` of `DASHTrainer`.

        trainer = DASHTrainer(..., reward_funcs=RewardRunner([right, polite], timeout=20, retry_on=(ConnectionError,)))

    Functions that want other settings get a runner of their own: `reward_funcs=[RewardRunner([judge], rate_limit=50),
    RewardRunner([unit_tests], backend="process"), MathAccuracyReward()]`.

    Args:
        functions: reward functions; reward models (modules, or their names) are left to TRL.
        backend: "thread" and "asyncio" are for functions that wait for others, "process" for those that compute, whose
            worker is killed when they take too long, "ray" for a cluster. Default: coroutine functions on asyncio,
            others on threads.
        timeout: seconds by the clock for a completion, from the start of the call; one of TRL's form has so much for
            each of its completions, in all 20 minutes at most, or `timeout` if that is longer.
        max_concurrency: calls at a time, of each backend, in the whole run; processes are at most this rank's share of
            the CPUs, and 8.
        rate_limit: starts per second of the whole run; of threads and asyncio.
        retry_on: exceptions after which a call is made again, such as `(ConnectionError, TimeoutError)`.
        retries: how often at most, after random, exponentially growing pauses.
        on_error: "unscore": a completion that a function fails on is left out of training; "raise": it ends the run.
    Attributes:
        rewards: what TRL calls, in the order of the functions.
    Raises:
        ValueError: for a function of no known form, and settings that cannot be.
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
        self.team = RewardTeam(self.own)  # a trainer makes one of all the functions that it uses
        self.ranks = 1  # processes of the run, whose limits these are
        self._backends: dict[tuple[int, Lane], Backend] = {}  # by process: in a forked one they have no threads
        self._closes = dict.fromkeys(one.form.close for one in self.own if one.form.close is not None)
        self._open = dict(self._closes)  # of functions that may have been used since they were closed
        weakref.finalize(self, _end, self._backends, self._open)  # with the runner, and at the latest with the process

    def close(self) -> None:
        """Ends threads, processes, and what functions hold. A later call starts them again."""
        _end(self._backends, self._open)

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ a batch

    def submit(self, rows: Sequence[Mapping[str, Any]], *, group_size: int = 1) -> Request:
        """Starts all functions on all rows, without waiting: for use without a trainer.

        Args:
            rows: of each completion its `prompt`, `completion`, `completion_ids` and columns.
            group_size: so many adjacent rows are completions of one prompt.
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
        """Starts the per-sample functions among some of the runner's on some rows, without waiting.

        Args:
            request: gets the outcomes, at the rows from `first` on.
            functions: with their numbers in the request.
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
                except ValueError as error:  # a column that only some rows have
                    self._put(request, one.form, number, row, [error])
                    continue
                done = partial(row_done, row)
                made.append(Call(one.score, arguments, timeout=timeout, done=done, stop=request.stop))
        for lane, made in calls.items():
            self._start(lane, made)

    def start_batch(self, request: Request, functions: Mapping[RunnerReward, int], batch: Mapping[str, Any]) -> None:
        """As `start`, the functions of TRL's form on the whole batch, as TRL calls them.

        TRL's logs belong to the main thread: what a function writes there on another one is kept until then.
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
        """A stateful function may look at the scores of a group once more, before it is complete."""
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
        """Of a call that is about so many completions; the request waits for it."""
        timeout = min(self.timeout * of, max(self.timeout, BATCH_SECONDS))
        most = max(ROWS_AHEAD, 1 + self.retries) * timeout  # until a task of Ray ends, or the last attempt
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
    while backends:  # a call that is ended may start another one, on a backend that is not there yet
        (process, _), backend = backends.popitem()
        if process == os.getpid():
            backend.close()
    while opened:
        opened.popitem()[0]()


class RewardTeam:
    """Functions of runners that begin together; a group is complete when all of them have spoken of it.

    The other functions of these runners are not called.

    Args:
        functions: as TRL calls them with a batch. One that is there twice makes its calls once, for both.
        ranks: processes of the run. group_size: of the batches that TRL calls the functions with.
    """

    def __init__(self, functions: Sequence[RunnerReward], ranks: int = 1, group_size: Callable[[], int] = lambda: 1):
        self._group_size = group_size
        self._numbers: dict[RewardRunner, dict[RunnerReward, int]] = {}  # in a request
        for number, one in enumerate(dict.fromkeys(functions)):
            self._numbers.setdefault(one.runner, {})[one] = number
        self._calls = [self._number(one) for one in functions]
        self._request: Request | None = None
        self._completions: Any = None  # of the batch that the request is for
        self._left: list[int] = []  # the calls that TRL has not made with it
        self._ranks = ranks
        self._begun: weakref.WeakSet[Request] = weakref.WeakSet()
        self.join()

    def join(self, group_size: int | None = None) -> None:
        """The runners are this team's from now on; another trainer's may have used them in between.

        Args:
            group_size: of the next batch, if it is another than the team's.
        """
        for runner in self._numbers:
            runner.team, runner.ranks = self, self._ranks
            for one in runner.own:
                one.group_size = self._group_size if group_size is None else lambda: group_size

    def begin(self, rows: int, group_size: int) -> Request:
        """Of so many rows, whose functions are started by `start`, and of TRL's form by the call that TRL makes."""
        request = Request(len(set(self._calls)), rows, group_size)
        self._begun.add(request)
        return request

    def cancel(self) -> None:
        """Nobody waits for what has begun."""
        for request in self._begun:
            if request.pending:
                request.cancel()

    def start(self, request: Request, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Starts all per-sample functions on some rows of a request, from row `first` on, without waiting."""
        for runner, functions in self._numbers.items():
            runner.start(request, functions, first, rows)

    def rewards(self, request: Request, functions: Sequence[RunnerReward], rows: Sequence[int]) -> Tensor:
        """[rows, F] float32 of rows whose groups are complete. NaN = does not apply; a row where one failed is NaN.

        Args:
            functions: F, the columns, in any order; each is one of the team's.
        """
        columns = [request.outcomes[self._number(one)] for one in functions]
        scores = [[score_of(outcomes[row]) for outcomes in columns] for row in rows]
        values = torch.tensor([[math.nan if one is None else one for one in row] for row in scores])
        return unscored(values, torch.tensor([[has_failed(one) for one in row] for row in scores]))

    def hand_over(self, request: Request, completions: Any) -> None:
        """The functions that TRL calls with these completions take their outcomes from a request that has begun."""
        self._request, self._completions, self._left = request, completions, self._calls.copy()

    def _number(self, one: RunnerReward) -> int:
        return self._numbers[one.runner][one.runner.own[one.number]]  # of a copy, too

    def outcomes(self, one: RunnerReward, batch: Mapping[str, Any]) -> list[Any]:
        """Of a function, when all are there. The first that TRL calls with a batch starts all of them."""
        if one.runner.own[one.number] not in self._numbers[one.runner]:  # a trainer uses others of the runner
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
    """Of what TRL calls a function with: of each completion, its prompt, itself and the data set's columns."""
    count = len(batch["completions"])
    columns = {name: values for name, values in batch.items() if isinstance(values, list) and len(values) == count}
    columns["completion"], columns["prompt"] = columns.pop("completions"), columns.pop("prompts")
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def unpack(reward_funcs: Any) -> Any:
    """The list of reward functions that TRL takes: runners give theirs, and forms unknown to TRL get a runner."""
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
    """A module, or the name of one: TRL's, computed on the main thread."""
    return isinstance(function, (nn.Module, str))


def _check(backend: str | None, timeout: float, max_concurrency: int, rate_limit: float | None, on_error: str) -> None:
    for name, value, known in (("backend", backend, (None, *BACKENDS)), ("on_error", on_error, ON_ERROR)):
        if value not in known:
            raise ValueError(f"{name}={value!r} does not exist: choose one of {known}.")
    limits = {"timeout": timeout, "max_concurrency": max_concurrency, "rate_limit": rate_limit}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit} lets no call come to its end: give more than 0.")
    if rate_limit is not None and backend in ("process", "ray"):
        raise ValueError(f"rate_limit={rate_limit} is not kept by backend={backend!r}: leave it out, or use threads.")
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("backend='ray', but Ray is not installed: pip install 'dash_trl[ray]', or use processes.")


def _check_backend(form: RewardForm, backend: str | None) -> None:
    if backend is None:
        return
    if form.asynchronous != (backend == "asyncio"):
        is_it = "a coroutine function: it needs" if form.asynchronous else "no coroutine function, as needed for"
        raise ValueError(
            f"backend={backend!r}, but '{form.name}' is {is_it} backend='asyncio'. Leave backend out, or give the "
            "function a runner of its own."
        )
    if form.batch and backend in ("process", "ray"):
        raise ValueError(
            f"backend={backend!r} takes completions one by one, but '{form.name}' has TRL's form and gets the whole "
            "batch. Write it per sample: reward(completion, answer, ...)."
        )
