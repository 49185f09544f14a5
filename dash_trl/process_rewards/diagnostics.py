"""Checks whether process rewards reach the advantages, and computes the logged figures.

Checks 1 to 3 are those of "Training-Free Process Rewards for LLM RL".

0. Are there any values?
1. Does any row have more than one advantage?
2. Does the process part change the advantages?
3. What does V cost?
4. Does V order the completions of a problem better than chance?
5. If V is made of the policy's own log-probs: does the policy still have any entropy?

Each failed check is logged once as a warning that names the remedy.
"""

import logging
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from dash_trl.process_rewards.credit import Rewards, moments

logger = logging.getLogger(__name__)

# Estimators that by definition give all tokens of a row the same advantage.
SCALAR_ESTIMATORS = ("grpo", "rloo")
DROWNED = 0.01  # the process part is lost if its spread is below this share of the outcome advantages' spread
DEAR = 0.5  # V is expensive if it takes more than this share of the time between two windows
LOST = 0.1  # the policy has stopped exploring if its entropy falls below this share of the first windows' entropy
PATIENCE = 3  # windows in a row with a failed check before the warning, since one window may be an accident


Figures = dict[str, tuple[float, float]]  # name → mean and standard deviation; NaN where there is nothing to average


def batch_figures(rewards: Rewards, boundaries: Tensor, values: Tensor, credit: Tensor, *, skipped: Tensor) -> Figures:
    """The figures of a window over all ranks: those that are logged, under their names, and those that the checks need.

    Args:
        rewards: what the credit estimator was given; N rows, T completion tokens.
        boundaries: [N, K] int, padded with −1.
        values: [N, K], NaN = missing, or padding.
        credit: [N, T], the advantages.
        skipped: [N] bool, True = the row is not valued.
    """
    asked, valued = ~skipped, rewards.valued
    count, lengths = (boundaries >= 0).sum(dim=1), rewards.mask.sum(dim=1)
    first, last = (values.gather(1, at.unsqueeze(1)).flatten() for at in (count * 0, (count - 1).clamp(min=0)))
    row, token = (rewards.ends & valued.unsqueeze(1)).nonzero(as_tuple=True)
    utilities, early = rewards.process[row, token], 2 * token < lengths[row]
    several, structure = row.bincount(minlength=len(valued)) > 1, structured(credit, rewards.mask)
    outcome, tokens = rewards.outcome_advantages, credit[rewards.mask]
    samples: dict[str, tuple[Tensor, Tensor | int]] = {
        "process/episodes": ((count - 1)[asked], 1),
        "process/missing_values": (values.isnan()[(boundaries >= 0) & asked.unsqueeze(1)], 1),
        "process/valued_rows": (valued, 1),
        "process/value_first": (first[asked & ~first.isnan()], 1),
        "process/value_last": (last[asked & ~last.isnan()], 1),
        "process/structured_rows": (structure[valued], 1),
        "process/utility_first_half": (utilities[early], 1),
        "process/utility_second_half": (utilities[~early], 1),
        "advantage/mean": (tokens, 1),
        "advantage/mean_outcome_only": (outcome, lengths),
        "asked": (asked, 1),
        "structured where several": (structure[several], 1),
        "added": (tokens - outcome.repeat_interleave(lengths), 1),
        "outcome": (outcome[valued], 1),
    }
    _, means, variances = moments(samples.values(), rewards.sum_over_ranks)
    return dict(zip(samples, zip(means.tolist(), variances.sqrt().tolist(), strict=True), strict=True))


def process_metrics(figures: Figures) -> dict[str, float]:
    """The figures of `batch_figures` that are logged."""
    numbers = {name: mean for name, (mean, _) in figures.items() if "/" in name}
    numbers["advantage/std"] = figures["advantage/mean"][1]
    numbers["advantage/std_outcome_only"] = figures["advantage/mean_outcome_only"][1]
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def structured(credit: Tensor, mask: Tensor) -> Tensor:
    """[N] bool, True = the tokens of the row have more than one advantage.

    Args:
        credit: [N, T], the advantages.
        mask: [N, T] bool, True = a token of the completion.
    """
    low, high = torch.where(mask, credit, credit[:, :1]).aminmax(dim=1)
    return high - low > 1e-6


