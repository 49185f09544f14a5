"""Loads value estimators from a Python file and from checkpoints, and measures them.

An estimator is called with `(requests, trainer)`, as in training. A `stage` replaces the trainer: it has the model, and
the other attributes of a trainer that the estimators of `dash_trl` use.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from dash_trl.distributed import Ranks
from dash_trl.process_rewards import FEATURES, MonteCarloValue, OutcomeValue, ServerValue, ValueRequest, checked_values
from dash_trl.rewards import load_from_file
from dash_trl.rollout import STATES, load_states
from dash_trl.update import evaluating
from examples.value_quality.figures import ceiling, figures_of
from examples.value_quality.study import Plan, Study


def position(requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
    """Value estimator that returns the number of each boundary in its response. It is the baseline of all others."""
    return [[float(number) for number in range(len(request.boundaries))] for request in requests]


def stage(model: Any, tokenizer: Any) -> SimpleNamespace:
    """Returns a stand-in for the trainer, with one rank. It ignores logged metrics."""
    accelerator = Accelerator()
    return SimpleNamespace(
        model=model,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        accelerator=accelerator,
        ranks=Ranks(accelerator),
        recorder=SimpleNamespace(log=lambda figures: None),
    )


@dataclass(frozen=True)
class Candidate:
    """A value estimator that is to be measured.

    Args:
        name: its name in the table.
        value: see `ValueEstimator`.
        sizes: for a value with `learn`: numbers of rollouts. For each number, a copy learns from so many rollouts and
            is measured. Empty = the value is measured as it is.
        entropies: True = a value that `needs_log_probs` gets entropies, too.
    """

    name: str
    value: Any
    sizes: Sequence[int] = ()
    entropies: bool = True

    def fitted(self, study: Study, lessons: Sequence[ValueRequest], trainer: Any) -> Iterator[tuple[str, Any]]:
        """For each size, yields a name and a copy of the estimator that has learned from the first `size` lessons."""
        if not self.sizes:
            yield self.name, self.value
        for size in self.sizes:
            value = copy.deepcopy(self.value)
            if type(value) is OutcomeValue and not study.probabilities:
                value = OutcomeValue(space="reward")
            known = [row for row in range(size) if study.lesson_outcomes[row] is not None]
            value.learn([lessons[row] for row in known], [study.lesson_outcomes[row] for row in known], trainer)
            yield f"{self.name}, {size:,} rollouts", value


def of_file(path: str, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Loads estimators from a Python file; a class is called without arguments.

    Args:
        path: the Python file.
        names: names of the estimators in the file.
    Returns:
        For each estimator, its name in the table and the estimator itself.
    Raises:
        ValueError: if a name is missing, the file raises an error, or an estimator cannot be measured here.
    """
    return [
        (f"{Path(path).stem}.{name}", _checked(f"value_name={name!r} of {path}", value))
        for name, value in zip(names, load_from_file(path, names, "value"), strict=True)
    ]


def _checked(name: str, value: Any) -> Any:
    try:
        value = value() if isinstance(value, type) else value
    except Exception as error:
        raise ValueError(
            f"{name} is a class that cannot be called without arguments ({type(error).__name__}: {error}): name an "
            "object of it."
        ) from error
    if not callable(value):
        raise ValueError(
            f"{name} is {value!r}, which cannot estimate V(prefix): name an object or a function that takes "
            "(requests, trainer), or a class of them."
        )
    if isinstance(value, MonteCarloValue | ServerValue):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which samples or scores by its trainer, but there is no trainer "
            "here. MonteCarloValue would be the truth itself; ServerValue has the same values as --value answer."
        )
    return value


def saved(checkpoint: str) -> Candidate:
    """Loads the `OutcomeValue` of the `ProcessRewardCallback` in a checkpoint.

    Raises:
        ValueError: if the checkpoint has no `OutcomeValue`, or this value has learned nothing.
    """
    name = OutcomeValue.__name__
    state = next((state[name] for state in load_states(checkpoint).values() if name in state), None)
    if state is None or not state["windows"]:
        raise ValueError(
            f"checkpoint={checkpoint!r} has no OutcomeValue that learned anything: name a checkpoint with a {STATES} "
            "of a run with ProcessRewardCallback(OutcomeValue())."
        )
    value = OutcomeValue(**state["settings"])
    value.load_state_dict(state)
    rollouts = sum(len(window["outcome"]) for window in state["windows"])
    entropies = state["windows"][0]["features"].shape[1] == len(FEATURES)
    return Candidate(f"outcome, {rollouts:,} rollouts of {Path(checkpoint).name}", value, entropies=entropies)


@torch.no_grad()
def with_log_probs(requests: Sequence[ValueRequest], model: Any, temperature: float) -> list[ValueRequest]:
    """Returns requests with the log-probs and entropies of their tokens, at the sampling temperature.

    Each request takes one pass of the model.
    """
    found = []
    with evaluating(model):
        for one in requests:
            ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1].float() / temperature
            log_probs = selective_log_softmax(logits, ids[0, len(one.prompt_ids) :]).tolist()
            entropies = entropy_from_logits(logits).tolist()
            found.append(replace(one, log_probs=tuple(log_probs), entropies=tuple(entropies)))
    return found


def measure(candidates: Sequence[Candidate], study: Study, plan: Plan, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Measures the candidates, and the position as baseline.

    Args:
        candidates: the value estimators.
        study: the samples.
        plan: how they were sampled.
        model: a transformers model with the weights that sampled the study.
        tokenizer: its tokenizer.
    Returns:
        The figures, and all values with the truth, as JSON; None = missing.
    """
    requests, lessons, trainer = study.requests, study.lessons, stage(model, tokenizer)
    if any(getattr(one.value, "needs_log_probs", False) for one in candidates):
        requests, lessons = (with_log_probs(of, model, plan.temperature) for of in (requests, lessons))
    problems = [number // plan.num_samples for number in range(len(requests))]
    rows = [
        {"problem": problem, "prompt": one.example["prompt"], "boundaries": list(one.boundaries), "truth": _json(truth)}
        for problem, one, truth in zip(problems, requests, study.truth, strict=True)
    ]
    estimators = {}
    for one in [Candidate("position", position), *candidates]:
        own, taught = requests, lessons
        if not one.entropies:
            own, taught = ([replace(request, entropies=None) for request in of] for of in (requests, lessons))
        for name, value in one.fitted(study, taught, trainer):
            values = checked_values(value(own, trainer), own, value)
            probabilities = study.probabilities and getattr(value, "space", None) == "probability"
            estimators[name] = figures_of(values, study.truth, problems, probabilities=probabilities, seed=plan.seed)
            for row, of_row in zip(rows, values, strict=True):
                row[name] = _json(of_row)
    truth = [one for row in study.truth for one in row]
    known = [one for one in truth if not math.isnan(one)]
    return {
        "responses": len(requests),
        "boundaries": len(truth),
        "without_truth": len(truth) - len(known),
        "mean_truth": math.fsum(known) / len(known) if known else None,
        "estimators": estimators,
        "ceiling": {"num_rollouts": plan.num_rollouts, **ceiling(*study.halves, problems)},
        "values": rows,
    }


def _json(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
