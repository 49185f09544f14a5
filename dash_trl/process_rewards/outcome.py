"""`OutcomeValue` learns V(prefix) during a run, from the outcomes of the last windows::

    rollouts of a window ──► features of their prefixes ──► V, by the fit to the previous windows
                                     └── and outcomes ──► buffer of the last windows ──► the fit for the next window

All ranks have the same buffer and use the fit that rank 0 computes.
"""

import hashlib
import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_trl.process_rewards.features import FEATURES, WITHOUT_ENTROPIES, prefix_features
from dash_trl.process_rewards.fit import Fit, fit_outcomes
from dash_trl.process_rewards.values import ValueRequest
from dash_trl.rollout import joined

logger = logging.getLogger(__name__)

ROUNDING = 1e-5  # a weighted sum of rewards is float32, so it may be this much below 0 or above 1


@dataclass(frozen=True)
class _Rollouts:
    """The entry of one window in the buffer: the features and outcomes of the window's R scored rollouts.

    All fields are tensors, so that `torch.load(weights_only=True)` can read a checkpoint that contains the buffer.

    Attributes:
        problem: [R] int64, a number that identifies the prompt.
        outcome: [R] float64, the weighted sum of the rewards.
        prefixes: [R] int64, number of rows in `features` that belong to each rollout.
        features: [M, F] float64, the F finite features of each of the M prefixes, rollout by rollout.
    """

    problem: Tensor
    outcome: Tensor
    prefixes: Tensor
    features: Tensor


