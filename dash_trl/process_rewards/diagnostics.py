"""Does the process signal arrive? The three checks of "Training-Free Process Rewards for LLM RL", and its metrics.

    0. Are there values at all?
    1. Does any row have more than one advantage?   2. Do the advantages change by the process part?
    3. What does V cost?

Each failed check is said once, with the remedy.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dash_trl.process_rewards.credit import Rewards

logger = logging.getLogger(__name__)

# Estimators that give all tokens of a row one advantage, as they are defined.
SCALAR_ESTIMATORS = ("grpo", "rloo")
DROWNED = 0.01  # the process part's share of the advantages' spread under which it is lost in the outcome
DEAR = 0.5  # share of the time between two windows that V may take
PATIENCE = 3  # windows in a row before a warning: one window may be an accident


def process_metrics(rewards: Rewards, boundaries: Tensor, values: Tensor, credit: Tensor, *, skipped: Tensor) -> dict:
    """Numbers of a generation batch, over all ranks.

    Args:
        boundaries, values: [N, K], padded with −1 and NaN. credit: [N, T]. skipped: [N] bool, rows not asked for.
    """
    asked = (boundaries >= 0) & ~skipped.unsqueeze(1)
    rows = ~skipped
    count = (boundaries >= 0).sum(dim=1)
    last = values.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).flatten()
    mask, used = rewards.mask, rewards.mask & rewards.valued.unsqueeze(1)
    outcome = rewards.outcome_advantages.unsqueeze(1).expand_as(credit)
    numbers = {
        "process/episodes": (count - 1)[rows].double().mean(),
        "process/missing_values": values.isnan()[asked].double().mean(),
        "process/valued_rows": rewards.valued.double().mean(),
        "process/value_first": values[rows, 0].nanmean(),
        "process/value_last": last[rows].nanmean(),
        "process/structured_rows": structured(credit, mask)[rewards.valued].double().mean(),
        "advantage/mean": credit[mask].mean(),
        "advantage/std": credit[mask].std(),
        "advantage/mean_outcome_only": outcome[mask].mean(),
        "advantage/std_outcome_only": outcome[mask].std(),
    }
    # U by position: first and second half of the completion
    position = torch.arange(mask.shape[1]) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    for name, half in (("first_half", position < 0.5), ("second_half", position >= 0.5)):
        numbers[f"process/utility_{name}"] = rewards.process[rewards.ends & used & half].mean()
    return {name: float(number) for name, number in numbers.items() if not number.isnan()}


def structured(credit: Tensor, mask: Tensor) -> Tensor:
    """[N] bool: rows whose tokens have more than one advantage."""
    high = credit.masked_fill(~mask, -torch.inf).amax(dim=1)
    low = credit.masked_fill(~mask, torch.inf).amin(dim=1)
    return high - low > 1e-6


class Diagnostics:
    """Runs the checks on each generation batch and warns once per check."""

    def __init__(self) -> None:
        self._failures = {"values": 0, "structure": 0, "scale": 0, "time": 0}
        self._last: float | None = None

    def check(self, credit: Tensor, rewards: Rewards, *, asked: bool, seconds: float, estimator: str) -> None:
        """
        Args:
            credit: [N, T]. asked: for the values of any row. seconds: that they took. estimator: its name.
        """
        now = time.perf_counter()
        between = now - self._last if self._last is not None else None
        self._last = now
        if asked:
            self._note(
                "values",
                not rewards.valued.any(),
                "No row has a value at its beginning and its end, so that there is no process reward: are the answers "
                "empty, or does the value estimator give NaN only? process/missing_values in the log is their share.",
            )
        several = (rewards.ends.sum(dim=1) > 1) & rewards.valued
        if several.any():
            collapsed = estimator in SCALAR_ESTIMATORS or not structured(credit, rewards.mask)[several].any()
            self._note(
                "structure",
                collapsed,
                f"All tokens of every row have one advantage: estimator={estimator!r} loses the structure of the "
                "process rewards. Use 'centered_return', 'episode' or another per-token estimator.",
            )
        if rewards.valued.any():
            process = (credit - rewards.outcome_advantages.unsqueeze(1))[rewards.mask].std()
            outcome = rewards.outcome_advantages[rewards.valued].std()
            self._note(
                "scale",
                bool(process < DROWNED * outcome),
                f"The process part changes the advantages by {process:.1e}, the outcome's spread is {outcome:.1e}: the "
                "signal is drowned. Raise CreditSettings.process_weight, or lower scale_floor if V hardly moves.",
            )
        if between is not None:
            self._note(
                "time",
                seconds > DEAR * between,
                f"V(prefix) takes {seconds:.1f} s of the {between:.1f} s between two generation batches. Fewer, longer "
                "episodes (min_episode_tokens) or a larger max_tokens_per_pass make it cheaper.",
            )

    def _note(self, check: str, failed: bool, message: str) -> None:
        self._failures[check] = self._failures[check] + 1 if failed else 0
        if self._failures[check] == PATIENCE:
            logger.warning(message)
