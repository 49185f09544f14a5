"""What is V(prefix) worth? Evidence of the last generation windows, and the weight that it earns.

    V and outcomes of a window ──► `Evidence`, sums per group ──► those of the last windows ──► figures, a weight

Groups are the units: their rollouts share a problem, and the prefixes of a rollout an outcome. So a figure is a
function of sums over groups, and its interval that of the jackknife which leaves out one group at a time (Tukey 1958),
with Student's t. V of a window has to be made without its outcomes: then so is what is found here.

What is looked at are inner boundaries, b_1 … b_{n−1}: V_0 knows nothing of the rollout, and at b_n all is said.

Letters: N rows (the G completions of a prompt adjacent), K boundaries per row, M = N / G groups.
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

WINDOWS = 8  # the last ones that are looked at, as `OutcomeValue` fits
LEAST_GROUPS = 8  # mixed ones, without which there is no interval, and no weight
LEAST_WEIGHT = 0.02  # a smaller one is 0: it would move little but noise


@dataclass(frozen=True)
class Evidence:
    """Sums over each group's rollouts that are scored and have a known V at an inner boundary; float64.

    Attributes:
        pairs: [M], pairs of rollouts with different outcomes. won: [M], those in which the better outcome has the
            larger V in the mean of its inner boundaries, ties half.
        products: [M, 3], ΣΔV², ΣΔVΔy, ΣΔy² with Δ from the group's mean; 0 where outcomes do not differ. A rollout
            counts 1, and so do all its boundaries together.
        units: [M, 2], ΣAΔy, ΣΔy² over all scored rollouts with A the outcome advantage; 0 where outcomes are alike.
    """

    pairs: Tensor
    won: Tensor
    products: Tensor
    units: Tensor

    def of_groups(self, groups: Tensor) -> Evidence:
        """Of the given groups (indices), in that order."""
        return Evidence(self.pairs[groups], self.won[groups], self.products[groups], self.units[groups])


def evidence_of(
    boundaries: Tensor, values: Tensor, outcomes: Tensor, advantages: Tensor, *, group_size: int
) -> Evidence:
    """What the groups of a window, or of a part of it, say of V.

    Args:
        boundaries: [N, K] int, padded with −1. values: [N, K], NaN = missing. outcomes: [N], NaN = unscored.
        advantages: [N], of the outcomes.
        group_size: G, dividing N.
    """
    number, scored = torch.arange(boundaries.shape[1]), ~outcomes.isnan()
    inner = (number > 0) & (number < (boundaries >= 0).sum(dim=1, keepdim=True) - 1)
    known = inner & values.isfinite() & scored.unsqueeze(1)
    v, y = torch.where(known, values.double(), 0), torch.where(scored, outcomes.double(), 0)
    share = known / known.sum(dim=1, keepdim=True).clamp(min=1).double()  # of a rollout's 1
    # [M, G] each.
    used, v_mean, y_of = (cells.view(-1, group_size) for cells in (known.any(dim=1), (share * v).sum(dim=1), y))

    # [M, G, G]: the first of a pair has the better outcome.
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
    """A figure of sums over groups, and half its 95 % interval: Student's t times the jackknife's standard error.

    σ² = (M − 1)/M·Σ_g (f_{−g} − f̄)², f_{−g} the figure without group g.

    Args:
        groups: [M, S], M >= 2. figure: sums [..., S] → [...].
    """
    total, count = groups.sum(dim=0), len(groups)
    without = figure(total - groups)
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return float(figure(total)), student(count - 1) * float(error)


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by Cornish and Fisher's expansion (A&S 26.7.5); within 0.5 % from 6 on."""
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


class Watch:
    """The evidence of the last `WINDOWS` generation windows; the same on all ranks, which are given the same."""

    def __init__(self) -> None:
        self._windows: list[Evidence] = []

    @property
    def full(self) -> bool:
        return len(self._windows) == WINDOWS

    def add(self, window: Evidence) -> None:
        """One without evidence counts, too, so that what is old is forgotten."""
        self._windows = [*self._windows, window][-WINDOWS:]

    def figures(self) -> dict[str, float]:
        """What is logged of at least one window, without what there is no evidence of."""
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
        """The lower end of β, 0 … 1, the slope of the outcome over V, both centred in their group, over mixed groups.

        V is a control variate of the outcome: of all (outcome − w·V), that with w = β varies least. A V that is right
        has β = 1, and one that is noise has 0. Exactly 0 for fewer than `LEAST_GROUPS`, where the interval holds 0 or
        lies below, and under `LEAST_WEIGHT`.
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
        """The advantage that a reward of 1 has had in groups of different outcomes; 0 without such a group."""
        if not self._windows:
            return 0.0
        products, squares = joined(self._windows).units.sum(dim=0).tolist()
        return products / squares if squares else 0.0

    def state_dict(self) -> list[dict[str, Tensor]]:
        """Its tensors are never changed."""
        return [dict(vars(window)) for window in self._windows]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        self._windows = [Evidence(**window) for window in state][-WINDOWS:]


def _log_odds(sums: Tensor) -> Tensor:
    """log odds of won pairs, whose interval is right where a share's would reach beyond 1; half a pair to each side."""
    won, pairs = sums.unbind(-1)
    return ((won + 0.5) / (pairs - won + 0.5)).log()


def _slope(sums: Tensor) -> Tensor:
    """β; 0 where V does not move."""
    vv, vy, _ = sums.unbind(-1)
    return (vy / vv).nan_to_num(0.0, 0.0, 0.0)
