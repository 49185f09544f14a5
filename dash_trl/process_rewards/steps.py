"""`StepValue` gives credit by a score of each episode, from a function or a process reward model::

    completion ──► Segmenter ──► texts of the episodes ──► scores ──► V, whose differences are the process rewards

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
    """A function that scores the episodes of some completions of this rank."""

    def __call__(
        self, prompts: list[str], steps: list[list[str]], **columns: list[Any]
    ) -> Sequence[Sequence[float | None] | None]:
        """Returns n numbers for each completion.

        A `None` or NaN is an unknown score. A completion with one, or with `None` in place of its numbers, gets its
        outcome advantage.

        Args:
            prompts: the prompts as the policy read them, including the chat template.
            steps: the n texts of the episodes of each completion; they may begin or end with white space.
            columns: the columns of the dataset without `prompt`.
        """


class StepValue:
    """V(prefix) from the scores that a function gives to the episodes.

    Args:
        score: the function, such as a `ProcessRewardModel`. It is called on every rank with this rank's completions.
        rewards: if True, a score is the reward of its episode, as in PRIME (arXiv 2502.01456), and V is the sum of the
            scores so far. Then a completion with more episodes may earn more. If False, a score is V after its episode.
            Then the first episode earns nothing, since there is no score of the prompt.
    Raises:
        ValueError: if `score` is not a function; during training, if it returns other numbers of scores than steps.
    """

    space = "reward"
    needs_answers = False

    def __init__(self, score: ScoreSteps, *, rewards: bool = True):
        if isinstance(score, type) or not callable(score):
            raise ValueError(
                f"score={score!r} cannot score episodes: pass ProcessRewardModel('…'), or a function (prompts, steps, "
                "**columns) that returns a list with one number per step for each completion."
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
                f"completions of {list(map(len, steps))} steps. Return for each completion a list with one number per "
                "step, or None if it has no scores."
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
    """Scores a step by the probability that it is right, from a token classifier at the last token of the step.

    The model is an `AutoModelForTokenClassification`, trained in the form of TRL's former `PRMTrainer` or of
    Math-Shepherd (arXiv 2312.08935): it reads the prompt, then each step followed by a separator, and the last token of
    the separator has the label.

    Args:
        model: the name or directory of a checkpoint, which each rank loads onto its device; or a model, which stays on
            its device.
        tokenizer: of the model. Default: the checkpoint's.
        separator: the text after a step; white space at the ends of a step is removed.
        label: the label whose probability is the score.
        batch_size: number of completions in a pass.
    Raises:
        ValueError: if the model is of another kind, or a completion is too long for it.
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
                "label that means a right step."
            )

    def __call__(self, prompts: list[str], steps: list[list[str]], **columns: list[Any]) -> list[list[float]]:
        if self._moves:
            self.model.to(PartialState().device)  # here, since the rank's device may be unknown before
        rows = [self._row(*one) for one in zip(prompts, steps, strict=True)]
        scores: list[list[float]] = []
        for first in range(0, len(rows), self.batch_size):
            scores += self._scored(rows[first : first + self.batch_size])
        return scores

    def _row(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """The token ids, and the position of the last token of each step."""
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ends = []
        for step in steps:
            ids = ids + self.tokenizer(step.strip() + self.separator, add_special_tokens=False)["input_ids"]
            ends.append(len(ids) - 1)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise ValueError(
                f"A completion with its prompt has {len(ids)} tokens, but the process reward model takes {longest}. "
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
