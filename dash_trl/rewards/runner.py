"""`RewardRunner`: runs reward functions in parallel and scores each completion on its own.

::

    RewardRunner([f, g]) ──► .rewards, which TRL calls one after another
       the first call    ──► submit: all rows of all functions ──► backends (threads, an event loop, processes, Ray)
                                          outcomes, in any order ──► Request, at their rows ──► complete groups
       each call         ──► waits for the request, returns its function's column

Each call ends with a score, or with the exception that explains why there is none.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dash_trl.rewards.failures import has_failed, number, unscored
from dash_trl.rewards.forms import RewardForm, form_of
from dash_trl.rewards.runner_reward import RunnerReward, outcome_of
from dash_trl.workers import AsyncCalls, Backend, ProcessCalls, RayCalls, Request, ThreadCalls, default_workers

BACKENDS = ("thread", "asyncio", "process", "ray")
Lane = tuple[str, int | None]  # kind of backend, and `max_concurrency`; functions with the same lane share a backend


class RewardRunner(AbstractContextManager["RewardRunner"]):
    """Runs reward functions that score one completion in parallel, with time limits and retries.

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
        functions: one reward function or a list, of any form but TRL's. Reward models (modules, or their names) may be
            among them.
        backend: "thread" and "asyncio" suit functions that wait, for example for a server; "process" suits functions
            that compute, and kills a worker whose call takes too long; "ray" uses a cluster. None = asyncio for
            coroutine functions, threads for others.
        timeout: seconds by the clock for one completion, from the start of the call.
        max_concurrency: largest number of calls at a time in the whole run, per backend. A rank has at most 8 worker
            processes, and no more than its share of the CPUs.
        rate_limit: calls that may start per second in the whole run. None = no limit.
        retry_on: exceptions after which a call is made again.
        retries: number of further attempts, after random pauses that grow exponentially.

    Attributes:
        rewards: the reward functions that TRL calls, in the order of `functions`.

    Raises:
        ValueError: if a function has TRL's form or no known form, a setting is invalid, or the backend cannot run a
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
    ):
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        retry_on = tuple(retry_on) if isinstance(retry_on, Iterable) else (retry_on,)
        _check(backend, timeout, max_concurrency, rate_limit)
        self.backend = backend
        self.timeout = timeout
        self._max_concurrency = max_concurrency
        self._rate_limit = rate_limit
        self._retries: dict[str, Any] = {"retry_on": retry_on, "retries": retries}
        self.rewards: list[Any] = [
            one if is_reward_model(one) else RunnerReward(form_of(one), self) for one in functions
        ]
        self.own = [one for one in self.rewards if isinstance(one, RunnerReward)]
        for one in self.own:
            _check_backend(one.form, backend)
        self.ranks = 1  # number of processes of the run, which share the limits
        self._backends: dict[Lane, Backend] = {}
        self._closes = dict.fromkeys(one.form.close for one in self.own if one.form.close is not None)
        self._open = dict(self._closes)  # `close` of functions that may have been used since the last `close`
        weakref.finalize(self, _end, self._backends, self._open)  # when the runner or the process ends

    def close(self) -> None:
        """End threads and worker processes, and close stateful functions. A later call starts them again."""
        _end(self._backends, self._open)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ a batch

    def submit(self, rows: Sequence[Mapping[str, Any]], *, group_size: int = 1) -> Request:
        """Start all functions on all rows and do not wait. Use it to score completions without a trainer.

        Args:
            rows: one mapping per completion, with `prompt`, `completion`, `completion_ids` and the dataset's columns.
            group_size: number of adjacent rows that are completions of one prompt.

        Returns:
            The request that gets the outcomes, with a method `wait`.
        """
        request = Request(len(self.own), len(rows), group_size)
        for index, one in enumerate(self.own):
            one.start(request, index, 0, rows)
        return request

    def backend_of(self, kind: str, limit: int | None = None) -> Backend:
        """Return the backend for a kind of `BACKENDS` and a stateful reward's `max_concurrency`."""
        self._open.update(self._closes)
        lane = kind, limit
        if lane not in self._backends:
            self._backends[lane] = self._make(kind, limit)
        return self._backends[lane]

    def _make(self, kind: str, limit: int | None) -> Backend:
        share = max(1, self._max_concurrency // self.ranks)
        share = min(share, limit or share)
        rate = self._rate_limit and self._rate_limit / self.ranks
        settings = {"rate_limit": rate, **self._retries}
        if kind in ("thread", "asyncio"):
            return (AsyncCalls if kind == "asyncio" else ThreadCalls)(share, **settings)
        functions = [one.score for one in self.own]
        if kind == "process":
            return ProcessCalls(functions, min(share, default_workers()), **settings)
        return RayCalls(functions, share, **settings)


def _end(backends: dict[Lane, Backend], opened: dict[Callable[[], Any], None]) -> None:
    while backends:  # the end of a call may start a further call, on a new backend
        backends.popitem()[1].close()
    while opened:
        opened.popitem()[0]()


class RewardTeam:
    """Starts all runner functions of a trainer together, even if they belong to several runners.

    A group is complete when every function has scored, or failed on, all of its rows.

    Args:
        functions: the functions; one that is listed twice is called once.
        ranks: number of processes of the run.
    """

    def __init__(self, functions: Sequence[RunnerReward], ranks: int):
        self._index = {one: index for index, one in enumerate(dict.fromkeys(functions))}
        self._begun: weakref.WeakSet[Request] = weakref.WeakSet()
        for one in self._index:
            one.runner.ranks = ranks

    def begin(self, rows: int, group_size: int) -> Request:
        """Create a request for a number of rows, of which `group_size` adjacent ones belong to a prompt."""
        request = Request(len(self._index), rows, group_size)
        self._begun.add(request)
        return request

    def cancel(self) -> None:
        """Cancel all requests of this team that are not complete."""
        for request in self._begun:
            request.cancel()

    def start(self, request: Request, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Start all functions on adjacent rows of a request, from the index `first` on, and do not wait."""
        for one, index in self._index.items():
            one.start(request, index, first, rows)

    def rewards(self, request: Request, functions: Sequence[RunnerReward], rows: Sequence[int]) -> Tensor:
        """Return the rewards of rows whose groups are complete.

        Args:
            request: the request of these rows.
            functions: [F] functions of the team.
            rows: [R] indices of rows in the request.

        Returns:
            [R, F] float32. NaN = the function does not apply, or a function failed on the row.
        """
        columns = [request.outcomes[self._index[one]] for one in functions]
        outcomes = [[outcome_of(column[row]) for column in columns] for row in rows]
        values = torch.tensor([[number(one) for one in row] for row in outcomes])
        return unscored(values, torch.tensor([[has_failed(one) for one in row] for row in outcomes]))

    @contextmanager
    def answering(self, request: Request) -> Iterator[None]:
        """Let the functions return the outcomes of a request, and start no calls, within the `with` block."""
        for one, index in self._index.items():
            one.known = request, index
        try:
            yield
        finally:
            for one in self._index:
                one.known = None


def unpack(reward_funcs: Any, **settings: Any) -> Any:
    """Turn `reward_funcs` into TRL's list: runners become their functions; functions of other forms get a runner."""
    if reward_funcs is None:
        return None
    found: list[Any] = []
    for one in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        if isinstance(one, RewardRunner):
            found += one.rewards
        elif is_reward_model(one) or form_of(one).batch:
            found.append(one() if isinstance(one, type) else one)
        else:
            found += RewardRunner(one, **settings).rewards
    return found


def is_reward_model(function: Any) -> bool:
    """Return whether a reward is a model (a module, or a model's name), which TRL calls on the main thread."""
    return isinstance(function, (nn.Module, str))


def _check(backend: str | None, timeout: float, max_concurrency: int, rate_limit: float | None) -> None:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r} does not exist: choose one of {(None, *BACKENDS)}.")
    limits = {"timeout": timeout, "max_concurrency": max_concurrency, "rate_limit": rate_limit}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit} would let no call finish: it must be greater than 0.")
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError(
            "backend='ray', but Ray is not installed: pip install 'dash_trl[ray]', or use backend='process'."
        )


def _check_backend(form: RewardForm, backend: str | None) -> None:
    if form.batch:
        raise ValueError(
            f"'{form.name}' has TRL's form and gets the whole batch, but a RewardRunner scores completions one by one. "
            "Pass it beside the runner in reward_funcs, or write it per sample: reward(completion, answer, ...)."
        )
    if backend is not None and form.asynchronous != (backend == "asyncio"):
        raise ValueError(
            f"backend={backend!r} cannot run '{form.name}': 'asyncio' runs coroutine functions, the other backends run "
            "other functions. Leave backend out, or give the function a runner of its own."
        )
