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
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from dash_trl.process_rewards.agreement import BINS
from dash_trl.update import check_tensor

WINDOWS = 8  # the last ones that are looked at, as `OutcomeValue` fits
LEAST_GROUPS = 8  # mixed ones, without which there is no interval, and no weight
LEAST_WEIGHT = 0.02  # a smaller one is 0: it would move little but noise
THIRDS = ("first", "second", "last")
SURELY = 1 - 1e-12  # a correlation above it is taken for this: Fisher's z has no number for 1


@dataclass(frozen=True)
class Evidence:
    """Sums over each group's rollouts that are scored and have a known V at an inner boundary; float64.

    A rollout counts 1, and so do all its boundaries together, except in pairs. Rollouts of a group are compared third
    by third of their responses, by the mean V at the boundaries b that lie in it (b / tokens): they have different
    numbers of boundaries, V drifts along a response, and so a pair counts at most three times, however long it is.
    Which third a boundary lies in depends on the response's length, so that V may look good by telling that alone:
    what the length orders is `shorter`.

    Attributes:
        pairs: [M, 3], pairs of rollouts with different outcomes and a V in this third. won: those in which the better
            outcome has the larger V, ties half. shorter: those in which it has the prefix of fewer tokens, ties half.
        products: [M, 3], ΣΔV², ΣΔVΔy, ΣΔy² with Δ from the group's mean; 0 where outcomes do not differ.
        errors: [M, 2], Σ(V − y)² and Σ(ȳ_others − y)², the mean outcome of a rollout's siblings.
        bins: [M, 2, BINS], ΣV and Σy by V. rollouts: [M], of errors and bins.
    """

    pairs: Tensor
    won: Tensor
    shorter: Tensor
    products: Tensor
    errors: Tensor
    bins: Tensor
    rollouts: Tensor

    def __len__(self) -> int:
        return len(self.rollouts)

    def groups(self, order: Tensor) -> Evidence:
        """These groups (indices), in that order."""
        return Evidence(**{one.name: getattr(self, one.name)[order] for one in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Evidence]) -> Evidence:
        return cls(**{one.name: torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)})


