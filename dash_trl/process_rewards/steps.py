"""`StepValue` computes V(prefix) from rewards of the episodes, which a function gives::

completion ──► Segmenter ──► texts of the episodes ──► rewards ──► V, whose differences are the rewards
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from dash_trl.process_rewards.values import ValueRequest


class StepValue:
    """Computes V(prefix) from the rewards that a function gives to the episodes, such as a process reward model.

    V is the sum of the rewards so far, as in PRIME (arXiv 2502.01456), so a completion with more episodes may get a
    larger V. If your function knows V after each step, let it return the differences. `estimator="gae"` and
    `estimator="vineppo"` are refused, because the sum has not the unit of the outcome.

    `examples/train_prm.py` has a function that calls a model. Each rank calls the function with its own completions.

    Args:
        score: function `(prompts, steps, **columns)`. `prompts` are the decoded prompts with the chat template, and
            `steps` has for each completion a list with the texts of its n episodes. `columns` are the columns of the
            dataset except `prompt`. It returns for each completion a list of n numbers, or None if it has no scores.
            A score that is None, NaN or infinite is missing, and so are the values that it would give.
    Raises:
        ValueError: during training, if `score` returns another number of scores.
    """

    space = "score"
    needs_answers = False

    def __init__(self, score: Callable[..., Sequence[Sequence[float | None] | None]]):
        self.score = score

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        return trainer.ranks.agree(self._values, requests, trainer._tokenizer)

    def _values(self, requests: Sequence[ValueRequest], tokenizer: Any) -> list[list[float]]:
        asked = [one for one in requests if len(one.boundaries) > 1]
        steps = [
            tokenizer.batch_decode([one.completion_ids[start:end] for start, end in pairwise(one.boundaries)])
            for one in asked
        ]
        examples = [one.example or {} for one in asked]
        names = {name for example in examples for name in example} - {"prompt"}
        columns = {name: [example.get(name) for example in examples] for name in names}
        prompts = tokenizer.batch_decode([one.prompt_ids for one in asked])
        scores = list(self.score(prompts, steps, **columns)) if asked else []
        pairs = zip_longest(scores, steps, fillvalue=())
        known = [[None] * len(texts) if row is None else row for row, texts in pairs]
        found, expected = list(map(len, known)), list(map(len, steps))
        if found != expected:
            raise ValueError(
                f"{self.score!r:.100} returned {found} scores for completions of {expected} steps. Return for each "
                "completion a list with one number per step, or None if it has no scores."
            )
        rows = [[math.nan if one is None else float(one) for one in row] for row in known]
        values = iter([[0.0, *accumulate(row)] for row in rows])
        return [next(values) if len(one.boundaries) > 1 else [math.nan] * len(one.boundaries) for one in requests]
