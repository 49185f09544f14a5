"""Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): sample prompts until a window's groups have signal::

    first round ──► groups with signal: too few? ──► another round … ──► at most `max_num_gen_batches` × the window

This module only decides how many groups to sample, and which of them make the window.

Letters: R ranks, K groups of a rank in a round.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMOOTHING = 0.2  # the weight of the last window in the running share of groups with signal


class DynamicSampling:
    """Decides how many groups each round of a window samples. The decision is the same on every rank.

    The size of a later round is estimated from the share of groups with signal so far; it is at most the size of the
    window. If windows are sampled ahead, the first round already has the size that is estimated from the last windows,
    so that training rarely has to wait for another round.

    Args:
        groups: groups of a window on a rank.
        ranks: R, the number of ranks.
        most: the largest number of generation batches; `max_num_gen_batches`.
        ahead: windows are sampled ahead.
    Attributes:
        room: groups of a window on all ranks.
    """

    def __init__(self, groups: int, ranks: int, *, most: int, ahead: bool):
        self.room = groups * ranks  # groups of the window, on all ranks
        self._groups, self._ranks, self._most, self._ahead = groups, ranks, most, ahead
        self._share = 1.0  # running share of groups with signal

    def first(self) -> int:
        """Return a rank's number of groups in the first round of the next window."""
        if not self._ahead:
            return self._groups
        return min(math.ceil(self._groups / max(self._share, 1e-6)), self._groups * self._most)

    def next(self, signal: Sequence[Tensor]) -> int:
        """Return a rank's number of groups in the next round; 0 if the window is complete.

        Args:
            signal: for each round so far, [R, K] bool, the groups with signal.
        """
        sampled, found = _counted(signal)
        missing = max(self.room - found, 0)
        share = (found + 1) / (sampled + 2)
        allowed = self._groups * self._most - sampled // self._ranks
        return min(math.ceil(missing / share / self._ranks), self._groups, allowed)

    def note(self, signal: Sequence[Tensor]) -> None:
        """Note the share of groups with signal in a complete window.

        Args:
            signal: as in `next`, for all rounds.
        """
        sampled, found = _counted(signal)
        self._share += SMOOTHING * (found / sampled - self._share)

    def metrics(self, signal: Sequence[Tensor]) -> dict[str, float]:
        """Return the figures of a complete window; the unit of groups is the window.

        Args:
            signal: as in `next`, for all rounds.
        """
        sampled, found = _counted(signal)
        return {
            "dynamic_sampling/rounds": len(signal),
            "dynamic_sampling/sampled": sampled / self.room,
            "dynamic_sampling/filled": min(found / self.room, 1.0),
            "dynamic_sampling/surplus": max(found / self.room - 1.0, 0.0),
        }


def _counted(signal: Sequence[Tensor]) -> tuple[int, int]:
    """Return the number of groups of all ranks and rounds, and the number of those with signal."""
    return sum(one.numel() for one in signal), sum(int(one.sum()) for one in signal)


def places_in_window(signal: Sequence[Tensor], room: int) -> tuple[list[Tensor], list[Tensor]]:
    """Choose the groups of the window: the first ones with signal, then silent ones if there is room left.

    Within a round, the first group of each rank comes first, then the second group of each rank, and so on. So each
    rank has about the same number of groups.

    Args:
        signal: for each round, [R, K] bool, the groups with signal.
        room: groups of the window on all ranks; at most the number of groups in all rounds.
    Returns:
        For each round, [R, K] bool, the groups with signal that are trained on; and [R, K] bool, all groups of the
        window.
    """
    flat = torch.cat([one.T.flatten() for one in signal])
    trained = flat & (flat.cumsum(dim=0) <= room)
    silent = ~flat & ((~flat).cumsum(dim=0) <= room - trained.sum())
    shapes = [one.T.shape for one in signal]

    def rounds(chosen: Tensor) -> list[Tensor]:
        parts = chosen.split([math.prod(shape) for shape in shapes])
        return [part.view(shape).T for part, shape in zip(parts, shapes, strict=True)]

    return rounds(trained), rounds(trained | silent)
