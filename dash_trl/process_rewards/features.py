"""Features of a prefix for `OutcomeValue`: five or seven numbers from the log-probs and entropies of its tokens::

    log p_t, H_t of a completion's tokens, boundaries b_0 = 0 < b_1 < … ──► one row of features per boundary

Here a row of features belongs to one boundary and depends only on the tokens and boundaries before it. So a value that
is computed from this row cannot reveal how the completion goes on or ends.

Letters: K boundaries, F features.
"""

from collections.abc import Sequence
from itertools import pairwise

# The names of the features, in the order of the columns. The last two exist only if entropies are known.
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
    """Returns one row of features for each boundary except b_0, because no token comes before b_0.

    Let b be a boundary, let a be the boundary before b, and let n be the number of tokens before b that the policy
    wrote. The row of features of b is::

        Σ_{t<b} log p_t, min_{t<b} log p_t, Σ_{a≤t<b} log p_t, min_{a≤t<b} log p_t, n, Σ_{t<b} H_t, max_{t<b} H_t

    If the log-prob of a token is unknown (NaN), the sum of log-probs is NaN for every prefix that contains the token.
    The same holds for entropies.

    Args:
        boundaries: 0 = b_0 < b_1 < …, K token positions in the completion.
        log_probs: log p_t of each token of the completion; 0 for tokens that the policy did not write.
        entropies: H_t of each token; 0 for tokens that the policy did not write. None = leave out the last two
            features.
        own: see `ValueRequest`.
    Returns:
        [K − 1, F] as nested lists.
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
