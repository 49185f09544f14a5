"""Distributes requests over several servers. Each is completed exactly once, even if servers fail.

The path of a request::

    complete: waits for its turn ──► the server with the fewest outstanding tokens ──► its completions
                  ▲                                 │ failed, hung, died
                  └─────────────────────────────────┘
    submit: a batch of coroutines that await `complete`, once or several times ──► collect: their results, in order

`health.Fleet` decides which request goes where. While there are requests, only the event loop's thread changes the
pool's state.
"""

import asyncio
import logging
import math
import queue
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp

from dash_trl.sampling.health import PROBE_EVERY, URGENT, Fleet, Job, State
from dash_trl.sampling.vllm import Completion, Options, ServerError, ServerGone, VLLMServer
from dash_trl.server_key import check_urls
from dash_trl.workers import EventLoop, Work, together

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # failures of one request before the run ends with an error
TICK = 0.25  # seconds between checks for servers that may be probed again or have stopped answering
START_TOGETHER = 1.0  # seconds; a request waits at most this long for the checks of unchecked servers
TEST_SECONDS = 60.0  # for the token that a server samples before it is trusted again
KEEP_ALIVE = 4.0  # seconds; uvicorn closes idle connections after 5 s, and a request sent at that moment is lost

T = TypeVar("T")
Batch = asyncio.Task[list[Any]]


class PoolError(RuntimeError):
    """The servers could not complete the work. The message names each server and its last error."""


