"""What the ranks of a run do together: agree whether all succeeded, gather rows, take their own slice.

    rank 0   work ──► done ───┐
    rank 1   work ──► error ──┴──► meeting ──► the error is raised on every rank

Without the meeting the others would go on into their next collective and wait there for a rank that has gone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

PATIENCE = 10.0  # seconds that a failed rank waits for the others, which may be in a collective that it left out
SHORTEST_LOOK, LONGEST_LOOK = 1e-4, 0.02  # seconds between looks at whether all have come

T = TypeVar("T")

_meetings = itertools.count()  # of this process: every rank comes to the same ones, in the same order


class RankFailed(RuntimeError):
    """Another rank failed; the message names it and its error."""


class Ranks:
    """The ranks of a run, seen from one of them. On the main thread, in the same order on every rank.

    Args:
        accelerator: accelerate's `Accelerator`.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def agree(self, work: Callable[[], T], *, main_only: bool = False, from_main: bool = False) -> T:
        """Do it on every rank, or on the main one; if it fails on any, all raise.

        Not by a collective: a rank that fails within `work` may have left the others in one. It then waits `PATIENCE`
        for them and ends with its own error, after which the launcher ends the others.

        Args:
            main_only: only the main process works. from_main: all work, and get the main process's value.
        Raises:
            Exception: what `work` raised on this rank.
            RankFailed: on the ranks on which it did not fail.
        """
        value: Any = None
        error: Exception | None = None
        if self.rank == 0 or not main_only:
            try:
                value = work()
            except Exception as caught:  # relayed to all ranks
                error = caught
        if self.count > 1:
            said = None if error is None else f"{type(error).__name__}: {error}"
            store = dist.distributed_c10d._get_default_store()
            failures = meet(store, self.rank, self.count, said, next(_meetings))
            if error is None and failures:
                rank, message = min(failures.items())
                raise RankFailed(f"Rank {rank} failed with {message}")
        if error is not None:
            raise error
        if main_only or from_main:
            value = broadcast_object_list([value])[0]
        return value

    def gather(self, rows: Tensor, *, pad: float = 0) -> Tensor:
        """[B, …] of this rank → [N, …] of all, on the CPU; [B, K] with another K on each rank is padded to the widest.

        Args:
            rows: float32 or integers, which every device can gather; B is the same on all ranks.
        """
        if rows.dim() > 1:
            rows = self._accelerator.pad_across_processes(rows.to(self._accelerator.device), dim=1, pad_index=pad)
        return self._accelerator.gather(rows.to(self._accelerator.device)).cpu()

    def gather_object(self, value: Any) -> list[Any]:
        """One picklable value of each rank, in their order."""
        return gather_object([value])

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on the CPU, in the dtype of `values` (MPS has no float64)."""
        return self._accelerator.reduce(values.to(self._accelerator.device), "sum").cpu()

    def own(self, rows: int) -> slice:
        """This rank's rows among the gathered ones.

        Args:
            rows: B, of a rank.
        """
        return slice(self.rank * rows, (self.rank + 1) * rows)


def meet(
    store: Any, rank: int, count: int, failure: str | None, number: int, *, patience: float = PATIENCE
) -> dict[int, str]:
    """Wait for all ranks, each with its failure or None.

    Args:
        store: torch's key-value store, which all ranks see.
        number: of the meeting, the same on all ranks; they come to one after the other.
        patience: seconds for which a rank that failed waits.
    Returns:
        rank → failure of those that failed, on every rank; just its own on one that was not met.
    """
    here = f"dash_trl/meeting{number}"
    if failure is not None:
        store.set(f"{here}/{rank}", failure)
        store.add(f"{here}/failed", 1)
    if store.add(f"{here}/arrived", 1) == count:
        for key in ("arrived", "failed", "complete"):  # nobody needs the one before any more
            store.delete_key(f"dash_trl/meeting{number - 1}/{key}")
        store.set(f"{here}/complete", "")
    elif not _came(store, f"{here}/complete", patience if failure is not None else None):
        return {rank: str(failure)}
    if store.add(f"{here}/failed", 0) == 0:
        return {}
    said = {other: f"{here}/{other}" for other in range(count)}
    return {other: store.get(key).decode() for other, key in said.items() if store.check([key])}


def _came(store: Any, key: str, seconds: float | None) -> bool:
    """Whether the key came within so many seconds (`None`: wait on).

    Looks now and then: `store.wait` cannot be interrupted by Ctrl+C, and prints warnings when its time is over.
    """
    ends = None if seconds is None else time.monotonic() + seconds
    pause = SHORTEST_LOOK
    while not store.check([key]):
        if ends is not None and time.monotonic() > ends:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK)
    return True
