"""Accuracy and pass@k of a loaded model, measured with a reward function: what a training script calls.

    prompts ──► LocalSampler ──► reward function ──► Evaluation: accuracy, pass@k, failed rewards

Letters: P prompts, S samples of each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash_trl.evaluation.estimates import CORRECT_ABOVE, pass_at_k
from dash_trl.evaluation.local import BATCH_SIZE, LocalSampler
from dash_trl.evaluation.sampler import Prompt, SampledCompletion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The samples of one evaluation.

    Args:
        completions: P lists of S texts.
        rewards: P lists of S rewards; `None` where the reward failed (was None, NaN or infinite).
    """

    completions: list[list[str]]
    rewards: list[list[float | None]]

    @property
    def scored(self) -> list[float]:
        return [reward for row in self.rewards for reward in row if reward is not None]

    @property
    def failed(self) -> int:
        """Samples without a usable reward. They count neither as right nor as wrong."""
        return sum(len(row) for row in self.rewards) - len(self.scored)

    @property
    def accuracy(self) -> float:
        """Share of correct completions among the scored ones; NaN if none is."""
        scored = self.scored
        return sum(reward > CORRECT_ABOVE for reward in scored) / len(scored) if scored else math.nan

    def pass_at(self, k: int) -> float:
        """Mean pass@k over the prompts with at least k scored samples; NaN if there is none."""
        estimates = []
        for row in self.rewards:
            scored = [reward for reward in row if reward is not None]
            if len(scored) >= k:
                estimates.append(pass_at_k(len(scored), sum(reward > CORRECT_ABOVE for reward in scored), k))
        return sum(estimates) / len(estimates) if estimates else math.nan


def sample_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
) -> list[list[str]]:
    """`num_samples` completions of each prompt: P lists of S texts, without special tokens.

    The model's mode and the global RNG state are afterwards what they were before. The samples depend on `seed` and on
    `batch_size`.

    Args:
        model: a causal language model on any device; unwrapped (`trainer.accelerator.unwrap_model`).
        tokenizer: with a chat template if the prompts are conversational.
        prompts: texts or lists of messages.
        temperature: 0 decodes greedily.
    """
    drawn = LocalSampler(model, tokenizer, batch_size).sample(
        prompts, num_samples=num_samples, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
    )
    return [[sample.text for sample in samples] for _, samples in drawn]


def evaluate(
    model: Any,
    tokenizer: Any,
    dataset: Any,
    reward_func: Callable[..., Sequence[float | None]],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
) -> Evaluation:
    """Samples every prompt of a data set and scores the samples with a TRL-style reward function.

    A reward that is None, NaN or infinite has failed: it is left out and counted in `Evaluation.failed`, never taken
    for 0. An exception of the reward function is not caught.

    Args:
        dataset: rows with a `prompt`; its other columns go to the reward function, as in TRL.
        reward_func: called once, with `prompts`, `completions`, `completion_ids` and the columns.
    """
    rows: list[Mapping[str, Any]] = list(dataset)
    drawn: list[list[SampledCompletion]] = [
        samples
        for _, samples in LocalSampler(model, tokenizer, batch_size).sample(
            [row["prompt"] for row in rows],
            num_samples=num_samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
    ]
    texts = [sample.text for samples in drawn for sample in samples]
    repeated = [row for row in rows for _ in range(num_samples)]
    rewards = reward_func(
        prompts=[row["prompt"] for row in repeated],
        completions=[
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(repeated, texts, strict=True)
        ],
        completion_ids=[sample.token_ids for samples in drawn for sample in samples],
        **{name: [row[name] for row in repeated] for name in (rows[0] if rows else {}) if name != "prompt"},
    )
    usable = [None if reward is None or not math.isfinite(reward) else float(reward) for reward in rewards]
    if len(usable) != len(texts):
        raise ValueError(f"The reward function returned {len(usable)} rewards for {len(texts)} completions.")
    starts = range(0, len(texts), num_samples)
    return Evaluation(
        completions=[texts[start : start + num_samples] for start in starts],
        rewards=[usable[start : start + num_samples] for start in starts],
    )


def accuracy(
    model: Any, tokenizer: Any, dataset: Any, reward_func: Callable[..., Sequence[float | None]], **sampling: Any
) -> float:
    """`evaluate(...).accuracy`, with a warning that counts the failed rewards, if any."""
    result = evaluate(model, tokenizer, dataset, reward_func, **sampling)
    if result.failed:
        logger.warning(
            "%d of %d rewards failed and are left out of the accuracy.",
            result.failed,
            result.failed + len(result.scored),
        )
    return result.accuracy
