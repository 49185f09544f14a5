"""Simulates which weight of an anchored V leaves the least noise in the gradient, on a task with known truth.

    python benchmarks/credit_variance.py --json credit_variance.json          # ~3 minutes on one core

A response has 6 to 8 lines and an answer. Each line has an operation and one of two equally likely forms. For 7 of 18
operations, one form leads to a wrong answer. The policy has one parameter per operation, so the gradient has 18
entries. V at a line is 0.25, plus `gain` times the change of the true value since the beginning, plus noise. A window
has 16 groups of 8. The weight of V is computed from the previous 8 windows, as in a run (`worth.Watch`).

The figure is `|E g|² / tr Var(g)` over the windows, for `centered_return`. Of two estimators of the same gradient, the
one with the larger figure needs fewer rows. The columns are weights of the outcome part and the process part:

- "outcome": 1 and 0.
- "1": 1 and 1.
- "r²": 1, and the squared correlation of V and outcome, as in earlier versions.
- "slope": 1 − w and w, with the weight w of `worth.Watch`.
- "slope, silent": the same, but without credit in groups with equal outcomes.

"slope − 1" is the difference of two columns, with half of its 95 % interval (jackknife over 20 blocks of windows).
"""

from typing import Any

import harness
import torch
from torch import Tensor

from dash_trl.process_rewards.credit import CreditSettings, Rewards, anchor, centered_return, place_rewards
from dash_trl.process_rewards.worth import WINDOWS, Watch, evidence_of
from dash_trl.rollout import joined
from dash_trl.update import group_advantages

GROUPS, GROUP, LINES, OPERATIONS, TRAPS = 16, 8, 8, 18, 7
BLOCKS = 20
VALUES = [(0.0, 0.05), (0.0, 0.15), (0.5, 0.05), (0.5, 0.15), (1.0, 0.05), (1.0, 0.15), (1.0, 0.3), (2.0, 0.1)]


def window(gain: float, noise: float) -> dict[str, Tensor]:
    """Draws a window of N rows of at most L lines.

    Returns:
        `operations` and `forms` [N, L]; `lengths` [N] in lines, with the answer; `outcomes` [N]; `values` [N, L+1],
        V at the `boundaries` [N, L+1] (−1 = no boundary).
    """
    number = torch.arange(LINES)
    lines = torch.randint(6, LINES + 1, (GROUPS,)).repeat_interleave(GROUP)
    operations = torch.randint(OPERATIONS, (GROUPS, LINES)).repeat_interleave(GROUP, 0)
    forms, written = torch.randint(2, operations.shape), number < lines.unsqueeze(1)
    traps = (operations < TRAPS) & written
    alive = torch.nn.functional.pad(1 - (traps & (forms == 1)).int().cummax(dim=1).values, (1, 0), value=1)
    to_come = torch.nn.functional.pad(traps.flip(1).cumsum(1).flip(1), (0, 1))
    truth = alive * 0.5**to_come
    values = 0.25 + gain * (truth - truth[:, :1]) + noise * torch.randn(truth.shape)
    values[:, 0] = 0.25
    at = torch.arange(LINES + 1).expand_as(values)
    return {
        "operations": operations,
        "forms": forms,
        "lengths": lines + 1,
        "outcomes": alive[:, -1].double(),
        "values": values.double(),
        "boundaries": torch.where(at <= lines.unsqueeze(1), at, -1),
    }


def gradient(of: dict[str, Tensor], credit: Tensor) -> Tensor:
    """Returns the gradient [OPERATIONS] of the forms' log-probs times their credit."""
    score = (of["forms"] - 0.5) * credit[:, :LINES]
    return torch.zeros(OPERATIONS, dtype=torch.double).index_add_(0, of["operations"].flatten(), score.flatten())


def gradients(of: dict[str, Tensor], advantages: Tensor, watch: Watch) -> dict[str, Tensor]:
    """Returns the gradient of a window for each weight, by name."""
    boundaries, values = anchor(of["boundaries"], of["values"], of["lengths"], of["outcomes"])
    process, ends, per_token, valued = place_rewards(boundaries, values, of["lengths"], LINES + 1)
    vv, vy, yy = joined(watch._windows).products.sum(dim=0).tolist()
    slope = watch.weight()

    def paid(outcome_weight: float, process_weight: float, unit: float = watch.unit()) -> Tensor:
        rewards = Rewards(
            process=process,
            ends=ends,
            values=per_token,
            mask=torch.arange(LINES + 1) < of["lengths"].unsqueeze(1),
            outcome=of["outcomes"],
            outcome_advantages=advantages,
            valued=valued & ~(of["outcomes"].view(-1, GROUP) == 1).all(dim=1).repeat_interleave(GROUP),  # not solved
            group_size=GROUP,
            unit=unit,
        )
        settings = CreditSettings(outcome_weight=outcome_weight, process_weight=process_weight)
        return gradient(of, centered_return(rewards, settings))

    return {
        "outcome": paid(1, 0),
        "1": paid(1, 1),
        "r²": paid(1, max(0.0, vy) ** 2 / (vv * yy)),
        "slope": paid(1 - slope, slope),
        "slope, silent": paid(1 - slope, slope, unit=0.0),
    }


def ratio(gradients: Tensor) -> float:
    """Returns `|E g|² / tr Var(g)` of gradients [windows, OPERATIONS]."""
    return float(gradients.mean(0).square().sum() / gradients.var(0).sum())


def half_width(first: Tensor, second: Tensor) -> float:
    """Returns half of the 95 % interval of the difference between the ratios of two columns."""
    block = torch.arange(len(first)) * BLOCKS // len(first)
    without = [ratio(first[block != number]) - ratio(second[block != number]) for number in range(BLOCKS)]
    error = torch.tensor(without).std(correction=0) * (BLOCKS - 1) ** 0.5
    return harness.student(BLOCKS - 1, 0.975) * float(error)


def measure(gain: float, noise: float, windows: int) -> dict[str, Any]:
    torch.manual_seed(0)
    watch, weights = Watch(), []
    found: dict[str, list[Tensor]] = {}
    for number in range(WINDOWS + windows):
        of = window(gain, noise)
        advantages = group_advantages(of["outcomes"].float().unsqueeze(1), torch.ones(1), GROUP).double()
        if number >= WINDOWS:
            weights.append(watch.weight())
            for name, one in gradients(of, advantages, watch).items():
                found.setdefault(name, []).append(one)
        watch.add(evidence_of(of["boundaries"], of["values"], of["outcomes"], advantages, group_size=GROUP))
    table = {name: torch.stack(rows) for name, rows in found.items()}
    ratios = {name: ratio(rows) for name, rows in table.items()}
    difference = ratios["slope"] - ratios["1"], half_width(table["slope"], table["1"])
    return {"weight": sum(weights) / len(weights), **ratios, "slope − 1": difference}


def main(windows: int) -> dict[str, Any]:
    results = {}
    for gain, noise in VALUES:
        results[f"{gain:g}, {noise:g}"] = row = measure(gain, noise, windows)
        harness.say(f"gain {gain:g}, noise {noise:g}", row)
    return results


if __name__ == "__main__":
    harness.run(main, __doc__, windows={"type": int, "default": 1500, "help": "number of windows for each V"})
