"""Samplers, which sample the completions of a window: this process, a user's `rollout_func`, or vLLM servers::

    sample: the rows of a window, and of later windows, while rewards are computed

A sampler passes rows to `Rewards.start` as soon as they are sampled, including rows of later windows. On servers, this
happens on the event loop's thread.

Rows with tools or environments have several turns. This process samples them in `Rounds`. On servers, each row by
itself asks a server for a turn, runs the tools, and asks again.
"""

from collections.abc import Coroutine, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled, to_rollouts
from dash_trl.collect.scoring import Rewards
from dash_trl.collect.turns import Rounds
from dash_trl.host import Host, on_servers
from dash_trl.log_probs import LogProbs
from dash_trl.rollout import joined
from dash_trl.sampling import URGENT
from dash_trl.seams import decoded, sync_weights
from dash_trl.tools import Conversation, Conversations


class Sampler:
    """Base of all samplers. All ranks call a method at the same point, except `forget`.

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
        self._tokenizer = host._tokenizer
        environments = None if conversations is None else conversations.environments.factories
        self.needs_token_ids = host.rollout_func is None and not environments  # an environment may add to its prompt
        self._rows: dict[int, list[Conversation]] = {}  # generation batch → its rows with several turns
        self._taken: list[Conversation] = []  # rows whose environments reward functions may use, and no other row

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        """Sample this rank's rows of a generation batch, or wait for them, and return them.

        Args:
            new: generation batches that the sampler has not been given before, in the order of their numbers. `prompts`
                is among them, unless an earlier call had it. The sampler may sample the others ahead.
        """
        raise NotImplementedError

    def _take(self, prompts: Prompts) -> None:
        """Keep the environments of a generation batch for its reward functions."""
        if self._conversations is not None:
            self._taken = self._rows.pop(prompts.number)
            self._conversations.score(self._taken)

    def log(self) -> None:
        """Log figures of the sampler, once per window."""

    def forget(self) -> None:
        """Drop the prompts and rows of all windows that `sample` has not returned yet."""
        for rows in self._rows.values():
            self._taken += rows
        self._rows.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Let other rows use the environments of the last generation batch, whose rewards have come by now."""
        if self._conversations is not None:
            self._conversations.give_back(self._taken)
        self._taken = []

    def _new_rows(self, prompts: Prompts) -> list[Conversation]:
        rows = [Conversation(*one) for one in zip(prompts.examples, prompts.ids, strict=True)]
        self._rows[prompts.number] = rows
        return rows

    def _of_one_turn(
        self,
        prompts: Prompts,
        own: slice,
        completion_ids: list[list[int]],
        log_probs: list[list[float | None]] | None,
        versions: Tensor,
    ) -> Sampled:
        """Return the adjacent rows `own` of a generation batch whose rows have one turn."""
        texts = prompts.prompts[own]
        prompt_ids = prompts.ids[own]
        completions = decoded(self._tokenizer, texts, prompt_ids, completion_ids)
        return Sampled(prompt_ids, completion_ids, completions, versions, prompts=texts, log_probs=log_probs)

    def _of_turns(self, conversations: Conversations, rows: Sequence[Conversation], versions: Tensor) -> Sampled:
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
            calls=[(row.calls, row.failed_calls) for row in rows] if conversations.has_tools else [],
            failures=[row.failure for row in rows],
        )


