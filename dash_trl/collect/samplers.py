"""Samplers, which sample the completions of a window: this process, a user's `rollout_func`, or vLLM servers::

    sample: the rows of a window ──► sample_ahead: later windows, while rewards are awaited

If rewards begin early, a sampler passes rows to the function `on_rows` as soon as they are sampled, including rows of
windows that are sampled ahead. Otherwise `on_rows` is `None`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled
from dash_trl.collect.scoring import Rewards
from dash_trl.host import Host, one_ahead
from dash_trl.log_probs import LogProbs
from dash_trl.seams import decoded, sync_weights

# (number of the generation batch, first row, prompts, token ids, completions)
OnRows = Callable[[int, int, list[Any], list[list[int]], list[Any]], None]


class Sampler:
    """Base of all samplers. Unless a sampler says otherwise, a method does nothing.

    All ranks call a method at the same point; `start_rewards_of_sampled` and `forget` are the exceptions.

    Args:
        host: the trainer.
        rewards: gets rows as soon as they are sampled, if their rewards start early.
    Attributes:
        needs_token_ids: False = the sampler tokenizes prompts itself.
    """

    needs_token_ids = True

    def __init__(self, host: Host, rewards: Rewards):
        self._host, self._timed = host, host.recorder.timed
        self._on_rows: OnRows | None = rewards.start if rewards.start_early else None

    def _versions(self, rows: int) -> Tensor:
        """Return `Sampled.policy_version` of rows that the current weights have sampled, [rows, 2]."""
        return torch.full((rows, 2), self._host.state.global_step)

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        """Sample this rank's rows of a generation batch, or wait for them, and return them.

        Args:
            prompts: the generation batch: a window, or another round of a window.
            new: generation batches that the sampler has not been given before, in the order of their numbers. They
                include `prompts`, unless an earlier call had it. The sampler may sample the others ahead.
        """
        raise NotImplementedError

    def sample_ahead(self) -> None:
        """Sample windows ahead if this process samples. Called while rewards are awaited and the device is idle."""

    def start_rewards_of_sampled(self) -> None:
        """Pass on the rows of later windows that were sampled since the last call, without waiting for other rows.

        `on_rows` gets the rows.
        """

    def log(self) -> None:
        """Log figures of the sampler. It is called once per window."""

    def forget(self) -> None:
        """Drop the prompts and rows of all windows that `sample` has not returned yet."""


class ByFunction(Sampler):
    """Samples with a user's `rollout_func`. It samples no window ahead."""

    needs_token_ids = False

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        with self._timed("generate"):
            sync_weights(self._host)  # TRL, too, sends the weights before it calls a `rollout_func`
            columns = dict(self._host.rollout_func(deepcopy(prompts.prompts), self._host))
        prompt_ids, completion_ids, log_probs = (
            columns.pop(name) for name in ("prompt_ids", "completion_ids", "logprobs")
        )
        return Sampled(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completions=decoded(self._host.processing_class, prompts.prompts, prompt_ids, completion_ids),
            policy_version=self._versions(len(completion_ids)),
            prompts=prompts.prompts,
            log_probs=log_probs,
            own_tokens=columns.pop("env_mask", None),
            columns=columns,
        )


