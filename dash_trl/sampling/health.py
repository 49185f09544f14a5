"""`Fleet` decides which job runs next, and on which server. It reads no clock and does no I/O.

The path of a job::

    add ──► waiting ── assign ──► running on a server ── answered ──► drop
               ▲                         │
               └─── failed, or its server is dead

The jobs of several batches may be in progress. The job with the lowest `order` goes first: jobs that the trainer waits
for run before jobs whose results it needs later. Among jobs of the same order, those that have failed before go first.

States of a server::

    healthy ── a request failed, or it was idle ──► suspect ── 3 failures in a row, or it is gone ──► dead
       ▲                                               │                                               │
       └── holds the current weights ── refitting ◄────┴────────── answers a probe ◄───────────────────┘

After a failure or after idle time, such as the time between two batches, a server becomes a suspect. It may have
restarted with its start-up weights, and its answers would not show that. Failed requests are counted separately from
probes, because an engine that hangs still answers probes. Methods get the current time as an argument, in seconds on
any clock.

A server that still works on a job when another batch begins stays healthy: its connections are open, so its process has
not restarted.
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
    """State of a server; only a healthy server may be given a job.

    A suspect or dead server has to be probed. A refitting server is being given the current weights, or waits for the
    first weight sync.
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    REFITTING = "refitting"
    DEAD = "dead"