class Diagnostics:
    """Runs the checks on each window and warns once per check, if it fails in `PATIENCE` windows in a row.

    Attributes:
        entropies: the policy's mean entropy per token in each of the first `PATIENCE` windows that V paid for.
    """

    def __init__(self) -> None:
        self._failures = {"values": 0, "structure": 0, "scale": 0, "time": 0, "worth": 0, "entropy": 0}
        self._last = -math.inf  # time of the previous window, in seconds
        self.entropies: list[float] = []

    def check(
        self,
        figures: Figures,
        *,
        seconds: float,
        estimator: str,
        ready: bool = True,
        pays: bool = True,
        auto: bool = False,
    ) -> None:
        """Runs checks 0 to 3 on one window.

        Args:
            figures: of `batch_figures`.
            seconds: the time that the values took.
            estimator: name of the credit estimator.
            ready: False while the value estimator has too little data, so that missing values are no mistake.
            pays: False while V has the weight 0 on purpose.
            auto: the weight of V is "auto", so that a small weight is no mistake.
        """
        now = time.perf_counter()
        between, self._last = now - self._last, now
        asked, valued = figures["asked"][0], figures["process/valued_rows"][0]
        several_structured = figures["structured where several"][0]
        process, outcome = figures["added"][1], figures["outcome"][1]
        if asked and ready:
            self._note(
                "values",
                valued == 0,
                "No row has a value at both its beginning and its end, so there is no process reward. Are the answers "
                "empty, or does the value estimator return only NaN? process/missing_values in the log is the share of "
                "missing values.",
            )
        # If no token has an advantage, the filter's metrics already show it.
        if pays and figures["advantage/mean"][1] > 0 and not math.isnan(several_structured):
            self._note(
                "structure",
                estimator in SCALAR_ESTIMATORS or several_structured == 0,
                f"In every row, all tokens have the same advantage: estimator={estimator!r} loses the structure of the "
                "process rewards. Use 'centered_return', 'episode' or another per-token estimator.",
            )
        if pays and valued and not auto:
            self._note(
                "scale",
                process < DROWNED * outcome,
                f"The process part changes the advantages by {process:.1e}, but the spread of the outcome advantages "
                f"is {outcome:.1e}: the process part is drowned. Raise CreditSettings.process_weight, or lower "
                "scale_floor if V hardly moves.",
            )
        self._note(
            "time",
            seconds > DEAR * between,
            f"V(prefix) takes {seconds:.1f} s of the {between:.1f} s between two generation windows. Fewer and longer "
            "episodes (a larger min_episode_tokens) or a larger max_tokens_per_pass make it cheaper.",
        )

    def watch(self, figures: Mapping[str, float], *, full: bool, entropy: float | None) -> None:
        """Runs checks 4 and 5 on a window that V paid for.

        Args:
            figures: of `Watch.figures`.
            full: they cover the full number of windows.
            entropy: the policy's mean entropy per token, for a V that is made of the policy's log-probs;
                None = unknown, or another V.
        """
        low = figures.get("process/concordance_low")
        if full and low is not None:
            self._note(
                "worth",
                low <= 0.5,
                "V orders the completions of a problem no better than chance: the better one has the larger V in "
                f"{figures['process/concordance']:.1%} of the pairs, and the 95 % interval begins at {low:.1%}. Its "
                "credit is noise. Use another value, or CreditSettings(process_weight='auto'), which gives V the "
                "weight 0 until it predicts outcomes, or leave the callback out.",
            )
        if entropy is not None and len(self.entropies) < PATIENCE:
            self.entropies.append(entropy)
        elif entropy is not None:
            first = sum(self.entropies) / PATIENCE
            self._note(
                "entropy",
                entropy < LOST * first,
                f"The policy's mean entropy per token has fallen to {entropy:.2g}, from {first:.2g} in the first "
                "windows that V paid for. V is made of the policy's own log-probs, so its credit may reward confidence "
                "in any text, and the logged figures of V cannot show this. Look at the accuracy on held-out problems. "
                "If it falls, use a smaller process_weight (0 switches V off), or a value that is not made of "
                "log-probs.",
            )

    def _note(self, check: str, failed: bool, message: str) -> None:
        self._failures[check] = self._failures[check] + 1 if failed else 0
        if self._failures[check] == PATIENCE:
            logger.warning(message)