class OutcomeValue:
    """V(prefix) = E[outcome | features of the tokens' log-probs], fitted to the rollouts of the last windows.

    `OutcomeValue` needs neither answers nor a reward model. It learns from the outcomes of the run's own rollouts and
    the log-probs that the sampler reports for their tokens. If the sampler reports no log-probs (transformers'
    `generate`), log-probs and entropies come from one forward pass over all scored rows. This pass takes about a third
    of the time of training on these rows. `process_rewards.features` computes the features, and `process_rewards.fit`
    fits a regression to them. The fit uses all scored rows that have loss tokens, including rows of solved groups, and
    each rollout has the weight 1.

    - The buffer holds the rollouts of the last windows. V of a window is computed by a fit to the buffer. Only then is
      the window added to the buffer, so that V does not depend on outcomes of its own window.
    - V(b_0) is the mean outcome of the buffer, because the empty prefix has no log-probs. (The mean outcome of the
      row's group cannot be used, because it depends on outcomes of the same window.) So V_0 does not depend on the
      problem. The difficulty of the problem changes the log-probs of the first episode, and so the first U.
    - V is missing until the buffer holds at least `min_rollouts` rollouts with an outcome above the mean and at least
      `min_rollouts` other rollouts. Both kinds of rollouts must come from at least `min_problems` problems, and only
      rollouts with a prefix whose log-probs are all known are counted. While V is missing, rows keep their outcome
      advantage.
    - If a prefix contains a token with unknown log-prob, its value is missing.

    V depends on the policy's confidence. So V does not fall at errors of which the policy is sure, and a policy that is
    rewarded by V may become sure of everything. Watch entropy and accuracy.

    Args:
        space: "probability" for outcomes within 0 … 1, fitted by logistic regression; "reward" for other outcomes,
            fitted by least squares.
        num_windows: number of windows in the buffer; older windows are dropped.
        ridge: number > 0, weight of the penalty on squared coefficients. For comparison, each rollout has the weight 1.
        min_rollouts: the least number of rollouts of each kind in the buffer; see above.
        min_problems: the least number of problems for each kind of rollouts; see above.
    Attributes:
        ready: True = there is a fit, so values can be computed.
    Raises:
        ValueError: if a setting is out of range; during training, if a reward is outside 0 … 1 with
            `space="probability"`, or if the rollouts in the buffer of a resumed run have another number of features,
            because the sampler has changed.
    """

    needs_answers = False
    needs_log_probs = True

    def __init__(
        self,
        *,
        space: str = "probability",
        num_windows: int = 8,
        ridge: float = 1.0,
        min_rollouts: int = 32,
        min_problems: int = 8,
    ):
        if space not in ("probability", "reward"):
            raise ValueError(f"space={space!r} is unknown: use 'probability' or 'reward'.")
        if min(num_windows, min_rollouts, min_problems) < 1 or not ridge > 0:
            raise ValueError(
                f"num_windows={num_windows}, min_rollouts={min_rollouts}, min_problems={min_problems} and "
                f"ridge={ridge} give nothing to fit V to, or a fit without bounds: the first three must be at least 1, "
                "and ridge must be above 0."
            )
        self.space = space
        self.num_windows, self.ridge = num_windows, ridge
        self.min_rollouts, self.min_problems = min_rollouts, min_problems
        self._windows: list[_Rollouts] = []  # the buffer, the same on all ranks
        self._fit: Fit | None = None
        self._outdated = False  # True = the buffer has changed since the last fit
        self._said = False  # True = the warning about missing data was given

    @property
    def ready(self) -> bool:
        return self._fit is not None

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        if self._outdated:  # the fit is not computed in load_state_dict, because the trainer is not known there
            self._fit = trainer.ranks.agree(partial(self._fitted, say=trainer.ranks.rank == 0), from_main=True)
            self._outdated = False
        return trainer.ranks.agree(partial(self._values, requests))

    def learn(self, requests: Sequence[ValueRequest], outcomes: Sequence[float], trainer: Any) -> None:
        """Adds a window to the buffer, after V has been computed for this window. This is a collective.

        Args:
            requests: this rank's scored rollouts.
            outcomes: the weighted sum of rewards of each rollout.
            trainer: the trainer. Only its `ranks` and its `recorder` are used.
        """
        own, unknown = trainer.ranks.agree(partial(self._lessons, requests, outcomes))
        parts = [one for one in trainer.ranks.gather_object(own) if one is not None]
        if parts:
            self._windows = [*self._windows, joined(parts)][-self.num_windows :]
            self._outdated = True
        prefixes = sum(len(part.features) for part in parts)
        left_out = sum(trainer.ranks.gather_object(unknown))
        trainer.recorder.log(
            {
                "process/learned_rollouts": float(sum(len(window.outcome) for window in self._windows)),
                "process/unknown_prefixes": left_out / max(1, prefixes + left_out),
            }
        )

    def learned_from(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether the buffer contains a rollout of a prompt.

        Args:
            prompt_ids: token ids of the prompt.
        """
        return any(_number(prompt_ids) in window.problem for window in self._windows)

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings and the buffer. A resumed run computes the fit from the buffer again.

        The state is the same on all ranks, and its tensors are never changed later. A resumed run uses the settings of
        its own `OutcomeValue`. The stored settings are for programs that load a checkpoint without training.
        """
        settings = {
            "space": self.space,
            "num_windows": self.num_windows,
            "ridge": self.ridge,
            "min_rollouts": self.min_rollouts,
            "min_problems": self.min_problems,
        }
        return {"settings": settings, "windows": [dict(vars(window)) for window in self._windows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        windows = [_Rollouts(**window) for window in state["windows"]]
        for window in windows:
            self._check(window.outcome.tolist())
        self._windows, self._fit, self._outdated, self._said = windows[-self.num_windows :], None, bool(windows), False

    def _values(self, requests: Sequence[ValueRequest]) -> list[list[float]]:
        asked = [request for request in requests if request.boundaries]
        if self._fit is None or not asked:
            return [[math.nan] * len(request.boundaries) for request in requests]
        table = torch.tensor([row for request in asked for row in self._features(request)], dtype=torch.double)
        inner = iter(self._fit(table.view(-1, self._columns(asked))))
        return [
            [self._fit.base, *(next(inner) for _ in request.boundaries[1:])] if request.boundaries else []
            for request in requests
        ]

    def _features(self, request: ValueRequest) -> list[list[float]]:
        assert request.log_probs is not None, "ValueRequest(..., log_probs=...), one per token of the completion"
        return prefix_features(request.boundaries, request.log_probs, request.entropies, request.own)

    def _columns(self, requests: Sequence[ValueRequest]) -> int:
        """Returns F, the number of features. Raises a `ValueError` if requests and buffer have different F."""
        known = {len(FEATURES) if request.entropies is not None else WITHOUT_ENTROPIES for request in requests}
        known |= {window.features.shape[1] for window in self._windows[-1:]}
        if len(known) > 1:
            raise ValueError(
                f"OutcomeValue has rollouts with {WITHOUT_ENTROPIES} features per prefix, and others with "
                f"{len(FEATURES)}: a sampler reports log-probs only, but a pass of the trainer's model also gives "
                "entropies. Use the sampler that the run began with, or delete callback_states.pt of the checkpoint to "
                "begin with an empty buffer."
            )
        return known.pop()

    def _check(self, outcomes: Sequence[float]) -> None:
        wrong = [one for one in outcomes if not -ROUNDING <= one <= 1 + ROUNDING]
        if self.space == "probability" and wrong:
            raise ValueError(
                f"OutcomeValue fits the probability of success, but a completion has the weighted reward {wrong[0]:g}, "
                "which is not a probability. Pass OutcomeValue(space='reward'), or scale rewards and reward_weights to "
                "0 … 1."
            )

    def _lessons(self, requests: Sequence[ValueRequest], outcomes: Sequence[float]) -> tuple[_Rollouts | None, int]:
        """Returns this rank's rollouts for the buffer (None = it has none), and the number of prefixes left out.

        A prefix is left out if it contains a token with unknown log-prob.
        """
        self._check(outcomes)
        if not requests:
            return None, 0
        columns = self._columns(requests)
        rows = [self._features(request) for request in requests]
        outcome = torch.tensor(outcomes, dtype=torch.double)
        known = [[row for row in of_one if all(map(math.isfinite, row))] for of_one in rows]
        cells = [row for of_one in known for row in of_one]
        return _Rollouts(
            problem=torch.tensor([_number(request.prompt_ids) for request in requests]),
            outcome=outcome.clamp(0, 1) if self.space == "probability" else outcome,
            prefixes=torch.tensor([len(of_one) for of_one in known]),
            features=torch.tensor(cells, dtype=torch.double).view(-1, columns),
        ), sum(map(len, rows)) - len(cells)

    def _fitted(self, say: bool) -> Fit | None:
        buffer = joined(self._windows)
        better = buffer.outcome > buffer.outcome.mean()
        taught = buffer.prefixes > 0
        found = []
        for kind in (better & taught, ~better & taught):
            found += [int(kind.sum()), len(buffer.problem[kind].unique())]
        if min(found[::2]) < self.min_rollouts or min(found[1::2]) < self.min_problems:
            if say and not self._said and len(self._windows) == self.num_windows:
                self._said = True
                logger.warning(
                    f"OutcomeValue cannot tell good prefixes from bad ones yet: of the {len(better)} rollouts of the "
                    f"last {self.num_windows} generation windows, {found[0]} rollouts from {found[1]} problems have a "
                    f"reward above the mean and prefixes with known log-probs, and {found[2]} rollouts from {found[3]} "
                    f"problems have a lower reward and such prefixes. It needs {self.min_rollouts} rollouts from "
                    f"{self.min_problems} problems of each kind. Until then, rows keep their outcome advantage. Easier "
                    "or harder problems, a larger num_windows, or smaller min_rollouts and min_problems help."
                )
            return None
        rollout = torch.arange(len(better)).repeat_interleave(buffer.prefixes)
        return fit_outcomes(
            buffer.features, rollout, buffer.outcome, logistic=self.space == "probability", ridge=self.ridge
        )


def _number(prompt_ids: Sequence[int]) -> int:
    """Returns a number that identifies a prompt. It is the same on every rank and in every run."""
    return int.from_bytes(hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=7).digest(), "big")
