"""`Ranks`: the ranks of a run end together at an error, gather rows and add up numbers.

A *barrier* is the end of `Ranks.agree`, where all ranks wait for each other and exchange their errors::

    rank 0   work ──► done ───┐
    rank 1   work ──► error ──┴──► barrier ──► the error is raised on every rank

Otherwise the others would wait for a failed rank in their next collective. Torch's key-value store is used, because a
collective could be mixed up with theirs.

A failure ends one numbered barrier on all ranks. So `work` may call `agree`, too: if it fails on one rank before that,
its error comes to the barrier for which the others wait::

    rank 0   agree( work( agree( work ──► done ──┐
    rank 1   agree( work ──► error ──────────────┴──► barrier ──► the error ends all these calls, without a new barrier
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor

# Seconds for which a failed rank waits for the others, which may hang in a collective that the failed rank never joins.
PATIENCE = 10.0
TIMEOUT = 1800.0  # seconds for which a rank without an error waits; torch's default for a collective on gloo
# A waiting rank polls the store. Its pauses are `LOOK_SHARE` × the time waited so far, but at least `FIRST_LOOK` and at
# most `LAST_LOOK` seconds.
LOOK_SHARE = 0.02
FIRST_LOOK = 1e-4
LAST_LOOK = 0.2

T = TypeVar("T")

_barriers = [0]  # number of barriers so far; the same on all ranks


class RankFailed(RuntimeError):
    """Another rank failed, or did not come to a barrier. The message names the rank and its error."""


class Ranks:
    """Communication between this rank and the others. All ranks call its methods in the same order, on the main thread.

    Args:
        accelerator: the `Accelerator` of the trainer.
        timeout: seconds for which `agree` waits for other ranks.
    Attributes:
        rank: index of this rank.
        count: number of ranks.
        steps_in_backward: True = DeepSpeed makes an optimizer step in its last backward pass.
    """

    def __init__(self, accelerator: Accelerator, timeout: float = TIMEOUT):
        self._accelerator = accelerator
        self.timeout = timeout
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.steps_in_backward = accelerator.distributed_type == DistributedType.DEEPSPEED

    def agree(
        self,
        work: Callable[..., T],
        *arguments: Any,
        main_only: bool = False,
        from_main: bool = False,
        **named: Any,
    ) -> T:
        """Call `work` on every rank. If it fails on one, all ranks raise an error.

        If the others are in a collective, it raises its own after `PATIENCE` seconds; the launcher ends them.

        Args:
            work: the function to call. It may call `agree`, unless `main_only` is True.
            arguments: its arguments by position.
            main_only: True = only the main rank calls `work`, and all ranks return its value.
            from_main: True = all ranks call `work`, and return the main rank's value.
            named: its arguments by name.
        Raises:
            Exception: the error of `work` on this rank.
            RankFailed: if another rank failed, or did not come to the barrier in time.
        """
        value: Any = None
        error: Exception | None = None
        before = _barriers[0]
        try:
            if self.rank == 0 or not main_only:
                value = work(*arguments, **named)
        except Exception as caught:
            # All ranks got this error in the last barrier, in a call of `agree` by `work`.
            if vars(caught).get("barrier") == _barriers[0] > before:
                raise
            error = caught
        if self.count > 1:
            _barriers[0] += 1
            store = dist.distributed_c10d._get_default_store()
            others = wait_for_all(store, self.rank, self.count, error, _barriers[0], timeout=self.timeout)
            if error is None and others:
                rank, text = min(others.items())
                error = RankFailed(f"Rank {rank} failed with {text}")
        if error is not None:
            vars(error)["barrier"] = _barriers[0]
            raise error
        if main_only or from_main:
            value = broadcast_object_list([value])[0]
        return value

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks as a CPU tensor, those of rank 0 first. Shorter rows are padded by 0.

        Args:
            rows: [B, …] with the same B on all ranks, as float32, bools or integers, which every device can gather.
        """
        rows = self._accelerator.pad_across_processes(rows.to(self._accelerator.device), dim=1)
        return self._accelerator.gather(rows).cpu()

    def gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks. The values must be picklable."""
        return gather_object([value])

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, on the CPU, in its dtype: not float64, which MPS does not have."""
        return self._accelerator.reduce(values.to(self._accelerator.device), "sum").cpu()

    def exact_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks in float64. Lists are sent, because not every device has float64."""
        return torch.tensor(self.gather_object(values.tolist()), dtype=torch.double).sum(dim=0)

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return int(self.gather(torch.tensor([number])).max())

    def own(self, rows: int) -> slice:
        """Return the slice of this rank's rows in the result of `gather`, of `rows` rows per rank."""
        return slice(self.rank * rows, (self.rank + 1) * rows)


@contextmanager
def accumulating(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[None]:
    """Within the block, let backward passes only accumulate gradients: no synchronisation, no step of DeepSpeed."""
    state = accelerator.gradient_state
    synchronise = state.sync_gradients
    state._set_sync_gradients(False)
    # DeepSpeed's backward gets `sync_gradients`.
    with nullcontext() if accelerator.distributed_type == DistributedType.DEEPSPEED else accelerator.no_sync(model):
        yield
    state._set_sync_gradients(synchronise)


def wait_for_all(
    store: dist.Store,
    rank: int,
    count: int,
    error: Exception | None,
    number: int,
    *,
    patience: float = PATIENCE,
    timeout: float = TIMEOUT,
) -> dict[int, str]:
    """Wait until all `count` ranks have come to barrier `number`, and exchange errors.

    A rank that failed waits `patience` seconds for the others, another one `timeout` seconds.

    Returns:
        Failed rank → text of its error, the same on all ranks; only this rank's error if it failed and the others did
        not come.
    Raises:
        RankFailed: if some ranks did not come in time.
    """
    keys = [f"dash_trl/{number}/{one}" for one in range(count)]
    said = ""
    if error is not None:  # whose own `__str__` may fail
        text = f"{type(error).__name__}: {traceback.TracebackException.from_exception(error)}"
        said = text.encode(errors="backslashreplace").decode()  # a store takes no half of a surrogate pair
    store.set(keys[rank], said)
    started = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - started
        if error is not None and waited > patience:
            return {rank: said}
        if waited > timeout:
            missing = [one for one, key in enumerate(keys) if not store.check([key])]
            raise RankFailed(f"Rank {rank} has waited {timeout:g} s (ddp_timeout) for the ranks {missing}.")
        # Poll instead of `store.wait`, which Ctrl+C cannot interrupt, and which prints warnings when its time is over.
        time.sleep(min(max(FIRST_LOOK, LOOK_SHARE * waited), LAST_LOOK))
    said_by_all = store.multi_get(keys)
    # All ranks have come to this barrier, so none still reads the keys of the last one.
    store.delete_key(f"dash_trl/{number - 1}/{rank}")
    return {one: value.decode() for one, value in enumerate(said_by_all) if value}
