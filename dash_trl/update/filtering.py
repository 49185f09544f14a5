"""Gradient filtering: advantages → which rows are worth a model pass, and what the loss divides by.

The paper's Section 3.5. A row whose advantage is zero has no policy gradient, so dropping it before any forward pass
changes nothing but the time. Terms that do not carry the advantage (KL with beta > 0, entropy bonus, auxiliary losses)
are lost with the row: there filtering is an approximation, as in the paper.

Letters: B rows, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dash_trl.update.arguments import check_tensor
from dash_trl.update.schedule import Segment

# Losses that TRL averages over the rows of a micro-batch, and the one that it averages over its tokens. The others
# (dapo, cispo, vespo, and ours, which are computed as the first two) divide by the tokens of the whole generation batch
# and need no correction.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
TOKEN_MEAN_LOSSES = ("bnpo",)


@dataclass(frozen=True)
class Filtered:
    """The verdict on B rows; each mask is [B] bool, and every row is in exactly one of the four.

    `constant`: no signal at all (max_t |A_t| = 0: a constant group, or no token in the loss). `threshold`: a signal
    below the threshold. `unscored`: no usable reward.
    """

    keep: Tensor
    constant: Tensor
    threshold: Tensor
    unscored: Tensor


def filter_rows(advantages: Tensor, loss_mask: Tensor, scored: Tensor, threshold: float | None) -> Filtered:
    """Drop a row when max_t |A_t| is 0 or under the threshold, or when it is unscored.

    Args:
        advantages: [B], or [B, T] for per-token credit.
        loss_mask: [B, T], 1 = a token that the loss counts.
        scored: [B] bool.
        threshold: >= 0; 0 drops only rows without any signal. `None` turns filtering off: every row is kept, as in
            TRL.
    Raises:
        ValueError: for a tensor of another rank, length or dtype.
    """
    check_tensor("scored", scored, "bools", B=None)
    check_tensor("loss_mask", loss_mask, B=len(scored), T=None)
    tokens = {"T": loss_mask.shape[1]} if getattr(advantages, "ndim", 1) == 2 else {}
    check_tensor("advantages", advantages, "floats", B=len(scored), **tokens)
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    signal = (per_token.abs() * loss_mask).amax(dim=1)
    unscored = ~scored
    constant = scored & (signal == 0)
    small = scored & (signal > 0) & (signal < (threshold or 0.0))
    if threshold is None:
        unscored, constant, small = unscored & False, constant & False, small & False
    return Filtered(keep=~(unscored | constant | small), constant=constant, threshold=small, unscored=unscored)


def loss_scale(loss_type: str, denominator: str, *, rows: int, tokens: int, segment: Segment) -> float:
    """What a re-packed micro-batch's loss is multiplied by, so that the sum over a segment does not depend on packing.

    TRL's mean over a micro-batch of b rows, averaged over a micro-steps and R ranks, gives each row the weight
    1 / (b·a·R) = 1 / all_rows, but gives the rows of a re-packed micro-batch 1 / (rows·a·R). With `passes` = a·R:

        all:   rows · passes / all_rows   (row means)      tokens · passes / all_tokens   (bnpo)      1 (token sums)
        kept:  rows · passes / kept_rows                   tokens · passes / kept_tokens      all_tokens / kept_tokens

    "all" is exactly GRPO's update, "kept" the paper's (an average over survivors). bnpo divides by the tokens of each
    *local* micro-batch in TRL; here by those of the segment, which differs by design but does not depend on packing.

    Args:
        loss_type: TRL's or ours.
        denominator: "all" or "kept".
        rows: rows of this micro-batch, dummies included (TRL's mean counts them too).
        tokens: loss tokens of this micro-batch on this rank.
        segment: the counts of the segment, over all ranks.
    """
    kept = denominator == "kept"
    all_rows, all_tokens = max(segment.all_rows, 1), max(segment.all_tokens, 1.0)
    divisor_rows = max(segment.kept_rows, 1) if kept else all_rows
    divisor_tokens = max(segment.kept_tokens, 1) if kept else all_tokens
    if loss_type in ROW_MEAN_LOSSES:
        return rows * segment.passes / divisor_rows
    if loss_type in TOKEN_MEAN_LOSSES:
        return tokens * segment.passes / divisor_tokens
    return all_tokens / divisor_tokens
