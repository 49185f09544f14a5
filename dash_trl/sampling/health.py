"""`Fleet` decides which job runs next, and on which server. It reads no clock and does no I/O.

The path of a job::

    add ──► waiting ── assign ──► running on a server ── answered ──► drop
               ▲                         │
               └─── failed, or its server is dead

States of a server::

    healthy ── a request failed, or it was idle ──► unchecked ─ 3 failures in a row, or it is gone ──► dead
       ▲                                               │                                               │
       └── holds the current weights ── refitting ◄────┴────────── answers a probe ◄───────────────────┘

An idle server becomes unchecked: it may have restarted with its start-up weights, which its answers would not show. A
server that works on a job has open connections, so it has not restarted. A probe does not reset the number of failed
requests, because an engine that hangs still answers probes.

`now` is the current time in seconds, on any clock.
"""

import asyncio
import math
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

FAILURES_UNTIL_DEAD = 3  # consecutive failed requests; one may be caused by the request, and two by chance
BACK_OFF = 0.5  # seconds before an unchecked server is probed; the time doubles with the second failure
PROBE_EVERY = 1.0  # seconds between probes of a dead server
# Limit of sequences in flight on one server, over all ranks: vLLM's largest default batch. More sequences would wait in
# vLLM's queue; instead, their jobs wait here.
SEQUENCES_PER_SERVER = 1024
JOBS = 512  # most in flight of one process; each has a connection. Linux's default limit is 1024 open files per process
URGENT = -1  # `Job.order` of jobs that the trainer waits for


class State(StrEnum):
    """State of a server. Only a healthy one gets jobs; a refitting one gets weights, or waits for the first sync."""

    HEALTHY = "healthy"
    UNCHECKED = "unchecked"
    REFITTING = "refitting"
    DEAD = "dead"


@dataclass(eq=False)
class Job:
    """One request that any server can complete. Jobs compare by identity.

    Attributes:
        tokens: load of a server by the job.
        order: priority; the lowest goes first. Jobs that the trainer waits for have `URGENT`.
        number: priority within an order, after the jobs that have failed.
        tried: URLs of the servers that were given the job. While it waits, it has failed on all of them.
        version: the weight version when a server was last given the job.
        limit: timeout with which the pool ends the current attempt.
    """

    tokens: int
    sequences: int = 1
    order: int = URGENT
    number: int = 0
    tried: list[str] = field(default_factory=list)
    version: int = 0
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    limit: asyncio.Timeout = field(init=False)

    def interrupt(self) -> bool:
        """End the current attempt; return False if it is ending already."""
        if self.limit.when() is not None:
            return False
        self.limit.reschedule(-math.inf)
        return True


@dataclass
class ServerStatus:
    """State of one server, as this process sees it.

    Attributes:
        version: weight version that the server held when last checked; None if unknown.
        failures: number of consecutive failed requests.
        last_answer: when the server last answered a job, or got one while idle.
        rest_until: when the server may be probed again.
    """

    url: str
    state: State = State.DEAD
    version: int | None = None
    failures: int = 0
    outstanding: set[Job] = field(default_factory=set)
    last_answer: float = -math.inf
    rest_until: float = -math.inf
    last_error: str = "none"


