"""Measures how well V(prefix) predicts outcomes, and computes the weight of V from this measurement::

    V and outcomes of a window ──► `Evidence`, sums per group ──► evidence of the last windows ──► figures, a weight

The rollouts of a group share a problem, and the prefixes of a rollout share an outcome, so only groups are independent
of each other. Each figure is therefore a function of sums over groups. The confidence interval of a figure is computed
by the jackknife, which leaves out one group at a time (Tukey 1958), and Student's t. The values of a window must be
computed without the outcomes of this window; otherwise the figures are biased.

Only the inner boundaries b_1 … b_{n−1} count. V_0 is the same for all rollouts of a prompt. V_n belongs to the prefix
right before the final answer, and this prefix already decides the outcome.

Letters: N rows (the G completions of a prompt are adjacent), K boundaries per row, M = N / G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from dash_trl.process_rewards.credit import outcome_units
from dash_trl.rollout import joined

WINDOWS = 8  # only the last 8 windows count; `OutcomeValue` is fitted to the same number of windows by default
LEAST_GROUPS = 8  # an interval and a weight need at least this number of groups with different outcomes
LEAST_WEIGHT = 0.02  # a smaller weight becomes 0, because it would add little more than noise


@dataclass(frozen=True)
class Evidence:
    """Sums over the rollouts of each group, in float64, from which the figures and the weight of V are computed.

    A rollout counts if it is scored and V is known at one or more of its inner boundaries. y is the outcome of a
    rollout, A is its outcome advantage, and Δ is the difference from the mean of the group.

    Attributes:
        pairs: [M], number of pairs of rollouts with different outcomes.
        won: [M], number of pairs in `pairs` in which the rollout with the better outcome has the larger mean V over its
            inner boundaries. A tie counts one half.
        products: [M, 3], the sums ΣΔV², ΣΔVΔy and ΣΔy² over inner boundaries; 0 if the outcomes are all the same. Each
            rollout has the weight 1, shared by its boundaries.
        units: [M, 2], the sums ΣAΔy and ΣΔy² over all scored rollouts, including rollouts without V; 0 if the outcomes
            are all the same.
    """

    pairs: Tensor
    won: Tensor
    products: Tensor
    units: Tensor

    def of_groups(self, groups: Tensor) -> Evidence:
        """Returns the evidence of the given groups, in the given order.

        Args:
            groups: int64, indices of the groups.
        """
        return Evidence(self.pairs[groups], self.won[groups], self.products[groups], self.units[groups])


def evidence_of(
    boundaries: Tensor, values: Tensor, outcomes: Tensor, advantages: Tensor, *, group_size: int
) -> Evidence:
    """Computes the evidence of the groups of a window, or of a part of it.

    Args:
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN = missing.
        outcomes: [N], NaN = unscored.
        advantages: [N], the outcome advantages.
        group_size: G, which divides N.
    """
    number, scored = torch.arange(boundaries.shape[1]), ~outcomes.isnan()
    inner = (number > 0) & (number < (boundaries >= 0).sum(dim=1, keepdim=True) - 1)
    known = inner & values.isfinite() & scored.unsqueeze(1)
    v, y = torch.where(known, values.double(), 0), torch.where(scored, outcomes.double(), 0)
    # The weight of each boundary. The weights of one rollout sum to 1.
    share = known / known.sum(dim=1, keepdim=True).clamp(min=1).double()
    # [M, G] each.
    used, v_mean, y_of = (cells.view(-1, group_size) for cells in (known.any(dim=1), (share * v).sum(dim=1), y))

    # [M, G, G]: True if the first of a pair has the better outcome.
    pairs = (y_of.unsqueeze(2) > y_of.unsqueeze(1)) & used.unsqueeze(2) & used.unsqueeze(1)
    order = (v_mean.unsqueeze(2) - v_mean.unsqueeze(1)).sign()
    won = (pairs * (order + 1) / 2).sum(dim=(1, 2))
    count = pairs.sum(dim=(1, 2))

    size = used.sum(dim=1, keepdim=True).clamp(min=1)
    v_centre = (v_mean.sum(dim=1, keepdim=True) / size).repeat_interleave(group_size, 0)
    y_centre = (used * y_of).sum(dim=1, keepdim=True) / size
    dv, dy = v - v_centre, (y_of - y_centre).view(-1, 1)
    products = torch.stack([(share * cells).sum(dim=1) for cells in (dv * dv, dv * dy, dy * dy)], dim=1)
    products = products.view(-1, group_size, 3).sum(dim=1) * (count > 0).unsqueeze(1)
    *sums, alike = outcome_units(outcomes, advantages, scored, group_size)
    units = torch.stack(sums, dim=1) * ~alike.unsqueeze(1)
    return Evidence(pairs=count.double(), won=won, products=products, units=units)


def interval(groups: Tensor, figure: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Computes a figure from sums over groups, and the half-width of its 95 % interval.

    The half-width is Student's t times the jackknife's standard error σ. Here σ² = (M − 1)/M·Σ_g (f_{−g} − f̄)², where
    f_{−g} is the figure without group g, and f̄ the mean of all f_{−g}.

    Args:
        groups: [M, S], S numbers per group, M >= 2.
        figure: a function that takes sums over groups [..., S] and returns figures [...].
    Returns:
        The figure and the half-width.
    """
    total, count = groups.sum(dim=0), len(groups)
    without = figure(total - groups)
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return float(figure(total)), student(count - 1) * float(error)


