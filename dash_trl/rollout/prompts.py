"""`EpochOrder` reproduces the order of the prompts in any epoch. `PromptReader` reads ahead in this order."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from dash_trl.rollout.queue import PromptQueue

Rows = list[dict[str, Any]]  # a rank's rows of one generation batch: one item of the rank's dataloader


class EpochOrder(Sampler):
    """Sampler in the order of TRL's `RepeatSampler`, but it can begin with any epoch.

    TRL draws one permutation per epoch from one generator, so a run that is resumed in epoch 1 would see the order of
    epoch 0 again (huggingface/trl#5911). Before epoch e, this sampler therefore draws the e earlier permutations.

    Args:
        sampler: TRL's sampler.
        epoch: function that returns the number of the epoch, from 0. It is used until `set_epoch` is called.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler = sampler
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        The dataloader of accelerate calls this before each epoch. With several ranks, the dataloader that
        `skip_first_batches` returns does not pass the call on. Then the constructor's function `epoch` is used.

        Args:
            epoch: number of the epoch, from 0.
        """
        self.epoch = lambda: epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle and self.sampler.seed is not None:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def open_epoch(dataloader: Any, epoch: int, skipped: int = 0) -> Iterator[Rows]:
    """Return an iterator over an epoch's micro-batches, as Transformers' `_run_epoch` makes it.

    Args:
        dataloader: the training dataloader.
        epoch: number of the epoch, from 0.
        skipped: number of micro-batches to leave out at the beginning of the epoch.
    """
    if hasattr(dataloader, "set_epoch"):
        dataloader.set_epoch(epoch)
    sampler: Any = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return iter(skip_first_batches(dataloader, skipped) if skipped else dataloader)


@dataclass
class _Epoch:
    """An epoch that is being read."""

    source: Iterator[Rows] | None  # yields the micro-batches that were not read yet. `None`: none is left
    batches: deque[Rows] = field(default_factory=deque)  # micro-batches that were read but not handed out


class PromptReader:
    """Hands Transformers its micro-batches, and reads ahead the prompts of the next `async_level` windows.

    TRL's dataloader yields the rows of a whole window again for each micro-step of the window. Such an item is called a
    micro-batch here. To know the prompts of a later window, the reader reads up to the first micro-batch of that
    window. It reads no further, and nothing after the last micro-step of the run::

        window          |------- n -------|----- n + 1 -----|----- n + 2 -----|       async_level = 2
        optimizer step  |--------|--------|--------|--------|--------|--------|
        handed out       ■■■■■■■■
        read             ■■■■■■■■ ■■■■■■■■ ■■■■■■■■ ■■■■■■■■ ■

    `DASHTrainer.get_batch_samples` calls `read`. The micro-batches that `read` returns do not depend on `async_level`.
    When an epoch has been read to its end, the reader opens the next epoch itself. Transformers later makes its own
    iterator for that epoch. The reader ignores this iterator, which reads nothing as long as it is unused. All ranks
    read the same number of micro-batches at the same micro-step. With `async_level=0` nothing is read ahead, and
    Transformers reads from its own iterators.

    Args:
        async_level: number of windows after the current one whose prompts are read ahead.
        window_batches: micro-steps of a window, `steps_per_generation × num_iterations`.
        step_batches: micro-steps of an optimizer step, `gradient_accumulation_steps`.
        sized: True = the dataset has a length. Transformers then takes an optimizer step for the last micro-batches of
            an epoch, even if they are fewer than `step_batches`. False = the dataset is a stream. Transformers takes no
            step for too few micro-batches; their gradients are added to the first optimizer step of the next epoch.
        open_epoch: function that takes the number of an epoch, from 0, and returns an iterator over the epoch's
            micro-batches.
    Attributes:
        epoch: number of the epoch that Transformers is in. The trainer sets it to the epoch with which a run begins.
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
        self._epochs: deque[_Epoch] = deque()  # from the current epoch to the one that is being read
        self._start = 0  # the first micro-step of this optimizer step
        self._handed: list[Rows] = []  # the micro-batches of this optimizer step

    def read(self, epoch_iterator: Iterator[Rows], count: int, *, step: int, state: Any) -> Iterator[Rows]:
        """Return the micro-batches of the optimizer step that begins, and read ahead.

        Args:
            epoch_iterator: the iterator from which Transformers reads the epoch. If it differs from the last one, the
                next epoch has begun.
            count: largest number of micro-batches to return.
            step: number of micro-steps before this optimizer step; the trainer's `_step`.
            state: the `TrainerState`.
        """
        if self.async_level == 0:
            return epoch_iterator
        if epoch_iterator is not self._given:
            if self._given is not None:
                self.epoch += 1
                self._epochs.popleft()  # drops the rest of the epoch if a callback has ended it
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
        """Return this rank's rows of each of the next `async_level` windows, or of fewer windows at the end of a run.

        Call this while the optimizer step of the last `read` is running. Do not change the lists: `read` returns the
        same objects later, unless a callback ends the epoch or the run first.

        Args:
            step: a micro-step of this optimizer step. The next windows are those that begin after it.
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
        """Return `None`: a checkpoint of Transformers already has the position in the dataset."""

    def _read_ahead(self, state: Any) -> None:
        """Read up to the first micro-batch of the last window that must be known, but not past the end of the run."""
        window = (self._start + len(self._handed) - 1) // self.window_batches  # last window in this optimizer step
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
        """Return how many optimizer steps the micro-batches read ahead suffice for, plus the running step."""
        steps = self._steps_of(len(self._handed), ended=True)
        return steps + sum(self._steps_of(len(one.batches), ended=one.source is None) for one in self._epochs)

    def _steps_of(self, batches: int, *, ended: bool) -> int:
        whole, rest = divmod(batches, self.step_batches)
        return whole + (rest > 0 and ended and self.sized)


def new_reader(
    args: Any, handler: Any, *, sized: bool, ahead: int, first: Callable[[], int] | None
) -> PromptReader | PromptQueue:
    """Build the `PromptReader` of a run; with dynamic sampling, build a `PromptQueue` instead.

    Args:
        args: the `DASHConfig`.
        handler: Transformers' callback handler, which knows the dataloader of the run.
        sized: see `PromptReader`.
        ahead: number of windows after the current one that may be sampled before training needs them.
        first: see `PromptQueue`. `None`: there is no dynamic sampling.
    """

    def opened(epoch: int, skipped: int = 0) -> Iterator[Rows]:
        return open_epoch(handler.train_dataloader, epoch, skipped * args.window_batches)

    step_batches = args.gradient_accumulation_steps
    if first is None:
        return PromptReader(
            args.async_level,
            window_batches=args.window_batches,
            step_batches=step_batches,
            sized=sized,
            open_epoch=opened,
        )
    return PromptQueue(
        num_generations=args.num_generations,
        prompts=args.groups_of_rank,
        window_batches=args.window_batches,
        accumulation=step_batches,
        ahead=ahead,
        first=first,
        open_epoch=opened,
    )
