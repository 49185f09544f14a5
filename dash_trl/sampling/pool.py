"""Distributes jobs over several servers. Every job is completed exactly once, even if servers fail.

The path of a job::

    complete: a job ──► backlog ──► the server with the fewest outstanding tokens ──► its completions
                           ▲                        │ failed, hung, died
                           └────────────────────────┘
    submit: coroutines that await `complete`, once or several times ──► collect: their results, in their order

A job is one request to a server. Several batches of coroutines may be in progress at once; `backlog.Backlog` and
`health.Fleet` decide which job goes where. While jobs are in progress, only the event loop's thread changes the
backlog, the fleet and the pool's other state. The results of a batch go through a queue to the thread that collects
them.
"""

import asyncio
import logging
import math
import queue
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from dash_trl.sampling.backlog import URGENT, Backlog, Job
from dash_trl.sampling.health import PROBE_EVERY, Fleet, State
from dash_trl.sampling.server import Completion, ServerError, ServerGone
from dash_trl.sampling.urls import check_urls
from dash_trl.sampling.vllm import VLLMServer
from dash_trl.workers import EventLoop

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # failures of one job before the run ends with an error
TICK = 0.25  # seconds between checks for servers that may be probed again or have stopped answering
START_TOGETHER = 1.0  # seconds; a new batch waits at most this long for the checks of suspect servers
TEST_SECONDS = 60.0  # for the token that a server samples before it is trusted again
KEEP_ALIVE = 4.0  # seconds; uvicorn closes idle connections after 5 s, and a request sent at that moment is lost


class PoolError(RuntimeError):
    """The servers could not complete the work. The message names each server and its last error."""


class Batch:
    """Coroutines that were submitted together.

    The event loop's thread puts their tasks into `finished`; the thread that submitted the batch reads them.

    Args:
        seen: called once with each result, on the thread that calls `read`; `None`: nobody is told.

    Attributes:
        tasks: one for each coroutine, in their order.
        finished: queue of the tasks that have ended.
    """

    def __init__(self, seen: Callable[[Any], None] | None):
        self.tasks: list[asyncio.Task[Any]] = []
        self.finished: queue.SimpleQueue[asyncio.Task[Any]] = queue.SimpleQueue()
        self._count = 0  # number of results that were read
        self._seen = seen
        self._error: Exception | None = None  # the first error; a call with `wait` raises it

    def read(self, *, wait: bool = False) -> None:
        """Read the results that have come since the last call, and call `seen` for each.

        Args:
            wait: True = wait for all results.

        Raises:
            Exception: the first error of a task or of `seen`. Without `wait`, an error is kept for the call with
                `wait`.
        """
        while self._count < len(self.tasks) and self._error is None and (wait or not self.finished.empty()):
            try:
                result = self.finished.get().result()
                self._count += 1
                if self._seen is not None:
                    self._seen(result)
            except Exception as error:
                self._error = error
        if wait and self._error is not None:
            raise self._error


