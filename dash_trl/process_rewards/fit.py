"""Fits a regression that predicts the outcome of a rollout from the features of a prefix, for `OutcomeValue`.

The model is a logistic or linear ridge regression on the features, their squares and their products. The computation is
in float64 and deterministic: it uses no random numbers and no learning rate.

Letters: M prefixes, F features, R rollouts, P = 1 + F + F(F + 1)/2 columns of the regression.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Newton's method stops when every entry of the gradient is at most this number times the number of rollouts.
GRADIENT = 1e-12
MOST_STEPS = 100  # a bound against endless loops; Newton's method usually needs 5 to 10 steps
SHORTEST = 2.0**-30  # a step that increases the objective is halved, at most down to this share of its length


@dataclass(frozen=True)
class Fit:
    """A fitted regression that returns the expected outcomes of prefixes from their features.

    Attributes:
        base: number, the mean outcome of the rollouts.
        mean: [F], mean of each feature in the fitted data. Each rollout has the weight 1, shared by its prefixes.
        scale: [F], standard deviation of each feature, with the same weights; 1 for a constant feature.
        low: [F], smallest value of each feature in the fitted data.
        high: [F], largest value of each feature in the fitted data.
        weights: [P], the weight of each column that `columns` returns.
        logistic: True = the weighted sum of the columns is the log-odds of the outcome, False = it is the outcome.
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

        The result for a prefix does not depend on the other prefixes in the call, not even in its last bit.

        Args:
            features: [M, F] float64.
        Returns:
            M numbers; NaN for a prefix if one of its features is NaN.
        """
        # No matrix product and no `torch.sigmoid`: both may round a row differently, depending on its index.
        columns = self.columns(features)
        scores = torch.zeros_like(columns[:, 0])
        for column, weight in zip(columns.unbind(1), self.weights.tolist(), strict=True):
            scores = scores + column * weight
        return [(1 + math.tanh(score / 2)) / 2 if self.logistic else score for score in scores.tolist()]

    def columns(self, features: Tensor) -> Tensor:
        """Returns the columns of the regression: 1, the standardised features, and their squares and products.

        A feature outside the range of the fitted data is clamped to this range, because a fit with squares is
        unreliable outside the range.

        Args:
            features: [M, F] float64.
        Returns:
            [M, P] float64.
        """
        z = (features.clamp(self.low, self.high) - self.mean) / self.scale
        row, column = torch.triu_indices(z.shape[1], z.shape[1])
        return torch.cat([torch.ones_like(z[:, :1]), z, z[:, row] * z[:, column]], dim=1)


def fit_outcomes(features: Tensor, rollout: Tensor, outcomes: Tensor, *, logistic: bool, ridge: float) -> Fit:
    """Fits the weights w that minimise Σ_m ω_m·ℓ(y_m, x_m·w) + ridge/2·Σ_{p>0} w_p².

    x_m are the columns of prefix m, and y_m is the outcome of its rollout. The loss of a logistic fit is
    ℓ(y, s) = −y·s + log(1 + e^s), and the loss of a linear fit is ℓ(y, s) = (y − s)²/2. The weight ω_m is 1 divided by
    the number of prefixes of the same rollout, so that each rollout has the weight 1. The intercept w_0 is not
    penalised.

    Args:
        features: [M, F] float64, finite.
        rollout: [M] int64, index of the rollout that each prefix belongs to.
        outcomes: [R] float64, outcome of each rollout. A logistic fit needs outcomes from 0 to 1 that are neither all 0
            nor all 1.
        logistic: True = logistic regression, False = linear regression.
        ridge: number > 0, weight of the penalty.
    """
    share = 1 / rollout.bincount(minlength=len(outcomes)).double()[rollout]
    mean = (share.unsqueeze(1) * features).sum(dim=0) / share.sum()
    spread = ((share.unsqueeze(1) * (features - mean).square()).sum(dim=0) / share.sum()).sqrt()
    low, high = features.aminmax(dim=0)
    constant = high == low
    scale = torch.where(constant, 1.0, spread)
    mean = torch.where(constant, low, mean)  # without rounding, so that a constant feature gives exactly 0
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
    """Fits a logistic regression by Newton's method.

    The objective is strictly convex. It has a minimum if the outcomes are neither all 0 nor all 1.
    """

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
