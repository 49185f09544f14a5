"""`in_parts`: a generation window whose rewards come in parts, for optimizer steps that do not wait for the rest.

some groups have come ──► part: reward → credit → filter → score ──► passes of the step that takes them
                           └──── once all have come: the whole batch, as if it had come at once ──► logs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dash_trl.rollout.batch import CreditedRollouts, Survivors, joined
from dash_trl.rollout.window import GenerationWindow


def in_parts(
    arriving: Iterator[tuple[Tensor, bool]],
    rows: int,
    part: Callable[[Tensor], tuple[CreditedRollouts, Tensor, GenerationWindow]],
    *,
    when_whole: Callable[[CreditedRollouts, Tensor, Survivors], None],
) -> Iterator[tuple[GenerationWindow, bool]]:
    """The window of each part as it comes, and whether it is the last that the running optimizer step takes.

    Args:
        arriving: the rows (indices) that have come, and whether they are such last ones.
        rows: of the batch.
        part: of these rows what they earn, their advantages by outcome alone, those of all ranks, and what is left.
        when_whole: called once, before the last part is handed out, with the credit of the batch in its order, and
            with the outcomes and the survivors of all parts.
    """
    credited, outcomes, survivors, order = [], [], [], []
    for now, last in arriving:
        credit, outcome, window = part(now)
        credited.append(credit)
        outcomes.append(outcome)
        survivors.append(window.rollouts)
        order.append(now)
        if sum(map(len, order)) == rows:
            when_whole(joined(credited).rows(torch.cat(order).argsort()), torch.cat(outcomes), joined(survivors))
        yield window, last
