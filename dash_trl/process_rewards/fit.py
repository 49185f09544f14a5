"""Fits a model that predicts the outcome from the features of a prefix, for `OutcomeValue`.

It is a logistic or linear ridge regression on the features, their squares and their products. The computation is in
float64 and deterministic: it has no random numbers and no learning rate.

Letters: M prefixes, F features, R rollouts, P = 1 + F + F(F + 1)/2 columns.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Newton's method ends if no entry of the gradient, divided by the number of rollouts, is larger than this.
GRADIENT = 1e-12
MOST_STEPS = 100  # a bound against endless loops; Newton's method takes 5 to 10 steps
SHORTEST = 2.0**-30  # a step that increases the objective is halved until this share of it is left


@dataclass(frozen=True)
class Fit:
    """A fitted model. It takes the features of prefixes and returns their expected outcomes.

    Attributes:
        base: number, the mean outcome of the rollouts.
        mean: [F], mean of each feature in the fitted data. Each rollout has the weight 1, shared by its prefixes.
        scale: [F], standard deviation of each feature; 1 for a constant feature.
        low: [F], smallest value of each feature in the fitted data.
        high: [F], largest value of each feature in the fitted data.
        weights: [P], the weight of each column of `columns`.
        logistic: True = columns times weights are log-odds of the outcome, False = they are the outcome itself.
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

        The result for a prefix is bitwise the same, whichever other prefixes are computed in the same call.

        Args:
            features: [M, F] float64.
        Returns:
            M numbers; NaN for a prefix with a feature that is NaN.
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
        unreliable outside of it.

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

    x_m are the columns of prefix m, and y_m is the outcome of its rollout. In a logistic fit,
    ℓ(y, s) = −y·s + log(1 + e^s); in a linear fit, ℓ(y, s) = (y − s)²/2. ω_m is 1 divided by the number of prefixes of
    the rollout that m belongs to, so that each rollout has the weight 1. The intercept w_0 is not penalised.

    Args:
        features: [M, F] float64, finite.
        rollout: [M] int64, index of the rollout that each prefix belongs to.
        outcomes: [R] float64, outcome of each rollout. For a logistic fit within 0 … 1, and neither all 0 nor all 1.
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

    The objective is convex, and strictly convex if both outcomes occur, so the minimum is unique.
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
