"""`RewardRunner`: runs reward functions in parallel and scores each completion on its own.

::

    RewardRunner([f, g]) ──► .rewards, which TRL calls one after another
       the first call    ──► submit: all rows of all functions ──► backends (threads, an event loop, processes, Ray)
                                          outcomes, in any order ──► Request, at their rows ──► complete groups
       each call         ──► waits for the request, returns its function's column
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from dash_trl.rewards.forms import form_of
from dash_trl.rewards.runner_reward import Request, RunnerReward
from dash_trl.workers import AsyncCalls, Backend, ProcessCalls, RayCalls, ThreadCalls, default_workers

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
        functions: one reward function or a list, of any form but TRL's. Reward models may be among them.
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
        ValueError: if a function has no form that the backend runs, or a setting is invalid.
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
        functions = functions if isinstance(functions, (list, tuple)) else [functions]
        retry_on = tuple(retry_on) if isinstance(retry_on, Iterable) else (retry_on,)
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
        self.backend = backend
        self.timeout = timeout
        self._max_concurrency = max_concurrency
        self._rate_limit = rate_limit
        self._retries: dict[str, Any] = {"retry_on": retry_on, "retries": retries}
        self.rewards: list[Any] = [
            one if is_reward_model(one) else RunnerReward(form_of(one), self) for one in functions
        ]
        self.own = [one for one in self.rewards if isinstance(one, RunnerReward)]
        for form in (one.form for one in self.own):
            if form.batch:
                raise ValueError(
                    f"'{form.name}' has TRL's form and gets the whole batch, but a RewardRunner scores completions one "
                    "by one. Pass it beside the runner in reward_funcs, or write it per sample: reward(completion, "
                    "answer, ...)."
                )
            if backend is not None and form.asynchronous != (backend == "asyncio"):
                raise ValueError(
                    f"backend={backend!r} cannot run '{form.name}': 'asyncio' runs coroutine functions, the other "
                    "backends run other functions. Leave backend out, or give the function a runner of its own."
                )
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

    def submit(self, rows: Sequence[Mapping[str, Any]]) -> Request:
        """Start all functions on all rows, without a trainer; return the request that gets the outcomes.

        Args:
            rows: one mapping per completion, with `prompt`, `completion`, `completion_ids` and the dataset's columns.
        """
        request = Request(self.own, len(rows))
        request.start(0, rows)
        return request

    def backend_of(self, kind: str, limit: int | None) -> Backend:
        """Return the backend for a kind of `BACKENDS` and a stateful reward's `max_concurrency`."""
        self._open.update(self._closes)
        lane = kind, limit
        if lane not in self._backends:
            share = max(1, self._max_concurrency // self.ranks)
            share = min(share, limit or share)
            rate = self._rate_limit and self._rate_limit / self.ranks
            settings = {"rate_limit": rate, **self._retries}
            functions = [one.score for one in self.own]
            makers: dict[str, Callable[..., Backend]] = {
                "thread": partial(ThreadCalls, share),
                "asyncio": partial(AsyncCalls, share),
                "process": partial(ProcessCalls, functions, min(share, default_workers())),
                "ray": partial(RayCalls, functions, share),
            }
            self._backends[lane] = makers[kind](**settings)
        return self._backends[lane]


def _end(backends: dict[Lane, Backend], opened: dict[Callable[[], object], None]) -> None:
    while backends:
        backends.popitem()[1].close()
    while opened:
        opened.popitem()[0]()


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


def is_reward_model(function: object) -> bool:
    """Return whether a reward is a model (a module, or a model's name), which TRL calls on the main thread."""
    return isinstance(function, (nn.Module, str))
