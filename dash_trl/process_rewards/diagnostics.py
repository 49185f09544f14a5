"""Does the process signal arrive? The three checks of "Training-Free Process Rewards for LLM RL", and its metrics.

    0. Are there values at all?
    1. Does any row have more than one advantage?   2. Do the advantages change by the process part?
    3. What does V cost?
    4. Does V order rollouts better than chance?   5. Is the policy still unsure of anything, where V is its confidence?

Each failed check is said once, with the remedy.
"""

import logging
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from dash_trl.process_rewards.credit import Rewards, moments

logger = logging.getLogger(__name__)

# Estimators that give all tokens of a row one advantage, as they are defined.
SCALAR_ESTIMATORS = ("grpo", "rloo")
DROWNED = 0.01  # the process part's share of the advantages' spread under which it is lost in the outcome
DEAR = 0.5  # share of the time between two windows that V may take
LOST = 0.1  # share of its entropy at first under which a policy has stopped to try anything else
PATIENCE = 3  # windows in a row before a warning: one window may be an accident


Figures = dict[str, tuple[float, float]]  # name → mean and standard deviation; NaN where there is nothing to average


def batch_figures(rewards: Rewards, boundaries: Tensor, values: Tensor, credit: Tensor, *, skipped: Tensor) -> Figures:
    """Figures of a generation batch, over all ranks: what is logged, under its name, and what the checks ask for.

    Args:
        boundaries, values: [N, K], padded with −1 and NaN. credit: [N, T]. skipped: [N] bool, rows not asked for.
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
    """What is logged of them."""
    numbers = {name: mean for name, (mean, _) in figures.items() if "/" in name}
    numbers["advantage/std"] = figures["advantage/mean"][1]
    numbers["advantage/std_outcome_only"] = figures["advantage/mean_outcome_only"][1]
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def structured(credit: Tensor, mask: Tensor) -> Tensor:
    """[N] bool: rows whose tokens have more than one advantage."""
    low, high = torch.where(mask, credit, credit[:, :1]).aminmax(dim=1)
    return high - low > 1e-6


class Diagnostics:
    """Runs the checks on each generation batch and warns once per check."""

    def __init__(self) -> None:
        self._failures = {"values": 0, "structure": 0, "scale": 0, "time": 0, "worth": 0, "entropy": 0}
        self._last = -math.inf  # seconds, at the window before
        self.entropies: list[float] = []  # of the first `PATIENCE` windows that were paid by V

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
        """
        Args:
            figures: `batch_figures`. seconds: that the values took. estimator: its name.
            ready: False while the value estimator has too little to go by, so that values are missing by intent.
            pays: False while nothing is paid by V, by intent.
            auto: V is paid what it is worth: a small weight is no mistake.
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
                "No row has a value at its beginning and its end, so that there is no process reward: are the answers "
                "empty, or does the value estimator give NaN only? process/missing_values in the log is their share.",
            )
        # Where no token has an advantage, the filter's metrics say so.
        if pays and figures["advantage/mean"][1] > 0 and not math.isnan(several_structured):
            self._note(
                "structure",
                estimator in SCALAR_ESTIMATORS or several_structured == 0,
                f"All tokens of every row have one advantage: estimator={estimator!r} loses the structure of the "
                "process rewards. Use 'centered_return', 'episode' or another per-token estimator.",
            )
        if pays and valued and not auto:
            self._note(
                "scale",
                process < DROWNED * outcome,
                f"The process part changes the advantages by {process:.1e}, the outcome's spread is {outcome:.1e}: the "
                "signal is drowned. Raise CreditSettings.process_weight, or lower scale_floor if V hardly moves.",
            )
        self._note(
            "time",
            seconds > DEAR * between,
            f"V(prefix) takes {seconds:.1f} s of the {between:.1f} s between two generation batches. Fewer, longer "
            "episodes (min_episode_tokens) or a larger max_tokens_per_pass make it cheaper.",
        )

    def watch(self, figures: Mapping[str, float], *, full: bool, entropy: float | None) -> None:
        """Of a window that was paid by V.

        Args:
            figures: `Watch.figures`. full: whether they are of as many windows as are looked at.
            entropy: mean of the policy's tokens, for a V that is made of its log-probs; None = not known, or another V.
        """
        low = figures.get("process/concordance_low")
        if full and low is not None:
            self._note(
                "worth",
                low <= 0.5,
                f"V orders the rollouts of a problem no better than chance: the better one has the larger V in "
                f"{figures['process/concordance']:.1%} of the pairs, and the 95 % interval begins at {low:.1%}. Its "
                "credit is noise. Use another value, CreditSettings(process_weight='auto'), which pays nothing while V "
                "is worth nothing, or leave the callback out.",
            )
        if entropy is not None and len(self.entropies) < PATIENCE:
            self.entropies.append(entropy)
        elif entropy is not None:
            first = sum(self.entropies) / PATIENCE
            self._note(
                "entropy",
                entropy < LOST * first,
                f"The policy's mean entropy per token has fallen to {entropy:.2g}, from {first:.2g} in the first "
                "windows that V paid for. V is made of the policy's own log-probs, so that its credit may pay for "
                "being sure, whatever is said; no figure of V's worth can see that. Look at the accuracy on held-out "
                "problems. If it falls, use a smaller process_weight (0 ends it), or a value that is not made of "
                "log-probs.",
            )

    def _note(self, check: str, failed: bool, message: str) -> None:
        self._failures[check] = self._failures[check] + 1 if failed else 0
        if self._failures[check] == PATIENCE:
            logger.warning(message)
