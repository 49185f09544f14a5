"""Every estimator on a study: values at all boundaries, and their figures."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dash_trl.process_rewards import OutcomeValue, ValueRequest, checked_values
from dash_trl.value_quality.candidates import Candidate, Position, Stage, with_log_probs
from dash_trl.value_quality.figures import figures_of
from dash_trl.value_quality.study import Plan, Study

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Results:
    """Of each estimator, by its name: `figures_of` it, and its values, one list per response."""

    figures: dict[str, dict[str, Any]]
    values: dict[str, list[list[float]]]

    def as_json(self, study: Study) -> dict[str, Any]:
        """The figures, and of every response its truth and values; what is missing is None."""
        rows = enumerate(zip(study.problems, study.requests, study.truth, strict=True))
        truth = [one for row in study.truth for one in row]
        known = [one for one in truth if not math.isnan(one)]
        return {
            "responses": len(study.requests),
            "boundaries": len(truth),
            "without_truth": len(truth) - len(known),
            "mean_truth": math.fsum(known) / len(known) if known else None,
            "estimators": self.figures,
            "values": [
                {
                    "problem": problem,
                    "prompt": (request.example or {}).get("prompt"),
                    "boundaries": list(request.boundaries),
                    "truth": _known(truth),
                    **{name: _known(values[row]) for name, values in self.values.items()},
                }
                for row, (problem, request, truth) in rows
            ],
        }


def measure(candidates: Sequence[Candidate], study: Study, plan: Plan, model: Any, tokenizer: Any) -> Results:
    """Position and the candidates.

    Args:
        model: a transformers model, of the weights that the study was sampled with.
    """
    requests, lessons, stage = study.requests, study.lessons, Stage(model, tokenizer)
    if any(one.needs_log_probs for one in candidates):
        requests = with_log_probs(requests, model, plan.temperature)
        lessons = with_log_probs(lessons, model, plan.temperature)
    results = Results({}, {})
    for one in [Candidate("position", Position()), *candidates]:
        if one.taught and type(one.value) is OutcomeValue and not study.probabilities:
            one = replace(one, value=OutcomeValue(space="reward"))
        own, taught = (_without_entropies(requests), _without_entropies(lessons))
        if one.entropies:
            own, taught = requests, lessons
        for name, value in one.fitted(plan.fit_rollouts, taught, study.lesson_outcomes, stage):
            values = checked_values(value(own, stage), own, value)
            known = [v for row in values for v in row if not math.isnan(v)]
            probabilities = study.probabilities and getattr(value, "space", None) == "probability"
            if probabilities and not all(0 <= v <= 1 for v in known):
                wrong = next(v for v in known if not 0 <= v <= 1)
                logger.warning(
                    f"{name} says of its values that they are probabilities, but gave {wrong:g}: Brier score and "
                    "calibration are left out."
                )
                probabilities = False
            results.values[name] = values
            results.figures[name] = figures_of(
                values, study.truth, study.problems, probabilities=probabilities, seed=plan.seed
            )
    return results


def _without_entropies(requests: Sequence[ValueRequest]) -> list[ValueRequest]:
    return [replace(request, entropies=None) for request in requests]


def _known(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
