"""The order of the prompts, reproducible from any epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


class EpochOrder(Sampler):
    """TRL's `RepeatSampler`, whose epoch e can be drawn without having drawn the epochs before it.

    TRL draws one permutation per epoch from one generator, so a run resumed in epoch 1 would see epoch 0's order again
    (huggingface/trl#5911). Here the generator is put where e epochs would have left it.

    Args:
        sampler: TRL's sampler.
        epoch: the epoch that the next iteration belongs to, from 0.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler = sampler
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle and self.sampler.seed is not None:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
