"""Samplers, which sample the completions of a window: this process, a user's `rollout_func`, or vLLM servers::

    sample: the rows of a window ──► sample_ahead: later windows, while rewards are awaited

A sampler passes rows to `Rewards.start` as soon as they are sampled, including rows of later windows.

Rows with tools or environments have several turns. This process samples them in `Rounds`. On servers, each row by
itself asks a server for a turn, runs the tools, and asks again.
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
from dash_trl.collect.turns import Rounds
from dash_trl.host import Host, on_servers, one_ahead
from dash_trl.log_probs import LogProbs
from dash_trl.rollout import joined
from dash_trl.sampling import URGENT
from dash_trl.seams import decoded, sync_weights
from dash_trl.tools import Conversation, Conversations

# Index of the first of adjacent rows, what servers have sampled of each row, weight versions of the requests
Work = tuple[int, Sequence[Any], list[int]]


class Sampler:
    """Base of all samplers. All ranks call a method at the same point, except `start_rewards_of_sampled` and `forget`.

    Args:
        rewards: gets rows as soon as they are sampled.
        conversations: runs tools and environments. `None`: rows have one turn.
    Attributes:
        needs_token_ids: False = the sampler tokenizes prompts itself.
    """

    def __init__(self, host: Host, rewards: Rewards, conversations: Conversations | None = None):
        self._host = host
        self._timed = host.recorder.timed
        self._rewards = rewards
        self._conversations = conversations
        # An environment may add to its prompt.
        self.needs_token_ids = conversations is None or conversations.environments is None
        self._rows: dict[int, list[Conversation]] = {}  # generation batch → its rows with several turns
        self._taken: list[Conversation] = []  # rows whose environments reward functions may use, and no other row

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        """Sample this rank's rows of a generation batch, or wait for them, and return them.

        Args:
            new: generation batches that the sampler has not been given before, in the order of their numbers. `prompts`
                is among them, unless an earlier call had it. The sampler may sample the others ahead.
        """
        self._give_back()  # by now, the rewards of the last generation batch have come
        sampled = self._sample(prompts, new)
        if self._conversations is None:
            return sampled
        self._taken = self._rows.pop(prompts.number)
        self._conversations.score(self._taken)
        return replace(
            sampled,
            calls=[(row.calls, row.failed_calls) for row in self._taken] if self._conversations.has_tools else [],
            failures=[row.failure for row in self._taken],
        )

    def _sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        raise NotImplementedError

    def sample_ahead(self) -> None:
        """Sample windows ahead if this process samples. Called after `sample`, while rewards are awaited."""

    def start_rewards_of_sampled(self) -> None:
        """Start the rewards of later windows' rows that were sampled since the last call, without waiting for more."""

    def log(self) -> None:
        """Log figures of the sampler, once per window."""

    def forget(self) -> None:
        """Drop the prompts and rows of all windows that `sample` has not returned yet."""
        for rows in self._rows.values():
            self._taken += rows
        self._rows.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Let other rows use the environments of the rows that reward functions used."""
        if self._conversations is not None:
            self._conversations.give_back(self._taken)
        self._taken = []

    def _new_rows(self, prompts: Prompts) -> list[Conversation]:
        rows = [Conversation(*one) for one in zip(prompts.examples, prompts.ids, strict=True)]
        self._rows[prompts.number] = rows
        return rows

    def _of_one_turn(
        self, prompts: Prompts, own: slice, completion_ids: list[list[int]], log_probs: Any, versions: Tensor
    ) -> Sampled:
        """Return the adjacent rows `own` of a generation batch whose rows have one turn."""
        texts = prompts.prompts[own]
        prompt_ids = prompts.ids[own]
        completions = decoded(self._host._tokenizer, texts, prompt_ids, completion_ids)
        return Sampled(prompt_ids, completion_ids, completions, versions, prompts=texts, log_probs=log_probs)

    def _of_turns(self, rows: Sequence[Conversation], versions: Tensor) -> Sampled:
        turns = [row.turns for row in rows]
        known = self._host.args.use_vllm or any(row.log_probs is not None for row in turns)
        return Sampled(
            prompt_ids=[row.prompt_ids for row in turns],
            completion_ids=[row.completion_ids for row in turns],
            completions=[row.messages for row in turns],
            policy_version=versions,
            log_probs=[row.log_probs or [None] * len(row.own) for row in turns] if known else None,
            own_tokens=[row.own for row in turns],
            prompts=[row.prompt for row in rows],
        )

    def _versions(self, rows: int) -> Tensor:
        """Return `Sampled.policy_version` of rows that the current weights have sampled."""
        return torch.full((rows, 2), self._host.state.global_step)


class ByFunction(Sampler):
    """Samples with a user's `rollout_func`. It samples no window ahead."""

    def __init__(self, host: Host, rewards: Rewards):
        super().__init__(host, rewards)
        self.needs_token_ids = False

    def _sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
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

    With `async_level=1`, it samples the next window while rewards are awaited, and `log_probs` computes log-probs that
    the engine does not report.
    """

    def __init__(self, host: Host, rewards: Rewards, conversations: Conversations | None, log_probs: LogProbs):
        super().__init__(host, rewards, conversations)
        self._log_probs = log_probs
        self._next: list[Prompts] = []  # generation batches to sample ahead
        self._ahead: dict[int, Sampled] = {}  # generation batches that were sampled ahead

    def _sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._next = [one for one in new if one is not prompts]
        ahead = self._ahead.pop(prompts.number, None)
        return self._sample_now(prompts) if ahead is None else ahead

    def sample_ahead(self) -> None:
        """Sample the next windows with the current weights, and begin their rewards at once."""
        for one in self._next:
            self._ahead[one.number] = self._sample_now(one)

    def _sample_now(self, prompts: Prompts) -> Sampled:
        versions = self._versions(len(prompts.examples))
        with self._timed("generate"):
            if self._conversations is None:
                turns = self._host._generate_single_turn(*prompts.tokenized, self._host.args.num_generations)
                sampled = self._of_one_turn(prompts, slice(None), *turns, versions)
            else:
                rows = self._new_rows(prompts)
                Rounds(self._host, self._conversations).sample(rows)
                sampled = self._of_turns(rows, versions)
        if sampled.log_probs is None and one_ahead(self._host):
            sampled = replace(sampled, log_probs=self._log_probs.of_tokens(sampled.prompt_ids, sampled.completion_ids))
        self._rewards.start(prompts, 0, sampled)
        return sampled

    def forget(self) -> None:
        self._ahead.clear()
        super().forget()


class OnServers(Sampler):
    """Samples on vLLM servers: all windows whose prompts are known, including windows that have not begun."""

    def __init__(self, host: Host, rewards: Rewards, conversations: Conversations | None):
        super().__init__(host, rewards, conversations)
        self._servers = host.vllm_generation
        self._pool = self._servers.pool
        self._submitted: dict[int, Any] = {}  # generation batch → its `Batch` of the pool

    def _sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        with self._timed("generate"):
            sync_weights(self._host)
            for one in new:  # all at once, so that the servers stay busy while the last rows of `prompts` are sampled
                order = URGENT if one is prompts else one.number
                works = self._requests(one, order) if self._conversations is None else self._turns(one, order)
                self._submitted[one.number] = self._pool.submit(works, partial(self._seen, one))
            with self._timed("wait_for_rollouts"):  # while this waits, the pool calls `_seen` on this thread
                return joined(self._host.ranks.agree(self._pool.collect, self._submitted.pop(prompts.number)))

    def _requests(self, prompts: Prompts, order: int) -> Iterator[Coroutine[Any, Any, Work]]:
        """Yield coroutines for the pool's event loop; each samples adjacent rows of one turn."""
        first = 0
        for ids, n, sampling in self._servers.requests(prompts.ids, self._host.args.num_generations):
            yield self._request(first, ids, n, sampling, order)
            first += n

    async def _request(self, first: int, ids: list[int], n: int, sampling: dict[str, Any], order: int) -> Work:
        return first, *await self._pool.complete(ids, n, sampling, order=order)

    def _turns(self, prompts: Prompts, order: int) -> Iterator[Coroutine[Any, Any, Work]]:
        """Yield coroutines for the pool's event loop; each samples a row of several turns."""
        sampling = self._servers.sampling()
        for number, row in enumerate(self._new_rows(prompts)):
            yield self._turns_of_row(number, row, order, sampling)

    async def _turns_of_row(self, number: int, row: Conversation, order: int, sampling: dict[str, Any]) -> Work:
        assert self._conversations is not None, "it has rows of several turns"
        versions: list[int] = []
        goes_on = await self._conversations.begin(row)
        while goes_on:
            limited = sampling | {"max_tokens": row.turns.room}
            (turn,), added = await self._pool.complete(row.turns.context, 1, limited, order=order, number=number)
            versions += added
            goes_on = await self._conversations.answer(row, turn.token_ids, turn.log_probs)
        return number, [row], versions

    def _seen(self, prompts: Prompts, work: Work) -> Sampled:
        """Decode rows that have been sampled, and begin their rewards. The pool calls it on the main thread."""
        first, rows, versions = work
        steps = torch.tensor([self._servers.steps(versions)] * len(rows))
        if self._conversations is None:
            own = slice(first, first + len(rows))
            token_ids = [row.token_ids for row in rows]
            sampled = self._of_one_turn(prompts, own, token_ids, [row.log_probs for row in rows], steps)
        else:
            sampled = self._of_turns(rows, steps)
        self._rewards.start(prompts, first, sampled)
        return sampled

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
        super().forget()  # last, because the conversations that are running have ended


def new_sampler(
    host: Host,
    rewards: Rewards,
    log_probs: LogProbs,
    conversations: Conversations | None,
) -> Sampler:
    """Build the sampler of a run: a `rollout_func`, vLLM servers or this process."""
    if host.rollout_func is not None:
        return ByFunction(host, rewards)
    if on_servers(host):
        return OnServers(host, rewards, conversations)
    return InProcess(host, rewards, conversations, log_probs)