def student(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t by the Cornish-Fisher expansion (A&S 26.7.5).

    Args:
        degrees: the degrees of freedom. From 6 on, the relative error is below 0.5 %.
    """
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


class Watch:
    """Keeps the evidence of the last `WINDOWS` windows, and computes the figures and the weight of V from it.

    Every rank must add the same evidence, so that all ranks compute the same weight.
    """

    def __init__(self) -> None:
        self._windows: list[Evidence] = []

    @property
    def full(self) -> bool:
        """Whether `WINDOWS` windows have been added."""
        return len(self._windows) == WINDOWS

    def add(self, window: Evidence) -> None:
        """Adds the evidence of a window and drops the oldest window if there are more than `WINDOWS`.

        Call it for every window, even if no group of the window gives evidence, so that old windows are dropped.
        """
        self._windows = [*self._windows, window][-WINDOWS:]

    def figures(self) -> dict[str, float]:
        """Returns the figures for the log: the share of pairs that V won, and the lower end of its 95 % interval.

        A figure with too little evidence is left out. At least one window must have been added before.
        """
        of_all = joined(self._windows)
        sums = torch.stack([of_all.won, of_all.pairs], dim=1)[of_all.pairs > 0]
        if not len(sums):
            return {}
        won, pairs = sums.sum(dim=0).tolist()
        found = {"process/concordance": won / pairs}
        if len(sums) >= LEAST_GROUPS:
            odds, margin = interval(sums, _log_odds)
            found["process/concordance_low"] = (1 + math.tanh((odds - margin) / 2)) / 2
        return found

    def weight(self) -> float:
        """Returns the weight of V, from 0 to 1: the lower end of the 95 % interval of β, at most 1.

        β is the slope of the linear regression of the outcome on V. Outcome and V are centred in each group, and only
        groups with different outcomes count. V is a control variate of the outcome: outcome − w·V has the smallest
        variance at w = β. A correct V has β = 1, and noise has β = 0. The weight is exactly 0 if fewer than
        `LEAST_GROUPS` groups count, or if the lower end of the interval is below `LEAST_WEIGHT`.
        """
        if not self._windows:
            return 0.0
        products = joined(self._windows).products
        products = products[products[:, 2] > 0]
        if len(products) < LEAST_GROUPS:
            return 0.0
        slope, margin = interval(products, _slope)
        low = min(slope - margin, 1.0)
        return low if low >= LEAST_WEIGHT else 0.0

    def unit(self) -> float:
        """Returns the outcome advantage per unit of reward, over the groups with different outcomes.

        In groups whose outcomes are all the same, `credit._scaled` multiplies process rewards by this number. It is 0
        if no group has different outcomes.
        """
        if not self._windows:
            return 0.0
        products, squares = joined(self._windows).units.sum(dim=0).tolist()
        return products / squares if squares else 0.0

    def state_dict(self) -> list[dict[str, Tensor]]:
        """Returns the evidence of the windows for a checkpoint; the tensors of the result are never changed later."""
        return [dict(vars(window)) for window in self._windows]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        self._windows = [Evidence(**window) for window in state][-WINDOWS:]


def _log_odds(sums: Tensor) -> Tensor:
    """Computes log((won + ½) / (lost + ½)), the log-odds of won pairs.

    The interval is computed for log-odds and then converted to shares, so that it stays within 0 … 1.
    """
    won, pairs = sums.unbind(-1)
    return ((won + 0.5) / (pairs - won + 0.5)).log()


def _slope(sums: Tensor) -> Tensor:
    """Computes the slope β; 0 if V is constant."""
    vv, vy, _ = sums.unbind(-1)
    return (vy / vv).nan_to_num(0.0, 0.0, 0.0)
