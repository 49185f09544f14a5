"""Work for several vLLM servers: every job is done exactly once, whatever fails.

    jobs ──► the server with the fewest outstanding tokens ──► results, in the order of the jobs
      ▲                        │ failed, hung, died
      └────────────────────────┘

By the rules of `health.Fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dash_trl.sampling.health import Fleet, State
from dash_trl.sampling.server import Completion, ServerError, VLLMServer
from dash_trl.sampling.urls import check_urls
from dash_trl.workers import EventLoop

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # of one job, before it is given up with the run
TICK = 0.25  # seconds between looks at who may be tried again
START_TOGETHER = 1.0  # seconds at most that a batch waits for all servers to be recognised
KEEP_ALIVE = 4.0  # seconds; uvicorn closes an idle connection after 5, and a request sent into that would be lost
API_KEY = "VLLM_API_KEY"  # vLLM's own variable


class PoolError(RuntimeError):
    """The servers could not do the work; the message names each of them and its last error."""


@dataclass(eq=False)
class Job:
    """Something any server can do; equal to no other.

    Attributes:
        ask: what to await of a server. tokens, sequences: the load that it is.
    """

    ask: Callable[[VLLMServer], Awaitable[Any]]
    tokens: int
    sequences: int = 1
    failed_on: list[str] = field(default_factory=list)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Lets a task's error wait for the next batch, where it is raised; asyncio prints what nobody has looked at."""
    if not task.cancelled():
        task.exception()