def evidence_of(boundaries: Tensor, values: Tensor, lengths: Tensor, outcomes: Tensor, *, group_size: int) -> Evidence:
    """What the groups of a window, or of a part of it, say of V.

    Args:
        boundaries: [N, K] int, padded with −1. values: [N, K], NaN = missing. lengths: [N], completion tokens.
        outcomes: [N], NaN = unscored. group_size: G, dividing N.
    """
    check_tensor("boundaries", boundaries, "integers", N=None, K=None)
    rows, most = boundaries.shape
    check_tensor("values", values, "floats", N=rows, K=most)
    check_tensor("lengths", lengths, "integers", N=rows)
    check_tensor("outcomes", outcomes, "floats", N=rows)

    def of_groups(table: Tensor) -> Tensor:
        return table.view(-1, group_size, *table.shape[1:])

    number, scored = torch.arange(most), ~outcomes.isnan()
    inner = (number > 0) & (number < (boundaries >= 0).sum(dim=1, keepdim=True) - 1)
    known = inner & values.isfinite() & scored.unsqueeze(1)
    v, y = torch.where(known, values.double(), 0), torch.where(scored, outcomes.double(), 0)

    # Pairs, [M, G, G, 3]: the first of them has the better outcome.
    third = (3 * boundaries // lengths.clamp(min=1).unsqueeze(1)).clamp(0, 2)
    within = known.unsqueeze(2) & (third.unsqueeze(2) == torch.arange(3))
    count = within.sum(dim=1)
    v_mean, b_mean = ((within * cells.unsqueeze(2)).sum(dim=1) / count.clamp(min=1) for cells in (v, boundaries))
    there = of_groups(count > 0)
    better = of_groups(y).unsqueeze(2) > of_groups(y).unsqueeze(1)
    pairs = better.unsqueeze(3) & there.unsqueeze(2) & there.unsqueeze(1)

    def ordered(of_rows: Tensor) -> Tensor:
        above = (of_groups(of_rows).unsqueeze(2) - of_groups(of_rows).unsqueeze(1)).sign()
        return (pairs * (above + 1) / 2).sum(dim=(1, 2))

    # Centred products; ω shares a rollout's 1 among its boundaries.
    used = known.any(dim=1)
    share = known / known.sum(dim=1, keepdim=True).clamp(min=1).double()
    in_group, of_group = of_groups(used), of_groups(used).sum(dim=1, keepdim=True).clamp(min=1)
    v_centre = (of_groups((share * v).sum(dim=1)).sum(dim=1, keepdim=True) / of_group).repeat_interleave(group_size, 0)
    y_centre = (in_group * of_groups(y)).sum(dim=1, keepdim=True) / of_group
    dv, dy = v - v_centre, (of_groups(y) - y_centre).view(-1, 1)
    products = torch.stack([(share * cells).sum(dim=1) for cells in (dv * dv, dv * dy, dy * dy)], dim=1)
    low, high = (of_groups(torch.where(used, y, edge)) for edge in (torch.inf, -torch.inf))
    mixed = low.amin(dim=1) < high.amax(dim=1)

    # Errors, against those of the siblings' mean.
    siblings = of_groups(scored).sum(dim=1, keepdim=True) - 1
    others = ((of_groups(y).sum(dim=1, keepdim=True) - of_groups(y)) / siblings.clamp(min=1)).view(-1)
    compared = used & (siblings > 0).repeat_interleave(group_size, 0).view(-1)
    share = share * compared.unsqueeze(1)
    errors = torch.stack([(share * (v - y.unsqueeze(1)).square()).sum(dim=1), compared * (others - y).square()], dim=1)
    place = (v * BINS).clamp(0, BINS - 1).long()
    bins = torch.zeros(rows, 2, BINS, dtype=torch.double)
    for of_one, cells in zip(bins.unbind(1), (v, y.unsqueeze(1)), strict=True):
        of_one.scatter_add_(1, place, share * cells)
    return Evidence(
        pairs=pairs.sum(dim=(1, 2)).double(),
        won=ordered(v_mean),
        shorter=ordered(-b_mean),
        products=of_groups(products).sum(dim=1) * mixed.unsqueeze(1),
        errors=of_groups(errors).sum(dim=1),
        bins=of_groups(bins).sum(dim=1),
        rollouts=of_groups(compared).sum(dim=1).double(),
    )


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

    def figures(self, *, probability: bool) -> dict[str, float]:
        """What is logged, without what there is no evidence of.

        Args:
            probability: whether V and outcomes are, so that they can be compared as numbers.
        """
        if not self._windows:
            return {}
        of_all = Evidence.joined(self._windows)
        pairs = of_all.pairs.sum(dim=1)
        mixed = pairs > 0
        found = {"process/concordance": float(of_all.won.sum() / pairs.sum())}
        if mixed.sum() >= LEAST_GROUPS:
            sums = torch.stack([of_all.won.sum(dim=1), pairs], dim=1)[mixed]
            odds, margin = interval(sums, _log_odds)
            found["process/concordance_low"] = (1 + math.tanh((odds - margin) / 2)) / 2
        shares = (of_all.won.sum(dim=0) / of_all.pairs.sum(dim=0)).tolist()
        found |= {f"process/concordance_{third}_third": share for third, share in zip(THIRDS, shares, strict=True)}
        found["process/concordance_position"] = float(of_all.shorter.sum() / pairs.sum())
        if probability:
            rollouts = of_all.rollouts.sum()
            errors = (of_all.errors.sum(dim=0) / rollouts).tolist()
            found |= dict(zip(("process/brier", "process/brier_siblings"), errors, strict=True))
            v, y = of_all.bins.sum(dim=0)
            found["process/calibration_error"] = float((v - y).abs().sum() / rollouts)
        return {name: number for name, number in found.items() if not math.isnan(number)}

    def weight(self) -> float:
        """The lower end of r², 0 … 1: r correlates V and outcome, both centred in their group, over mixed groups.

        Its interval is that of Fisher's z. Exactly 0 for fewer than `LEAST_GROUPS`, where the interval holds 0 or lies
        below, and under `LEAST_WEIGHT`.
        """
        if not self._windows:
            return 0.0
        products = Evidence.joined(self._windows).products
        products = products[products[:, 2] > 0]
        if len(products) < LEAST_GROUPS:
            return 0.0
        z, margin = interval(products, _fisher)
        squared = math.tanh(max(0.0, z - margin)) ** 2
        return squared if squared >= LEAST_WEIGHT else 0.0

    def state_dict(self) -> list[dict[str, Tensor]]:
        """Its tensors are never changed."""
        return [dict(vars(window)) for window in self._windows]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        self._windows = [Evidence(**window) for window in state][-WINDOWS:]


def _log_odds(sums: Tensor) -> Tensor:
    """log odds of won pairs, whose interval is right where a share's would reach beyond 1; half a pair to each side."""
    won, pairs = sums.unbind(-1)
    return ((won + 0.5) / (pairs - won + 0.5)).log()


def _fisher(sums: Tensor) -> Tensor:
    """atanh(r); 0 where V does not move."""
    vv, vy, yy = sums.unbind(-1)
    return (vy / (vv * yy).sqrt()).nan_to_num(0.0, 0.0, 0.0).clamp(-SURELY, SURELY).atanh()