class Fleet:
    """Servers and unfinished jobs as one process sees them.

    Args:
        urls: distinct URLs. At first all count as dead, so that they are probed.
        ranks: number of processes that share the servers and, equally, the sequences in flight.

    Attributes:
        waiting: the jobs that no server works on, in order of priority.
        version: weight version that the servers have to hold.
    """

    def __init__(self, urls: Iterable[str], ranks: int = 1):
        self.servers = {url: ServerStatus(url) for url in urls}
        self.waiting: list[Job] = []
        self.most_sequences = SEQUENCES_PER_SERVER // ranks
        self.most_jobs = JOBS // len(self.servers)
        self.version = 0

    # -------------------------------------------------------------------------------------------------- questions

    def choose(self, sequences: int, avoid: Collection[str] = ()) -> str | None:
        """Return the URL of the server with room and the fewest outstanding tokens; None if the job has to wait.

        A server without jobs has room. Servers to `avoid` are chosen only if no other holds the current weights.
        """
        current = self.current()
        current = [server for server in current if server.url not in avoid] or current
        ready = [
            server
            for server in current
            if server.state == State.HEALTHY
            and (
                not server.outstanding
                or len(server.outstanding) < self.most_jobs
                and sum(job.sequences for job in server.outstanding) + sequences <= self.most_sequences
            )
        ]
        return min(ready, key=lambda server: sum(job.tokens for job in server.outstanding)).url if ready else None

    def jobs(self) -> list[Job]:
        return [*self.waiting, *(job for server in self.servers.values() for job in server.outstanding)]

    def to_probe(self, now: float) -> list[str]:
        return [
            server.url
            for server in self.servers.values()
            if server.state in (State.DEAD, State.UNCHECKED) and now >= server.rest_until
        ]

    def urls_of(self, state: State) -> list[str]:
        return [server.url for server in self.servers.values() if server.state == state]

    def current(self) -> list[ServerStatus]:
        """Return the servers that held the current weights when last checked; a dead one is not among them."""
        return [server for server in self.servers.values() if server.version == self.version]

    # ------------------------------------------------------------------------------------------------------- jobs

    def add(self, job: Job) -> None:
        job.assigned.clear()
        insort(self.waiting, job, key=lambda job: (job.order, not job.tried, job.number))

    def assign(self, now: float) -> None:
        """Give waiting jobs to servers, in their order, until no server has room."""
        for job in tuple(self.waiting):
            url = self.choose(job.sequences, avoid=job.tried)
            if url is not None:
                server = self.servers[url]
                if not server.outstanding:
                    server.last_answer = now
                server.outstanding.add(job)
                self.waiting.remove(job)
                job.tried.append(url)
                job.version = self.version
                job.assigned.set()
            elif not job.tried:  # otherwise another server may have room for a job that has not failed on it
                break

    def drop(self, job: Job) -> None:
        if not job.assigned.is_set():
            self.waiting.remove(job)
        for server in self.servers.values():
            server.outstanding.discard(job)

    # ----------------------------------------------------------------------------------------------------- events

    def served(self, url: str, now: float) -> None:
        server = self.servers[url]
        server.last_answer = now
        server.failures = 0

    def failed(self, url: str, error: str, now: float, *, gone: bool = False) -> None:
        """Record that a live server failed a request. If the connection broke (`gone`), it is dead at once."""
        server = self.servers[url]
        server.failures += 1
        if gone or server.failures >= FAILURES_UNTIL_DEAD:
            self.died(url, error, now)
        else:
            server.last_error = error
            server.state = State.UNCHECKED
            server.rest_until = now + BACK_OFF * server.failures
            self.uncheck_idle(now)

    def answered(self, url: str) -> None:
        """Record that a server has answered a probe; `refitted` follows."""
        self.servers[url].state = State.REFITTING

    def refitted(self, url: str, version: int, now: float) -> None:
        """Record that a server holds a version, unless a request has failed on it meanwhile; an old one: it is dead."""
        server = self.servers[url]
        if server.state != State.REFITTING:
            return
        server.version = version
        if version == self.version:
            server.state = State.HEALTHY
        else:
            self.died(url, server.last_error, now)

    def died(self, url: str, error: str, now: float) -> None:
        """Record that a server does not answer, or did not load the weights. Idle servers may get its jobs."""
        server = self.servers[url]
        server.last_error = error
        server.state = State.DEAD
        server.version = None
        server.failures = 0
        server.rest_until = now + PROBE_EVERY
        self.uncheck_idle(now)

    def new_version(self, version: int) -> None:
        """Record that there are new weights. No server gets a job until it holds them."""
        self.version = version
        for server in self.servers.values():
            if server.state != State.DEAD:
                server.state = State.REFITTING

    def uncheck_idle(self, now: float) -> None:
        """Make idle servers unchecked: while a server is idle, no request shows whether it has restarted."""
        for server in self.servers.values():
            if server.state == State.HEALTHY and not server.outstanding:
                server.state = State.UNCHECKED
                server.rest_until = now
