"""Samplers, which sample the completions of a window: this process, a user's `rollout_func`, or vLLM servers::

    sample: the rows of a window ──► sample_ahead: later windows, while rewards are awaited

A sampler passes rows to `Rewards.start` as soon as they are sampled, including rows of windows that are sampled ahead.
"""

from collections.abc import Coroutine, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled
from dash_trl.collect.scoring import Rewards
from dash_trl.host import Host, one_ahead
from dash_trl.log_probs import LogProbs
from dash_trl.rollout import joined
from dash_trl.sampling import URGENT
from dash_trl.seams import decoded, sync_weights

# Index of the first of adjacent rows, what servers have sampled of each row, weight versions of the requests
Work = tuple[int, Sequence[Any], list[int]]


class Sampler:
    """Base of all samplers. Unless a sampler says otherwise, a method does nothing.

    All ranks call a method at the same point; `start_rewards_of_sampled` and `forget` are the exceptions.

    Args:
        host: the trainer.
        rewards: gets rows as soon as they are sampled.
    Attributes:
        needs_token_ids: False = the sampler tokenizes prompts itself.
    """

    needs_token_ids = True

    def __init__(self, host: Host, rewards: Rewards):
        self._host, self._timed, self._rewards = host, host.recorder.timed, rewards

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
        """Sample windows ahead if this process samples. Called after `sample`, while rewards are awaited."""

    def start_rewards_of_sampled(self) -> None:
        """Pass on the rows of later windows that were sampled since the last call, without waiting for other rows."""

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
            completions=decoded(self._host._tokenizer, prompts.prompts, prompt_ids, completion_ids),
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
        self._next: list[Prompts] = []  # generation batches to sample ahead
        self._sampled: dict[int, Sampled] = {}  # generation batches that were sampled ahead

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._next = [one for one in new if one is not prompts]
        ahead = self._sampled.pop(prompts.number, None)
        return self._sample(prompts) if ahead is None else ahead

    def sample_ahead(self) -> None:
        """Sample the next windows with the current weights, and begin their rewards at once."""
        for one in self._next:
            self._sampled[one.number] = self._sample(one)

    def _sample(self, prompts: Prompts) -> Sampled:
        with self._timed("generate"):
            completion_ids, log_probs = self._host._generate_single_turn(
                *prompts.tokenized, self._host.args.num_generations
            )
            completions = decoded(self._host._tokenizer, prompts.prompts, prompts.ids, completion_ids)
        versions = self._versions(len(completion_ids))
        sampled = Sampled(
            prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs
        )
        return self._finished(prompts, sampled)

    def _finished(self, prompts: Prompts, sampled: Sampled) -> Sampled:
        """Add log-probs if they are needed, and begin the rewards of the rows."""
        if sampled.log_probs is None and one_ahead(self._host):
            sampled = replace(sampled, log_probs=self._log_probs.of_tokens(sampled.prompt_ids, sampled.completion_ids))
        self._rewards.start(prompts, 0, sampled)
        return sampled

    def forget(self) -> None:
        self._sampled.clear()


class OnServers(Sampler):
    """Samples on vLLM servers: all windows whose prompts are known, including windows that have not begun.

    Args:
        host: see `Sampler`.
        rewards: see `Sampler`.
        servers: a `ServerGeneration`.
    """

    def __init__(self, host: Host, rewards: Rewards, servers: Any):
        super().__init__(host, rewards)
        self._servers, self._pool = servers, servers.pool
        self._submitted: dict[int, Any] = {}  # generation batch → its `Batch` of the pool

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        with self._timed("generate"):
            sync_weights(self._host)
            for one in new:  # all at once, so that the servers stay busy while the last rows of `prompts` are sampled
                works = self._works(one, URGENT if one is prompts else one.number)
                self._submitted[one.number] = self._pool.submit(works, partial(self._seen, one))
            with self._timed("wait_for_rollouts"):  # while this waits, the pool calls `_seen` on this thread
                return joined(self._host.ranks.agree(self._pool.collect, self._submitted.pop(prompts.number)))

    def _works(self, prompts: Prompts, order: int) -> Iterator[Coroutine[Any, Any, Work]]:
        """Yield coroutines for the event loop of the pool; each samples adjacent rows."""
        first = 0
        for ids, n, sampling in self._servers.requests(prompts.ids, self._host.args.num_generations):
            yield self._group(first, ids, n, sampling, order)
            first += n

    async def _group(self, first: int, ids: list[int], n: int, sampling: dict[str, Any], order: int) -> Work:
        return first, *await self._pool.complete(ids, n, sampling, order=order)

    def _seen(self, prompts: Prompts, work: Work) -> Sampled:
        """Decode rows that have been sampled, and begin their rewards. The pool calls it on the main thread."""
        first, rows, versions = work
        steps = torch.tensor([self._servers.steps(versions)] * len(rows))
        sampled = self._sampled(prompts, first, rows, steps)
        self._rewards.start(prompts, first, sampled)
        return sampled

    def _sampled(self, prompts: Prompts, first: int, rows: Sequence[Any], versions: Tensor) -> Sampled:
        own = slice(first, first + len(rows))
        texts = prompts.prompts[own]
        prompt_ids = prompts.ids[own]
        completion_ids = [row.token_ids for row in rows]
        completions = decoded(self._host._tokenizer, texts, prompt_ids, completion_ids)
        log_probs = [row.log_probs for row in rows]
        return Sampled(prompt_ids, completion_ids, completions, versions, prompts=texts, log_probs=log_probs)

    def start_rewards_of_sampled(self) -> None:
        for batch in self._submitted.values():
            batch.read()

    def log(self) -> None:
        """Log the healthy servers as the main process counts them, and the retries and waiting groups of all ranks."""
        pool = self._pool
        retried, queued = self._host.ranks.sum(torch.tensor([pool.retried, len(pool.fleet.waiting)])).tolist()
        self._host.recorder.log({"servers/healthy": len(pool.fleet.current()), "async/queued_groups": queued})
        self._host.recorder.total("servers/retried_requests", retried)

    def forget(self) -> None:
        self._submitted.clear()
        self._pool.cancel()
