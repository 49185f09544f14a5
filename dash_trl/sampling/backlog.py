"""`Backlog` decides which job runs next, and on which server. It reads no clock and does no I/O.

Lifecycle of a job::

    add ──► waiting ── assign ──► running on a server ── served ──► done
               ▲                      │
               └── failed, or its server is dead

Several batches of jobs may be in progress. The batch with the lowest `order` goes first: jobs that the trainer waits
for run before jobs whose results it needs later. Within a batch, jobs that have failed before go first.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from dash_trl.sampling.health import Fleet, State

URGENT = -1  # `Job.order` of jobs that the trainer waits for


@dataclass(eq=False)
class Job:
    """One request that any server can complete. Jobs compare by identity.

    Attributes:
        tokens: number of tokens that the job adds to a server's load.
        sequences: number of sequences that the job samples.
        prompt_ids: token ids of the prompt.
        sampling: sampling parameters, see `VLLMServer.complete`.
        order: priority of the job; the lowest goes first. Jobs that the trainer waits for have `URGENT`.
        number: position of the job in its batch.
        failed_on: URLs of the servers on which the job failed, one entry for each failure.
        versions: the weight version at two times: when the job was given to the server that completed it, and when it
            was done.
        began: when it was submitted, in seconds on any clock.
    """

    tokens: int
    sequences: int = 1
    prompt_ids: Sequence[int] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    order: int = URGENT
    number: int = 0
    failed_on: list[str] = field(default_factory=list)
    versions: tuple[int, int] = (0, 0)
    began: float = 0.0

    @property
    def place(self) -> tuple[int, bool, int]:
        """Sort key of the job among the waiting jobs."""
        return self.order, not self.failed_on, self.number


class Backlog:
    """Unfinished jobs of all batches: waiting jobs and running jobs.

    Args:
        fleet: the state of the servers. The backlog reports to it which jobs start, finish and fail.
    """

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.waiting: list[Job] = []  # sorted by `Job.place`
        self.running: dict[Job, str] = {}  # job → URL of its server

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the waiting jobs."""
        for job in jobs:
            insort(self.waiting, job, key=attrgetter("place"))

    def assign(self) -> list[tuple[Job, str]]:
        """Assign waiting jobs to servers, in the order of `Job.place`, until no server has room.

        Returns:
            (job, URL of its server) for each assigned job.
        """
        given = []
        for job in tuple(self.waiting):
            url = self.fleet.choose(job.sequences, avoid=job.failed_on)
            if url is not None:
                self.waiting.remove(job)
                self.running[job] = url
                self.fleet.started(url, job, job.tokens, job.sequences)
                job.versions = self.fleet.version, self.fleet.version
                given.append((job, url))
            elif not job.failed_on:  # otherwise another server may have room for a job that has not failed on it
                break
        return given

    def served(self, job: Job) -> None:
        """Record that a job is done.

        Args:
            job: a running job.
        """
        self.fleet.served(self.running.pop(job), job)
        job.versions = job.versions[0], self.fleet.version

    def failed(self, job: Job, error: str, now: float, *, gone: bool = False) -> None:
        """Record that a server failed a job. The job waits again, for another server if there is one.

        Args:
            job: a running job.
            error: the server's error, for messages.
            now: current time in seconds.
            gone: True = the connection was refused or dropped; see `Fleet.failed`.
        """
        url = self.running.pop(job)
        self.fleet.failed(url, job, error, now, gone=gone)
        self._return(job, url)

    def lost(self) -> list[Job]:
        """Take jobs back from dead servers. The jobs wait again.

        Returns:
            The jobs that were taken back.
        """
        dead = [job for job, url in self.running.items() if self.fleet.servers[url].state == State.DEAD]
        for job in dead:
            url = self.running.pop(job)
            self.fleet.abandoned(url, job)
            self._return(job, url)
        return dead

    def _return(self, job: Job, url: str) -> None:
        job.failed_on.append(url)
        self.add([job])

    def drop(self, job: Job) -> None:
        """Remove a job whose result is no longer needed."""
        if job in self.running:
            self.fleet.abandoned(self.running.pop(job), job)
        elif job in self.waiting:
            self.waiting.remove(job)
