"""`Ranks`: communication between the ranks of a run, which end together at an error, gather rows and add up numbers.

A *meeting* is the point at the end of `Ranks.agree` where all ranks wait for each other and exchange their errors::

    rank 0   work ──► done ───┐
    rank 1   work ──► error ──┴──► meeting ──► the error is raised on every rank

Without a meeting, the other ranks would go on to their next collective, and wait there for a rank that has failed. A
meeting uses torch's key-value store, because a rank may fail while the other ranks are in a collective. If the meeting
were a collective, too, the two would be mixed up.

Meetings are numbered, and each failure ends one meeting on all ranks. So `work` may call `agree`, too: if it fails on
one rank before that call, its error comes to the meeting for which the other ranks wait::

    rank 0   agree( work( agree( work ──► done ──┐
    rank 1   agree( work ──► error ──────────────┴──► meeting ──► the error ends all these calls, without a new meeting
"""

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor

# Seconds for which a failed rank waits for the others, which may hang in a collective that the failed rank never joins.
PATIENCE = 10.0
TIMEOUT = 1800.0  # seconds for which a rank without an error waits; torch's default for a collective on gloo
# A waiting rank polls the store. Its pauses are `LOOK_SHARE` × the time waited so far, but at least `FIRST_LOOK` and at
# most `LAST_LOOK` seconds.
FIRST_LOOK, LAST_LOOK, LOOK_SHARE = 1e-4, 0.2, 0.02

T = TypeVar("T")

_meetings = [0]  # number of meetings so far; the same on all ranks
_lines: list[Any] = []  # the `Lines` of this process
HELLO = b"dash_trl"


class RankFailed(RuntimeError):
    """Another rank failed, or did not come to a meeting. The message names the rank and its error."""


class Lines:
    """TCP connections between rank 0 and the others. The system closes one when a rank ends, however it ends.

    Without them, ranks that no launcher ends together, such as those of `srun`, would wait for `ddp_timeout`.
    """

    def __init__(self, store: Any, rank: int, host: str):
        self._ends: dict[int, socket.socket] = {}
        self._listener: Any = None
        if rank == 0:
            port = 0
            with suppress(OSError):  # a name of this node that others use, but this node itself does not have
                self._listener = socket.create_server((host, 0))  # not on other addresses of this node
                self._listener.setblocking(False)
                port = self._listener.getsockname()[1]
            store.set("dash_trl/port", str(port))
        else:
            with suppress(OSError):  # a firewall between nodes
                self._ends[0] = socket.create_connection((host, int(store.get("dash_trl/port"))), 10)
                self._ends[0].sendall(HELLO + rank.to_bytes(4))

    def check(self, error: Exception | None) -> None:
        """Raise a `RankFailed` from `error` if a rank has ended to which this rank is connected."""
        with suppress(OSError):
            while self._listener is not None:
                end, _ = self._listener.accept()
                end.settimeout(1)
                said = end.recv(12)
                if said.startswith(HELLO):  # others may look for open ports
                    self._ends[int.from_bytes(said[8:])] = end
        for rank, end in self._ends.items():
            end.setblocking(False)
            with suppress(BlockingIOError):
                with suppress(ConnectionError):
                    end.recv(1)
                raise RankFailed(f"Rank {rank} has ended without a word to the others. See its own output.") from error


