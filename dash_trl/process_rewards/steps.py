"""`StepValue`: credit by a score of each episode, from a function or a process reward model.

    completion ──► Segmenter ──► texts of the episodes ──► scores ──► V, whose differences are paid

Letters: n episodes of a completion.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from accelerate import PartialState

from dash_trl.process_rewards.arguments import named
from dash_trl.process_rewards.values import ValueRequest
from dash_trl.update import evaluating


class ScoreSteps(Protocol):
    """Scores episodes, of some completions of this rank. A text may begin or end with white space."""

    def __call__(
        self, prompts: list[str], steps: list[list[str]], **columns: list[Any]
    ) -> Sequence[Sequence[float | None] | None]:
        """n numbers for each completion. `None` or NaN: not known, which leaves the completion to its outcome.

        Args:
            prompts: as the policy read them, chat template and all. steps: n texts of each completion.
            columns: of the dataset, but for `prompt`.
        """


class StepValue:
    """V(prefix) whose differences are what a function gives each episode.

    Args:
        score: the function, such as a `ProcessRewardModel`; called on every rank with this rank's completions.
        rewards: a score is the reward of its episode, as in PRIME (arXiv 2502.01456), and V is their sum so far. So a
            completion with more episodes may earn more. False: a score is V itself, after its episode; then the first
            episode earns nothing, since nothing scores the prompt alone.
    """

    space = "reward"
    needs_answers = False

    def __init__(self, score: ScoreSteps, *, rewards: bool = True):
        if isinstance(score, type) or not callable(score):
            raise ValueError(
                f"score={score!r} cannot score episodes: pass ProcessRewardModel('…'), or a function (prompts, steps, "
                "**columns) that returns a list of numbers for each completion, one for each of its steps."
            )
        self.score, self.rewards = score, rewards

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return trainer.ranks.agree(lambda: self._values(requests, trainer._tokenizer))

    def _values(self, requests: Sequence[ValueRequest], tokenizer: Any) -> list[list[float]]:
        asked = [request for request in requests if len(request.boundaries) > 1]
        steps = [
            tokenizer.batch_decode([one.completion_ids[slice(*ends)] for ends in _pairs(one.boundaries)])
            for one in asked
        ]
        examples = [one.example or {} for one in asked]
        columns = {
            name: [row.get(name) for row in examples] for name in dict.fromkeys(n for row in examples for n in row)
        }
        columns.pop("prompt", None)
        prompts = tokenizer.batch_decode([one.prompt_ids for one in asked])
        scores = list(self.score(prompts, steps, **columns)) if asked else []
        if [len(row or rest) for row, rest in zip(scores, steps, strict=False)] != list(map(len, steps)):
            raise ValueError(
                f"{named(self.score)} returned {[None if row is None else len(row) for row in scores]} scores for "
                f"completions of {list(map(len, steps))} steps. Return a list for each completion, with a number for "
                "each of its steps, or None where it has no scores."
            )
        found = iter(scores)
        return [
            self._of(next(found), request) if len(request.boundaries) > 1 else [math.nan] * len(request.boundaries)
            for request in requests
        ]

    def _of(self, scores: Sequence[float | None] | None, request: ValueRequest) -> list[float]:
        numbers = [math.nan if one is None else float(one) for one in scores or [None] * (len(request.boundaries) - 1)]
        if not all(map(math.isfinite, numbers)):
            return [math.nan] * len(request.boundaries)
        return [0.0, *accumulate(numbers)] if self.rewards else [numbers[0], *numbers]


def _pairs(boundaries: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(boundaries[:-1], boundaries[1:], strict=True))


class ProcessRewardModel:
    """P(a step is right), by a model that classifies tokens: the last one of each step, with two labels.

    As `AutoModelForTokenClassification` has it, trained in the form of TRL's former `PRMTrainer` or of Math-Shepherd
    (arXiv 2312.08935): the prompt, then each step with a separator behind it, whose last token has the label.

    Args:
        model: the name or folder of a checkpoint, which each rank loads; or a model, which stays where it is.
        tokenizer: the model's; default: the checkpoint's.
        separator: text behind a step; white space at a step's ends is left out.
        label: the one whose probability is the score.
        batch_size: completions of a pass.
    Raises:
        ValueError: for a model of another kind, or a completion that is too long for it.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, separator: str = "\n", label: int = 1, batch_size: int = 16
    ):
        self._moves = isinstance(model, str)
        if self._moves:
            from transformers import AutoModelForTokenClassification, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
            model = AutoModelForTokenClassification.from_pretrained(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.separator, self.label, self.batch_size = separator, label, batch_size
        labels = model.config.num_labels
        if tokenizer is None or "TokenClassification" not in type(model).__name__ or not 0 <= label < labels:
            raise ValueError(
                f"{type(model).__name__} with {labels} labels, label={label} and tokenizer={type(tokenizer).__name__} "
                "cannot score steps. Pass a checkpoint of AutoModelForTokenClassification with its tokenizer, and the "
                "label of a right step."
            )

    def __call__(self, prompts: list[str], steps: list[list[str]], **columns: list[Any]) -> list[list[float]]:
        if self._moves:
            self.model.to(PartialState().device)  # of this rank; it may not be known before
        rows = [self._row(*one) for one in zip(prompts, steps, strict=True)]
        scores: list[list[float]] = []
        for first in range(0, len(rows), self.batch_size):
            scores += self._scored(rows[first : first + self.batch_size])
        return scores

    def _row(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Token ids, and the position of each step's last one."""
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ends = []
        for step in steps:
            ids = ids + self.tokenizer(step.strip() + self.separator, add_special_tokens=False)["input_ids"]
            ends.append(len(ids) - 1)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise ValueError(
                f"A completion has {len(ids)} tokens with its prompt, but the process reward model takes {longest}. "
                "Lower max_completion_length, or use another model."
            )
        return ids, ends

    @torch.no_grad()
    def _scored(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        batch = self.tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, padding_side="right", return_tensors="pt")
        with evaluating(self.model):
            logits = self.model(**batch.to(self.model.device)).logits.float()
        right = logits.softmax(dim=-1)[..., self.label].tolist()
        return [[row[end] for end in ends] for row, (_, ends) in zip(right, rows, strict=True)]
