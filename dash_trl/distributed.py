"""What the ranks of a run do together: agree whether all succeeded, gather rows, take their own rows::

    rank 0   work ──► done ───┐
    rank 1   work ──► error ──┴──► meeting ──► the error is raised on every rank

Without the meeting, the other ranks would go on to their next collective and wait there for a rank that has gone. The
meeting itself is not a collective, but uses torch's key-value store. If it were one, a rank that failed within a
collective would answer another collective than the one that the others are in.
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

PATIENCE = 10.0  # seconds that a failed rank waits for the others, which may hang in a collective that it missed
TIMEOUT = 1800.0  # seconds that the other ranks wait; torch's default for a collective on gloo
# Seconds between two looks at the store: `LOOK_SHARE` of the time waited so far, within these limits.
FIRST_LOOK, LAST_LOOK, LOOK_SHARE = 1e-4, 0.2, 0.02
WELL = b"well"  # what a rank without an error writes into the store

T = TypeVar("T")

# How many meetings this process has had, at each depth of nested calls of `agree`. All ranks have the same meetings in
# the same order. If work fails on one rank, meetings nested in that work do not shift the numbers of later meetings.
_depths = [0]
_left_behind: list[str] = []  # this rank's keys of the last meeting, which others may still be reading


class RankFailed(RuntimeError):
    """Another rank failed, or did not come to a meeting. The message names the rank and its error."""


class Ranks:
    """The ranks of a run, as seen from one of them.

    Every method runs on the main thread, and all ranks call the methods in the same order.

    Args:
        accelerator: accelerate's `Accelerator`.
        timeout: seconds for which a rank waits for the others in `agree`.
    Attributes:
        rank: index of this rank.
        count: number of ranks.
    """

    def __init__(self, accelerator: Any, timeout: float = TIMEOUT):
        self._accelerator = accelerator
        self._timeout = timeout
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def agree(self, work: Callable[[], T], *, main_only: bool = False, from_main: bool = False) -> T:
        """Call `work` on every rank, or only on the main one. If it fails on any rank, all ranks raise.

        If a rank fails while the others are in a collective, it waits `PATIENCE` seconds for them and then raises its
        own error; the launcher then ends the other ranks.

        Args:
            work: the function to call.
            main_only: call it only on the main process. All ranks get its value.
            from_main: call it on all ranks, but return the main process's value on all of them.
        Returns:
            The value of `work`.
        Raises:
            Exception: the error of `work` on this rank. If it succeeded here, the error of the first rank that failed,
                with a `RankFailed` as its cause.
            RankFailed: another rank failed with an error that is neither built-in nor of this package, or it did not
                come in time.
        """
        _depths[-1] += 1
        meeting = [".".join(map(str, _depths[: depth + 1])) for depth in range(len(_depths))]
        value: Any = None
        error: Exception | None = None
        _depths.append(0)
        try:
            if self.rank == 0 or not main_only:
                value = work()
        except Exception as caught:  # raised below, on all ranks
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
        """Gather the rows of all ranks on the CPU. If ranks have different numbers of columns, rows are padded.

        Args:
            rows: [B, …] float32 or integers, which every device can gather. B is the same on all ranks.
            pad: the value that fills missing columns.
        Returns:
            [N, …], the rows of rank 0 first.
        """
        if rows.dim() > 1:
            rows = self._accelerator.pad_across_processes(rows.to(self._accelerator.device), dim=1, pad_index=pad)
        return self._accelerator.gather(rows.to(self._accelerator.device)).cpu()

    def gather_object(self, value: Any) -> list[Any]:
        """Gather one picklable value from each rank, in the order of the ranks."""
        return gather_object([value])

    def sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over the ranks, on the CPU and in the dtype of `values` (MPS has no float64)."""
        return self._accelerator.reduce(values.to(self._accelerator.device), "sum").cpu()

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return int(self.gather(torch.tensor([number])).min())

    def own(self, rows: int) -> slice:
        """Return the position of this rank's rows among the gathered ones.

        Args:
            rows: number of rows of each rank.
        """
        return slice(self.rank * rows, (self.rank + 1) * rows)


@contextmanager
def accumulating(accelerator: Any, model: Any) -> Iterator[None]:
    """Turn off gradient synchronisation and DeepSpeed's step after this backward pass.

    It is for all passes of a micro-step but the last.

    Args:
        accelerator: accelerate's `Accelerator`.
        model: the wrapped model.
    """
    state = accelerator.gradient_state
    synchronise = state.sync_gradients
    state._set_sync_gradients(False)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # its engine marks the boundary itself
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
    """Wait until all ranks have come to a meeting, and exchange their errors.

    Args:
        store: torch's key-value store, which all ranks share.
        rank: this rank.
        count: number of ranks.
        error: this rank's error; `None` if it succeeded.
        meeting: the names of the meetings that surround this one, outermost first, and this one's name last; the same
            on all ranks.
        left_behind: keys of this rank's earlier meetings. They are deleted and replaced by the keys of this meeting.
        patience: seconds for which a rank that failed waits for the others.
        timeout: seconds for which a rank that succeeded waits for the others.
    Returns:
        For each rank that failed, the text of its error, and the error itself if it is built-in or of this package.
        This is the same on every rank, with two exceptions: a rank that failed and met nobody in time gets only its own
        error; and if a rank has failed in a surrounding meeting, and so will not come to this one, that failure is
        returned.
    Raises:
        RankFailed: some ranks did not come in time.
    """
    keys = [f"dash_trl/{meeting[-1]}/{one}" for one in range(count)]
    failed = [f"dash_trl/{name}/failed" for name in meeting]
    if error is not None:  # set before this rank counts as present: the others look for failures once all are present
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
        # Poll: Ctrl+C cannot interrupt `store.wait`, which also prints warnings when its time is over.
        time.sleep(min(max(FIRST_LOOK, LOOK_SHARE * waited), LAST_LOOK))
    said_by_all = [store.get(key) for key in keys] if store.check([failed[-1]]) else []
    for key in left_behind:  # a rank that is here no longer reads keys of earlier meetings
        store.delete_key(key)
    left_behind[:] = [keys[rank]] + ([failed[-1]] if error is not None else [])
    return {one: _read(value) for one, value in enumerate(said_by_all) if value != WELL}


def _written(error: Exception) -> bytes:
    """Write an error as JSON.

    It is not pickled: anybody who can reach the store may write there, and unpickling would run their code.
    """
    said = traceback.TracebackException.from_exception(error)  # gives a text even if the error's own `__str__` fails
    kind = type(error)
    text = f"{kind.__name__}: {said}"
    try:
        return json.dumps([text, kind.__module__, kind.__name__, error.args]).encode()
    except Exception:  # the arguments are not JSON, or nested too deeply
        return json.dumps([text, kind.__module__, kind.__name__, [str(said)]]).encode()


def _read(written: bytes) -> tuple[str, Exception | None]:
    """Return the text of an error, and the error itself if it is built-in or of this package."""
    text, module, name, arguments = json.loads(written)
    known = module == "builtins" or module.startswith("dash_trl.")
    kind = getattr(sys.modules.get(module), name, None) if known else None
    try:
        return text, kind(*arguments) if isinstance(kind, type) and issubclass(kind, Exception) else None
    except Exception:  # some errors, such as UnicodeDecodeError, cannot be built from a text
        return text, None
