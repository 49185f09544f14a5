"""`arrivals`: the groups of a generation batch in the order in which their rewards come, in step on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dash_trl.workers import Request


def arrivals(
    request: Request, groups: int, least: Callable[[int], int], share: Callable[[], int]
) -> Iterator[tuple[Tensor, bool]]:
    """The rows of the groups that have come since the last time, and whether they are the last of their share.

    Waits for the first. A share is what one optimizer step takes: the batch, or a part of it (Mini).

    All ranks hand out the same number of groups at a time, as many as the rank has that has the fewest, so that what
    is done with them, collectives and model passes, is the same everywhere. So each waits for the slowest.

    Args:
        request: of this rank's batch, of so many groups, no fewer than on any other rank.
        least: the least of the numbers that all ranks call it with.
        share: the groups of the next share, asked when it begins. It is at least one, and at most what is left.
    """
    here: list[int] = []
    while groups:
        left = min(max(share(), 1), groups)
        groups -= left
        while left:
            here += request.next_groups(wait=not here)
            count = min(least(len(here)), left)
            now, here = here[:count], here[count:]
            left -= count
            yield torch.tensor([row for group in now for row in request.rows_of(group)]), not left
