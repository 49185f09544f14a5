"""Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): a window takes prompts until its groups have signal.

    first round ──► groups with signal: too few? ──► another round … ──► at most `max_num_gen_batches` × the window

Pure: which groups, and how many more. Letters: R ranks, K groups of a rank in a round.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMOOTHING = 0.2  # the weight of the last window in the running share of groups with signal


class DynamicSampling:
    """How many groups the rounds of a window have; the same on every rank.

    The next round is as large as it takes by the share of groups with signal so far, and no larger than the window.
    Where windows are sampled ahead, the first round is so large already: nobody waits for another one then.

    Args:
        groups: of a window on a rank. ranks: R. most: generation batches, see `max_num_gen_batches`.
        ahead: windows are sampled ahead.
    """

    def __init__(self, groups: int, ranks: int, *, most: int, ahead: bool):
        self.room = groups * ranks  # groups of the window, on all ranks
        self._groups, self._ranks, self._most, self._ahead = groups, ranks, most, ahead
        self._share = 1.0  # of groups that had signal in the last windows

    def first(self) -> int:
        """Groups of a rank in the first round of the next window."""
        if not self._ahead:
            return self._groups
        return min(math.ceil(self._groups / max(self._share, 1e-6)), self._groups * self._most)

    def next(self, signal: Sequence[Tensor]) -> int:
        """Groups of a rank in the next round; 0: the window is complete.

        Args:
            signal: [R, K] bool of each round so far: the groups that have signal.
        """
        sampled, found = _counted(signal)
        missing = max(self.room - found, 0)
        share = (found + 1) / (sampled + 2)
        allowed = self._groups * self._most - sampled // self._ranks
        return min(math.ceil(missing / share / self._ranks), self._groups, allowed)

    def note(self, signal: Sequence[Tensor]) -> None:
        """A window is complete."""
        sampled, found = _counted(signal)
        self._share += SMOOTHING * (found / sampled - self._share)

    def metrics(self, signal: Sequence[Tensor]) -> dict[str, float]:
        """Of a window that is complete. Groups are counted in those of a window."""
        sampled, found = _counted(signal)
        return {
            "dynamic_sampling/rounds": len(signal),
            "dynamic_sampling/sampled": sampled / self.room,
            "dynamic_sampling/filled": min(found / self.room, 1.0),
            "dynamic_sampling/surplus": max(found / self.room - 1.0, 0.0),
        }


def _counted(signal: Sequence[Tensor]) -> tuple[int, int]:
    """The groups of all ranks and rounds, and those with signal."""
    return sum(one.numel() for one in signal), sum(int(one.sum()) for one in signal)


def places_in_window(signal: Sequence[Tensor], room: int) -> tuple[list[Tensor], list[Tensor]]:
    """Which groups make the window: those with signal that came first, and silent ones in what room is left.

    Within a round, groups come in the order of their places in their rank's share, and then of the ranks, so that each
    rank has about as many.

    Args:
        signal: [R, K] bool of each round. room: groups of the window, on all ranks; no more than all rounds have.
    Returns:
        [R, K] bool of each round: groups with signal that are trained on; and all groups of the window.
    """
    flat = torch.cat([one.T.flatten() for one in signal])
    trained = flat & (flat.cumsum(dim=0) <= room)
    silent = ~flat & ((~flat).cumsum(dim=0) <= room - trained.sum())
    shapes = [one.T.shape for one in signal]

    def rounds(chosen: Tensor) -> list[Tensor]:
        parts = chosen.split([math.prod(shape) for shape in shapes])
        return [part.view(shape).T for part, shape in zip(parts, shapes, strict=True)]

    return rounds(trained), rounds(trained | silent)