@dataclass(eq=False)
class Job:
    """One request that any server can complete. Jobs compare by identity.

    Attributes:
        tokens: number of tokens that the job adds to a server's load.
        sequences: number of sequences that the job samples.
        order: priority of the job; the lowest goes first. Jobs that the trainer waits for have `URGENT`.
        number: priority among jobs of the same order; equal numbers run in the order in which they were added.
        tried: URLs of the servers that were given the job. While it waits, it has failed on all of them.
        version: the weight version when the job was given to the last of these servers.
        assigned: set when a server is given the job.
        limit: the pool ends the job's current attempt by it.
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
        url: address of the server.
        state: current state.
        version: weight version that the server held when last checked; None if unknown.
        failures: number of consecutive failed requests.
        outstanding: the jobs that the server works on.
        last_answer: when the server last answered a job, or was given a job while it was idle, in seconds.
        rest_until: the server is not probed before this time, in seconds.
        last_error: last error, for the message when no server is left.
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
        """Tokens of all outstanding jobs."""
        return sum(job.tokens for job in self.outstanding)

    @property
    def sequences(self) -> int:
        """Sequences of all outstanding jobs."""
        return sum(job.sequences for job in self.outstanding)


class Fleet:
    """Servers and unfinished jobs as one process sees them, and the weight version that the servers have to hold.

    Args:
        urls: distinct URLs. At first all servers count as dead, so that they are probed.
        ranks: number of processes that share the servers. Each may have an equal share of the sequences in flight.
        sequences: limit of sequences in flight on one server, over all ranks.
        jobs: limit of jobs in flight on all servers, for this process.

    Attributes:
        servers: URL → server.
        waiting: the jobs that no server works on, in the order in which they are given to servers.
        most_sequences: limit of this process's sequences in flight on one server.
        most_jobs: limit of this process's jobs in flight on one server.
        version: current weight version.
    """

    def __init__(self, urls: Iterable[str], ranks: int = 1, *, sequences: int = SEQUENCES_PER_SERVER, jobs: int = JOBS):
        self.servers = {url: ServerStatus(url) for url in urls}
        self.waiting: list[Job] = []
        self.most_sequences = sequences // ranks
        self.most_jobs = max(1, jobs // len(self.servers))
        self.version = 0

    # -------------------------------------------------------------------------------------------------- questions

    def choose(self, sequences: int, avoid: Collection[str] = ()) -> str | None:
        """Choose the server with room that has the fewest outstanding tokens. A server without jobs always has room.

        Args:
            sequences: number of sequences that the job adds.
            avoid: URLs of servers on which the job failed before. They are chosen only if no other server holds the
                current weights.

        Returns:
            URL of the server; None if the job has to wait.
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
        """Return the number of jobs that servers work on."""
        return sum(len(server.outstanding) for server in self.servers.values())

    def to_probe(self, now: float) -> list[str]:
        """Return the URLs of servers that have to be probed now.

        Args:
            now: current time in seconds.
        """
        return [
            server.url
            for server in self.servers.values()
            if server.state in (State.DEAD, State.SUSPECT) and now >= server.rest_until
        ]

    def urls_of(self, state: State) -> list[str]:
        """Return the URLs of the servers in a state."""
        return [server.url for server in self.servers.values() if server.state == state]

    def current(self) -> list[ServerStatus]:
        """Return the servers that held the current weights when they were last checked; no dead server does."""
        return [server for server in self.servers.values() if server.version == self.version]

    def describe(self) -> str:
        """Describe the state and the last error of each server, one line each."""
        return "\n".join(f"  {s.url} is {s.state}; last error: {s.last_error}" for s in self.servers.values())

    # ------------------------------------------------------------------------------------------------------- jobs

    def add(self, job: Job) -> None:
        """Add a job to the waiting jobs."""
        job.assigned.clear()
        insort(self.waiting, job, key=lambda job: (job.order, not job.tried, job.number))

    def assign(self, now: float) -> None:
        """Give waiting jobs to servers, in their order, until no server has room.

        Args:
            now: current time in seconds.
        """
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
        """Remove a job that is done, has failed or is no longer needed."""
        if not job.assigned.is_set():
            self.waiting.remove(job)
        for server in self.servers.values():
            server.outstanding.discard(job)

    # ----------------------------------------------------------------------------------------------------- events

    def served(self, url: str, now: float) -> None:
        """Record that a server completed a job.

        Args:
            url: URL of the server.
            now: current time in seconds.
        """
        server = self.servers[url]
        server.last_answer = now
        server.failures = 0

    def failed(self, url: str, error: str, now: float, *, gone: bool = False) -> None:
        """Record that a server, which was not dead, failed a request.

        Args:
            url: URL of the server.
            error: the error, for messages.
            now: current time in seconds.
            gone: True = the connection was refused or dropped. The server's process may have ended, so the server
                counts as dead at once.
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
        """Record that a server has answered a probe. It is refitting until it is known to hold the current weights.

        Args:
            url: URL of the server.
        """
        self.servers[url].state = State.REFITTING

    def refitted(self, url: str, version: int, now: float) -> None:
        """Record that a refitting server holds the weights of a version.

        If the version is no longer the current one, the server counts as dead, so that it is probed again. If the
        server is no longer refitting, because a request has failed on it, nothing is recorded.

        Args:
            url: URL of the server.
            version: weight version that the server holds.
            now: current time in seconds.
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
        """Record that a server does not answer, or did not load the weights. Idle servers, which may get its jobs,
        become suspects.

        Args:
            url: URL of the server.
            error: the error, for messages.
            now: current time in seconds.
        """
        server = self.servers[url]
        server.last_error = error
        server.state = State.DEAD
        server.version = None
        server.failures = 0
        server.rest_until = now + PROBE_EVERY
        self.suspect_idle(now)

    def new_version(self, version: int) -> None:
        """Record that there are new weights. No server may be given a job until it holds them.

        Args:
            version: the new weight version.
        """
        self.version = version
        for server in self.servers.values():
            if server.state != State.DEAD:
                server.state = State.REFITTING

    def suspect_idle(self, now: float) -> None:
        """Make idle servers suspects, so that they are probed before their next job.

        While a server is idle, no request shows whether it has restarted.

        Args:
            now: current time in seconds.
        """
        for server in self.servers.values():
            if server.state == State.HEALTHY and not server.outstanding:
                server.state = State.SUSPECT
                server.rest_until = now
