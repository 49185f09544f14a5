"""Whose job goes next, and to which server, of all batches in work: a pure state machine, without a clock or I/O.

    add ──► waiting ── assign ──► running on a server ── served ──► done
               ▲                      │
               └── failed, or its server is dead

The batch of the lowest order goes first: what the trainer waits for, before what it will need later. Within a batch a
job that has failed goes first.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dash_trl.sampling.health import Fleet, State


@dataclass(eq=False)
class Job:
    """Something any server can do; equal to no other.

    Attributes:
        tokens, sequences: the load that it is.
        ask: what to await of a server.
        order: of its batch, the lowest first. number: in its batch.
        failed_on: the servers that failed it, or died of it.
        versions: of the weights when it was given to the server that did it, and when it was done.
    """

    tokens: int
    sequences: int = 1
    ask: Any = None
    order: int = 0
    number: int = 0
    failed_on: list[str] = field(default_factory=list)
    versions: tuple[int, int] = (0, 0)

    @property
    def place(self) -> tuple[int, bool, int]:
        return self.order, not self.failed_on, self.number


class Backlog:
    """The jobs of all batches in work.

    Args:
        fleet: the servers; it is told what they are given.
    """

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.waiting: list[Job] = []  # in the order of their places
        self.running: dict[Job, str] = {}  # → the server's URL

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            insort(self.waiting, job, key=lambda job: job.place)

    def assign(self) -> list[tuple[Job, str]]:
        """Gives jobs to servers, in the order of their places, until nobody has room; returns those given."""
        given = []
        kept: set[str] = set()  # for a job that waits for room there, lest smaller ones fill it for ever
        for job in tuple(self.waiting):
            url = self.fleet.choose(job.sequences, avoid=job.failed_on, kept=kept)
            if url is not None:
                self.waiting.remove(job)
                self.running[job] = url
                self.fleet.started(url, job, job.tokens, job.sequences)
                job.versions = self.fleet.version, self.fleet.version
                given.append((job, url))
            elif job.failed_on:
                kept.update(self.fleet.able(avoid=job.failed_on))
            else:
                break
        return given

    def served(self, job: Job) -> None:
        """It is done."""
        self.fleet.served(self.running.pop(job), job)
        job.versions = job.versions[0], self.fleet.version

    def failed(self, job: Job, error: str, now: float, *, gone: bool = False) -> None:
        """Its server failed it, see `Fleet.failed`: it waits again."""
        url = self.running.pop(job)
        self.fleet.failed(url, job, error, now, gone=gone)
        self._return(job, url)

    def lost(self) -> list[Job]:
        """Takes back what dead servers have, and returns it."""
        dead = [job for job, url in self.running.items() if self.fleet.servers[url].state == State.DEAD]
        for job in dead:
            url = self.running.pop(job)
            self.fleet.abandoned(url, job)
            self._return(job, url)
        return dead

    def _return(self, job: Job, url: str) -> None:
        job.failed_on.append(url)
        self.add([job])

    def drop(self, jobs: Iterable[Job]) -> None:
        """Nobody needs them any more."""
        jobs = set(jobs)
        self.waiting = [job for job in self.waiting if job not in jobs]
        for job in jobs & self.running.keys():
            self.fleet.abandoned(self.running.pop(job), job)
