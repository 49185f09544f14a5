"""A fit of outcomes to the features of prefixes: logistic or linear, with squares and products, ridge, in float64.

A function of its arguments alone: no random numbers, no order of passes, no tuning.

Letters: M prefixes, F features, R rollouts, P = 1 + F + F(F + 1)/2 columns.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Newton's method ends where no entry of the gradient, per rollout, is above this. It takes 5 to 10 steps; a step is
# halved where it leads uphill.
GRADIENT = 1e-12
MOST_STEPS = 100
SHORTEST = 2.0**-30


@dataclass(frozen=True)
class Fit:
    """
    Attributes:
        base: the mean outcome of the rollouts.
        mean, scale, low, high: [F], of the features that it was made of.
        weights: [P]. logistic: whether they give log-odds.
    """

    base: float
    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    weights: Tensor
    logistic: bool

    def __call__(self, features: Tensor) -> list[float]:
        """[M]: the expected outcome; NaN where a feature is. A prefix's is bitwise the same beside whatever others."""
        # Sums over columns and torch's sigmoid may round a row otherwise where it lies otherwise in memory.
        columns = self.columns(features)
        scores = torch.zeros_like(columns[:, 0])
        for column, weight in zip(columns.unbind(1), self.weights.tolist(), strict=True):
            scores = scores + column * weight
        return [(1 + math.tanh(score / 2)) / 2 if self.logistic else score for score in scores.tolist()]

    def columns(self, features: Tensor) -> Tensor:
        """[M, P]: 1, the standardised features, their squares and products.

        A feature beyond all that was seen is taken for the outermost: a square knows nothing of what lies there.
        """
        z = (features.clamp(self.low, self.high) - self.mean) / self.scale
        row, column = torch.triu_indices(z.shape[1], z.shape[1])
        return torch.cat([torch.ones_like(z[:, :1]), z, z[:, row] * z[:, column]], dim=1)


def fit_outcomes(features: Tensor, rollout: Tensor, outcomes: Tensor, *, logistic: bool, ridge: float) -> Fit:
    """The minimum over w of Σ_m ω_m·ℓ(y_m, x_m·w) + ridge/2·Σ_{p>0} w_p², ω_m = 1 / (prefixes of m's rollout).

    ℓ is −y·s + log(1 + e^s) (logistic), or (y − s)²/2. Each rollout counts 1, whatever its number of prefixes; the
    intercept w_0 is free.

    Args:
        features: [M, F] float64, finite. rollout: [M] int64, whose prefix it is. ridge: > 0.
        outcomes: [R] float64, of the rollouts; within 0 … 1 and not all 0 or all 1 for a logistic fit.
    """
    share = 1 / rollout.bincount(minlength=len(outcomes)).double()[rollout]
    mean = (share.unsqueeze(1) * features).sum(dim=0) / share.sum()
    spread = ((share.unsqueeze(1) * (features - mean).square()).sum(dim=0) / share.sum()).sqrt()
    low, high = features.aminmax(dim=0)
    constant = high == low
    scale = torch.where(constant, 1.0, spread)
    mean = torch.where(constant, low, mean)  # exactly, so that its column is 0
    size = 1 + features.shape[1] * (features.shape[1] + 3) // 2
    fit = Fit(float(outcomes.mean()), mean, scale, low, high, torch.zeros(size, dtype=torch.double), logistic)
    x, y = fit.columns(features), outcomes[rollout]
    penalty = torch.full((size,), float(ridge), dtype=torch.double)
    penalty[0] = 0
    return replace(fit, weights=(_logistic if logistic else _linear)(x, y, share, penalty))


def _linear(x: Tensor, y: Tensor, share: Tensor, penalty: Tensor) -> Tensor:
    weighted = x * share.unsqueeze(1)
    return torch.linalg.solve(x.T @ weighted + penalty.diag(), weighted.T @ y)


def _logistic(x: Tensor, y: Tensor, share: Tensor, penalty: Tensor) -> Tensor:
    """By Newton's method; the objective is convex, and strictly so where both outcomes are there."""

    def objective(weights: Tensor) -> Tensor:
        scores = x @ weights
        losses = torch.logaddexp(scores, torch.zeros_like(scores)) - y * scores
        return (share * losses).sum() + penalty @ weights.square() / 2

    weights = torch.zeros_like(penalty)
    weights[0] = torch.logit((share * y).sum() / share.sum())
    value = objective(weights)
    for _ in range(MOST_STEPS):
        chance = (x @ weights).sigmoid()
        gradient = x.T @ (share * (chance - y)) + penalty * weights
        if gradient.abs().max() <= GRADIENT * share.sum():
            break
        curvature = x.T @ (x * (share * chance * (1 - chance)).unsqueeze(1)) + penalty.diag()
        step, size = torch.linalg.solve(curvature, gradient), 1.0
        while not (found := objective(weights - size * step)) <= value and size > SHORTEST:
            size /= 2
        if not found <= value:  # nothing is left but rounding
            break
        weights, value = weights - size * step, found
    return weights
