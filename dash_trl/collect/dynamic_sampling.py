"""Dynamic sampling (DAPO, arXiv 2503.14476, Section 3.2): sample prompts until a window is full of groups with signal::

    first round ──► groups with signal: too few? ──► another round … ──► at most `max_num_gen_batches` × the window

A group has *signal* if the filter keeps at least one of its rows. This module decides how many groups are sampled, and
which of them belong to the window.

Letters: R ranks, K groups of a rank in all rounds so far.
"""

import math
from dataclasses import dataclass

from torch import Tensor

SMOOTHING = 0.2  # the weight of the last window in the running average of the share of groups with signal


@dataclass
class DynamicSampling:
    """Decides how many groups each round of a window samples. The decision is the same on every rank.

    The first round samples as many groups as a window has, or more if windows are sampled ahead and recent windows had
    few groups with signal, so that training rarely waits for a second round. A further round samples as many groups as
    will probably fill the window, at most a whole window.

    Attributes:
        groups: number of groups of a window on a rank.
        ranks: R.
        most: `max_num_gen_batches`: a window samples at most `most` · `groups` groups on a rank.
        ahead: True = windows are sampled ahead.
        share: running average of the share of groups with signal. A checkpoint saves it.
    """

    groups: int
    ranks: int
    most: int
    ahead: bool
    share: float = 1.0

    @property
    def room(self) -> int:
        """Number of groups of a window on all ranks."""
        return self.groups * self.ranks

    def first(self) -> int:
        """Return the number of groups that each rank samples in the first round of the next window."""
        if not self.ahead:
            return self.groups
        return min(math.ceil(self.groups / max(self.share, 1e-6)), self.groups * self.most)

    def next(self, signal: Tensor) -> int:
        """Return the number of groups that each rank samples in the next round.

        It is 0 if the window is full of groups with signal, or its limit of groups is reached.

        Args:
            signal: [R, K] bool, True = the group has signal.
        """
        sampled = signal.numel()
        found = int(signal.sum())
        missing = max(self.room - found, 0)
        share = (found + 1) / (sampled + 2)
        allowed = self.groups * self.most - sampled // self.ranks
        return min(math.ceil(missing / share / self.ranks), self.groups, allowed)

    def note(self, signal: Tensor, rounds: int) -> dict[str, float]:
        """Update the running average after a window is complete, and return its figures."""
        found = int(signal.sum())
        self.share += SMOOTHING * (found / signal.numel() - self.share)
        return {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/sampled": signal.numel() / self.room,
            "dynamic_sampling/filled": found / self.room,
        }


def rows_of_window(signal: Tensor, room: int, rank: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Choose the groups of the window: first groups with signal, then silent groups if there is room left.

    The first group of each rank comes first, then the second group of each rank, and so on, so that ranks get about the
    same number. With two ranks and room for 4 groups (+ = signal, − = silent)::

        round 0    rank 0: A+ B−    rank 1: C− D+       A, C, B, D: two groups with signal
        round 1    rank 0: E+ F+    rank 1: G− H−       E, G, F, H: two more, so the window is full
        window     rank 0: A E F    rank 1: D           if F were silent, the first silent group would join: C

    Args:
        signal: [R, K] bool, True = the group has signal.
        room: number of groups of the window on all ranks; at most the number of groups in all rounds.
        group_size: number of rows of a group.
    Returns:
        Two tensors [B] bool for this rank's rows of all rounds: True = the row's group is chosen; True = it is chosen
        and has signal.
    """
    flat = signal.T.flatten()
    trained = flat & (flat.cumsum(dim=0) <= room)
    chosen = trained | ~flat & ((~flat).cumsum(dim=0) <= room - trained.sum())

    def rows(groups: Tensor) -> Tensor:
        return groups.view(-1, len(signal))[:, rank].repeat_interleave(group_size)

    return rows(chosen), rows(trained)
