"""Gradient filtering: decides from the advantages which rows are dropped before model passes (the paper's Section 3.5).

A row whose advantage is 0 has no policy gradient. If every loss term contains the advantage, dropping the row changes
only the time of a step. KL with beta > 0, the entropy bonus and auxiliary losses do not contain it. With these,
filtering is an approximation, as in the paper, because a dropped row no longer contributes to them.

Letters: B rows, T completion tokens.
"""

import torch
from torch import Tensor

# Why the filter drops a row: not at all; because `max_t |A_t|` is 0 (equal rewards, or no loss token), or above 0 and
# below the threshold; or because the row is unscored.
KEPT, CONSTANT, THRESHOLD, UNSCORED = range(4)


def filter_rows(advantages: Tensor, loss_mask: Tensor, scored: Tensor, threshold: float | None) -> Tensor:
    """Drop unscored rows, and rows whose `max_t |A_t|` over their loss tokens is 0 or below the threshold.

    Args:
        advantages: [B], or [B, T] for per-token credit.
        loss_mask: [B, T], 1 = a token that the loss counts.
        scored: [B] bool, True = the row is scored.
        threshold: smallest `max_t |A_t|` of a kept row, at least 0. `None`: every row is kept, as in TRL.
    Returns:
        [B] int64: `KEPT`, `CONSTANT`, `THRESHOLD` or `UNSCORED`.
    """
    dropped = torch.full(scored.shape, KEPT)
    if threshold is not None:
        per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        signal = (per_token.abs() * loss_mask).amax(dim=1)
        dropped[signal < threshold] = THRESHOLD
        dropped[signal == 0] = CONSTANT
        dropped[~scored] = UNSCORED
    return dropped
