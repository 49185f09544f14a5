"""Gradient filtering: decides from the advantages which rows are dropped before model passes (the paper's Section 3.5).

A row whose advantage is 0 has no policy gradient. If every loss term contains the advantage, dropping the row changes
only the time of a step. KL with beta > 0, the entropy bonus and auxiliary losses do not contain it. With these,
filtering is an approximation, as in the paper, because a dropped row no longer contributes to them.

Letters: B rows, T completion tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Filtered:
    """The result of the filter: four masks [B] bool. Every row is True in exactly one of them.

    Attributes:
        keep: True = the row is a survivor.
        constant: True = dropped, because `max_t |A_t|` is 0 (equal rewards, or no loss token).
        threshold: True = dropped, because `max_t |A_t|` is above 0 and below the threshold.
        unscored: True = dropped, because the row is unscored.
    """

    keep: Tensor
    constant: Tensor
    threshold: Tensor
    unscored: Tensor

    def rows(self, rows: Tensor) -> "Filtered":
        """Return the result for the rows with the given indices."""
        return Filtered(**{name: mask[rows] for name, mask in vars(self).items()})


def filter_rows(advantages: Tensor, loss_mask: Tensor, scored: Tensor, threshold: float | None) -> Filtered:
    """Drop unscored rows, and rows whose `max_t |A_t|` over their loss tokens is 0 or below the threshold.

    Args:
        advantages: [B], or [B, T] for per-token credit.
        loss_mask: [B, T], 1 = a token that the loss counts.
        scored: [B] bool, True = the row is scored.
        threshold: smallest `max_t |A_t|` of a kept row, at least 0. `None`: every row is kept, as in TRL.
    """
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    signal = (per_token.abs() * loss_mask).amax(dim=1)
    unscored = ~scored
    constant = scored & (signal == 0)
    small = scored & (signal > 0) & (signal < (threshold or 0.0))
    if threshold is None:
        unscored, constant, small = unscored & False, constant & False, small & False
    return Filtered(keep=~(unscored | constant | small), constant=constant, threshold=small, unscored=unscored)
