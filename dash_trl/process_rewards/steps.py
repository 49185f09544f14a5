"""`StepValue` computes V(prefix) from scores of the episodes. A function or a process reward model gives the scores::

    completion ──► Segmenter ──► texts of the episodes ──► scores ──► V, whose differences are the process rewards

Letters: n episodes of a completion.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, zip_longest
from statistics import fmean
from typing import Any, Protocol

import torch
from accelerate import PartialState

from dash_trl.process_rewards.arguments import named
from dash_trl.process_rewards.values import ValueRequest
from dash_trl.update import evaluating


class ScoreSteps(Protocol):
    """The type of a function that scores the episodes of completions.

    Each rank calls the function with its own completions.
    """

    def __call__(
        self, prompts: list[str], steps: list[list[str]], **columns: list[Any]
    ) -> Sequence[Sequence[float | None] | None]:
        """Returns one list per completion with one score for each of its n episodes.

        A score that is None, NaN or infinite is unknown. None instead of a list means that all scores of the completion
        are unknown. A completion with an unknown score gets no process rewards and keeps its outcome advantage.

        Args:
            prompts: the decoded prompt of each completion, including the chat template.
            steps: the n texts of each completion's episodes. A text may begin or end with white space.
            columns: the columns of the dataset except `prompt`, each with one entry per completion.
        """


class StepValue:
    """Computes V(prefix) from the scores that a function gives to the episodes.

    Args:
        score: the function, such as a `ProcessRewardModel`; see `ScoreSteps`.
        rewards: True = a score is the reward of its episode, as in PRIME (arXiv 2502.01456). V is then the sum of the
            scores so far, so a completion with more episodes may get a larger V. False = a score is V after its
            episode. The prompt alone has no score, so V_0 is the mean of V_1 over the completions of the prompt.
    Attributes:
        space: "reward", if a score is V. "score", if V is a sum of scores, which does not have the unit of the outcome:
            then `estimator="gae"` and anchored values are refused.
    Raises:
        ValueError: if `score` is not a function; during training, if `score` does not return one list or None per
            completion, or if a list does not have one score per episode.
    """

    needs_answers = False

    def __init__(self, score: ScoreSteps, *, rewards: bool = True):
        if isinstance(score, type) or not callable(score):
            raise ValueError(
                f"score={score!r} cannot score episodes: pass ProcessRewardModel('…'), or a function (prompts, steps, "
                "**columns) that returns a list with one number per step for each completion."
            )
        self.score, self.rewards = score, rewards
        self.space = "score" if rewards else "reward"

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        ranks = trainer.ranks
        rows = ranks.agree(lambda: self._values(requests, trainer._tokenizer))
        if self.rewards:
            return rows
        # V_0 must not depend on the completion, or it would be no baseline for the completion's first episode.
        own = [
            (one.prompt_ids, row[1])
            for one, row in zip(requests, rows, strict=True)
            if len(row) > 1 and row[1] == row[1]
        ]
        firsts: dict[tuple[int, ...], list[float]] = {}
        for prompt, first in chain.from_iterable(ranks.gather_object(own)):
            firsts.setdefault(prompt, []).append(first)
        return [
            [fmean(firsts.get(one.prompt_ids, row[:1])), *row[1:]] if len(row) > 1 else row
            for one, row in zip(requests, rows, strict=True)
        ]

    def _values(self, requests: Sequence[ValueRequest], tokenizer: Any) -> list[list[float]]:
        asked = [request for request in requests if len(request.boundaries) > 1]
        steps = [
            tokenizer.batch_decode([one.completion_ids[slice(*ends)] for ends in pairwise(one.boundaries)])
            for one in asked
        ]
        examples = [one.example or {} for one in asked]
        columns = {
            name: [row.get(name) for row in examples] for name in dict.fromkeys(n for row in examples for n in row)
        }
        columns.pop("prompt", None)
        prompts = tokenizer.batch_decode([one.prompt_ids for one in asked])
        scores = list(self.score(prompts, steps, **columns)) if asked else []
        found = [len(rest) if row is None else len(row) for row, rest in zip_longest(scores, steps, fillvalue=())]
        if len(scores) != len(steps) or found != list(map(len, steps)):
            raise ValueError(
                f"{named(self.score)} returned {[None if row is None else len(row) for row in scores]} scores for "
                f"completions of {list(map(len, steps))} steps. Return for each completion a list with one number per "
                "step, or None if it has no scores."
            )
        of_asked = iter(scores)
        return [
            self._of(next(of_asked), request) if len(request.boundaries) > 1 else [math.nan] * len(request.boundaries)
            for request in requests
        ]

    def _of(self, scores: Sequence[float | None] | None, request: ValueRequest) -> list[float]:
        numbers = [math.nan if one is None else float(one) for one in scores or [None]]
        if not all(map(math.isfinite, numbers)):
            return [math.nan] * len(request.boundaries)
        return [0.0, *accumulate(numbers)] if self.rewards else [math.nan, *numbers]


class ProcessRewardModel:
    """Scores each step by the probability that the step is right, which a token classifier predicts.

    A step is the text of an episode. The model is an `AutoModelForTokenClassification`, trained with data in the form
    of TRL's former `PRMTrainer` or of Math-Shepherd (arXiv 2312.08935). Its input is the tokenizer's BOS token (if it
    has one), the prompt, then each step with a separator after it. Steps and separators are tokenized one by one. The
    prediction at the separator's last token is the score of the step before the separator.

    Args:
        model: the name or directory of a checkpoint, or a model object. Each rank loads a checkpoint onto its own
            device. A model object stays on its device.
        tokenizer: the tokenizer of the model. None = the tokenizer of the checkpoint; a model object needs one.
        separator: the text after each step. White space at the beginning and the end of a step is removed.
        label: index of the label that means "right". The probability of this label is the score.
        batch_size: number of completions in one model pass.
    Raises:
        ValueError: if the model is no token classifier with two labels or more, has no such label or no tokenizer;
            during training, if a completion with its prompt is longer than the model's `max_position_embeddings`.
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
        if (
            tokenizer is None
            or "TokenClassification" not in type(model).__name__
            or not 0 <= label < labels
            or labels < 2
        ):
            raise ValueError(
                f"{type(model).__name__} with {labels} labels, label={label} and tokenizer={type(tokenizer).__name__} "
                "cannot score steps. Pass a checkpoint of AutoModelForTokenClassification with two labels or more, its "
                "tokenizer, and the label that means a right step."
            )

    def __call__(self, prompts: list[str], steps: list[list[str]], **columns: list[Any]) -> list[list[float]]:
        if self._moves:
            self.model.to(PartialState().device)  # not in __init__, where the rank's device may still be unknown
        rows = [self._row(*one) for one in zip(prompts, steps, strict=True)]
        scores: list[list[float]] = []
        for first in range(0, len(rows), self.batch_size):
            scores += self._scored(rows[first : first + self.batch_size])
        return scores

    def _row(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Returns the token ids of the model's input, and the position of the last token of each step's separator."""
        texts = [prompt, self.separator, *map(str.strip, steps)]
        ids, separator, *parts = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        begin = self.tokenizer.bos_token_id
        if begin is not None and ids[:1] != [begin]:
            ids = [begin, *ids]
        ends = []
        for part in parts:
            ids = [*ids, *part, *separator]
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
