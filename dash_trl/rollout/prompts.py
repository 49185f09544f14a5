"""`EpochOrder` reproduces the order of the prompts in any epoch. `new_queue` builds a run's `PromptQueue`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_callback import CallbackHandler
from trl.trainer.utils import RepeatSampler

from dash_trl.rollout.queue import PromptQueue, Rows


@dataclass(eq=False)
class EpochOrder(Sampler):
    """Sampler in the order of TRL's `RepeatSampler` that can begin with any epoch.

    TRL draws one permutation per epoch from one generator, so a run that is resumed in epoch 1 would repeat the order
    of epoch 0 (huggingface/trl#5911). Before epoch e, this sampler draws the e earlier permutations.

    Attributes:
        epoch: function that returns the epoch, from 0, until `set_epoch` is called.
    """

    sampler: RepeatSampler
    epoch: Callable[[], int]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration, as accelerate's dataloader does before each epoch.

        With several ranks, the dataloader of `skip_first_batches` does not pass the call on. Then `epoch` is used.
        """
        self.epoch = lambda: epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:  # with `args.seed`, which is a number
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def open_epoch(dataloader: DataLoader, epoch: int, skipped: int = 0) -> Iterator[Rows]:
    """Return an iterator over the micro-batches of an epoch (from 0), as Transformers' `_run_epoch` makes it.

    The first `skipped` micro-batches are left out.
    """
    if hasattr(dataloader, "set_epoch"):
        dataloader.set_epoch(epoch)
    sampler: Any = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return iter(skip_first_batches(dataloader, skipped) if skipped else dataloader)


def new_queue(args: Any, handler: CallbackHandler, first: Callable[[], int] | None) -> PromptQueue | None:
    """Build the `PromptQueue` of a run. `None`: Transformers reads the prompts itself.

    Args:
        handler: Transformers' callback handler, which knows the run's dataloader.
        first: see `PromptQueue`. `None`: no dynamic sampling.
    """
    if not args.async_level and first is None:
        return None
    rows = args.per_device_train_batch_size * args.steps_per_generation if first is None else args.num_generations
    return PromptQueue(
        rows=rows,
        prompts=1 if first is None else args.groups_of_rank,
        window_batches=args.window_batches,
        accumulation=args.gradient_accumulation_steps,
        ahead=args.async_level,
        first=first or (lambda: 1),
        open_epoch=lambda epoch, skipped: open_epoch(handler.train_dataloader, epoch, skipped * args.window_batches),
    )
