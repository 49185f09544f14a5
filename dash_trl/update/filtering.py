"""Gradient filtering: decides from the advantages which rows are worth a model pass (the paper's Section 3.5).

A row whose advantage is zero has no policy gradient. Dropping it before any forward pass changes only the time that a
step takes. Terms without the advantage (KL with beta > 0, entropy bonus, auxiliary losses) are lost with the row; with
them, filtering is an approximation, as in the paper.

Letters: B rows, T completion tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Filtered:
    """The filter's verdict on B rows. Every row is in exactly one of the four masks.

    Attributes:
        keep: [B] bool, the row survives.
        constant: [B] bool, no signal at all, that is `max_t |A_t| = 0`: its group is constant, or it has no loss token.
        threshold: [B] bool, a signal below the threshold.
        unscored: [B] bool, no usable reward.
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
        scored: [B] bool.
        threshold: at least 0; 0 drops only rows without any signal. `None` turns filtering off: every row is kept, as
            in TRL.
    """
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    signal = (per_token.abs() * loss_mask).amax(dim=1)
    unscored = ~scored
    constant = scored & (signal == 0)
    small = scored & (signal > 0) & (signal < (threshold or 0.0))
    if threshold is None:
        unscored, constant, small = unscored & False, constant & False, small & False
    return Filtered(keep=~(unscored | constant | small), constant=constant, threshold=small, unscored=unscored)