class InProcess(Sampler):
    """Samples in this process, with Transformers or colocated vLLM.

    With `async_level=1`, it samples the next window while rewards are awaited.

    Args:
        host: see `Sampler`.
        rewards: see `Sampler`.
        log_probs: computes the log-probs of the sampled tokens, if this process samples the next window while it waits
            for rewards, and the engine does not report log-probs.
    """

    def __init__(self, host: Host, rewards: Rewards, log_probs: LogProbs):
        super().__init__(host, rewards)
        self._log_probs = log_probs
        self._known: dict[int, Prompts] = {}  # generation batches to sample ahead
        self._sampled: dict[int, Sampled] = {}  # generation batches that were sampled ahead

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._known |= {one.number: one for one in new}
        self._known.pop(prompts.number, None)
        ahead = self._sampled.pop(prompts.number, None)
        return self._sample(prompts) if ahead is None else ahead

    def sample_ahead(self) -> None:
        """Sample the known windows with the current weights, and begin their rewards at once."""
        for number in sorted(self._known):
            self._sampled[number] = self._sample(self._known.pop(number))

    def _sample(self, prompts: Prompts) -> Sampled:
        with self._timed("generate"):
            completion_ids, log_probs = self._host._generate_single_turn(
                *prompts.tokenized, self._host.args.num_generations
            )
            completions = decoded(self._host.processing_class, prompts.prompts, prompts.ids, completion_ids)
        versions = self._versions(len(completion_ids))
        sampled = Sampled(
            prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs
        )
        return self._finished(prompts.number, sampled)

    def _finished(self, number: int, sampled: Sampled) -> Sampled:
        """Add log-probs if they are needed, and pass the rows to `on_rows`, so that their rewards begin."""
        if sampled.log_probs is None and one_ahead(self._host):
            sampled = replace(sampled, log_probs=self._log_probs.of_tokens(sampled.prompt_ids, sampled.completion_ids))
        if self._on_rows is not None:
            self._on_rows(number, 0, sampled.prompts, sampled.completion_ids, deepcopy(sampled.completions))
        return sampled

    def forget(self) -> None:
        self._known.clear()
        self._sampled.clear()


class OnServers(Sampler):
    """Samples on vLLM servers: all windows whose prompts are known, including windows that have not begun.

    Args:
        host: see `Sampler`.
        rewards: see `Sampler`.
        pool: a `ServerGeneration`.
    """

    def __init__(self, host: Host, rewards: Rewards, pool: Any):
        super().__init__(host, rewards)
        self._pool = pool
        self._known: dict[int, Prompts] = {}
        self._completions: dict[int, list[Any]] = {}  # generation batch → completions of its rows; None = not sampled

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._known |= {one.number: one for one in new}
        if self._on_rows is not None:
            self._completions |= {one.number: [None] * len(one.examples) for one in new}
        on_sampled = None if self._on_rows is None else self._pass_on
        self._pool.expect(prompts.number, {one.number: one.ids for one in new}, on_sampled)
        with self._timed("generate"):
            # While this call waits, the pool calls `_pass_on` on this thread.
            completion_ids, log_probs = self._host._generate_single_turn(
                *prompts.tokenized, self._host.args.num_generations
            )
            versions = self._pool.policy_version
            if self._on_rows is None:  # then `_pass_on` has not decoded the completions
                completions = decoded(self._host.processing_class, prompts.prompts, prompts.ids, completion_ids)
            else:
                completions = self._completions.pop(prompts.number)
        del self._known[prompts.number]
        return Sampled(prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs)

    def _pass_on(self, number: int, first: int, completion_ids: list[list[int]]) -> None:
        """Pass rows that have been sampled to `on_rows`. The pool calls it on the main thread."""
        assert self._on_rows is not None, "the pool calls this method only if rewards start early"
        own, prompts = slice(first, first + len(completion_ids)), self._known[number]
        completions = decoded(self._host.processing_class, prompts.prompts[own], prompts.ids[own], completion_ids)
        self._completions[number][own] = completions
        self._on_rows(number, first, prompts.prompts[own], completion_ids, deepcopy(completions))

    def start_rewards_of_sampled(self) -> None:
        if self._on_rows is not None:
            self._pool.show_finished()

    def log(self) -> None:
        """Log the healthy servers as the main process counts them, and the retries and waiting groups of all ranks."""
        healthy, *counts = self._pool.metrics()
        retried, queued = self._host.ranks.sum(torch.tensor(counts)).tolist()
        self._host.recorder.log({"servers/healthy": healthy, "async/queued_groups": queued})
        self._host.recorder.total("servers/retried_requests", retried)

    def forget(self) -> None:
        self._known.clear()
        self._completions.clear()
        self._pool.forget_windows()
