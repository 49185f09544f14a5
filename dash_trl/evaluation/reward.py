"""Scores samples with one reward function, problem by problem."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerState

from dash_trl.evaluation.samplers import SampledCompletion, Sampler
from dash_trl.rewards import (
    FailureWatch,
    RewardRunner,
    RunnerReward,
    form_of,
    is_reward_model,
    raise_reward_error,
    unpack,
    watch,
)
from dash_trl.workers import EventLoop

PATIENCE = 120.0  # time limit of a reward in seconds; a reward that runs a program in the sandbox may take a minute


class Reward(AbstractContextManager["Reward"]):
    """Calls one reward function as in training. As a context manager, it ends the workers that it has started.

    Args:
        function: one reward function in any form of `dash_trl.rewards.forms`, a list with one function, or a
            `RewardRunner` with one function, which is not closed.
    Raises:
        ValueError: if there are several functions, or a reward model.
    """

    def __init__(self, function: Any):
        found = unpack(function, timeout=PATIENCE) or []
        if len(found) != 1 or is_reward_model(found[0]):
            raise ValueError(
                f"An evaluation needs one reward function, which says what is correct, but there are {len(found)}, or "
                "it is a reward model. Give one function; to the commands, with --reward_name."
            )
        self._stays_open = isinstance(function, RewardRunner)
        (one,) = found
        self._function = watch(one, getattr(one, "__name__", type(one).__name__))
        self._failures = FailureWatch([self._function], [self._function.name])
        self._loop = EventLoop()  # not this thread's: a notebook runs one there

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise a `ValueError` if the function needs a column that does not exist."""
        one = self._function
        form = one.form if isinstance(one, RunnerReward) else form_of(one.func)
        form.check_columns(columns)

    def scores(self, row: Mapping[str, Any], samples: Sequence[SampledCompletion]) -> list[float | None]:
        """Return the reward of each sample of a problem; None = the function failed (an exception, None, NaN, ±inf).

        Raises:
            ValueError: if the function does not return a list of numbers.
        """
        chat = not isinstance(row["prompt"], str)
        rewards = self._function(
            prompts=[row["prompt"]] * len(samples),
            completions=[[{"role": "assistant", "content": one.text}] if chat else one.text for one in samples],
            completion_ids=[one.token_ids for one in samples],
            **{name: [value] * len(samples) for name, value in row.items() if name != "prompt"},
            trainer_state=TrainerState(),
            **dict.fromkeys(("log_extra", "log_metric"), lambda *_: None),  # an evaluation logs no notes
        )
        # An async function of TRL's form returns a coroutine.
        rewards = self._loop.run(rewards) if asyncio.iscoroutine(rewards) else rewards
        raise_reward_error([self._function])
        self._failures.unscore(  # warns of failures
            torch.tensor([[math.nan if one is None else one] for one in rewards]), torch.clone, counts=False
        )
        return rewards

    def __exit__(self, *exception: object) -> None:
        self._loop.close()
        if isinstance(self._function, RunnerReward) and not self._stays_open:
            self._function.runner.close()


def scored_samples(
    sampler: Sampler, problems: Dataset, reward: Reward, **sampling: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Sample completions of problems and score them. Yield each problem as soon as it is done, in any order.

    `problems` are rows with a `prompt` and the columns of the reward function; `sampling` goes to `Sampler.sample`.

    Yields:
        The index of a problem, and a row with its `prompt`, its `answer` if it has one, and its `samples`.
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