class Ranks:
    """Communication between this rank and the other ranks of a run.

    All ranks must call the methods in the same order, on the main thread.

    Args:
        accelerator: the `Accelerator` of the trainer.
        timeout: seconds for which a rank waits for the other ranks in `agree`.
    Attributes:
        rank: index of this rank.
        count: number of ranks.
        timeout: seconds for which a rank waits for the other ranks in `agree`.
    """

    def __init__(self, accelerator: Any, timeout: float = TIMEOUT):
        self._accelerator, self.timeout = accelerator, timeout
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        if self.count > 1 and not _lines:
            store = dist.distributed_c10d._get_default_store()
            _lines.append(Lines(store, self.rank, os.environ.get("MASTER_ADDR", "localhost")))

    def agree(
        self,
        work: Callable[..., T],
        *arguments: Any,
        main_only: bool = False,
        from_main: bool = False,
        **named: Any,
    ) -> T:
        """Call `work` on every rank, or only on the main rank. If `work` fails on one rank, all ranks raise an error.

        If one rank fails while the other ranks are in a collective, the failed rank waits `PATIENCE` seconds for them,
        and then raises its own error. The launcher then ends the other ranks.

        Args:
            work: the function to call. It may call `agree`, unless `main_only` is True.
            arguments: arguments of `work` by position.
            main_only: True = call `work` only on the main rank, and return its value on all ranks.
            from_main: True = call `work` on all ranks, but return the value of the main rank on all ranks.
            named: arguments of `work` by name.
        Returns:
            The value of `work`.
        Raises:
            Exception: the error of `work` on this rank.
            RankFailed: if another rank failed, or did not come to the meeting in time.
        """
        value: Any = None
        error: Exception | None = None
        before = _meetings[0]
        try:
            if self.rank == 0 or not main_only:
                value = work(*arguments, **named)
        except Exception as caught:
            # All ranks got this error in the last meeting, in a call of `agree` by `work`.
            if vars(caught).get("meeting") == _meetings[0] > before:
                raise
            error = caught
        if self.count > 1:
            _meetings[0] += 1
            store = dist.distributed_c10d._get_default_store()
            others = meet(store, self.rank, self.count, error, _meetings[0], timeout=self.timeout, lines=_lines[0])
            if error is None and others:
                rank, text = min(others.items())
                error = RankFailed(f"Rank {rank} failed with {text}")
        if error is not None:
            vars(error)["meeting"] = _meetings[0]
            raise error
        if main_only or from_main:
            value = broadcast_object_list([value])[0]
        return value

    def check_lines(self, error: Exception) -> None:
        """Raise a `RankFailed` if another rank has ended, from which an error of torch's communication may follow."""
        for lines in _lines:
            lines.check(error)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks as a CPU tensor. Rows with fewer columns than on other ranks are padded by 0.

        Args:
            rows: [B, …] in float32 or an integer type, because every device can gather these. B is the same on all
                ranks.
        Returns:
            [N, …], the rows of rank 0 first.
        """
        rows = rows.to(self._accelerator.device)
        if rows.dim() > 1:
            rows = self._accelerator.pad_across_processes(rows, dim=1)
        return self._accelerator.gather(rows).cpu()

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. The values must be picklable."""
        return gather_object([value])

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, as a CPU tensor in the dtype of `values`.

        Args:
            values: the tensor of this rank, not in float64, which MPS does not have.
        """
        return self._accelerator.reduce(values.to(self._accelerator.device), "sum").cpu()

    def exact_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks in float64. Ranks exchange lists, because not every device has float64."""
        return torch.tensor(self.gather_object(values.tolist()), dtype=torch.double).sum(dim=0)

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return int(self.gather(torch.tensor([number])).max())

    def own(self, rows: int) -> slice:
        """Return the slice that selects this rank's rows from the result of `gather`.

        Args:
            rows: number of rows of each rank.
        """
        return slice(self.rank * rows, (self.rank + 1) * rows)


@contextmanager
def accumulating(accelerator: Any, model: Any) -> Iterator[None]:
    """`with` block in which a backward pass only accumulates gradients: no synchronisation, and no step of DeepSpeed.

    Use this context for all passes of a micro-step except the last.

    Args:
        accelerator: the `Accelerator` of the trainer.
        model: the wrapped model.
    """
    state = accelerator.gradient_state
    synchronise = state.sync_gradients
    state._set_sync_gradients(False)
    # DeepSpeed's backward gets `sync_gradients`.
    with nullcontext() if accelerator.distributed_type == DistributedType.DEEPSPEED else accelerator.no_sync(model):
        yield
    state._set_sync_gradients(synchronise)


def meet(
    store: Any,
    rank: int,
    count: int,
    error: Exception | None,
    number: int,
    *,
    patience: float = PATIENCE,
    timeout: float = TIMEOUT,
    lines: Any = None,
) -> dict[int, str]:
    """Wait until all ranks have come to a meeting, and exchange their errors.

    Args:
        store: torch's key-value store, which all ranks share.
        rank: index of this rank.
        count: number of ranks.
        error: the error of this rank. `None`: this rank succeeded.
        number: the number of this meeting, the same on all ranks.
        patience: seconds for which a rank that failed waits for the others.
        timeout: seconds for which a rank that succeeded waits for the others.
        lines: the `Lines` to other ranks. `None`: there are none.
    Returns:
        Failed rank → text of its error; empty if no rank failed. It is the same on every rank, with one exception: if
        this rank failed and the other ranks did not come in time, the result is only this rank's error.
    Raises:
        RankFailed: if some ranks did not come in time.
    """
    keys = [f"dash_trl/{number}/{one}" for one in range(count)]
    failed = f"dash_trl/{number}/failed"
    if error is not None:  # set before this rank's key, because the others read failures once all keys are set
        store.set(failed, "")
    said = "" if error is None else _described(error)
    store.set(keys[rank], said)
    started = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - started
        if lines is not None and not store.check(keys):
            lines.check(error)
        if error is not None and waited > patience:
            return {rank: said}
        if waited > timeout:
            missing = [one for one, key in enumerate(keys) if not store.check([key])]
            raise RankFailed(f"Rank {rank} has waited {timeout:g} s (ddp_timeout) for the ranks {missing}.")
        # Poll instead of `store.wait`, which Ctrl+C cannot interrupt, and which prints warnings when its time is over.
        time.sleep(min(max(FIRST_LOOK, LOOK_SHARE * waited), LAST_LOOK))
    said_by_all = [store.get(key) for key in keys] if store.check([failed]) else []
    for name in (rank, "failed"):  # all ranks have come to this meeting, so none still reads the keys of the last one
        store.delete_key(f"dash_trl/{number - 1}/{name}")
    return {one: value.decode() for one, value in enumerate(said_by_all) if value}


def _described(error: Exception) -> str:
    """Return the type and the text of an error, also if the error's own `__str__` fails."""
    # A store takes no half of a surrogate pair.
    return f"{type(error).__name__}: {traceback.TracebackException.from_exception(error)}".encode(
        errors="backslashreplace"
    ).decode()
