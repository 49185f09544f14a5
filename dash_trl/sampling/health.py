"""Which server may be given a prompt: a pure state machine, without a clock and without I/O.

    healthy ── a request failed ──► suspect ── failed again, or its process is gone ──► dead
       ▲  ▲                            │                                                 │ answers a probe
       │  └───────── served one ───────┘                                                 ▼
       └──────────────────────── has the current weights ◄────────────────────────── refitting

A dead server comes back only through `refitting`: one that was restarted answers with the weights of its start-up, and
nothing in the answer says so. Failures of requests are counted apart from probes, since a wedged engine still answers
probes. Times are arguments, in seconds on any clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

FAILURES_UNTIL_DEAD = 3  # in a row: one may be the request's fault, two a coincidence
FIRST_BACK_OFF, LAST_BACK_OFF = 0.5, 8.0  # seconds that a suspect rests, doubled with each failure
PROBE_EVERY = 1.0  # seconds between looks at a dead server
SEQUENCES_PER_SERVER = 1024  # in flight; vLLM's own largest batch, so that more would only wait in its queue


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
        rest_until: a suspect is not tried, a dead server not probed, before this time.
        last_error: for the message when all is lost.
    """

    url: str
    state: State = State.DEAD
    version: int | None = None
    failures: int = 0
    outstanding: dict[int, tuple[int, int]] = field(default_factory=dict)
    rest_until: float = -math.inf
    last_error: str = "was never reached"

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
    """

    def __init__(self, urls: Iterable[str]):
        self.servers = {url: Server(url) for url in urls}
        self.version = 0
        self.down_since: float | None = None

    # -------------------------------------------------------------------------------------------------- questions

    def choose(self, sequences: int, now: float, avoid: Iterable[str] = ()) -> str | None:
        """The server with the fewest outstanding tokens among those that may be given a prompt; None = wait.

        Args:
            sequences: that the job will add. avoid: servers on which it failed before; taken if there is no other.
        """
        ready = [
            server
            for server in self.servers.values()
            if self._current(server)
            and (not server.outstanding or server.sequences + sequences <= SEQUENCES_PER_SERVER)
            # a suspect gets one job at a time, to show what it can
            and (server.state == State.HEALTHY or (now >= server.rest_until and not server.outstanding))
        ]
        avoid = set(avoid)
        if any(server.url not in avoid for server in self.servers.values() if self._current(server)):
            ready = [server for server in ready if server.url not in avoid]
        return min(ready, key=lambda server: server.tokens).url if ready else None

    def to_probe(self, now: float) -> list[str]:
        """The dead servers at which to look now."""
        return [s.url for s in self.servers.values() if s.state == State.DEAD and now >= s.rest_until]

    def lost(self, now: float, timeout: float) -> bool:
        """Whether no server could be given a prompt for `timeout` seconds."""
        return self.down_since is not None and now - self.down_since >= timeout

    def describe(self) -> str:
        return "\n".join(f"  {s.url} is {s.state}; last error: {s.last_error}" for s in self.servers.values())

    def _current(self, server: Server) -> bool:
        return server.state in (State.HEALTHY, State.SUSPECT) and server.version == self.version

    # ----------------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> None:
        """Work arrives: the time without any usable server counts from here."""
        self.down_since = None
        self._note_loss(now)

    def started(self, url: str, job: int, tokens: int, sequences: int) -> None:
        self.servers[url].outstanding[job] = (tokens, sequences)

    def served(self, url: str, job: int) -> None:
        server = self.servers[url]
        server.outstanding.pop(job, None)
        server.failures = 0
        if server.state == State.SUSPECT:
            server.state = State.HEALTHY

    def abandoned(self, url: str, job: int) -> None:
        """The job was taken back; that says nothing about the server."""
        self.servers[url].outstanding.pop(job, None)

    def failed(self, url: str, job: int, error: str, now: float, *, gone: bool = False) -> None:
        """A request failed; `gone`: nobody listens there any more."""
        server = self.servers[url]
        server.outstanding.pop(job, None)
        server.last_error = error
        server.failures += 1
        if server.state in (State.HEALTHY, State.SUSPECT):
            if gone or server.failures >= FAILURES_UNTIL_DEAD:
                self._die(server, now)
            else:
                server.state = State.SUSPECT
                server.rest_until = now + min(FIRST_BACK_OFF * 2 ** (server.failures - 1), LAST_BACK_OFF)
        self._note_loss(now)

    def answered(self, url: str) -> None:
        """A dead server answers probes: it is about to be given weights."""
        server = self.servers[url]
        if server.state == State.DEAD:
            server.state = State.REFITTING

    def refitted(self, url: str, version: int, now: float) -> None:
        """It was seen to hold the weights of `version`; nothing comes of it if that is no longer the current one."""
        server = self.servers[url]
        if server.state != State.REFITTING:
            return
        server.version = version
        if version == self.version:
            server.state, server.failures = State.HEALTHY, 0
            self.down_since = None
        else:
            self._die(server, now)

    def refit_failed(self, url: str, error: str, now: float) -> None:
        server = self.servers[url]
        server.last_error = error
        if server.state == State.REFITTING:
            self._die(server, now)
        self._note_loss(now)

    def new_version(self, version: int, now: float) -> None:
        """There are new weights: no server may be given a prompt until it has them."""
        self.version = version
        for server in self.servers.values():
            if server.state != State.DEAD:
                server.state = State.REFITTING
        self._note_loss(now)

    def _die(self, server: Server, now: float) -> None:
        server.state, server.version, server.rest_until = State.DEAD, None, now + PROBE_EVERY

    def _note_loss(self, now: float) -> None:
        if any(self._current(server) for server in self.servers.values()):
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now
