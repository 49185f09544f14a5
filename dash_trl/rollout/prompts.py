"""The order of the prompts, which a run resumed in any epoch reproduces, and a reader that reads ahead in it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

Rows = list[dict[str, Any]]  # rows of the dataset: a rank's share of a generation batch, one item of its dataloader


class EpochOrder(Sampler):
    """TRL's `RepeatSampler`, which can begin with any epoch.

    TRL draws one permutation per epoch from one generator, so a run that is resumed in epoch 1 would see the order of
    epoch 0 again (huggingface/trl#5911). This sampler first puts the generator into the state that it has after e
    epochs.

    Args:
        sampler: TRL's sampler.
        epoch: returns the epoch, from 0, if `set_epoch` was not called before the iteration.
        chosen: epoch → its prompts in their order, as whole generation batches; `None`: TRL's order.
    """

    def __init__(
        self,
        sampler: RepeatSampler,
        epoch: Callable[[], int],
        chosen: Callable[[int], Sequence[int] | None] = lambda epoch: None,
    ):
        self.sampler = sampler
        self.epoch = epoch
        self.chosen = chosen

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        accelerate's dataloader calls this before each epoch. With several ranks, `skip_first_batches` does not pass the
        call on.

        Args:
            epoch: number of the epoch, from 0.
        """
        self.epoch = lambda: epoch

    def __iter__(self) -> Iterator[int]:
        if (prompts := self.chosen(self.epoch())) is not None:
            return self._repeated(prompts)
        if self.sampler.shuffle and self.sampler.seed is not None:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def _repeated(self, prompts: Sequence[int]) -> Iterator[int]:
        size = self.sampler.batch_size
        for first in range(0, len(prompts), size):
            for _ in range(self.sampler.repeat_count):
                for prompt in prompts[first : first + size]:
                    yield from [prompt] * self.sampler.mini_repeat_count

    def __len__(self) -> int:
        return len(self.sampler)


def permutation(prompts: int, epoch: int, seed: int | None) -> list[int]:
    """Return the order in which TRL's sampler visits the prompts of an epoch.

    Args:
        prompts: number of prompts.
        epoch: number of the epoch, from 0.
        seed: `None`: the prompts are not shuffled.
    """
    if seed is None:
        return list(range(prompts))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(prompts, generator=generator) for _ in range(epoch + 1)]
    return orders[-1].tolist()


def open_epoch(dataloader: Any, epoch: int, skipped: int = 0) -> Iterator[Rows]:
    """Begin an epoch as Transformers' `_run_epoch` does.

    Args:
        dataloader: the training dataloader.
        epoch: number of the epoch, from 0.
        skipped: number of micro-batches to leave out at its beginning.
    """
    if hasattr(dataloader, "set_epoch"):
        dataloader.set_epoch(epoch)
    sampler: Any = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return iter(skip_first_batches(dataloader, skipped) if skipped else dataloader)


@dataclass
class _Epoch:
    """An epoch that is being read: the micro-batches that were read but not handed out, and the source of the rest."""

    source: Iterator[Rows] | None  # `None`: the epoch was read to its end
    batches: deque[Rows] = field(default_factory=deque)