class ServerPool:
    """Pool of servers that balances requests by outstanding tokens. Requests of a failed server go to other servers.

    Args:
        urls: addresses of the servers, such as ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        server_timeout: seconds without any usable server after which a `PoolError` is raised.
        request_timeout: seconds, without weight syncs, in which a server with requests has to answer one of them, or
            else counts as dead.
        ranks: number of processes that share the servers.

    Attributes:
        retried: number of requests so far that had to wait again.
        refit: coroutine function that gives a server the current weights and returns their version, or None before the
            first weight sync. If `refit` is None, servers are used as they are.

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
        self.retried = 0
        self.refit: Callable[[VLLMServer], Awaitable[int | None]] | None = None
        self._batches = set[Batch]()
        self._watcher: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # of a check; it ends all jobs
        self._wake = asyncio.Event()
        self._weights_sent = asyncio.Event()  # cleared during a weight sync to all servers
        self._weights_sent.set()
        self._usable = -math.inf  # when a server was last usable, or given weights
        self._checks: dict[str, asyncio.Task[None]] = {}  # URL → its check, which may outlive a batch
        self._refitting = set[str]()  # URLs of servers whose check gives them weights
        self._loop = EventLoop()
        session = self._loop.run(self._connect())
        self._servers = {url: VLLMServer(url, session, request_timeout) for url in self.urls}
        weakref.finalize(self, self._loop.close, session.close)

    async def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE))

    def wait_until_ready(self) -> None:
        """Wait until every server answers; raise a `PoolError` after `server_timeout`."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            self.ask_all(self._check, self.fleet.urls_of(State.DEAD))
            missing = self.fleet.urls_of(State.DEAD)
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise self.error(
                    f"{len(missing)} of {len(self.urls)} vLLM servers did not answer within vllm_server_timeout="
                    f"{self.server_timeout:g} s. Start them (`dash_trl serve MODEL --servers {len(self.urls)}`) or "
                    "correct vllm_server_urls"
                )
            time.sleep(PROBE_EVERY)

    # ------------------------------------------------------------------------------------------- batches in work

    def submit(
        self,
        works: Iterable[Work],
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> Batch:
        """Start coroutines that await `complete`. The first error among them cancels the others.

        The event loop's thread passes this error to `failed`.
        """

        def ended(batch: Batch) -> None:
            if not batch.cancelled() and (error := batch.exception()) is not None:
                failed(error)

        async def start() -> Batch:
            batch = asyncio.ensure_future(together(works))
            batch.add_done_callback(ended)
            return batch

        batch = self._loop.run(start())
        self._batches.add(batch)
        return batch

    def collect(self, batch: Batch) -> list[Any]:
        """Wait for a batch, and return the results in the order of its coroutines, or raise their first error."""
        try:
            self._loop.run(asyncio.wait([batch]))
            return batch.result()
        finally:
            self.cancel(batch)  # after an interrupt, it is unfinished

    def as_completed(self, works: Iterable[Work[T]]) -> Iterator[T]:
        """Run coroutines and yield their results in order of completion, as long as the caller iterates."""
        results = queue.SimpleQueue[Any]()

        async def put(work: Work) -> None:
            results.put(await work)

        async def put_all() -> None:
            try:
                await together(map(put, works))
            finally:
                results.put(results)  # the end

        batch = self.submit([put_all()])
        try:
            while (result := results.get()) is not results:
                yield result
            self.collect(batch)
        finally:
            self.cancel(batch)

    def run(self, works: Iterable[Work[T]]) -> list[T]:
        return self.collect(self.submit(works))

    def cancel(self, *batches: Batch) -> None:
        """Cancel batches, or all, with their requests on the servers, and wait for their end."""
        batches = batches or tuple(self._batches)

        async def end() -> None:
            for batch in batches:
                batch.cancel()
            await asyncio.gather(*batches, return_exceptions=True)

        self._loop.run(end())
        self._batches.difference_update(batches)

    # --------------------------------------------------------------------------------- requests, on the loop's thread

    async def complete(
        self, prompt_ids: Sequence[int], n: int, sampling: Options, *, order: int = URGENT, number: int = 0
    ) -> tuple[list[Completion], list[int]]:
        """Sample `n` continuations of one prompt on any server. This coroutine runs on the pool's event loop.

        Args:
            sampling: see `VLLMServer.complete`.
            order, number: see `Job`.

        Returns:
            The continuations, and the weight versions when the server got the request and when it answered.

        Raises:
            PoolError: if no server could be used for `server_timeout`, or the request failed `ATTEMPTS` times.
            ValueError: if a server refused the request as invalid.
        """
        job = Job(n * (len(prompt_ids) + int(sampling.get("max_tokens") or 16)), n, order, number)
        await self._check_idle()
        while True:
            try:
                async with asyncio.timeout(None) as job.limit:  # `_look_after_servers` ends it
                    url = await self._assigned(job)
                    completions = await self._servers[url].complete(prompt_ids, n, sampling, timeout=0)
                    # A server that fails a weight sync may sample with wrong weights, and is dead at its end.
                    await self._weights_sent.wait()
                server = self.fleet.servers[url]
                if server.state == State.DEAD:
                    raise ServerError(server.last_error)
                self.fleet.served(url, time.monotonic())
                return completions, [job.version, self.fleet.version]
            except (ServerError, TimeoutError) as error:
                if self._error is not None:
                    raise self._error from None
                self._failed(job, error)
            finally:
                self.fleet.drop(job)
                self._wake.set()

    async def _check_idle(self) -> None:
        """Check idle servers, unless weights are being sent, and wait: the first to answer would get all jobs."""
        now = time.monotonic()
        self.fleet.uncheck_idle(now)
        if self._weights_sent.is_set():
            self._start_checks(now)
            checks = [self._checks[server.url] for server in self.fleet.current() if server.url in self._checks]
            if checks:
                await asyncio.wait(checks, timeout=START_TOGETHER)

    async def _assigned(self, job: Job) -> str:
        self.fleet.add(job)
        self._wake.set()
        if self._watcher is None or self._watcher.done():
            self._error = None
            self._watcher = asyncio.ensure_future(self._watch())
        await job.assigned.wait()
        return job.tried[-1]

    def _failed(self, job: Job, error: Exception) -> None:
        """Record that a server failed a job; raise after `ATTEMPTS` failures, because the job may be the cause."""
        url = job.tried[-1]
        server = self.fleet.servers[url]
        if server.state != State.DEAD:
            logger.warning(f"Server {url} failed a request, which goes to another server: {error}")
            self.fleet.failed(url, str(error), time.monotonic(), gone=isinstance(error, ServerGone))
        self.retried += 1
        if len(job.tried) >= ATTEMPTS:
            what = f"A request failed {ATTEMPTS} times, most recently on {url}: {server.last_error}"
            raise self.error(what) from error

    async def _watch(self) -> None:
        """Check servers and give jobs to them until no job is left. An error in a check ends all jobs."""
        self._usable = time.monotonic()
        while self.fleet.jobs():
            self._wake.clear()
            try:
                if self._weights_sent.is_set():
                    self._look_after_servers(time.monotonic())
                self.fleet.assign(time.monotonic())
            except Exception as error:
                self._error = error
                for job in self.fleet.jobs():
                    job.interrupt()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._wake.wait()

    def _look_after_servers(self, now: float) -> None:
        """Take jobs back from servers that died or do not answer, and check servers that are not trusted."""
        for url, server in self.fleet.servers.items():
            if server.outstanding and server.last_answer < now - self.request_timeout:
                self.fleet.died(url, f"answered no request for {self.request_timeout:g} s", now)
            if server.state == State.DEAD and (lost := [job for job in server.outstanding if job.interrupt()]):
                logger.warning(f"{len(lost)} requests of {url} go to other servers: {server.last_error}")
        self._start_checks(now)
        if self.fleet.current():
            self._usable = now
        elif now - self._usable >= self.server_timeout:
            raise self.error(f"No vLLM server could be used for {self.server_timeout:g} s")

    # ----------------------------------------------------------------------------------------------------- weights

    def ask_all(self, ask: Callable[[VLLMServer], Awaitable[T]], urls: Sequence[str] | None = None) -> dict[str, T]:
        """Call an async function with several servers in parallel; return URL → return value.

        Args:
            urls: URLs of the servers; None: all.

        Raises:
            PoolError: if a server cannot be reached or failed.
            Exception: another error of `ask`, when all calls have ended.
        """
        urls = self.urls if urls is None else urls

        async def answers() -> list[Any]:
            return await asyncio.gather(*[ask(self._servers[url]) for url in urls], return_exceptions=True)

        found = dict(zip(urls, self._loop.run(answers()), strict=True))
        for url, answer in found.items():
            if isinstance(answer, ServerError):
                raise PoolError(f"{url}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return found

    def use_adapter(self) -> None:
        """Let all requests use the LoRA adapter that the servers are given."""
        for server in self._servers.values():
            server.uses_adapter = True

    def new_version(self, version: int) -> list[str]:
        """Begin a weight sync, which `weights_sent` ends; return the URLs of the servers that have to get the weights.

        Dead servers get them when they answer again. Requests in flight go on with the new weights. Checks that are
        giving servers older weights end first, because these could come last. No server is probed until the sync ends.
        """

        async def begin() -> list[str]:
            self._weights_sent.clear()
            for url, check in list(self._checks.items()):
                if url not in self._refitting and not check.done():  # a probe may take long
                    self._checks.pop(url).cancel()
            if self._checks:
                await asyncio.wait(self._checks.values())
            self.fleet.new_version(version)
            return self.fleet.urls_of(State.REFITTING)

        return self._loop.run(begin())

    def weights_sent(self, errors: Mapping[str, str | None]) -> None:
        """End a weight sync. `errors`: URL → why the server does not hold the new weights; None if it does."""

        async def end() -> None:
            now = self._usable = time.monotonic()
            for url, error in errors.items():
                if error is None:
                    self.fleet.refitted(url, self.fleet.version, now)
                else:
                    logger.warning(f"Server {url} did not load the weights of version {self.fleet.version}: {error}")
                    self.fleet.died(url, error, now)
            for server in self.fleet.servers.values():
                server.last_answer = now
            # Idle servers are probed again, because they may have restarted since they loaded the weights.
            self.fleet.uncheck_idle(now)
            self._weights_sent.set()
            self._wake.set()  # jobs may be waiting

        self._loop.run(end())

    def _start_checks(self, now: float) -> None:
        """Start the checks that are due. Raise the error of a check that has ended."""
        for url in [url for url, check in self._checks.items() if check.done()]:
            self._checks.pop(url).result()
        for url in self.fleet.to_probe(now):
            if url not in self._checks:
                self._checks[url] = asyncio.ensure_future(self._check(self._servers[url]))
                self._checks[url].add_done_callback(lambda _: self._wake.set())

    async def _check(self, server: VLLMServer) -> None:
        """Probe an unchecked or dead server, and give it the current weights unless it holds them."""
        url = server.url
        known = self.fleet.servers[url]
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
        except Exception as error:
            self.fleet.died(url, str(error), time.monotonic())
            if not isinstance(error, ServerError):  # it ends the run; a later request meets it again
                raise

    def error(self, what: str) -> PoolError:
        """Return an error with a message (without a full stop) and the state of every server."""
        states = (f"\n  {one.url} is {one.state}; last error: {one.last_error}" for one in self.fleet.servers.values())
        return PoolError(f"{what}. The servers as this process sees them:{''.join(states)}")
