"""The features of a prefix by hand, and the fit to outcomes by its definition."""

import math
from itertools import combinations_with_replacement

import pytest
import torch

from dash_trl.process_rewards import FEATURES
from dash_trl.process_rewards.features import prefix_features
from dash_trl.process_rewards.fit import fit_outcomes

# ----------------------------------------------------------------------------------------------------------- features


def test_features_by_hand():
    rows = prefix_features((0, 2, 3), [-1.0, -4.0, -2.0, -9.0], [0.5, 2.0, 1.0, 9.0])
    assert rows == [[-5.0, -4.0, -5.0, -4.0, 2.0, 2.5, 2.0], [-7.0, -4.0, -2.0, -2.0, 3.0, 3.5, 2.0]]
    assert prefix_features((0, 2, 3), [-1.0, -4.0, -2.0]) == [row[:5] for row in rows]
    assert len(rows[0]) == len(FEATURES) and prefix_features((0,), []) == []
    without_tools = prefix_features((0, 3, 4), [-1.0, -4.0, 0.0, -2.0], own=[1, 1, 0, 1])
    assert without_tools == [row[:5] for row in rows]


def test_an_unknown_log_prob_is_one_of_every_prefix_that_holds_it():
    rows = prefix_features((0, 1, 2, 3), [-1.0, math.nan, -2.0])
    assert [math.isnan(sum(row)) for row in rows] == [False, True, True]


# ---------------------------------------------------------------------------------------------------------------- fit


def examples(logistic: bool, rollouts: int = 40, features: int = 3):
    """Prefixes of rollouts with one to four each, and outcomes that depend on them."""
    generator = torch.Generator().manual_seed(0)
    rollout = torch.arange(rollouts).repeat_interleave(torch.arange(rollouts) % 4 + 1)
    x = torch.randn(len(rollout), features, generator=generator, dtype=torch.double) * torch.tensor([1.0, 30.0, 0.01])
    x += torch.tensor([0.0, -50.0, 7.0])
    first = torch.tensor([int((rollout == r).nonzero()[0]) for r in range(rollouts)])
    score = x[first, 0] + 0.5 * torch.randn(rollouts, generator=generator, dtype=torch.double)
    return x, rollout, (score > 0).double() if logistic else 3 * score


def by_definition(x, rollout):
    """(columns, weights) of the objective, in Python numbers."""
    counts = [rollout.tolist().count(one) for one in rollout.tolist()]
    weights = [1 / count for count in counts]
    columns = []
    for feature in x.T.tolist():
        mean = sum(w * v for w, v in zip(weights, feature, strict=True)) / sum(weights)
        variance = sum(w * (v - mean) ** 2 for w, v in zip(weights, feature, strict=True)) / sum(weights)
        columns.append([(v - mean) / math.sqrt(variance) for v in feature])
    rows = list(zip(*columns, strict=True))
    products = [[1.0, *row, *(a * b for a, b in combinations_with_replacement(row, 2))] for row in rows]
    return torch.tensor(products, dtype=torch.double), torch.tensor(weights, dtype=torch.double)


@pytest.mark.parametrize(("logistic", "ridge"), [(True, 0.01), (True, 1.0), (True, 100.0), (False, 2.0)])
def test_a_fit_is_the_minimum_of_its_objective(logistic, ridge):
    """Both objectives are convex: it is where the gradient is 0."""
    x, rollout, outcomes = examples(logistic)
    fit = fit_outcomes(x, rollout, outcomes, logistic=logistic, ridge=ridge)
    columns, shares = by_definition(x, rollout)
    w, y = fit.weights.clone().requires_grad_(), outcomes[rollout]
    found = torch.sigmoid(columns @ w) if logistic else columns @ w
    losses = -(y * found.log() + (1 - y) * (1 - found).log()) if logistic else (y - found) ** 2 / 2
    loss = (shares * losses).sum() + ridge / 2 * (w[1:] ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.abs().max() < 1e-9
    assert fit(x) == pytest.approx(found.tolist(), abs=1e-9) and fit.base == outcomes.mean()


@pytest.mark.parametrize("logistic", [True, False])
def test_a_rollout_counts_as_one_whatever_its_prefixes(logistic):
    """Each prefix of one rollout thrice over changes nothing."""
    x, rollout, outcomes = examples(logistic)
    again = torch.cat([torch.arange(len(x)), *[(rollout == 3).nonzero().flatten()] * 2])
    one = fit_outcomes(x, rollout, outcomes, logistic=logistic, ridge=1.0)
    other = fit_outcomes(x[again], rollout[again], outcomes, logistic=logistic, ridge=1.0)
    assert one(x) == pytest.approx(other(x), abs=1e-9)


def test_nothing_is_guessed_beyond_what_was_seen():
    x, rollout, outcomes = examples(logistic=False)
    fit = fit_outcomes(x, rollout, outcomes, logistic=False, ridge=1.0)
    beyond, edge = x[:1].clone(), x[:1].clone()
    beyond[0, 1], edge[0, 1] = 1e9, x[:, 1].max()
    assert fit(beyond) == fit(edge)
    assert math.isnan(*fit(torch.full((1, 3), math.nan, dtype=torch.double)))


@pytest.mark.parametrize("logistic", [True, False])
def test_a_constant_feature_and_separable_outcomes_are_no_trouble(logistic):
    x = torch.tensor([[0.1, 0.3]] * 10 + [[0.2, 0.3]] * 10, dtype=torch.double)
    outcomes = torch.tensor([0.0] * 10 + [1.0] * 10, dtype=torch.double)
    fit = fit_outcomes(x, torch.arange(20), outcomes, logistic=logistic, ridge=1e-3)
    assert [round(one) for one in fit(x)] == outcomes.tolist()
