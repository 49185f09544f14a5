"""Work for several vLLM servers: every job is done exactly once, whatever fails.

    submit: jobs ──► backlog ──► the server with the fewest outstanding tokens ──► collect: results, in their order
                        ▲                        │ failed, hung, died
                        └────────────────────────┘
    submit_chains: coroutines that ask for one job after the other

Several batches may be in work at once, by the rules of `backlog.Backlog` and `health.Fleet`; both, and everything else
that is written here while servers work, belong to the event loop's thread. What has finished belongs to who takes it.
"""

import asyncio
import logging
import math
import queue
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from dash_trl.sampling.backlog import Backlog, Job
from dash_trl.sampling.health import Fleet, State
from dash_trl.sampling.server import Completion, ServerError, VLLMServer
from dash_trl.sampling.urls import check_urls
from dash_trl.workers import EventLoop

logger = logging.getLogger(__name__)

URGENT = -1  # the order of what the trainer waits for
ATTEMPTS = 6  # of one job, before it is given up with the run
TICK = 0.25  # seconds between looks at who may be tried again, and at who is silent
LOOK_AGAIN = 1.0  # seconds between looks at servers that are missing at the start
START_TOGETHER = 1.0  # seconds at most that a batch waits for all servers to be recognised
KEEP_ALIVE = 4.0  # seconds; uvicorn closes an idle connection after 5, and a request sent into that would be lost


class PoolError(RuntimeError):
    """The servers could not do the work; the message names each of them and its last error."""


Seen = Callable[[int, Any], None]  # called with (number of a job, its result)


class Ask(Protocol):
    async def __call__(self, ids: list[int], max_tokens: int) -> Completion:
        """One continuation of a prompt."""


@dataclass(eq=False)
class Chain:
    """Requests of which each depends on what came of the one before, as in a conversation.

    Attributes:
        run: a coroutine function on the pool's event loop, which asks for one completion after the other.
        versions: of the weights when the first request was given to its server, and when the last one was done.
    """

    run: Callable[[Ask], Awaitable[None]]
    versions: tuple[int, int] = (-1, -1)
    sequences: int = 1


class Batch:
    """Jobs that were submitted together; the loop's thread finishes them, the one that submitted them takes them.

    Args:
        jobs: or chains, numbered from 0. began: seconds, on the loop's clock.
        seen: called with each result once, where it is taken.
    Attributes:
        finished: (number of a job, its result), as they come; an exception in place of the rest.
        results: that were taken, in the order of the jobs.
    """

    def __init__(self, jobs: Sequence[Job | Chain], began: float, seen: Seen | None = None):
        self.jobs = jobs
        self.began = began
        self.finished: Any = queue.SimpleQueue()
        self.results: list[Any] = [None] * len(jobs)
        self._seen = seen
        self._left = len(jobs)
        self._error: BaseException | None = None  # that was met by one who does not wait

    def take(self, *, wait: bool = False) -> None:
        """What has finished since.

        Args:
            wait: for all.
        Raises:
            Exception: where it waits, what went wrong, in the work or in `seen`, now or before.
        """
        while self._left and self._error is None and (wait or not self.finished.empty()):
            finished = self.finished.get()
            if isinstance(finished, BaseException):
                self._error = finished
                break
            number, self.results[finished[0]] = finished
            self._left -= 1
            if self._seen is not None:
                try:
                    self._seen(number, self.results[number])
                except Exception as error:
                    self._error = error
        if wait and self._error is not None:
            raise self._error


class _Reply:
    """Where a request of a chain ends, in place of a batch's queue."""

    def __init__(self, future: asyncio.Future[Any]):
        self._future = future

    def put(self, finished: tuple[int, Any] | BaseException) -> None:
        if self._future.done():  # its chain was cancelled
            return
        if isinstance(finished, BaseException):
            self._future.set_exception(finished)
        else:
            self._future.set_result(finished[1])


