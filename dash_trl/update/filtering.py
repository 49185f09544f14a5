"""Gradient filtering: decides from the advantages which rows are dropped before model passes (the paper's Section 3.5).

A row whose advantage is 0 has no policy gradient. If the loss has no other terms, dropping the row changes only the
time that a step takes. If the loss has terms without the advantage (KL with beta > 0, entropy bonus, auxiliary losses),
these terms of a dropped row are missing, so filtering is an approximation, as in the paper.

Letters: B rows, T completion tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Filtered:
    """The result of the filter for B rows. Every row is True in exactly one of the four masks.

    Attributes:
        keep: [B] bool, True = the row is a survivor.
        constant: [B] bool, True = dropped, because `max_t |A_t| = 0`: all rewards of the group are equal, or the row
            has no loss token.
        threshold: [B] bool, True = dropped, because `max_t |A_t|` is below the threshold.
        unscored: [B] bool, True = dropped, because the row is unscored.
    """

    keep: Tensor
    constant: Tensor
    threshold: Tensor
    unscored: Tensor


def filter_rows(advantages: Tensor, loss_mask: Tensor, scored: Tensor, threshold: float | None) -> Filtered:
    """Drop a row if its largest absolute advantage, `max_t |A_t|`, is 0 or below the threshold, or if it is unscored.

    Args:
        advantages: [B], or [B, T] for per-token credit.
        loss_mask: [B, T], 1 = a token that the loss counts.
        scored: [B] bool, True = the row is scored.
        threshold: number >= 0; 0 drops only unscored rows and rows whose advantages are all 0. `None` turns filtering
            off: every row is kept, as in TRL.
    """
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    signal = (per_token.abs() * loss_mask).amax(dim=1)
    unscored = ~scored
    constant = scored & (signal == 0)
    small = scored & (signal > 0) & (signal < (threshold or 0.0))
    if threshold is None:
        unscored, constant, small = unscored & False, constant & False, small & False
    return Filtered(keep=~(unscored | constant | small), constant=constant, threshold=small, unscored=unscored)
