"""What a prefix looks like: a few numbers made of the log-probs and entropies of its tokens, for `OutcomeValue`.

    log p_t, H_t of a completion's tokens, boundaries b_0 = 0 < b_1 < … ──► one row of numbers per boundary

A row depends on the tokens before its boundary, and on the boundaries before it, alone: a value made of it has seen
neither what the completion goes on with nor how it ends.

Letters: K boundaries, F features.
"""

from collections.abc import Sequence
from itertools import pairwise

# The numbers of a prefix, in this order; the last two only where entropies are known.
FEATURES = (
    "sum of log-probs",
    "minimum of log-probs",
    "sum of log-probs, last episode",
    "minimum of log-probs, last episode",
    "position",
    "sum of entropies",
    "maximum of entropies",
)
WITHOUT_ENTROPIES = 5


def prefix_features(
    boundaries: Sequence[int],
    log_probs: Sequence[float],
    entropies: Sequence[float] | None = None,
    own: Sequence[int] | None = None,
) -> list[list[float]]:
    """[K − 1, F], a row per boundary b behind b_0, which has no token to speak of; a = the boundary before b.

    Σ_{t<b} log p_t, min_{t<b} log p_t, Σ_{a≤t<b} log p_t, min_{a≤t<b} log p_t, n, Σ_{t<b} H_t, max_{t<b} H_t; n = the
    tokens before b that the policy wrote.

    A number that is not known (NaN) makes its sum NaN, and with it the rows of every prefix that holds the token.

    Args:
        boundaries: 0 = b_0 < b_1 < …; log_probs, entropies: one per token of the completion, 0 for tokens that the
            policy did not write. own: see `ValueRequest`.
    """
    rows = []
    total = lowest = disorder = highest = 0.0
    written = 0
    for start, end in pairwise(boundaries):
        written += end - start if own is None else sum(own[start:end])
        last, least = sum(log_probs[start:end]), min(log_probs[start:end])
        total, lowest = total + last, min(lowest, least)
        row = [total, lowest, last, least, float(written)]
        if entropies is not None:
            disorder, highest = disorder + sum(entropies[start:end]), max(highest, *entropies[start:end])
            row += [disorder, highest]
        rows.append(row)
    return rows