class ServerPool:
    """Work for several servers, balanced by outstanding tokens; what a failed server had is done by the others.

    Args:
        urls: e.g. ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        server_timeout: seconds without any usable server until a `PoolError`.
        request_timeout: seconds in which a server that works on jobs has to answer one; else it is suspected, and they
            go elsewhere. Those of a weight sync do not count, nor those for which a job waits here.
        ranks: processes that share the servers.
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
        self.retried = 0  # requests that went to another server
        self._batches: dict[Job, Batch] = {}  # of the jobs that are not done
        self._requests: dict[Job, asyncio.Task[Any]] = {}
        self._chains: dict[Batch, list[asyncio.Task[None]]] = {}
        self._heard = dict.fromkeys(self.urls, 0.0)  # server → when it last answered, or had nothing to answer
        self._worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._refitting: set[str] = set()  # those that are being given the weights that others have
        self._sending = False  # weights, to all servers
        self._sent = -math.inf
        self.refit: Callable[[VLLMServer], Awaitable[int | None]] | None = None  # None: servers are taken as they are
        self._recognising: dict[str, asyncio.Task[None]] = {}  # they outlive a batch: a large model is long in loading
        self._loop = EventLoop()
        session = self._loop.run(self._connect())
        self._servers = {url: VLLMServer(url, session, request_timeout) for url in self.urls}
        weakref.finalize(self, self._loop.close, session.close)

    async def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE))

    def wait_until_ready(self) -> None:
        """Every server answers: at the start of a run a missing one is a mistake.

        Raises:
            PoolError: after `server_timeout`.
        """

        async def look(urls: list[str]) -> list[str]:
            await asyncio.gather(*map(self._recognise, urls))
            return [url for url in urls if self.fleet.servers[url].state == State.DEAD]

        deadline = time.monotonic() + self.server_timeout
        missing = self._loop.run(look(self.urls))
        while missing and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN)
            missing = self._loop.run(look(missing))
        if missing:
            raise PoolError(
                self.message(
                    f"{len(missing)} of {len(self.urls)} vLLM servers did not answer within vllm_server_timeout="
                    f"{self.server_timeout:g} s. Start them (`python -m dash_trl.serve MODEL --servers "
                    f"{len(self.urls)}`) or correct vllm_server_urls"
                )
            )

    def complete(
        self, prompts: Sequence[tuple[Sequence[int], int]], sampling: dict[str, Any]
    ) -> list[list[Completion]]:
        """Per prompt, in order, its continuations; arguments as in `completions`.

        Raises:
            PoolError: no server could be used for `server_timeout`, or a prompt failed `ATTEMPTS` times.
            ValueError: a server refused a request as invalid.
        """
        return self.run(self.completions(prompts, sampling))

    def completions(
        self,
        prompts: Sequence[tuple[Sequence[int], int] | tuple[Sequence[int], int, int | None]],
        sampling: dict[str, Any],
    ) -> list[Job]:
        """A job per prompt, whose result is its continuations, a `Completion` each.

        Args:
            prompts: (token ids, how many continuations) each, and, if it differs from that of `sampling`, `max_tokens`.
            sampling: vLLM's sampling parameters, as in the body of `/v1/completions`.
        """

        def job(number: int, ids: Sequence[int], n: int, max_tokens: int | None = None) -> Job:
            own = sampling if max_tokens is None else {**sampling, "max_tokens": max_tokens}
            tokens = n * (len(ids) + int(own.get("max_tokens") or 16))
            return Job(tokens, n, ask=lambda server: server.complete(ids, n, own, timeout=math.inf), number=number)

        return [job(number, *prompt) for number, prompt in enumerate(prompts)]

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[Job]:
        """A job for each sequence, whose result is the log-prob of every token but the first, at temperature 1."""

        def job(number: int, ids: Sequence[int]) -> Job:
            return Job(len(ids), ask=lambda server: server.log_probs(ids, timeout=math.inf), number=number)

        return [job(*one) for one in enumerate(sequences)]

    # ------------------------------------------------------------------------------------------- batches in work

    def submit(self, jobs: list[Job], *, order: int, seen: Seen | None = None) -> Batch:
        """Work on these jobs from now on; `collect` waits for it.

        Args:
            jobs: numbered from 0. order: batches of a lower one go first. seen: see `Batch`.
        """
        for job in jobs:
            job.order = order
        return self._loop.run(self._submit(jobs, seen))

    def collect(self, batch: Batch) -> list[Any]:
        """The results of a batch, in the order of its jobs; raises what went wrong, as `run`."""
        try:
            batch.take(wait=True)
        finally:  # what is left of it after an error, or an interrupt
            self._loop.run(self._forget(batch))
        return batch.results

    def submit_chains(
        self, chains: Sequence[Chain], sampling: dict[str, Any], *, order: int, seen: Seen | None = None
    ) -> Batch:
        """Run these chains from now on; `collect` waits for all of them.

        Args:
            sampling: as in `completions`. order, seen: as in `submit`; the result of each chain is an empty list.
        """

        async def start() -> Batch:
            batch = Batch(chains, time.monotonic(), seen)
            follow = (self._follow(batch, number, one, sampling, order) for number, one in enumerate(chains))
            self._chains[batch] = [asyncio.ensure_future(one) for one in follow]
            return batch

        return self._loop.run(start())

    async def _follow(self, batch: Batch, number: int, chain: Chain, sampling: dict[str, Any], order: int) -> None:
        if sampling.get("seed") is not None:  # as vLLM does for the continuations of one request
            sampling = {**sampling, "seed": sampling["seed"] + number}

        async def ask(ids: list[int], max_tokens: int) -> Completion:
            (job,) = self.completions([(ids, 1, max_tokens)], sampling)
            job.order, job.number = order, number
            reply = asyncio.get_running_loop().create_future()
            await self._submit([job], None, _Reply(reply))
            try:
                (completion,) = await reply
            finally:
                self._drop([job])
            oldest, newest = job.versions
            chain.versions = oldest if chain.versions[0] < 0 else chain.versions[0], newest
            return completion

        try:
            await chain.run(ask)
        except Exception as error:
            self._fail({batch}, error)
        else:
            if chain.versions[0] < 0:  # it asked for nothing
                chain.versions = self.fleet.version, self.fleet.version
            batch.finished.put((number, []))

    def as_completed(self, jobs: list[Job]) -> Iterator[tuple[int, Any]]:
        """(number of a job, its result), as they come; raises as `run`. Where it is left early, so is the work."""
        batch = self.submit(jobs, order=URGENT)
        try:
            for _ in jobs:
                finished = batch.finished.get()
                if isinstance(finished, BaseException):
                    raise finished
                yield finished
        finally:
            self._loop.run(self._forget(batch))

    def cancel(self) -> None:
        """Nobody needs what is in work: it is taken back from the servers, too."""

        async def cancel() -> None:
            self._fail({*self._chains, *self._batches.values()}, PoolError("The work was cancelled."))

        self._loop.run(cancel())

    def run(self, jobs: list[Job]) -> list[Any]:
        """The results of these jobs, which go before all that was submitted: the trainer waits for them.

        Raises:
            PoolError: no server could be used for `server_timeout`, or a job failed `ATTEMPTS` times.
            ValueError: a server refused a request as invalid.
        """
        return self.collect(self.submit(jobs, order=URGENT))

    async def _submit(self, jobs: list[Job], seen: Seen | None, reply: _Reply | None = None) -> Batch:
        batch = Batch(jobs, time.monotonic(), seen)
        if reply is not None:
            batch.finished = reply
        self.fleet.look_around(batch.began)
        suspects = [url for url in self.fleet.to_probe(batch.began) if self.fleet.servers[url].state == State.SUSPECT]
        if suspects:  # the first to answer would be given all the work
            await asyncio.wait(self._look_at(suspects), timeout=START_TOGETHER)
        self._batches.update(dict.fromkeys(jobs, batch))
        self.backlog.add(jobs)
        self._wake.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return batch

    # ------------------------------------------------------------------------------- the work, on the loop's thread

    async def _work(self) -> None:
        """As long as a batch is in work."""
        try:
            while self._batches:
                try:
                    self._hand_out()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(TICK):
                            await self._wake.wait()
                    self._take_in()
                except Exception as error:  # what a server that was looked at raised, for example, concerns all
                    self._fail(set(self._batches.values()), error)
        finally:  # nobody shall wait for what nobody works on
            self._fail(set(self._batches.values()), PoolError("The work was cancelled."))

    def _hand_out(self) -> None:
        """Jobs to servers; and looks at those that are not trusted."""
        self._wake.clear()
        now = time.monotonic()
        if not self._sending:
            self._look_at(self.fleet.to_probe(now))
        for url, server in self.fleet.servers.items():
            if self._sending or not server.outstanding:
                self._heard[url] = now
        for job, url in self.backlog.assign():
            self._requests[job] = asyncio.ensure_future(job.ask(self._servers[url]))
            self._requests[job].add_done_callback(lambda _: self._wake.set())
        self._give_up()

    def _take_in(self) -> None:
        """Jobs from servers that died or are silent; and results from the others.

        Not while weights are sent: where that fails, a server goes on with what it has loaded, and is dead at the end.
        """
        if self._sending:
            return
        lost = self.backlog.lost()
        if lost:
            logger.warning(f"{len(lost)} requests of vLLM servers that are taken for dead go to others.")
        for job in lost:
            if job in self._requests:  # its batch has not failed meanwhile
                self._requests.pop(job).cancel()
                self._count_failure(job, self.fleet.servers[job.failed_on[-1]].last_error)
        for job, task in [(job, task) for job, task in self._requests.items() if task.done()]:
            if job in self._requests:
                del self._requests[job]
                self._answered(job, task)
        earliest = time.monotonic() - self.request_timeout
        for job, url in list(self.backlog.running.items()):
            if self._heard[url] < earliest and job in self._requests:
                self._requests.pop(job).cancel()
                self._failed(job, ServerError(f"answered no request for {self.request_timeout:g} s"))

    def _answered(self, job: Job, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is None:
            self._heard[self.backlog.running[job]] = time.monotonic()
            self.backlog.served(job)
            self._batches.pop(job).finished.put((job.number, task.result()))
        elif isinstance(error, ServerError):
            self._failed(job, error)
        else:
            self._fail({self._batches[job]}, error)

    def _failed(self, job: Job, error: ServerError) -> None:
        url = self.backlog.running[job]
        self.backlog.failed(job, str(error), time.monotonic(), gone=error.gone)
        logger.warning(f"vLLM server {url} failed a request, which goes to another: {error}")
        self._count_failure(job, str(error))

    def _count_failure(self, job: Job, error: str) -> None:
        """Of those that a server had when it died, too: one of them may be what kills servers."""
        self.retried += 1
        if len(job.failed_on) >= ATTEMPTS:
            what = self.message(f"A request failed {ATTEMPTS} times, at last with {job.failed_on[-1]}: {error}")
            self._fail({self._batches[job]}, PoolError(what))

    def _give_up(self) -> None:
        """Batches that no server could be given a job of for too long. While weights are sent nobody can."""
        if self._sending or self.backlog.running:
            return
        now = time.monotonic()
        for batch in set(self._batches.values()):
            if self.fleet.lost(max(batch.began, self._sent), now, self.server_timeout):
                self._fail(
                    {batch}, PoolError(self.message(f"No vLLM server could be used for {self.server_timeout:g} s"))
                )

    def _fail(self, batches: Iterable[Batch], error: BaseException) -> None:
        for batch in batches:
            batch.finished.put(error)
            self._drop_batch(batch)

    async def _forget(self, batch: Batch) -> None:
        self._drop_batch(batch)

    def _drop_batch(self, batch: Batch) -> None:
        for task in self._chains.pop(batch, ()):
            if task is not asyncio.current_task():
                task.cancel()
        self._drop([job for job in batch.jobs if isinstance(job, Job)])

    def _drop(self, jobs: Sequence[Job]) -> None:
        self.backlog.drop(jobs)
        for job in jobs:
            self._batches.pop(job, None)
            if job in self._requests:
                self._requests.pop(job).cancel()

    # ----------------------------------------------------------------------------------------------------- weights

    def on_each(self, ask: Callable[[VLLMServer], Awaitable[Any]], urls: Sequence[str] | None = None) -> dict[str, Any]:
        """`ask` of these servers (`None`: all) at once: url → its answer, or the exception that it raised."""
        urls = self.urls if urls is None else urls

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*[ask(self._servers[url]) for url in urls], return_exceptions=True)

        return dict(zip(urls, self._loop.run(ask_all()), strict=True))

    def ask_all(self, ask: Callable[[VLLMServer], Awaitable[Any]]) -> dict[str, Any]:
        """As `on_each` of all servers, which have to answer.

        Raises:
            PoolError: one cannot be reached, or failed. What else `ask` raised is raised.
        """
        answers = self.on_each(ask)
        for url, answer in answers.items():
            if isinstance(answer, ServerError):
                raise PoolError(f"{url}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def use_adapter(self, name: str) -> None:
        """Requests name this adapter, in place of a server's model."""
        for server in self._servers.values():
            server.adapter = name

    def new_version(self, version: int) -> list[str]:
        """Weights are about to be sent; `weights_sent` ends it. What is in flight goes on with them.

        Waits for servers that are being given older ones, lest these come last; no other is looked at until the end.

        Returns:
            The servers that are to be given them; the dead get them when they answer again.
        """

        async def begin() -> list[str]:
            self._sending = True
            for url, look in list(self._recognising.items()):
                if url not in self._refitting and not look.done():  # it may take long where nobody answers
                    self._recognising.pop(url).cancel()
            if self._recognising:
                await asyncio.wait(self._recognising.values())
            self.fleet.new_version(version, time.monotonic())
            return self.fleet.waiting()

        return self._loop.run(begin())

    def weights_sent(self, version: int, errors: Mapping[str, str | None]) -> None:
        """
        Args:
            errors: server → why it has not got the weights, None if it has.
        """

        async def end() -> None:
            self._sending, self._sent = False, time.monotonic()
            for url, error in errors.items():
                if error is None:
                    self.fleet.refitted(url, version, self._sent)
                else:
                    logger.warning(f"vLLM server {url} did not take the weights of version {version}: {error}")
                    self.fleet.refit_failed(url, error, self._sent)
            # Jobs may wait here: a server that had none may have become another since it took the weights.
            self.fleet.look_around(self._sent)
            self._wake.set()

        self._loop.run(end())

    def _look_at(self, urls: Sequence[str]) -> list[asyncio.Task[None]]:
        """Starts to recognise servers, and raises what earlier looks raised."""
        for url in [url for url, task in self._recognising.items() if task.done()]:
            self._recognising.pop(url).result()
        for url in urls:
            if url not in self._recognising:
                self._recognising[url] = asyncio.ensure_future(self._recognise(url))
                self._recognising[url].add_done_callback(lambda _: self._wake.set())
        return [self._recognising[url] for url in urls]

    async def _recognise(self, url: str) -> None:
        """Look at a server that is not trusted; it gets the current weights, if it has others, before any prompt."""
        server, known = self._servers[url], self.fleet.servers[url]
        try:
            await server.probe()
            doubtful = known.version is None or known.failures > 0
            self.fleet.answered(url)
            self._refitting.add(url)
            try:
                version = self.fleet.version if self.refit is None else await self.refit(server)
            finally:
                self._refitting.discard(url)
            if version is None:
                self.fleet.waits(url, time.monotonic())
                return
            if doubtful and not known.outstanding:  # else its next answer will tell, behind which a trial would wait
                await server.try_out()
            self.fleet.refitted(url, version, time.monotonic())
        except ServerError as error:
            self.fleet.refit_failed(url, str(error), time.monotonic())

    def message(self, what: str) -> str:
        """An error's text, with what is known of every server."""
        return f"{what}. The servers, as this process saw them:\n{self.fleet.describe()}"
