"""Which server may be given a prompt: a pure state machine, without a clock and without I/O.

    healthy ── a request failed, or it was idle ──► suspect ── 3 failures in a row, or it is gone ──► dead
       ▲                                               │                                               │
       └── holds the current weights ── refitting ◄────┴────────── answers a probe ◄───────────────────┘

Nobody is trusted over a failure or over idle time, such as that between two batches: whoever answers then may be
another process, with the weights of its start-up, and nothing in its answers says so. Failures of requests are counted
apart from probes, since a wedged engine still answers probes. Times are arguments, in seconds on any clock.

Several batches may be in work at once. A server that is at work when another begins stays trusted: its connections
hold, so it is the process that was seen. The time without any usable server counts for each batch from its own
beginning: before that nobody may have looked, and what begins later puts nothing off.
"""

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

FAILURES_UNTIL_DEAD = 3  # in a row: one may be the request's fault, two a coincidence
FIRST_BACK_OFF, LAST_BACK_OFF = 0.5, 8.0  # seconds that a suspect rests, doubled with each failure
PROBE_EVERY = 1.0  # seconds between looks at a dead server
SEQUENCES_PER_SERVER = 1024  # in flight, of all ranks; vLLM's own largest batch: more would only wait in its queue
JOBS = 512  # in flight over all servers, each a connection: half of the open files that Linux grants a process


class State(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    REFITTING = "refitting"
    DEAD = "dead"


@dataclass
class Server:
    """What is known of one server.

    Attributes:
        version: of the weights that it was seen to hold; None = unknown.
        failures: requests that failed in a row.
        outstanding: job → (tokens, sequences) that it is working on.
        rest_until: it is not probed before this time.
        last_error: for the message when all is lost.
    """

    url: str
    state: State = State.DEAD
    version: int | None = None
    failures: int = 0
    outstanding: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    rest_until: float = -math.inf
    last_error: str = "none"

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.outstanding.values())

    @property
    def sequences(self) -> int:
        return sum(sequences for _, sequences in self.outstanding.values())


class Fleet:
    """The servers of one process, and the version of the weights that they have to hold.

    Args:
        urls: distinct; all servers are `dead` until they are seen to hold the current weights.
        ranks: processes that share the servers, each of which may have an equal part of what they hold in flight.
        sequences: in flight on a server, of all ranks. jobs: in flight on all servers, of this process.
    """

    def __init__(self, urls: Iterable[str], ranks: int = 1, *, sequences: int = SEQUENCES_PER_SERVER, jobs: int = JOBS):
        self.servers = {url: Server(url) for url in urls}
        self.most_sequences = sequences // ranks
        self.most_jobs = max(1, jobs // len(self.servers))
        self.version = 0
        self.down_since: float | None = None

    # -------------------------------------------------------------------------------------------------- questions

    def able(self, avoid: Iterable[str] = ()) -> list[str]:
        """The servers that may be given a job as soon as they have room.

        Args:
            avoid: servers on which it failed before; taken if no other has the current weights.
        """
        # They were seen to hold the current weights; whether they still do is seen before they become healthy.
        current = [server for server in self.servers.values() if server.version == self.version]
        avoid = set(avoid)
        current = [server for server in current if server.url not in avoid] or current
        return [server.url for server in current if server.state == State.HEALTHY]

    def choose(self, sequences: int, avoid: Iterable[str] = (), kept: Collection[str] = ()) -> str | None:
        """The server with the fewest outstanding tokens among those that may be given a prompt; None = wait.

        Args:
            sequences: that the job will add. avoid: see `able`. kept: servers on which others wait for room.
        """
        able = [self.servers[url] for url in self.able(avoid) if url not in kept]
        ready = [
            server
            for server in able
            if not server.outstanding
            or (len(server.outstanding) < self.most_jobs and server.sequences + sequences <= self.most_sequences)
        ]
        return min(ready, key=lambda server: server.tokens).url if ready else None

    def to_probe(self, now: float) -> list[str]:
        """The servers at which to look now."""
        return [
            server.url
            for server in self.servers.values()
            if server.state in (State.DEAD, State.SUSPECT) and now >= server.rest_until
        ]

    def waiting(self) -> list[str]:
        """The servers that are to be given the current weights, or are being given them."""
        return [server.url for server in self.servers.values() if server.state == State.REFITTING]

    def lost(self, since: float, now: float, timeout: float) -> bool:
        """Whether no server could be given a prompt for `timeout` seconds, counted from `since` at the earliest."""
        return self.down_since is not None and now - max(self.down_since, since) >= timeout

    def describe(self) -> str:
        return "\n".join(f"  {s.url} is {s.state}; last error: {s.last_error}" for s in self.servers.values())

    # ----------------------------------------------------------------------------------------------------- events

    def started(self, url: str, job: Hashable, tokens: int, sequences: int) -> None:
        """A job, unique among those of all batches in work, was given to the server."""
        self.servers[url].outstanding[job] = (tokens, sequences)

    def served(self, url: str, job: Hashable) -> None:
        server = self.servers[url]
        server.outstanding.pop(job, None)
        server.failures = 0

    def abandoned(self, url: str, job: Hashable) -> None:
        """The job was taken back; that says nothing about the server."""
        self.servers[url].outstanding.pop(job, None)

    def failed(self, url: str, job: Hashable, error: str, now: float, *, gone: bool = False) -> None:
        """A request failed; `gone`: the connection was refused or dropped, so that its process may have ended."""
        server = self.servers[url]
        server.outstanding.pop(job, None)
        server.last_error = error
        server.failures += 1
        if gone or server.failures >= FAILURES_UNTIL_DEAD:
            self._die(server, now)
        elif server.state != State.DEAD:
            server.state = State.SUSPECT
            server.rest_until = now + min(FIRST_BACK_OFF * 2 ** (server.failures - 1), LAST_BACK_OFF)
        self.look_around(now)

    def answered(self, url: str) -> None:
        """It answers a probe: it is about to be given weights, unless it has them."""
        self.servers[url].state = State.REFITTING

    def refitted(self, url: str, version: int, now: float) -> None:
        """It was seen to hold the weights of `version`; nothing comes of it if that is no longer the current one."""
        server = self.servers[url]
        if server.state != State.REFITTING:
            return
        server.version = version
        if version == self.version:
            server.state = State.HEALTHY
            self.down_since = None
        else:
            self._die(server, now)
            self.look_around(now)

    def waits(self, url: str, now: float) -> None:
        """It answers a probe, but has other weights, and can be given none before the next ones are sent to all."""
        self.servers[url].version = None
        self.look_around(now)

    def refit_failed(self, url: str, error: str, now: float) -> None:
        """It did not answer a probe, or did not take the weights."""
        server = self.servers[url]
        server.last_error = error
        self._die(server, now)
        self.look_around(now)

    def new_version(self, version: int, now: float) -> None:
        """There are new weights: no server may be given a prompt until it has them."""
        self.version = version
        for server in self.servers.values():
            if server.state != State.DEAD:
                server.state = State.REFITTING
        self.look_around(now)

    def look_around(self, now: float) -> None:
        """Work arrives, of a batch or of those that lost it: who had none, nobody saw whether they are still what they
        were. Is anybody left?
        """
        for server in self.servers.values():
            if server.state == State.HEALTHY and not server.outstanding:
                server.state, server.rest_until = State.SUSPECT, now
        if any(server.version == self.version for server in self.servers.values()):
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now

    def _die(self, server: Server, now: float) -> None:
        server.state, server.version, server.rest_until = State.DEAD, None, now + PROBE_EVERY
        server.failures = 0
