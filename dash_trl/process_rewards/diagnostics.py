"""The logged figures of process rewards, which show whether these reach the advantages."""

import math
from collections.abc import Callable, Iterable, Sequence

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
    lengths = rewards.mask.sum(dim=1)
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
        "advantage/mean": credit[rewards.mask],
        "advantage/mean_outcome_only": rewards.outcome_advantages.repeat_interleave(lengths),
    }
    means, (*_, of_tokens, of_outcome) = (one.tolist() for one in _moments(samples.values(), rewards.sum_over_ranks))
    figures = dict(zip(samples, means, strict=True))
    figures |= {"advantage/std": of_tokens, "advantage/std_outcome_only": of_outcome}
    return {name: number for name, number in figures.items() if not math.isnan(number)}


def _moments(samples: Iterable[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of S samples over all ranks, [S] float64 each; NaN = undefined.

    The deviation has a sum of its own, because Σx² would lose digits.
    """
    parts = [values.double() for values in samples]
    sums = [[values.numel(), values.sum()] for values in parts]
    count, total = sum_over_ranks(torch.tensor(sums, dtype=torch.double)).unbind(1)
    mean = total / count
    squares = [(values - centre).square_().sum() for values, centre in zip(parts, mean, strict=True)]
    return mean, (sum_over_ranks(torch.stack(squares)) / (count - 1).clamp(min=0)).sqrt()