class ServerPool:
    """Pool of servers that balances jobs by outstanding tokens. Jobs of a failed server go to other servers.

    Args:
        urls: addresses of the servers, such as ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        server_timeout: seconds without any usable server after which a `PoolError` is raised.
        request_timeout: seconds in which a server with jobs has to answer one of them. Otherwise all of its jobs count
            as failed and go to other servers. The time of a weight sync and the time in the backlog do not count.
        ranks: number of processes that share the servers.

    Attributes:
        fleet: state of the servers.
        backlog: unfinished jobs.
        retried: number of requests so far that went back to the backlog, because they failed or their server died.
        refit: coroutine function that gives a server the current weights and returns their version, or None if the
            server has to wait for the first weight sync. If `refit` is None, servers are used as they are.

    Raises:
        ValueError: see `check_urls`.
    """

    def __init__(
        self, urls: Sequence[str], *, server_timeout: float = 240.0, request_timeout: float = 600.0, ranks: int = 1
    ):
        self.urls = check_urls(urls)
        self.server_timeout = server_timeout
        self.request_timeout = request_timeout
        self.fleet = Fleet(self.urls, ranks)
        self.backlog = Backlog(self.fleet)
        self.retried = 0
        self._batches: set[Batch] = set()
        self._answers: dict[Job, asyncio.Future[list[Completion]]] = {}  # unfinished job → its result to be
        self._requests: dict[Job, asyncio.Task[list[Completion]]] = {}  # running job → its request
        self._last_answers = dict.fromkeys(self.urls, 0.0)  # URL → when the server last answered or had no job
        self._worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._refitting: set[str] = set()  # URLs of servers whose check gives them weights
        self._sending = False  # whether a weight sync to all servers is in progress
        self._usable = -math.inf  # when a server was last usable, or given weights
        self.refit: Callable[[VLLMServer], Awaitable[int | None]] | None = None
        self._checks: dict[str, asyncio.Task[None]] = {}  # URL → its check, which may outlive a batch
        self._loop = EventLoop()
        session = self._loop.run(self._connect())
        self._servers: dict[str, VLLMServer] = {url: VLLMServer(url, session, request_timeout) for url in self.urls}
        weakref.finalize(self, self._loop.close, session.close)

    async def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE))

    def wait_until_ready(self) -> None:
        """Wait until every server answers.

        A server that is missing at the start of a run counts as a mistake in the settings. A server that dies later
        does not end the run.

        Raises:
            PoolError: if a server does not answer within `server_timeout`.
        """

        def dead() -> list[str]:
            return [url for url in self.urls if self.fleet.servers[url].state == State.DEAD]

        async def missing_servers() -> list[str]:
            await asyncio.gather(*map(self._check, dead()))
            return dead()

        deadline = time.monotonic() + self.server_timeout
        while missing := self._loop.run(missing_servers()):
            if time.monotonic() >= deadline:
                raise PoolError(
                    self.message(
                        f"{len(missing)} of {len(self.urls)} vLLM servers did not answer within vllm_server_timeout="
                        f"{self.server_timeout:g} s. Start them (`dash_trl serve MODEL --servers "
                        f"{len(self.urls)}`) or correct vllm_server_urls"
                    )
                )
            time.sleep(PROBE_EVERY)

    def completions(
        self,
        prompts: Sequence[tuple[Sequence[int], int] | tuple[Sequence[int], int, int | None]],
        sampling: dict[str, Any],
        *,
        order: int = URGENT,
    ) -> list[Job]:
        """Make one job for each prompt; its result is the list of the prompt's continuations (`Completion`).

        Args:
            prompts: (token ids, number of continuations) for each prompt. A third element replaces `max_tokens` of
                `sampling`, unless it is None.
            sampling: sampling parameters, see `VLLMServer.complete`.
            order: see `Job`.

        Returns:
            The jobs, in the order of the prompts.
        """

        jobs = []
        for number, (ids, n, *limit) in enumerate(prompts):
            own = sampling if not limit or limit[0] is None else sampling | {"max_tokens": limit[0]}
            tokens = n * (len(ids) + int(own.get("max_tokens") or 16))
            jobs.append(Job(tokens, n, prompt_ids=ids, sampling=own, order=order, number=number))
        return jobs

    # ------------------------------------------------------------------------------------------- batches in work

    def submit(self, works: Iterable[Coroutine[Any, Any, Any]], seen: Callable[[Any], None] | None = None) -> Batch:
        """Start coroutines without waiting for them; `collect` waits.

        Args:
            works: coroutines that await `complete`, once or several times.
            seen: see `Batch`.
        """
        batch = Batch(seen)
        self._batches.add(batch)

        async def start() -> None:
            await self._check_idle()
            for work in works:
                task = asyncio.ensure_future(work)
                task.add_done_callback(batch.finished.put)
                batch.tasks.append(task)

        self._loop.run(start())
        return batch

    def collect(self, batch: Batch) -> list[Any]:
        """Wait for a batch.

        Args:
            batch: see `submit`.

        Returns:
            The results, in the order of the batch's coroutines.

        Raises:
            Exception: the errors of `run`, and an error of the batch's `seen`.
        """
        try:
            batch.read(wait=True)
        finally:  # drop the unfinished jobs after an error or an interrupt
            self._forget(batch)
        return [task.result() for task in batch.tasks]

    def _forget(self, batch: Batch) -> None:
        """Cancel what is unfinished of a batch."""

        async def forget() -> None:
            for task in batch.tasks:
                task.cancel()
            await asyncio.gather(*batch.tasks, return_exceptions=True)

        self._batches.discard(batch)
        self._loop.run(forget())

    def as_completed(self, jobs: list[Job]) -> Iterator[tuple[int, Any]]:
        """Run jobs and yield their results in order of completion.

        If the caller stops iterating early, the unfinished jobs are dropped.

        Args:
            jobs: jobs that are numbered from 0.

        Yields:
            (number of a job, its result).

        Raises:
            Exception: the errors of `run`.
        """

        async def numbered(job: Job) -> tuple[int, list[Completion]]:
            return job.number, await self.complete(job)

        batch = self.submit(map(numbered, jobs))
        try:
            for _ in jobs:
                yield batch.finished.get().result()
        finally:
            self._forget(batch)

    def cancel(self) -> None:
        """Cancel all batches and their requests on the servers. Call it when nobody needs the results any more."""
        for batch in tuple(self._batches):
            self._forget(batch)

    def run(self, jobs: list[Job]) -> list[list[Completion]]:
        """Run jobs and wait for them.

        Args:
            jobs: the jobs.

        Returns:
            The results, in the order of the jobs.

        Raises:
            PoolError: if no server could be used for `server_timeout`, or a job failed `ATTEMPTS` times.
            ValueError: if a server refused a request as invalid.
        """
        return self.collect(self.submit(map(self.complete, jobs)))

    async def _check_idle(self) -> None:
        """Check idle servers, unless weights are being sent."""
        now = time.monotonic()
        self.fleet.suspect_idle(now)
        suspects = [url for url in self.fleet.to_probe(now) if self.fleet.servers[url].state == State.SUSPECT]
        if suspects and not self._sending:  # otherwise the first suspect that answers its probe would be given all jobs
            await asyncio.wait(self._start_checks(suspects), timeout=START_TOGETHER)

    async def complete(self, job: Job, *, check: bool = False) -> list[Completion]:
        """Wait until a server has completed a job. This coroutine runs on the pool's event loop.

        Args:
            job: the job.
            check: True = check idle servers first, because the batch of the job has begun long ago.
        """
        if check:
            await self._check_idle()
        job.began = time.monotonic()
        answer = self._answers[job] = asyncio.get_running_loop().create_future()
        self.backlog.add([job])
        self._wake.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        try:
            return await answer
        finally:
            self._drop(job)

    # ------------------------------------------------------------------------------- the work, on the loop's thread

    async def _work(self) -> None:
        """Assign jobs and take in their results until no job is left."""
        while self._answers:
            try:
                self._assign()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await self._wake.wait()
                self._collect_answers()
            except Exception as error:  # for example in a server check; the error concerns all jobs
                for job in tuple(self._answers):
                    self._fail(job, error)

    def _wake_up(self, _: asyncio.Task[Any]) -> None:
        self._wake.set()

    def _assign(self) -> None:
        """Assign waiting jobs to servers, and check servers that are not trusted."""
        self._wake.clear()
        now = time.monotonic()
        if not self._sending:
            self._start_checks(self.fleet.to_probe(now))
        for url, server in self.fleet.servers.items():
            if self._sending or not server.outstanding:
                self._last_answers[url] = now
        for job, url in self.backlog.assign():
            request = self._servers[url].complete(job.prompt_ids, job.sequences, job.sampling, timeout=math.inf)
            self._requests[job] = asyncio.ensure_future(request)
            self._requests[job].add_done_callback(self._wake_up)
        self._fail_waiting()

    def _collect_answers(self) -> None:
        """Take back jobs of servers that died or do not answer, and take in the results of other servers.

        Not during a weight sync: a server that fails it may sample with wrong weights, and is dead at its end.
        """
        if self._sending:
            return
        lost = self.backlog.lost()
        if lost:
            logger.warning(f"{len(lost)} requests of servers that are considered dead go to other servers.")
        for job in lost:
            self._requests.pop(job).cancel()
            self._count_failure(job, self.fleet.servers[job.failed_on[-1]].last_error)
        for job in [job for job, task in self._requests.items() if task.done()]:
            task = self._requests.pop(job)
            error = task.exception()
            if error is None:
                self._last_answers[self.backlog.running[job]] = time.monotonic()
                self.backlog.served(job)
                answer = self._answers.pop(job)
                if not answer.done():  # cancelled
                    answer.set_result(task.result())
            elif isinstance(error, ServerError):
                self._failed(job, error)
            else:
                self._fail(job, error)
        earliest = time.monotonic() - self.request_timeout
        for job, url in tuple(self.backlog.running.items()):
            if self._last_answers[url] < earliest:
                self._requests.pop(job).cancel()
                self._failed(job, ServerError(f"answered no request for {self.request_timeout:g} s"))

    def _failed(self, job: Job, error: ServerError) -> None:
        """Return a job to the backlog after its server has failed it."""
        url = self.backlog.running[job]
        self.backlog.failed(job, str(error), time.monotonic(), gone=isinstance(error, ServerGone))
        logger.warning(f"Server {url} failed a request, which goes to another server: {error}")
        self._count_failure(job, str(error))

    def _count_failure(self, job: Job, error: str) -> None:
        """End a job after `ATTEMPTS` failures. The loss of its server counts, because the job may be the cause."""
        self.retried += 1
        if len(job.failed_on) >= ATTEMPTS:
            what = self.message(f"A request failed {ATTEMPTS} times, most recently on {job.failed_on[-1]}: {error}")
            self._fail(job, PoolError(what))

    def _fail_waiting(self) -> None:
        """Fail the jobs for which no server has been usable for `server_timeout` seconds, apart from weight syncs."""
        now = time.monotonic()
        if self._sending or self.fleet.current():
            self._usable = now
        if self.backlog.running:
            return
        for job in tuple(self._answers):
            if now - max(job.began, self._usable) >= self.server_timeout:
                what = self.message(f"No vLLM server could be used for {self.server_timeout:g} s")
                self._fail(job, PoolError(what))

    def _fail(self, job: Job, error: BaseException) -> None:
        """End a job with an error."""
        answer = self._answers[job]
        self._drop(job)
        if not answer.done():  # cancelled
            answer.set_exception(error)

    def _drop(self, job: Job) -> None:
        """Forget a job, and cancel its request."""
        self.backlog.drop(job)
        self._answers.pop(job, None)
        if job in self._requests:
            self._requests.pop(job).cancel()

    # ----------------------------------------------------------------------------------------------------- weights

    def on_each(
        self, ask: Callable[..., Awaitable[Any]], *arguments: Any, urls: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Call an async function with several servers in parallel.

        Args:
            ask: coroutine function that gets a server and `arguments`.
            arguments: further arguments of `ask`.
            urls: URLs of the servers; None: all.

        Returns:
            URL → return value of `ask`, or the exception that it raised.
        """
        urls = self.urls if urls is None else urls

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*[ask(self._servers[url], *arguments) for url in urls], return_exceptions=True)

        return dict(zip(urls, self._loop.run(ask_all()), strict=True))

    def ask_all(self, ask: Callable[[VLLMServer], Awaitable[Any]]) -> dict[str, Any]:
        """Call an async function with all servers in parallel, and raise if one fails.

        Args:
            ask: coroutine function that gets a server.

        Returns:
            URL → return value of `ask`.

        Raises:
            PoolError: if a server cannot be reached or failed.
            Exception: any other exception of `ask`.
        """
        answers = self.on_each(ask)
        for url, answer in answers.items():
            if isinstance(answer, ServerError):
                raise PoolError(f"{url}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def use_adapter(self) -> None:
        """Let all requests use the LoRA adapter that the servers are given, in place of their model."""
        for server in self._servers.values():
            server.uses_adapter = True

    def new_version(self, version: int) -> list[str]:
        """Begin a weight sync, which `weights_sent` ends. Requests in flight continue with the new weights.

        If servers are being given older weights outside a sync, the call first waits for that to end. Otherwise the
        older weights could arrive after the new weights. No server is probed until the sync ends.

        Args:
            version: the new weight version.

        Returns:
            URLs of the servers that have to be given the new weights. Dead servers get the weights when they answer
            again.
        """

        async def begin() -> list[str]:
            self._sending = True
            for url, check in list(self._checks.items()):
                if url not in self._refitting and not check.done():  # a probe may take long
                    self._checks.pop(url).cancel()
            if self._checks:
                await asyncio.wait(self._checks.values())
            self.fleet.new_version(version, time.monotonic())
            return self.fleet.waiting()

        return self._loop.run(begin())

    def weights_sent(self, version: int, errors: Mapping[str, str | None]) -> None:
        """End a weight sync and record which servers hold the new weights.

        Args:
            version: the new weight version.
            errors: URL → why the server does not have the weights; None if it has them.
        """

        async def end() -> None:
            self._sending = False
            now = self._usable = time.monotonic()
            for url, error in errors.items():
                if error is None:
                    self.fleet.refitted(url, version, now)
                else:
                    logger.warning(f"Server {url} did not load the weights of version {version}: {error}")
                    self.fleet.refit_failed(url, error, now)
            # Idle servers are probed again, because they may have restarted since they loaded the weights.
            self.fleet.suspect_idle(now)
            self._wake.set()  # jobs may be waiting

        self._loop.run(end())

    def _start_checks(self, urls: Sequence[str]) -> list[asyncio.Task[None]]:
        """Start the checks of servers that are not being checked; return all. Raise the error of one that ended."""
        for url in [url for url, task in self._checks.items() if task.done()]:
            self._checks.pop(url).result()
        for url in urls:
            if url not in self._checks:
                self._checks[url] = asyncio.ensure_future(self._check(url))
                self._checks[url].add_done_callback(self._wake_up)
        return [self._checks[url] for url in urls]

    async def _check(self, url: str) -> None:
        """Probe a suspect or dead server. If it holds other weights, give it the current weights before any job."""
        server, known = self._servers[url], self.fleet.servers[url]
        self._refitting.discard(url)
        try:
            await server.probe()
            self._refitting.add(url)
            doubtful = known.version is None or known.failures > 0
            self.fleet.answered(url)
            version = self.fleet.version if self.refit is None else await self.refit(server)
            self._refitting.discard(url)  # the rest may be cancelled
            if version is None:
                return
            # If the server has jobs, its next answer shows whether the engine works; a test would wait for the jobs.
            if doubtful and not known.outstanding:
                # An engine that hangs still answers other requests.
                await server.complete([0], 1, {"max_tokens": 1}, timeout=min(TEST_SECONDS, self.request_timeout))
            self.fleet.refitted(url, version, time.monotonic())
        except ServerError as error:
            self.fleet.refit_failed(url, str(error), time.monotonic())

    def message(self, what: str) -> str:
        """Extend an error message by the state and the last error of every server.

        Args:
            what: the message, without a full stop.
        """
        return f"{what}. The servers as this process sees them:\n{self.fleet.describe()}"
