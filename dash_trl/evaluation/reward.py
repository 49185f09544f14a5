"""One reward function that says what is correct, called for the samples of one problem after the other.

By it `evaluate` and `accuracy` measure a loaded model, as a training script does.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerState

from dash_trl.evaluation.figures import figures_of
from dash_trl.evaluation.sampler import SampledCompletion, Sampler
from dash_trl.evaluation.samplers import BATCH_SIZE, LocalSampler
from dash_trl.rewards import RewardRunner, RewardTeam, RunnerReward, raise_mistakes, unpack

logger = logging.getLogger(__name__)

PATIENCE = 120.0  # seconds for a completion; the sandbox ends a program in one minute
BROKEN_AFTER = 10  # problems in a row on which a reward function raised for every sample


class Reward(AbstractContextManager["Reward"]):
    """One reward function, as training calls it; a context manager that ends the workers that it started.

    Args:
        function: what a trainer takes as `reward_funcs`: a function of any form (`dash_trl.rewards.forms`), a
            `RewardRunner`, one of its `rewards`, or a list of one of these. A runner is left to its owner to close.
    Raises:
        ValueError: for several functions, or a reward model.
    """

    def __init__(self, function: Any):
        given = function if isinstance(function, (list, tuple)) else [function]
        runners = [one for one in given if isinstance(one, RewardRunner | RunnerReward)]
        self._own = [RewardRunner(one, timeout=PATIENCE) for one in given if one not in runners]
        found = unpack([*runners, *self._own])
        if len(found) != 1 or not isinstance(found[0], RunnerReward):
            raise ValueError(
                f"An evaluation needs one reward function, which says what is correct, but there are {len(found)}, or "
                "it is a reward model. Give one function; to the commands, with --reward_name."
            )
        (self._function,) = found
        self._team = RewardTeam(found)  # which calls no others of a runner
        self._raised = 0  # problems in a row

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises a ValueError if the function asks for a column that there is not."""
        if not self._function.form.batch:
            self._function.form.check_columns(columns)

    def scores(self, row: Mapping[str, Any], samples: Sequence[SampledCompletion]) -> list[float | None]:
        """Of the samples of one problem; None where it failed (an exception, None, NaN, ±inf).

        Raises:
            ValueError: it returned no list of numbers.
            RuntimeError: it raised on every sample of `BROKEN_AFTER` problems in a row; the cause is the last error.
        """
        chat = not isinstance(row["prompt"], str)
        self._team.join(group_size=len(samples))  # a trainer may have used the function in between
        rewards = self._function(
            prompts=[row["prompt"]] * len(samples),
            completions=[[{"role": "assistant", "content": one.text}] if chat else one.text for one in samples],
            completion_ids=[one.token_ids for one in samples],
            **{name: [value] * len(samples) for name, value in row.items() if name != "prompt"},
            trainer_state=TrainerState(),
            log_extra=_not_logged,
            log_metric=_not_logged,
        )
        raise_mistakes([self._function])
        self._raised = self._raised + 1 if all(self._function.raised) else 0
        if self._raised == BROKEN_AFTER:
            raise RuntimeError(
                f"The reward function '{self._function.name}' raised on every sample of {BROKEN_AFTER} problems in a "
                f"row; at last it {self._function.failure}. Correct it."
            ) from self._function.error
        return rewards

    def __exit__(self, *exception: object) -> None:
        for runner in self._own:
            runner.close()


def _not_logged(*arguments: Any) -> None:
    """In place of TRL's `log_extra` and `log_metric`."""


def scored_samples(
    sampler: Sampler, problems: Any, reward: Reward, **sampling: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index of a problem, its `prompt`, `answer`, if it has one, and `samples`), in the order in which they are done.

    Args:
        problems: rows with a `prompt` and the columns that the reward reads.
        sampling: arguments of `Sampler.sample`.
    """
    for index, samples in sampler.sample([row["prompt"] for row in problems], **sampling):
        problem: Mapping[str, Any] = problems[index]
        scores = reward.scores(problem, samples)
        row = {name: problem[name] for name in ("prompt", "answer") if name in problem}
        row["samples"] = [
            {"text": one.text, "tokens": len(one.token_ids), "truncated": one.truncated, "reward": score}
            for one, score in zip(samples, scores, strict=True)
        ]
        yield index, row


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
        reward_func: see `Reward`; as `reward_funcs` of a trainer, but one.
        k: of pass@k; at most `num_samples`.
        batch_size: rows that are sampled side by side; the samples depend on it.
        sampling: `num_samples`, `temperature`, `max_completion_length` and `seed`, see `Sampler.sample`.
    Raises:
        ValueError: for several reward functions, or one that asks for a column that there is not.
    """
    with Reward(reward_func) as reward:
        if len(dataset):
            reward.check_columns(list(dataset[0]))
        rows = dict(scored_samples(LocalSampler(model, tokenizer, batch_size), dataset, reward, **sampling))
    return figures_of([row["samples"] for row in rows.values()], k)


def accuracy(model: Any, tokenizer: Any, dataset: Any, reward_func: Any, **sampling: Any) -> float:
    """The accuracy of `evaluate`, NaN where every reward failed; a warning says which share of them did, if any."""
    figures = evaluate(model, tokenizer, dataset, reward_func, **sampling)
    if figures["failed"]:
        logger.warning("%.1f %% of the rewards failed and are left out of the accuracy.", 100 * figures["failed"])
    return math.nan if figures["accuracy"] is None else figures["accuracy"]
