"""The logged figures of process rewards, and checks whether these reach the advantages.

Checks 1 and 2 come from "Training-Free Process Rewards for LLM RL"; its third is the figure `time/values`:

0. Is V known at the first and the last boundary of any row?
1. Do the tokens of any row have different advantages?
2. Do the process rewards change the advantages noticeably?
3. Does the outcome of any group count in the window?

A check that fails in `PATIENCE` windows in a row warns; check 3 at once.
"""

import logging
import math
from collections import Counter

import torch
from torch import Tensor

from dash_trl.process_rewards.credit import Rewards, moments

logger = logging.getLogger(__name__)

DROWNED = 0.01  # check 2 fails if process rewards change the advantages by less than this share of their spread
PATIENCE = 3  # a check must fail in this number of windows in a row before it warns; one failure may be chance


Figures = dict[str, tuple[float, float]]  # name → mean and standard deviation; NaN if there are no numbers to average


def batch_figures(rewards: Rewards, boundaries: Tensor, values: Tensor, credit: Tensor, *, skipped: Tensor) -> Figures:
    """Return a window's figures over all ranks: name → mean and standard deviation. Those without "/" are not logged.

    Args:
        rewards: the input of the credit estimator.
        boundaries: [N, K] int, padded with −1.
        values: [N, K], V at each boundary; NaN = missing.
        credit: [N, T], the result of the credit estimator.
        skipped: [N] bool, True = no V was asked for.
    """
    asked = ~skipped
    valued = rewards.valued
    count = (boundaries >= 0).sum(dim=1)
    lengths = rewards.mask.sum(dim=1)
    first = values[:, 0]
    last = values[torch.arange(len(values)), count - 1]
    row, token = (rewards.ends & valued.unsqueeze(1)).nonzero(as_tuple=True)
    utilities = rewards.process[row, token]
    early = 2 * token < lengths[row]
    several = row.bincount(minlength=len(valued)) > 1
    low, high = torch.where(rewards.mask, credit, credit[:, :1]).aminmax(dim=1)
    structure = high - low > 1e-6
    outcome_only = rewards.outcome_advantages.repeat_interleave(lengths)
    tokens = credit[rewards.mask]
    samples = {
        "process/episodes": (count - 1)[asked],
        "process/missing_values": values.isnan()[(boundaries >= 0) & asked.unsqueeze(1)],
        "process/valued_rows": valued,
        "process/value_first": first[asked & ~first.isnan()],
        "process/value_last": last[asked & ~last.isnan()],
        "process/structured_rows": (several & structure)[valued],
        "process/utility_first_half": utilities[early],
        "process/utility_second_half": utilities[~early],
        "advantage/mean": tokens,
        "advantage/mean_outcome_only": outcome_only,
        "asked": asked,
        "several": several[valued],
        "added": tokens - outcome_only,
        "outcome": rewards.outcome_advantages[valued],
    }
    _, means, variances = moments(samples.values(), rewards.sum_over_ranks)
    return dict(zip(samples, zip(means.tolist(), variances.sqrt().tolist(), strict=True), strict=True))


def process_metrics(figures: Figures) -> dict[str, float]:
    """Return the figures of `batch_figures` that are logged, without those that are NaN."""
    numbers = {name: mean for name, (mean, _) in figures.items() if "/" in name}
    numbers["advantage/std"] = figures["advantage/mean"][1]
    numbers["advantage/std_outcome_only"] = figures["advantage/mean_outcome_only"][1]
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


class Diagnostics:
    """Warns if a check has failed in `PATIENCE` windows in a row; again only after it has passed."""

    def __init__(self) -> None:
        self._failures = Counter[str]()  # name of a check → number of windows in a row in which it has failed

    def check(self, figures: Figures, *, estimator: str) -> None:
        """Run the checks on the figures of one window."""
        asked, valued = figures["asked"][0], figures["process/valued_rows"][0]
        process, outcome = figures["added"][1], figures["outcome"][1]
        if asked:
            self._note(
                "values",
                valued == 0,
                "No row has a value at both its beginning and its end, so there is no process reward. Are the answers "
                "empty, or does the value estimator return only NaN? process/missing_values in the log is the share of "
                "missing values.",
            )
        # Check 1 is left out if all advantages are the same, because the filter's metrics already show this.
        if figures["advantage/mean"][1] > 0 and figures["several"][0] > 0:
            self._note(
                "structure",
                figures["process/structured_rows"][0] == 0,
                f"In every row, all tokens have the same advantage: estimator={estimator!r} loses the structure of the "
                "process rewards. Use 'grpo_process' or another one that gives each token an advantage of its own.",
            )
        if valued:
            self._note(
                "scale",
                process < DROWNED * outcome,
                f"Process rewards have almost no effect: they change the advantages by {process:.1e}, but the standard "
                f"deviation of the outcome advantages is {outcome:.1e}. Raise CreditSettings.process_weight, or lower "
                "scale_floor if V hardly changes within a completion.",
            )
        self._note(
            "alone",
            not any(figures["advantage/mean_outcome_only"]) and figures["advantage/mean"][1] > 0,
            "V alone drives this step: all outcome advantages of the window are 0, but with process rewards the "
            "advantages are not. If V is wrong, the policy learns what is wrong. ProcessRewardCallback(skip_silent="
            "True) prevents such steps.",
            patience=1,
        )

    def _note(self, check: str, failed: bool, message: str, *, patience: int = PATIENCE) -> None:
        self._failures[check] = self._failures[check] + 1 if failed else 0
        if self._failures[check] == patience:
            logger.warning(message)
