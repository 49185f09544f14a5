"""`RewardAgent`: reward functions that run side by side, each completion on its own, whatever fails.

    RewardAgent([f, g]) ──► .rewards, which TRL calls one after another
       the first call    ──► submit: all rows of all functions ──► backends (threads, an event loop, processes, Ray)
                                          outcomes, in any order ──► Request, at their rows ──► complete groups
       each call         ──► waits for the request, returns its function's column

A call ends with a score, or with the reason why there is none; it never takes another one along. All of it happens
beside the main thread, on which alone TRL's logs are written.
"""

from __future__ import annotations

import atexit
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dash_trl.rewards.agent_reward import LOGS, AgentReward
from dash_trl.rewards.forms import RewardForm, Score, form_of, read_score
from dash_trl.workers import AsyncCalls, Backend, Call, Pace, Request, RetriedCalls, ThreadCalls, default_workers

BACKENDS = ("thread", "asyncio", "process", "ray")
ON_ERROR = ("unscore", "raise")


class RewardAgent:
    """Reward functions of any form (see `dash_trl.rewards.forms`), for `reward_funcs` of `DASHTrainer`.

        trainer = DASHTrainer(..., reward_funcs=RewardAgent([right, polite], timeout=20, transient=(ConnectionError,)))

    Functions that want other settings get an agent of their own: `reward_funcs=[RewardAgent([judge], rate_limit=50),
    RewardAgent([unit_tests], backend="process"), MathAccuracyReward()]`.

    Args:
        functions: reward functions; reward models (modules, or their names) are left to TRL.
        backend: "thread" and "asyncio" are for functions that wait for others, "process" for those that compute, whose
            worker is killed when they take too long, "ray" for a cluster. Default: coroutine functions on asyncio,
            others on threads.
        timeout: seconds by the clock for a completion, from the start of the call; one of TRL's form has so much for
            each of its completions.
        max_concurrency: calls at a time, of the whole run; processes are at most this machine's CPUs.
        rate_limit: starts per second of the whole run; of threads and asyncio.
        transient: exceptions after which a call is made again, such as `(ConnectionError, TimeoutError)`.
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
        transient: type[Exception] | Sequence[type[Exception]] = (),
        retries: int = 2,
        on_error: str = "unscore",
    ):
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not functions:
            raise ValueError("RewardAgent([]) has no reward function: give at least one.")
        transient = tuple(transient) if isinstance(transient, Iterable) else (transient,)
        _check(backend, timeout, max_concurrency, rate_limit, transient, retries, on_error)
        self.backend, self.timeout = backend, timeout
        self.max_concurrency, self.rate_limit = max_concurrency, rate_limit
        self.transient, self.retries, self.on_error = transient, retries, on_error
        self.rewards: list[Any] = []
        self._own: list[AgentReward] = []
        for one in functions:
            if not is_reward_model(one):
                one = AgentReward(form_of(one), self, len(self._own))
                _check_backend(one.form, backend)
                self._own.append(one)
            self.rewards.append(one)
        self._ranks = 1
        self._team: Sequence[RewardAgent] = [self]
        self._backends: dict[str, Backend] = {}
        self._request: Request | None = None
        self._completions: Any = None  # that the request is for
        self._left: set[int] = set()  # functions that TRL has not called for it
        atexit.register(self.close)

    def join(self, ranks: int, team: Sequence[RewardAgent]) -> None:
        """What a trainer tells it.

        Args:
            ranks: processes of the run, of whose limits this one has its share.
            team: all agents of the trainer: they begin together.
        """
        self._ranks, self._team = ranks, team

    def close(self) -> None:
        """Ends threads, processes, and what functions hold. A later call starts them again."""
        for backend in self._backends.values():
            backend.close()
        self._backends.clear()
        for close in dict.fromkeys(one.form.close for one in self._own if one.form.close is not None):
            close()

    def __enter__(self) -> RewardAgent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ a batch

    def submit(
        self, rows: Sequence[Mapping[str, Any]], *, group_size: int = 1, batch: Mapping[str, Any] | None = None
    ) -> Request:
        """Starts all functions on all rows, without waiting.

        Args:
            rows: of each completion its `prompt`, `completion`, `completion_ids` and columns.
            group_size: so many adjacent rows are completions of one prompt.
            batch: what functions of TRL's form are called with; needed where there are any.
        """
        request = Request(len(self._own), len(rows), group_size, self._on_group)
        calls: dict[str, list[Call]] = {}
        for number, one in enumerate(self._own):
            made = calls.setdefault(self._kind(one.form), [])
            if one.form.batch:
                made.append(self._batch_call(request, number, len(rows), batch or {}))
                continue
            for row, known in enumerate(rows):
                try:
                    arguments = one.form.arguments(known)
                except ValueError as error:  # a column that only some rows have
                    request.put(number, row, [error])
                    continue
                done = partial(self._row_done, request, number, row)
                made.append(Call(one.form.function, arguments, timeout=self.timeout, done=done))
        for kind, made in calls.items():
            request.calls += made
            self._start(kind, made)
        return request

    def _batch_call(self, request: Request, number: int, rows: int, batch: Mapping[str, Any]) -> Call:
        """TRL's logs belong to the main thread: what a function writes there on another one is kept until then."""
        logged: list[tuple[str, tuple]] = []

        def done(call: Call) -> None:
            outcome = call.error if call.error is not None else Returned(call.value, logged)
            request.put(number, 0, [outcome] * rows)

        later = {name: partial(_note_call, logged, name) for name in LOGS}
        function = self._own[number].form.function
        return Call(function, {**batch, **later}, timeout=self.timeout * rows, done=done)

    def _row_done(self, request: Request, number: int, row: int, call: Call) -> None:
        request.put(number, row, [_outcome(call)])

    def _on_group(self, request: Request, number: int, group: int) -> None:
        """A stateful function may look at the scores of the group once more."""
        post_process = self._own[number].form.post_process
        if post_process is None:
            request.complete(number, group)
            return
        rows = request.rows_of(group)
        outcomes = [request.outcomes[number][row] for row in rows]
        scores = [math.nan if isinstance(one, BaseException) or one.value is None else one.value for one in outcomes]

        def done(call: Call) -> None:
            for row, new in zip(rows, _processed(call, outcomes), strict=True):
                request.outcomes[number][row] = new
            request.complete(number, group)

        call = Call(_call_with, {"function": post_process, "scores": scores}, timeout=self.timeout, done=done)
        request.calls.append(call)
        self._start("thread", [call])

    def outcomes(self, number: int, batch: Mapping[str, Any], group_size: int) -> list[Any]:
        """Of one function, when all are there. The first that TRL calls with a batch starts those of all agents."""
        if self._request is None or self._completions is not batch["completions"]:
            rows = _rows(batch)
            for agent in self._team:
                agent._begin(rows, group_size, batch)
        request = self._request
        assert request is not None, "it has begun"
        request.wait()
        self._left.discard(number)
        if not self._left:
            self._request = self._completions = None
        return request.outcomes[number]

    def _begin(self, rows: Sequence[Mapping[str, Any]], group_size: int, batch: Mapping[str, Any]) -> None:
        self._request, self._completions = self.submit(rows, group_size=group_size, batch=batch), batch["completions"]
        self._left = {one.number for one in self._own}

    # ----------------------------------------------------------------------------------------------- backends

    def _kind(self, form: RewardForm) -> str:
        return self.backend or ("asyncio" if form.asynchronous else "thread")

    def _start(self, kind: str, calls: Sequence[Call]) -> None:
        if kind not in self._backends:
            backend = self._make(kind)
            self._backends[kind] = RetriedCalls(backend, self.transient, self.retries) if self.transient else backend
        self._backends[kind].submit(calls)

    def _make(self, kind: str) -> Backend:
        share = max(1, self.max_concurrency // self._ranks)
        pace = None if self.rate_limit is None else Pace(self.rate_limit / self._ranks)
        if kind == "thread":
            return ThreadCalls(share, pace=pace)
        if kind == "asyncio":
            return AsyncCalls(share, pace=pace)
        if kind == "process":
            from dash_trl.workers import ProcessCalls

            return ProcessCalls(min(share, default_workers()))
        from dash_trl.workers import RayCalls

        return RayCalls(share)


@dataclass(frozen=True)
class Returned:
    """What a function of TRL's form returned for a whole batch, and the calls of TRL's logs that it made meanwhile."""

    output: Any
    logged: Sequence[tuple[str, tuple]]


def _note_call(logged: list[tuple[str, tuple]], name: str, *arguments: Any) -> None:
    logged.append((name, arguments))


def _outcome(call: Call) -> Score | BaseException:
    if call.error is not None:
        return call.error
    try:
        return read_score(call.value)
    except ValueError as error:
        return error


def _call_with(function: Callable[[Any], Any], scores: list[float]) -> list[float]:
    processed = [float(value) for value in function(scores)]
    if len(processed) != len(scores):
        raise ValueError(f"post_process_scores returned {len(processed)} scores for {len(scores)}")
    return processed


def _processed(call: Call, outcomes: Sequence[Any]) -> list[Any]:
    """Outcomes with new scores; one that had none, and got none, stays as it was."""
    if call.error is not None:
        return [call.error] * len(outcomes)
    return [
        old
        if math.isnan(value) and (isinstance(old, BaseException) or old.value is None)
        else Score(value, {} if isinstance(old, BaseException) else old.notes)
        for value, old in zip(call.value, outcomes, strict=True)
    ]


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of what TRL calls a function with: of each completion, its prompt, itself and the data set's columns."""
    count = len(batch["completions"])
    columns = {name: values for name, values in batch.items() if isinstance(values, list) and len(values) == count}
    columns["completion"], columns["prompt"] = columns.pop("completions"), columns.pop("prompts")
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def unpack(reward_funcs: Any) -> Any:
    """The list of reward functions that TRL takes: agents give theirs, and forms unknown to TRL get an agent."""
    if reward_funcs is None:
        return None
    found: list[Any] = []
    for one in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        if isinstance(one, RewardAgent):
            found += one.rewards
        elif is_reward_model(one) or form_of(one).batch:
            found.append(one)
        else:
            found += RewardAgent(one).rewards
    return found


def is_reward_model(function: Any) -> bool:
    """A module, or the name of one: TRL's, computed on the main thread."""
    return isinstance(function, (nn.Module, str))


def _check(
    backend: Any,
    timeout: float,
    max_concurrency: int,
    rate_limit: float | None,
    transient: Sequence[Any],
    retries: int,
    on_error: Any,
) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} does not exist: choose one of {BACKENDS}, or None.")
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} does not exist: choose one of {ON_ERROR}.")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} would end every call: give the seconds that a completion may take.")
    if not max_concurrency >= 1:
        raise ValueError(f"max_concurrency={max_concurrency} lets no call start: give at least 1.")
    if rate_limit is not None and not rate_limit > 0:
        raise ValueError(f"rate_limit={rate_limit} lets no call start: give the starts per second, or None.")
    if not retries >= 0:
        raise ValueError(f"retries={retries} is negative: give 0 to make every call once.")
    for one in transient:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise ValueError(f"transient names {one!r}, which is no class of exceptions: e.g. (ConnectionError,).")
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
            "function an agent of its own."
        )
    if form.batch and backend in ("process", "ray"):
        raise ValueError(
            f"backend={backend!r} takes completions one by one, but '{form.name}' has TRL's form and gets the whole "
            "batch. Write it per sample: reward(completion, answer, ...)."
        )
