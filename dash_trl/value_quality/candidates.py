"""What is measured: value estimators by name, by import path and from a checkpoint, and what they are handed.

An estimator is called as in training, `(requests, trainer)`; for the trainer there is a `Stage`, which has the model
and what the estimators of this package use of a trainer.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from dash_trl.distributed import Ranks
from dash_trl.process_rewards import FEATURES, MonteCarloValue, OutcomeValue, ServerValue, ValueRequest
from dash_trl.rollout import STATES, load_states
from dash_trl.update import evaluating

TOKENS_PER_PASS = 2048  # whose logits, of a vocabulary of 152 thousand in float32, are 1.2 GB


class Position:
    """The rival of every value: a boundary's number in its response."""

    space = "position"
    needs_answers = False

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return [[float(number) for number in range(len(request.boundaries))] for request in requests]


@dataclass(frozen=True)
class Candidate:
    """
    Args:
        name: in the table. value: see `ValueEstimator`.
        taught: it has `learn`, and is measured after each number of rollouts.
        entropies: whether it is to get them, where it `needs_log_probs`.
    """

    name: str
    value: Any
    taught: bool = False
    entropies: bool = True

    @property
    def needs_answers(self) -> bool:
        return getattr(self.value, "needs_answers", True)

    @property
    def needs_log_probs(self) -> bool:
        return getattr(self.value, "needs_log_probs", False)

    def fitted(
        self, sizes: Sequence[int], lessons: Sequence[ValueRequest], outcomes: Sequence[float | None], stage: Any
    ) -> Iterator[tuple[str, Any]]:
        """(name, estimator) after the first so many lessons, for each size; as it is, if it is not taught."""
        if not self.taught:
            yield self.name, self.value
        for size in sizes if self.taught else ():
            value = copy.deepcopy(self.value)
            known = [
                (lesson, outcome)
                for lesson, outcome in zip(lessons[:size], outcomes[:size], strict=True)
                if outcome is not None
            ]
            value.learn([lesson for lesson, _ in known], [outcome for _, outcome in known], stage)
            yield f"{self.name}, {size:,} rollouts", value


class Stage:
    """In place of a trainer: `model`, `processing_class`, `accelerator`, `ranks` (one), a `recorder` that drops all."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.processing_class, self._tokenizer = model, tokenizer, tokenizer
        self.accelerator = Accelerator()
        self.ranks = Ranks(self.accelerator)
        self.recorder = SimpleNamespace(log=lambda figures: None)


def imported(path: str) -> Any:
    """The estimator of an import path, `module.name`, looked for in the working directory, too; a class is called.

    Raises:
        ValueError: there is none, or its module fails.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"value_path={path!r} is no import path of an estimator: write it as module.name.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        value = getattr(importlib.import_module(module), name)
        value = value() if isinstance(value, type) else value
    except Exception as error:
        raise ValueError(
            f"value_path={path!r} gives no estimator ({type(error).__name__}: {error}). It is module.name, imported "
            f"from {Path.cwd()} or what is installed; a class is called without arguments."
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(value):
        raise ValueError(
            f"value_path={path!r} is {value!r}, which cannot estimate V(prefix): name an instance or a function that "
            "takes (requests, trainer), or a class of them."
        )
    if isinstance(value, MonteCarloValue | ServerValue):
        raise ValueError(
            f"value_path={path!r} is a {type(value).__name__}, which samples or scores as its trainer does: here is "
            "none. Completions of prefixes are the truth that all others are measured by; ServerValue's values are "
            "those of --values answer."
        )
    if hasattr(value, "learn"):
        try:
            copy.deepcopy(value)
        except Exception as error:
            raise ValueError(
                f"value_path={path!r} learns, but cannot be copied ({type(error).__name__}: {error}), and to each "
                "number of rollouts a copy is fitted. Open what cannot be copied at the first call."
            ) from error
    return value


def saved(checkpoint: str) -> Candidate:
    """The `OutcomeValue` that a checkpoint's `ProcessRewardCallback` had.

    Raises:
        ValueError: there is none, or it has learned nothing.
    """
    name = OutcomeValue.__name__
    state = next((state[name] for state in load_states(checkpoint).values() if name in state), None)
    if state is None or not state["windows"]:
        raise ValueError(
            f"checkpoint={checkpoint!r} has no OutcomeValue that learned anything: {STATES} was looked for in it, of a "
            "run with ProcessRewardCallback(OutcomeValue())."
        )
    value = OutcomeValue(**state["settings"])
    value.load_state_dict(state)
    rollouts = sum(len(window["outcome"]) for window in state["windows"])
    size = f"{rollouts:,} rollouts of {Path(checkpoint).name or checkpoint}"
    entropies = state["windows"][0]["features"].shape[1] == len(FEATURES)
    return Candidate(f"outcome, {size}", value, entropies=entropies)


@torch.no_grad()
def with_log_probs(requests: Sequence[ValueRequest], model: Any, temperature: float) -> list[ValueRequest]:
    """The requests with log-probs and entropies of their tokens, at the temperature of sampling, as in training.

    A pass over all of them, in batches of `TOKENS_PER_PASS` tokens, padding included, or of one request.
    """
    found: dict[int, ValueRequest] = {}
    with evaluating(model):
        for rows in _batches([len(one.prompt_ids) + len(one.completion_ids) for one in requests]):
            of_rows = [requests[row] for row in rows]
            ids = [[*one.prompt_ids, *one.completion_ids] for one in of_rows]
            width = max(map(len, ids))
            padded = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
            keep = 1 + max(len(one.completion_ids) for one in of_rows)
            inputs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "logits_to_keep": keep, "use_cache": False}
            taken = {name: value for name, value in inputs.items() if name in signature(model.forward).parameters}
            logits = model(input_ids=padded, attention_mask=mask, **taken).logits[:, -keep:]
            for row, one, of_row, tokens in zip(rows, of_rows, logits, padded, strict=True):
                length = len(one.completion_ids)
                own = of_row[keep - 1 - length : keep - 1].float() / temperature
                log_probs = selective_log_softmax(own, tokens[width - length :])
                found[row] = replace(
                    one, log_probs=tuple(log_probs.tolist()), entropies=tuple(entropy_from_logits(own).tolist())
                )
    return [found[row] for row in range(len(requests))]


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > TOKENS_PER_PASS:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
