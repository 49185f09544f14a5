"""Accuracy and pass@k of a loaded model, measured with a reward function: what a training script calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from dash_trl.evaluation.figures import figures_of
from dash_trl.evaluation.reward import Reward, scored_samples
from dash_trl.evaluation.samplers import BATCH_SIZE, LocalSampler

logger = logging.getLogger(__name__)


def evaluate(
    model: Any,
    tokenizer: Any,
    dataset: Any,
    reward_func: Any,
    *,
    k: Sequence[int] = (1,),
    batch_size: int = BATCH_SIZE,
    **sampling: Any,
) -> dict[str, Any]:
    """Samples every prompt of a data set, scores the samples, and returns their figures (see `figures_of`).

    A reward that is None, NaN or infinite, or an exception of the function, has failed: it is left out of the accuracy
    and counted in `failed`, never taken for 0.

    Args:
        model: a causal language model on any device; unwrapped (`trainer.accelerator.unwrap_model`). Its mode and the
            global random state are afterwards what they were before.
        dataset: rows with a `prompt`; its other columns go to the reward function, as in TRL.
        reward_func: of any form, or a `RewardAgent` of one.
        k: of pass@k; at most `num_samples`.
        batch_size: rows that are sampled side by side; the samples depend on it.
        sampling: `num_samples`, `temperature`, `max_new_tokens` and `seed`, see `Sampler.sample`.
    """
    sampler = LocalSampler(model, tokenizer, batch_size)
    with Reward(reward_func) as reward:
        rows = dict(scored_samples(sampler, dataset, reward, **sampling))
    return figures_of([row["samples"] for row in rows.values()], k)


def accuracy(model: Any, tokenizer: Any, dataset: Any, reward_func: Any, **sampling: Any) -> float:
    """The accuracy of `evaluate`, NaN where every reward failed; a warning says which share of them did, if any."""
    figures = evaluate(model, tokenizer, dataset, reward_func, **sampling)
    if figures["failed"]:
        logger.warning("%.1f %% of the rewards failed and are left out of the accuracy.", 100 * figures["failed"])
    return math.nan if figures["accuracy"] is None else figures["accuracy"]
