"""`OutcomeValue`: V(prefix) fitted, while a run goes on, to how the completions of its last windows ended.

    a window's rollouts ──► features of their prefixes ──► V by the fit to the windows before
                                     └── and outcomes ──► buffer of the last windows ──► the fit for the next one

All ranks keep the same buffer, and the first one's fit is that of all.
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

ROUNDING = 1e-5  # by which a sum of rewards times weights, in float32, may miss 0 or 1


@dataclass(frozen=True)
class _Rollouts:
    """What a window's R scored rollouts teach; only tensors, so that `torch.load(weights_only=True)` reads them.

    Attributes:
        problem: [R] int64, a number for the prompt. outcome: [R] float64.
        prefixes: [R] int64, how many of the rows of `features` are a rollout's. features: [M, F] float64, finite.
    """

    problem: Tensor
    outcome: Tensor
    prefixes: Tensor
    features: Tensor


class OutcomeValue:
    """V(prefix) = E[outcome | what the log-probs up to it look like], fitted to the rollouts of the last windows.

    It needs no answers and no reward model: the outcomes of a run's own rollouts, and the log-probs of their tokens,
    as the sampler reports them. If it reports none (transformers' `generate`), log-probs and entropies come from one
    forward pass over all scored rows, a third of what training on them costs. `process_rewards.features` has the
    numbers, `process_rewards.fit` the fit: logistic with squares and products. All scored rows that have tokens teach,
    those of solved groups too, and each rollout counts 1.

    - A window is valued by a fit that has not seen its outcomes, and teaches afterwards.
    - V(b_0) is the mean outcome of the buffer: the empty prefix has no log-probs, so that this is what a fit to it
      would give. (The mean of the row's own group would tell outcomes of the window that is valued.) V knows nothing of
      the problem: how hard it is shows from the first episode's log-probs on, and is paid there.
    - Until the buffer has `min_rollouts` better than its mean and as many that are not, each from `min_problems`
      problems, V is missing and rows keep their outcome advantage; a prefix with a token of unknown log-prob has none.

    Beware: it trusts the policy's confidence. Errors of which a model is sure are not seen, and a policy that is paid
    for its own log-probs may learn to be sure: watch entropy and accuracy.

    Args:
        space: "probability" for outcomes in 0 … 1; "reward" for others, fitted by least squares.
        num_windows: how many of the last generation windows are fitted.
        ridge: weight of the squared coefficients against the rollouts, each of which counts 1.
        min_rollouts, min_problems: see above.
    Attributes:
        ready: whether there is a fit.
    Raises:
        ValueError: for impossible settings; in training, for a reward that is no probability with that space, and for
            a resumed state of another sampler.
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
                f"ridge={ridge} give nothing to fit V to, or a fit without bounds: the first three are at least 1, "
                "ridge is above 0."
            )
        self.space = space
        self.num_windows, self.ridge = num_windows, ridge
        self.min_rollouts, self.min_problems = min_rollouts, min_problems
        self._windows: list[_Rollouts] = []  # the last ones, the same on all ranks
        self._fit: Fit | None = None
        self._outdated = False
        self._said = False  # that there is nothing to fit to

    @property
    def ready(self) -> bool:
        return self._fit is not None

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        if self._outdated:  # here, where the ranks are known: a resumed state is fitted, too
            self._fit = trainer.ranks.agree(partial(self._fitted, say=trainer.ranks.rank == 0), from_main=True)
            self._outdated = False
        return trainer.ranks.agree(partial(self._values, requests))

    def learn(self, requests: Sequence[ValueRequest], outcomes: Sequence[float], trainer: Any) -> None:
        """Takes in a window that has been valued: this rank's scored rollouts, and their weighted rewards."""
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
        """Whether the buffer has a rollout of this problem."""
        return any(_number(prompt_ids) in window.problem for window in self._windows)

    def state_dict(self) -> dict[str, Any]:
        """The settings, and the buffer, of which the fit is a function; the same on all ranks.

        A resumed run goes on with its own settings; those saved are for who has no others. The tensors never change.
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
        """F of these requests, which is that of the buffer."""
        known = {len(FEATURES) if request.entropies is not None else WITHOUT_ENTROPIES for request in requests}
        known |= {window.features.shape[1] for window in self._windows[-1:]}
        if len(known) > 1:
            raise ValueError(
                f"OutcomeValue has rollouts with {WITHOUT_ENTROPIES} numbers per prefix, and others with "
                f"{len(FEATURES)}: a sampler reports log-probs alone, a pass of the trainer's model gives entropies, "
                "too. Go on with the sampler that the run began with, or delete callback_states.pt of the checkpoint "
                "to begin with an empty buffer."
            )
        return known.pop()

    def _check(self, outcomes: Sequence[float]) -> None:
        wrong = [one for one in outcomes if not -ROUNDING <= one <= 1 + ROUNDING]
        if self.space == "probability" and wrong:
            raise ValueError(
                f"OutcomeValue fits the probability of success, but a completion has the weighted reward {wrong[0]:g}, "
                "which is none. Pass OutcomeValue(space='reward'), or bring rewards and reward_weights to 0 … 1."
            )

    def _lessons(self, requests: Sequence[ValueRequest], outcomes: Sequence[float]) -> tuple[_Rollouts | None, int]:
        """What this rank's rollouts teach, None without any; and how many of their prefixes are unknown."""
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
                    f"OutcomeValue has nothing to tell good prefixes from bad ones by: of the {len(better)} rollouts "
                    f"of the last {self.num_windows} generation windows, {found[0]} of {found[1]} problems have a "
                    f"reward above their mean and prefixes of known log-prob, {found[2]} of {found[3]} a "
                    f"lower one. It takes {self.min_rollouts} of {self.min_problems} problems each. Rows keep their "
                    "outcome advantage until then: problems of another difficulty, a larger num_windows, or smaller "
                    "min_rollouts and min_problems end it sooner."
                )
            return None
        rollout = torch.arange(len(better)).repeat_interleave(buffer.prefixes)
        return fit_outcomes(
            buffer.features, rollout, buffer.outcome, logistic=self.space == "probability", ridge=self.ridge
        )


def _number(prompt_ids: Sequence[int]) -> int:
    """For the same prompt the same, on every rank and in every run."""
    return int.from_bytes(hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=7).digest(), "big")