class ByFunction(Sampler):
    """Samples with a user's `rollout_func`. It samples no window ahead."""

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        with self._timed("generate"):
            sync_weights(self._host)  # TRL, too, sends the weights before it calls a `rollout_func`
            columns = dict(self._host.rollout_func(deepcopy(prompts.prompts), self._host))
        prompt_ids = columns.pop("prompt_ids")
        completion_ids = columns.pop("completion_ids")
        return Sampled(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completions=decoded(self._tokenizer, prompts.prompts, prompt_ids, completion_ids),
            policy_version=torch.full((len(completion_ids), 2), self._host.state.global_step),
            prompts=prompts.prompts,
            log_probs=columns.pop("logprobs"),
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
        self._ahead: dict[int, Sampled] = {}  # generation batches that were sampled ahead

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._give_back()
        for one in new:  # `prompts` first, whose rewards are computed while the others are sampled
            versions = torch.full((len(one.examples), 2), self._host.state.global_step)
            with self._timed("generate"):
                if self._conversations is None:
                    turns = self._host._generate_single_turn(*one.tokenized, self._host.args.num_generations)
                    sampled = self._of_one_turn(one, slice(None), *turns, versions)
                else:
                    rows = self._new_rows(one)
                    Rounds(self._host, self._conversations).sample(rows)
                    sampled = self._of_turns(self._conversations, rows, versions)
            if sampled.log_probs is None and self._host.args.async_level:
                rollouts = to_rollouts(sampled, [], group=versions[:, 0], pad_token_id=self._tokenizer.pad_token_id)
                sampled = replace(sampled, log_probs=self._log_probs.of_policy(rollouts))
            self._rewards.start(one, 0, sampled)
            self._ahead[one.number] = sampled
        self._take(prompts)
        return self._ahead.pop(prompts.number)

    def forget(self) -> None:
        self._ahead.clear()
        super().forget()


class OnServers(Sampler):
    """Samples on vLLM servers: all windows whose prompts are known, including windows that have not begun."""

    def __init__(self, host: Host, rewards: Rewards, conversations: Conversations | None):
        super().__init__(host, rewards, conversations)
        self._servers = host.vllm_generation
        self._pool = self._servers.pool
        self._tokenizer = deepcopy(host._tokenizer)  # the main thread uses the other one
        self._submitted: dict[int, Any] = {}  # generation batch → its batch of the pool
        self._arrived: dict[int, dict[int, Sampled]] = {}  # generation batch → first row → adjacent sampled rows

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self.begin(prompts, new)
        with self._timed("generate"), self._timed("wait_for_rollouts"):
            return self._host.ranks.agree(self.finish, prompts)

    def begin(self, prompts: Prompts, new: Sequence[Prompts]) -> None:
        """Begin to sample as `sample` does, and do not wait: `arrived` returns the rows."""
        self._give_back()
        with self._timed("generate"):
            sync_weights(self._host)
            for one in new:  # all at once, so that the servers stay busy while the last rows of `prompts` are sampled
                order = URGENT if one is prompts else one.number
                self._arrived[one.number] = {}
                failed = [self._rewards.of_prompts(one).fail] if self._rewards.start_early else []
                self._submitted[one.number] = self._pool.submit(self._works(one, order), *failed)

    def finish(self, prompts: Prompts) -> Sampled:
        """Wait for all rows of a generation batch that `begin` has begun, and return them."""
        self._pool.collect(self._submitted.pop(prompts.number))
        sampled = self.arrived(prompts, range(len(prompts.examples)))
        del self._arrived[prompts.number]
        self._take(prompts)
        return sampled

    def arrived(self, prompts: Prompts, rows: Sequence[int]) -> Sampled:
        """Return rows of a generation batch, which have arrived, in this order; rows of one request are adjacent."""
        found = self._arrived[prompts.number]
        sampled = joined([found[row] for row in rows if row in found])
        steps = [self._servers.steps(versions) for versions in sampled.policy_version.tolist()]
        return replace(sampled, policy_version=torch.tensor(steps))

    def _works(self, prompts: Prompts, order: int) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield coroutines for the pool's event loop; each samples adjacent rows of one turn, or a row of several."""
        if self._conversations is not None:
            for number, row in enumerate(self._new_rows(prompts)):
                yield self._note(prompts, number, self._turns(self._conversations, number, row, order))
            return
        first = 0
        for ids, n, sampling in self._servers.requests(prompts.ids, self._host.args.num_generations):
            request = self._pool.complete(ids, n, sampling, order=order)
            yield self._note(prompts, first, self._turn(prompts, slice(first, first + n), request))
            first += n

    async def _note(self, prompts: Prompts, first: int, work: Coroutine[Any, Any, Sampled]) -> None:
        """Keep the rows that a coroutine samples, and start their rewards."""
        sampled = await work
        self._arrived[prompts.number][first] = sampled
        self._rewards.start(prompts, first, sampled)

    async def _turn(self, prompts: Prompts, own: slice, request: Coroutine[Any, Any, Any]) -> Sampled:
        rows, versions = await request
        token_ids = [row.token_ids for row in rows]
        log_probs = [row.log_probs for row in rows]
        return self._of_one_turn(prompts, own, token_ids, log_probs, torch.tensor([versions] * len(rows)))

    async def _turns(self, conversations: Conversations, number: int, row: Conversation, order: int) -> Sampled:
        sampling = self._servers.sampling()
        versions: list[int] = []
        goes_on = await conversations.begin(row)
        while goes_on:
            sampling["max_tokens"] = row.turns.room
            (turn,), added = await self._pool.complete(row.turns.context, 1, sampling, order=order, number=number)
            versions += added
            goes_on = await conversations.answer(row, turn.token_ids, turn.log_probs)
        versions = versions or [self._pool.fleet.version]
        return self._of_turns(conversations, [row], torch.tensor([[versions[0], versions[-1]]]))

    def log(self) -> None:
        """Log the healthy servers as the main process counts them, and the retries of all ranks."""
        recorder = self._host.recorder
        recorder.log({"servers/healthy": len(self._pool.fleet.current())})
        recorder.total("servers/retried_requests", self._host.ranks.sum(torch.tensor(self._pool.retried)).item())

    def forget(self) -> None:
        self._pool.cancel()  # first, because requests that end fill `_arrived`
        self._submitted.clear()
        self._arrived.clear()
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