class ServerPool:
    """Work for several servers, balanced by outstanding tokens; what a failed server had is done by the others.

    Args:
        urls: e.g. ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        server_timeout: seconds without any usable server until a `PoolError`.
        request_timeout: seconds for one answer; after that the server is suspected and the job goes elsewhere.
    Raises:
        ValueError: no URL, not a URL, or one twice.
    """

    def __init__(self, urls: Sequence[str], *, server_timeout: float = 240.0, request_timeout: float = 600.0):
        self.urls = check_urls(urls)
        self.server_timeout = server_timeout
        self.request_timeout = request_timeout
        self.fleet = Fleet(self.urls)
        self.refit: Callable[[VLLMServer], Awaitable[int | None]] = self._without_weights
        self._recognising: dict[str, asyncio.Task[None]] = {}  # they outlive a batch: a large model is long in loading
        self._loop = EventLoop()
        session = self._loop.run(self._connect())
        self._servers = {url: VLLMServer(url, session, request_timeout) for url in self.urls}
        weakref.finalize(self, self._loop.close, session.close)

    async def _connect(self) -> aiohttp.ClientSession:
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        )

    async def _without_weights(self, server: VLLMServer) -> int | None:
        """A pool that never sent weights takes the servers as they are."""
        return self.fleet.version

    def wait_until_ready(self) -> None:
        """Every server answers: at the start of a run a missing one is a mistake.

        Raises:
            PoolError: after `server_timeout`.
        """

        async def wait(server: VLLMServer) -> str | None:
            deadline = time.monotonic() + self.server_timeout
            while True:
                try:
                    await server.probe()
                    await self._recognise(server.url)
                    return None
                except ServerError as error:
                    if time.monotonic() > deadline:
                        return f"  {server.url}: {error}"
                    await asyncio.sleep(1.0)

        async def wait_for_all() -> list[str | None]:
            return await asyncio.gather(*map(wait, self._servers.values()))

        missing = [line for line in self._loop.run(wait_for_all()) if line]
        if missing:
            raise PoolError(
                f"{len(missing)} of {len(self.urls)} vLLM servers did not answer within vllm_server_timeout="
                f"{self.server_timeout:g} s. Start them (`python -m dash_trl.serve MODEL --servers {len(self.urls)}`) "
                "or correct vllm_server_urls.\n" + "\n".join(missing)
            )

    def complete(
        self,
        prompts: Sequence[tuple[Sequence[int], int] | tuple[Sequence[int], int, int | None]],
        sampling: dict[str, Any],
    ) -> list[list[Completion]]:
        """Sample continuations.

        Args:
            prompts: (token ids, how many continuations) each, and, if it differs from that of `sampling`, `max_tokens`.
            sampling: vLLM's sampling parameters, as in the body of `/v1/completions`.
        Returns:
            Per prompt, in order, its continuations.
        Raises:
            PoolError: no server could be used for `server_timeout`, or a prompt failed `ATTEMPTS` times.
            ValueError: a server refused a request as invalid.
        """

        def job(ids: Sequence[int], n: int, max_tokens: int | None = None) -> Job:
            own = sampling if max_tokens is None else {**sampling, "max_tokens": max_tokens}
            tokens = n * (len(ids) + int(own.get("max_tokens") or 16))
            return Job(lambda server: server.complete(ids, n, own), tokens, n)

        return self._collect([job(*prompt) for prompt in prompts])

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token but the first, at temperature 1; raises as `complete`."""

        def job(ids: Sequence[int]) -> Job:
            return Job(lambda server: server.log_probs(ids), len(ids))

        return self._collect([job(ids) for ids in sequences])

    def on_each(self, ask: Callable[[VLLMServer], Awaitable[Any]], urls: Sequence[str] | None = None) -> dict[str, Any]:
        """`ask` of these servers (`None`: all) at once: url → its answer, or the exception that it raised."""
        urls = self.urls if urls is None else urls

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*[ask(self._servers[url]) for url in urls], return_exceptions=True)

        return dict(zip(urls, self._loop.run(ask_all()), strict=True))

    def _collect(self, jobs: list[Job]) -> list[Any]:
        async def collect() -> list[Any]:
            results: list[Any] = [None] * len(jobs)
            async for i, result in self._as_completed(jobs):
                results[i] = result
            return results

        return self._loop.run(collect())

    async def _as_completed(self, jobs: list[Job]) -> AsyncIterator[tuple[int, Any]]:
        """(number of the job, result), each exactly once, as they finish."""
        pending = deque(range(len(jobs)))
        running: dict[asyncio.Task[Any], tuple[int, str]] = {}
        fleet = self.fleet
        began = time.monotonic()
        fleet.begin(began)
        suspects = self._look_at([url for url in fleet.to_probe(began) if fleet.servers[url].state == State.SUSPECT])
        if suspects:  # the first to answer would be given all the work
            await asyncio.wait(suspects, timeout=START_TOGETHER)
        try:
            while pending or running:
                now = time.monotonic()
                for number in list(pending):
                    job = jobs[number]
                    url = fleet.choose(job.sequences, avoid=job.failed_on)
                    if url is not None:
                        pending.remove(number)
                        fleet.started(url, job, job.tokens, job.sequences)
                        running[asyncio.ensure_future(job.ask(self._servers[url]))] = (number, url)
                    elif not job.failed_on:
                        break  # nobody has room
                self._look_at(fleet.to_probe(now))
                if fleet.lost(began, now, self.server_timeout) and not running:
                    raise PoolError(self.message(f"No vLLM server could be used for {self.server_timeout:g} s"))
                tasks = [*running, *self._recognising.values()] or [asyncio.ensure_future(asyncio.sleep(TICK))]
                done, _ = await asyncio.wait(tasks, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                for task in done & running.keys():
                    number, url = running.pop(task)
                    error = task.exception()
                    if error is None:
                        fleet.served(url, jobs[number])
                        yield number, task.result()
                    elif isinstance(error, ServerError):
                        fleet.failed(url, jobs[number], str(error), time.monotonic(), gone=error.gone)
                        logger.warning(f"vLLM server {url} failed a request, which goes to another: {error}")
                        self._count_failure(jobs[number], url, str(error))
                        pending.appendleft(number)
                    else:
                        raise error
                lost = [task for task, (_, url) in running.items() if fleet.servers[url].state == State.DEAD]
                if lost:
                    logger.warning(f"{len(lost)} requests of vLLM servers that are taken for dead go to others.")
                for task in lost:
                    number, url = running.pop(task)
                    task.cancel()
                    fleet.abandoned(url, jobs[number])
                    self._count_failure(jobs[number], url, fleet.servers[url].last_error)
                    pending.appendleft(number)
        finally:
            for task, (number, url) in running.items():
                fleet.abandoned(url, jobs[number])
                task.cancel()

    def _count_failure(self, job: Job, url: str, error: str) -> None:
        """Of those that a server had when it died, too: one of them may be what kills servers."""
        job.failed_on.append(url)
        if len(job.failed_on) >= ATTEMPTS:
            raise PoolError(self.message(f"A request failed {ATTEMPTS} times, at last with {url}: {error}"))

    def settle(self) -> None:
        """Wait for servers that are being given weights: before newer ones are sent, lest the old ones come last."""

        async def wait() -> None:
            if self._recognising:
                await asyncio.wait(self._recognising.values())

        self._loop.run(wait())

    def _look_at(self, urls: Sequence[str]) -> list[asyncio.Task[None]]:
        """Starts to recognise servers, and raises what earlier looks raised."""
        for url in [url for url, task in self._recognising.items() if task.done()]:
            self._recognising.pop(url).result()
        for url in urls:
            if url not in self._recognising:
                self._recognising[url] = asyncio.ensure_future(self._recognise(url))
                self._recognising[url].add_done_callback(_retrieve)  # though this batch may end before it
        return [self._recognising[url] for url in urls]

    async def _recognise(self, url: str) -> None:
        """Look at a server that is not trusted; it gets the current weights, if it has others, before any prompt."""
        server, known = self._servers[url], self.fleet.servers[url]
        try:
            await server.probe()
            doubtful = known.version is None or known.failures > 0
            self.fleet.answered(url)
            version = await self.refit(server)
            if version is None:
                return  # it waits for the next weights
            if doubtful:
                await server.try_out()
            self.fleet.refitted(url, version, time.monotonic())
            if doubtful:
                logger.info(f"vLLM server {url} has the weights of version {version}.")
        except ServerError as error:
            self.fleet.refit_failed(url, str(error), time.monotonic())

    def message(self, what: str) -> str:
        """An error's text, with what is known of every server."""
        return f"{what}. The servers, as this process saw them:\n{self.fleet.describe()}"