class PromptReader:
    """Hands Transformers its micro-batches, and reads ahead the prompts of the next `async_level` windows.

    A generation window is sampled from the first of its micro-batches; the others repeat the same prompts. The reader
    reads only as far as prompts must be known, and no further than micro-steps will run::

        window          |------- n -------|----- n + 1 -----|----- n + 2 -----|       async_level = 2
        optimizer step  |--------|--------|--------|--------|--------|--------|
        handed out       ■■■■■■■■
        read             ■■■■■■■■ ■■■■■■■■ ■■■■■■■■ ■■■■■■■■ ■

    `Trainer.get_batch_samples` calls it. It hands out the same micro-batches for every `async_level`. When an epoch has
    been read to its end, the reader opens the next epoch itself. It ignores the iterator that Transformers makes for
    that epoch later, which reads nothing until it is asked. All ranks read the same number of micro-batches at the same
    micro-step. With `async_level=0` nothing is read ahead, and Transformers reads from its own iterators.

    Args:
        async_level: number of windows whose prompts are known ahead of the one that begins.
        window_batches: micro-steps of a window, `steps_per_generation × num_iterations`.
        step_batches: micro-steps of an optimizer step, `gradient_accumulation_steps`.
        sized: the dataset has a length. Transformers then makes an optimizer step of the rest of an epoch, too. For a
            stream it does not: the gradients of the rest are added to the first optimizer step of the next reading.
        open_epoch: number of an epoch, from 0 → an iterator over its micro-batches.
    Attributes:
        epoch: the epoch that Transformers is in. Set it to the epoch with which a run begins.
    """

    def __init__(
        self,
        async_level: int,
        *,
        window_batches: int,
        step_batches: int,
        sized: bool,
        open_epoch: Callable[[int], Iterator[Rows]],
    ):
        self.async_level = async_level
        self.window_batches = window_batches
        self.step_batches = step_batches
        self.sized = sized
        self.open_epoch = open_epoch
        self.epoch = 0
        self._given: Iterator[Rows] | None = None  # Transformers' iterator of this epoch
        self._epochs: deque[_Epoch] = deque()  # from the current one to the one that is being read
        self._start = 0  # the first micro-step of this optimizer step
        self._handed: list[Rows] = []  # the micro-batches of this optimizer step

    def read(self, epoch_iterator: Iterator[Rows], count: int, *, step: int, state: Any) -> Iterator[Rows]:
        """Return the micro-batches of the optimizer step that begins.

        Args:
            epoch_iterator: the iterator from which Transformers reads the epoch. If it differs from the last one, the
                next epoch has begun.
            count: the largest number of micro-batches.
            step: number of micro-steps before this optimizer step; the trainer's `_step`.
            state: the `TrainerState`.
        """
        if self.async_level == 0:
            return epoch_iterator
        if epoch_iterator is not self._given:
            if self._given is not None:
                self.epoch += 1
                self._epochs.popleft()  # drops the rest of it, if a callback has ended it
            self._given = epoch_iterator
            if not self._epochs:
                self._epochs.append(_Epoch(epoch_iterator))
        self._start, self._handed = step, []
        now = self._epochs[0]
        while len(now.batches) < count and now.source is not None:
            self._read_one(now)
        self._handed = [now.batches.popleft() for _ in range(min(count, len(now.batches)))]
        self._read_ahead(state)
        return iter(self._handed)

    def upcoming(self, step: int) -> list[Rows]:
        """Return this rank's rows of the next `async_level` windows, fewer at the end of a run.

        Call it while the optimizer step of the last `read` is running. The result has the same list objects that will
        be handed out later, unless a callback ends the epoch or the run before; do not change them.

        Args:
            step: windows that begin after this micro-step are returned.
        """
        read = enumerate(chain(self._handed, *(epoch.batches for epoch in self._epochs)), self._start)
        first = (batch for number, batch in read if number > step and number % self.window_batches == 0)
        return list(islice(first, self.async_level))

    def close(self) -> None:
        """Drop what was read ahead, and release the dataloader's workers."""
        self._given = None
        self._epochs.clear()
        self._handed = []

    def state_dict(self) -> None:
        """Return `None`: Transformers knows the place in the dataset."""

    def _read_ahead(self, state: Any) -> None:
        """Read up to the first micro-batch of the last window that must be known, but not past the end of the run."""
        window = (self._start + len(self._handed) - 1) // self.window_batches  # the last one in this optimizer step
        while (
            self._next_micro_step() <= (window + self.async_level) * self.window_batches
            and state.global_step + self._optimizer_steps() < state.max_steps
        ):
            reading = self._epochs[-1]
            if reading.source is not None:
                self._read_one(reading)
            elif len(self._epochs) > 1 and not reading.batches:
                return  # after an empty epoch, the run ends
            elif self.epoch + len(self._epochs) < state.num_train_epochs:
                self._epochs.append(_Epoch(self.open_epoch(self.epoch + len(self._epochs))))
            else:
                return

    @staticmethod
    def _read_one(epoch: _Epoch) -> None:
        assert epoch.source is not None
        batch = next(epoch.source, None)
        if batch is None:
            epoch.source = None
        else:
            epoch.batches.append(batch)

    def _next_micro_step(self) -> int:
        """Return the micro-step of the micro-batch that is read next."""
        return self._start + len(self._handed) + sum(len(epoch.batches) for epoch in self._epochs)

    def _optimizer_steps(self) -> int:
        """Return how many optimizer steps the micro-batches read so far make, including the running one."""
        steps = self._steps_of(len(self._handed), ended=True)
        return steps + sum(self._steps_of(len(one.batches), ended=one.source is None) for one in self._epochs)

    def _steps_of(self, batches: int, *, ended: bool) -> int:
        whole, rest = divmod(batches, self.step_batches)
        return whole + (rest > 0 and ended and self.sized)
