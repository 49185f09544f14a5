"""The logged figures of process rewards, which show whether these reach the advantages."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dash_trl.process_rewards.credit import Rewards


def batch_figures(
    rewards: Rewards, values: Sequence[Sequence[float]], credit: Tensor, *, skipped: Tensor
) -> dict[str, float]:
    """Return a window's figures over all ranks, without means of no numbers.

    Args:
        rewards: the input of the credit estimator.
        values: of N rows, V at each boundary; NaN = missing.
        credit: [N, T], the result of the credit estimator.
        skipped: [N] bool, True = no V was asked for.
    """
    asked = ~skipped
    valued = rewards.valued
    first, last = torch.tensor([[row[0], row[-1]] for row in values], dtype=torch.double).unbind(1)
    episodes = torch.tensor([len(row) - 1 for row in values])
    of_asked = torch.tensor([value for row, wanted in zip(values, asked, strict=True) if wanted for value in row])
    several = rewards.ends.sum(dim=1) > 1
    low, high = torch.where(rewards.mask, credit, credit[:, :1]).aminmax(dim=1)
    structure = high - low > 1e-6
    samples = {
        "process/episodes": episodes[asked],
        "process/missing_values": of_asked.isnan(),
        "process/valued_rows": valued,
        "process/value_first": first[asked & ~first.isnan()],
        "process/value_last": last[asked & ~last.isnan()],
        "process/structured_rows": (several & structure)[valued],
    }
    sums = [[values.numel(), values.double().sum()] for values in samples.values()]
    count, total = rewards.sum_over_ranks(torch.tensor(sums, dtype=torch.double)).unbind(1)
    means = zip(samples, (total / count).tolist(), strict=True)
    return {name: mean for name, mean in means if not math.isnan(mean)}
