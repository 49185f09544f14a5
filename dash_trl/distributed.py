"""What the ranks of a run do together: agree whether all succeeded, gather rows, take their own slice.

    rank 0   work ──► done ───┐
    rank 1   work ──► error ──┴──► meeting ──► the error is raised on every rank

Without the meeting the others would go on into their next collective and wait there for a rank that has gone. It is not
a collective itself: a rank that fails within one would answer another than the others are in.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor

PATIENCE = 10.0  # seconds that a failed rank waits for the others, which may be in a collective that it left out
TIMEOUT = 1800.0  # seconds that the others wait; torch's for a collective on gloo
FIRST_LOOK, LAST_LOOK, LOOK_SHARE = 1e-4, 0.2, 0.02  # seconds between looks: a share of those waited, within limits
WELL = b"well"  # in the store, in place of an error

T = TypeVar("T")

# The meetings of this process so far, at each depth of agreements within agreements. All ranks come to the same ones in
# the same order; those within a work that failed on one rank do not shift the numbers of the later ones.
_depths = [0]
_left_behind: list[str] = []  # this rank's keys of meetings that others may still be reading


class RankFailed(RuntimeError):
    """Another rank failed, or did not come; the message names it and its error."""


class Ranks:
    """The ranks of a run, seen from one of them. On the main thread, in the same order on every rank.

    Args:
        accelerator: accelerate's `Accelerator`. timeout: seconds to wait for a rank in an agreement.
    """

    def __init__(self, accelerator: Any, timeout: float = TIMEOUT):
        self._accelerator = accelerator
        self._timeout = timeout
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def agree(self, work: Callable[[], T], *, main_only: bool = False, from_main: bool = False) -> T:
        """Do it on every rank, or on the main one; if it fails on any, all raise.

        A rank that fails while the others are in a collective waits `PATIENCE` for them and ends with its own error,
        after which the launcher ends the others.

        Args:
            main_only: only the main process works. from_main: all work, and get the main process's value.
        Raises:
            Exception: what `work` raised on this rank, or else on the first that failed, with a `RankFailed` as its
                cause.
            RankFailed: where another rank's error is neither built-in nor of this package, or a rank did not come in
                time.
        """
        _depths[-1] += 1
        meeting = [".".join(map(str, _depths[: depth + 1])) for depth in range(len(_depths))]
        value: Any = None
        error: Exception | None = None
        _depths.append(0)
        try:
            if self.rank == 0 or not main_only:
                value = work()
        except Exception as caught:  # relayed to all ranks
            error = caught
        finally:
            _depths.pop()
        if self.count > 1:
            store = dist.distributed_c10d._get_default_store()
            others = meet(store, self.rank, self.count, error, meeting, _left_behind, timeout=self._timeout)
            if error is None and others:
                rank, (text, relayed) = min(others.items())
                cause = RankFailed(f"Rank {rank} failed with {text}")
                raise cause if relayed is None else relayed from cause
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

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(self.gather(torch.tensor([number])).min())

    def own(self, rows: int) -> slice:
        """This rank's rows among the gathered ones.

        Args:
            rows: B, of a rank.
        """
        return slice(self.rank * rows, (self.rank + 1) * rows)


@contextmanager
def accumulating(accelerator: Any, model: Any) -> Iterator[None]:
    """No gradient synchronisation and no DeepSpeed step after this backward pass: more follow in the micro-step."""
    state = accelerator.gradient_state
    synchronise = state.sync_gradients
    state._set_sync_gradients(False)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # its engine has its own boundary
    with nullcontext() if deepspeed else accelerator.no_sync(model):
        yield
    state._set_sync_gradients(synchronise)


def meet(
    store: Any,
    rank: int,
    count: int,
    error: Exception | None,
    meeting: list[str],
    left_behind: list[str],
    *,
    patience: float = PATIENCE,
    timeout: float = TIMEOUT,
) -> dict[int, tuple[str, Exception | None]]:
    """Wait for all ranks, each with its error or None.

    Args:
        store: torch's key-value store, which all ranks see.
        meeting: its name, the same on all ranks, behind those of the agreements that it lies within.
        left_behind: this rank's keys of the meetings before, to be removed; those of this one are left in it.
        patience: seconds for which a rank that failed waits. timeout: seconds for which the others do.
    Returns:
        Of each rank that failed, the text of its error, and the error if it is built-in or of this package; the same on
        every rank. Only its own on one that failed and met nobody. If one has failed in an agreement around this one,
        so that it will not come to this one: that one.
    Raises:
        RankFailed: some did not come in time.
    """
    keys = [f"dash_trl/{meeting[-1]}/{one}" for one in range(count)]
    failed = [f"dash_trl/{name}/failed" for name in meeting]
    if error is not None:  # before it counts as having come: the others look for failures when all have
        store.set(failed[-1], keys[rank])
    store.set(keys[rank], WELL if error is None else _written(error))
    started = time.monotonic()
    while not store.check(keys):
        around = [key for key in failed[:-1] if store.check([key])]
        if around:
            key = store.get(around[0]).decode()
            return {int(key.rpartition("/")[2]): _read(store.get(key))}
        waited = time.monotonic() - started
        if error is not None and waited > patience:
            return {rank: _read(_written(error))}
        if waited > timeout:
            missing = [one for one, key in enumerate(keys) if not store.check([key])]
            raise RankFailed(f"Rank {rank} has waited {timeout:g} s (ddp_timeout) for the ranks {missing}.")
        # Looks, since `store.wait` cannot be interrupted by Ctrl+C, and prints warnings when its time is over.
        time.sleep(min(max(FIRST_LOOK, LOOK_SHARE * waited), LAST_LOOK))
    said_by_all = [store.get(key) for key in keys] if store.check([failed[-1]]) else []
    for key in left_behind:  # who is here has left the meetings before
        store.delete_key(key)
    left_behind[:] = [keys[rank]] + ([failed[-1]] if error is not None else [])
    return {one: _read(value) for one, value in enumerate(said_by_all) if value != WELL}


def _written(error: Exception) -> bytes:
    """JSON, since anybody who reaches the store may write there: unpickling would run whatever that is."""
    said = traceback.TracebackException.from_exception(error)  # its text is safe where the error's own `__str__` fails
    kind = type(error)
    text = f"{kind.__name__}: {said}"
    try:
        return json.dumps([text, kind.__module__, kind.__name__, error.args]).encode()
    except Exception:  # arguments that are no JSON, or too deep
        return json.dumps([text, kind.__module__, kind.__name__, [str(said)]]).encode()


def _read(written: bytes) -> tuple[str, Exception | None]:
    """(text, the error if it is built-in or of this package)."""
    text, module, name, arguments = json.loads(written)
    known = module == "builtins" or module.startswith("dash_trl.")
    kind = getattr(sys.modules.get(module), name, None) if known else None
    try:
        return text, kind(*arguments) if isinstance(kind, type) and issubclass(kind, Exception) else None
    except Exception:  # UnicodeDecodeError, for example, takes no text
        return text, None
