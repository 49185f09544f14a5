"""`Fleet` decides which job runs next, and on which server. It reads no clock and does no I/O.

The path of a job::

    add ──► waiting ── assign ──► running on a server ── answered ──► drop
               ▲                         │
               └─── failed, or its server is dead

States of a server::

    healthy ── a request failed, or it was idle ──► suspect ── 3 failures in a row, or it is gone ──► dead
       ▲                                               │                                               │
       └── holds the current weights ── refitting ◄────┴────────── answers a probe ◄───────────────────┘

An idle server becomes a suspect, because it may have restarted with its start-up weights, and its answers would not
show that. A server that works on a job has open connections, so it has not restarted. Failed requests are counted
separately from probes, because an engine that hangs still answers probes.

The argument `now` is the current time in seconds, on any clock.
"""

import asyncio
import math
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

FAILURES_UNTIL_DEAD = 3  # consecutive failed requests; one may be caused by the request, and two by chance
BACK_OFF = 0.5  # seconds before a suspect is probed; the time doubles with the second failure
PROBE_EVERY = 1.0  # seconds between probes of a dead server
# Limit of sequences in flight on one server, over all ranks: vLLM's largest default batch. More sequences would wait in
# vLLM's queue; instead, their jobs wait here.
SEQUENCES_PER_SERVER = 1024
JOBS = 512  # most in flight of one process; each has a connection. Linux's default limit is 1024 open files per process
URGENT = -1  # `Job.order` of jobs that the trainer waits for


class State(StrEnum):
    """State of a server; only a healthy server is given jobs.

    A refitting server is being given the current weights, or waits for the first weight sync.
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    REFITTING = "refitting"
    DEAD = "dead"


@dataclass(eq=False)
class Job:
    """One request that any server can complete. Jobs compare by identity.

    Attributes:
        tokens: tokens that the job adds to a server's load.
        sequences: sequences that the job samples.
        order: priority; the lowest goes first. Jobs that the trainer waits for have `URGENT`.
        number: priority among jobs of the same order that have not failed; jobs that have failed go before them.
        tried: URLs of the servers that were given the job. While it waits, it has failed on all of them.
        version: the weight version when a server was last given the job.
        assigned: set when a server is given the job.
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


@dataclass
class ServerStatus:
    """State of one server, as this process sees it.

    Attributes:
        version: weight version that the server held when last checked; None if unknown.
        failures: number of consecutive failed requests.
        last_answer: when the server last answered a job, or was given a job while idle.
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

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.outstanding)

    @property
    def sequences(self) -> int:
        return sum(job.sequences for job in self.outstanding)


class Fleet:
    """Servers and unfinished jobs as one process sees them.

    Args:
        urls: distinct URLs. At first all servers count as dead, so that they are probed.
        ranks: number of processes that share the servers and, equally, the sequences in flight.
        sequences: limit of sequences in flight on one server, over all ranks.
        jobs: limit of this process's jobs in flight on all servers.

    Attributes:
        waiting: the jobs that no server works on, in the order in which servers get them.
        most_sequences: this process's share of `sequences`.
        most_jobs: each server's share of `jobs`.
        version: weight version that the servers have to hold.
    """

    def __init__(self, urls: Iterable[str], ranks: int = 1, *, sequences: int = SEQUENCES_PER_SERVER, jobs: int = JOBS):
        self.servers = {url: ServerStatus(url) for url in urls}
        self.waiting: list[Job] = []
        self.most_sequences = sequences // ranks
        self.most_jobs = max(1, jobs // len(self.servers))
        self.version = 0

    # -------------------------------------------------------------------------------------------------- questions

    def choose(self, sequences: int, avoid: Collection[str] = ()) -> str | None:
        """Return the URL of the server with room and the fewest outstanding tokens; None if the job has to wait.

        A server without jobs always has room.

        Args:
            avoid: URLs of servers that are chosen only if no other server holds the current weights.
        """
        current = self.current()
        current = [server for server in current if server.url not in avoid] or current
        ready = [
            server
            for server in current
            if server.state == State.HEALTHY
            and (
                not server.outstanding
                or (len(server.outstanding) < self.most_jobs and server.sequences + sequences <= self.most_sequences)
            )
        ]
        return min(ready, key=lambda server: server.tokens).url if ready else None

    def running(self) -> int:
        return sum(len(server.outstanding) for server in self.servers.values())

    def to_probe(self, now: float) -> list[str]:
        """Return the URLs of the servers that have to be probed now."""
        return [
            server.url
            for server in self.servers.values()
            if server.state in (State.DEAD, State.SUSPECT) and now >= server.rest_until
        ]

    def urls_of(self, state: State) -> list[str]:
        return [server.url for server in self.servers.values() if server.state == state]

    def current(self) -> list[ServerStatus]:
        """Return the servers that held the current weights when last checked. No dead server is among them."""
        return [server for server in self.servers.values() if server.version == self.version]

    def describe(self) -> str:
        return "\n".join(f"  {s.url} is {s.state}; last error: {s.last_error}" for s in self.servers.values())

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
        """Record that a server, which was not dead, failed a request.

        If the connection was refused or dropped (`gone`), it counts as dead at once, because its process may have
        ended.
        """
        server = self.servers[url]
        server.failures += 1
        if gone or server.failures >= FAILURES_UNTIL_DEAD:
            self.died(url, error, now)
        else:
            server.last_error = error
            server.state = State.SUSPECT
            server.rest_until = now + BACK_OFF * server.failures
            self.suspect_idle(now)

    def answered(self, url: str) -> None:
        """Record that a server has answered a probe. It is refitting until it is known to hold the current weights."""
        self.servers[url].state = State.REFITTING

    def refitted(self, url: str, version: int, now: float) -> None:
        """Record that a server holds the weights of a version, unless a request has failed on it meanwhile.

        If the version is no longer current, the server counts as dead and is probed again.
        """
        server = self.servers[url]
        if server.state != State.REFITTING:
            return
        server.version = version
        if version == self.version:
            server.state = State.HEALTHY
        else:
            self.died(url, server.last_error, now)

    def died(self, url: str, error: str, now: float) -> None:
        """Record that a server does not answer, or did not load the weights.

        Idle servers, which may get its jobs, become suspects.
        """
        server = self.servers[url]
        server.last_error = error
        server.state = State.DEAD
        server.version = None
        server.failures = 0
        server.rest_until = now + PROBE_EVERY
        self.suspect_idle(now)

    def new_version(self, version: int) -> None:
        """Record that there are new weights. No server is given a job until it holds them."""
        self.version = version
        for server in self.servers.values():
            if server.state != State.DEAD:
                server.state = State.REFITTING

    def suspect_idle(self, now: float) -> None:
        """Make idle servers suspects: while a server is idle, no request shows whether it has restarted."""
        for server in self.servers.values():
            if server.state == State.HEALTHY and not server.outstanding:
                server.state = State.SUSPECT
                server.rest_until = now
