"""Fits outcomes to features of prefixes: logistic or linear regression with squares and products, and ridge.

The computation is in float64 and deterministic: it has no random numbers, and nothing has to be tuned.

Letters: M prefixes, F features, R rollouts, P = 1 + F + F(F + 1)/2 columns.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Newton's method ends if no entry of the gradient, per rollout, is larger than this. It takes 5 to 10 steps. A step
# that increases the objective is halved.
GRADIENT = 1e-12
MOST_STEPS = 100
SHORTEST = 2.0**-30


@dataclass(frozen=True)
class Fit:
    """A fitted model: features of a prefix → expected outcome.

    Attributes:
        base: the mean outcome of the rollouts.
        mean: [F], mean of each feature in the fitted data, in which each rollout counts 1.
        scale: [F], standard deviation of each feature; 1 for a constant feature.
        low: [F], smallest value of each feature.
        high: [F], largest value of each feature.
        weights: [P], one per column.
        logistic: True = the weights give log-odds, False = they give the outcome itself.
    """

    base: float
    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    weights: Tensor
    logistic: bool

    def __call__(self, features: Tensor) -> list[float]:
        """Returns the expected outcome of each prefix.

        The outcome of a prefix is bitwise the same, whatever other prefixes are computed with it.

        Args:
            features: [M, F] float64.
        Returns:
            M numbers; NaN where a feature is NaN.
        """
        # A matrix product and torch's sigmoid may round a row differently at another place in memory.
        columns = self.columns(features)
        scores = torch.zeros_like(columns[:, 0])
        for column, weight in zip(columns.unbind(1), self.weights.tolist(), strict=True):
            scores = scores + column * weight
        return [(1 + math.tanh(score / 2)) / 2 if self.logistic else score for score in scores.tolist()]

    def columns(self, features: Tensor) -> Tensor:
        """Returns 1, the standardised features, and their squares and products.

        A feature outside the range of the fitted data is clamped to it, since squares do not extrapolate.

        Args:
            features: [M, F] float64.
        Returns:
            [M, P] float64.
        """
        z = (features.clamp(self.low, self.high) - self.mean) / self.scale
        row, column = torch.triu_indices(z.shape[1], z.shape[1])
        return torch.cat([torch.ones_like(z[:, :1]), z, z[:, row] * z[:, column]], dim=1)


def fit_outcomes(features: Tensor, rollout: Tensor, outcomes: Tensor, *, logistic: bool, ridge: float) -> Fit:
    """Minimises Σ_m ω_m·ℓ(y_m, x_m·w) + ridge/2·Σ_{p>0} w_p² over the weights w.

    ℓ(y, s) is −y·s + log(1 + e^s) in a logistic fit, else (y − s)²/2. ω_m = 1 / (number of prefixes of m's rollout), so
    each rollout counts 1, however many prefixes it has. The intercept w_0 is not penalised.

    Args:
        features: [M, F] float64, finite.
        rollout: [M] int64, the rollout that each prefix belongs to.
        outcomes: [R] float64, of the rollouts; for a logistic fit within 0 … 1, and neither all 0 nor all 1.
        logistic: fit a logistic instead of a linear regression.
        ridge: > 0.
    """
    share = 1 / rollout.bincount(minlength=len(outcomes)).double()[rollout]
    mean = (share.unsqueeze(1) * features).sum(dim=0) / share.sum()
    spread = ((share.unsqueeze(1) * (features - mean).square()).sum(dim=0) / share.sum()).sqrt()
    low, high = features.aminmax(dim=0)
    constant = high == low
    scale = torch.where(constant, 1.0, spread)
    mean = torch.where(constant, low, mean)  # exact, so that the column of a constant feature is exactly 0
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
    """Minimises by Newton's method. The objective is convex, and strictly convex if both outcomes occur."""

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
        if not found <= value:  # only rounding errors are left
            break
        weights, value = weights - size * step, found
    return weights
