"""Samplers for rows with several turns, which call tools or act in an environment::

    TurnsInProcess, in rounds: sample a turn of all rows that wait ──► run their tools, in parallel ──► …
    TurnsOnServers, each row by itself: ask a server for a turn ──► run the tools ──► ask a server ──► …

All ranks run the same number of rounds, because sampling in this process may be a collective.
"""

from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled, TurnCounts
from dash_trl.collect.samplers import ByFunction, InProcess, OnServers, Sampler, Work
from dash_trl.collect.scoring import Rewards
from dash_trl.host import Host, on_servers
from dash_trl.log_probs import LogProbs
from dash_trl.tools import Conversation, Conversations


class Rounds:
    """Samples rows with several turns in this process, in rounds: a round samples one turn of every waiting row.

    All ranks call every method at the same point.

    Args:
        host: the trainer.
        conversations: runs tools and environments.
    """

    def __init__(self, host: Host, conversations: Conversations):
        self._host, self._ranks, self._conversations = host, host.ranks, conversations

    def sample(self, rows: Sequence[tuple[Conversation, list[int] | None]]) -> None:
        """Sample all turns of rows.

        Args:
            rows: the rows, each with the token ids of its prompt. `None` in place of the ids: the prompt is tokenized
                after the row's environment is reset.
        """
        begin = [self._conversations.begin(*one) for one in rows]
        self._sample_rounds(self._with_another_turn([row for row, _ in rows], begin), first=True)

    def go_on(
        self, rows: Sequence[Conversation], ids: Sequence[list[int]], log_probs: Sequence[Any] | None
    ) -> tuple[Any, ...]:
        """Sample the remaining turns of rows whose first turn is sampled already, for TRL's evaluation.

        Args:
            rows: the rows.
            ids: token ids of each first turn.
            log_probs: the sampler's log-probs of each first turn. `None`: unknown.
        Returns:
            The tuple of TRL's `_tool_call_loop`.
        """
        self._sample_rounds(self._answered(rows, ids, log_probs), first=False)
        turns = [row.turns for row in rows if row.turns is not None]
        return (
            [one.own for one in turns],
            [one.messages for one in turns],
            [one.completion_ids for one in turns],
            None if log_probs is None else [one.log_probs for one in turns],
            [row.calls for row in rows],  # TRL adds them up when they are gathered
            [row.failed_calls for row in rows],
            [[] for _ in rows],  # images
        )

    def _sample_rounds(self, waiting: list[Conversation], *, first: bool) -> None:
        while self._ranks.sum(torch.tensor(len(waiting))):  # ranks may have different numbers of waiting rows
            contexts = [row.turns.context for row in waiting if row.turns is not None]
            waiting = self._answered(waiting, *self._generate(contexts, first))
            first = False

    def _generate(self, contexts: list[list[int]], first: bool) -> tuple[list[list[int]], list[Any] | None]:
        """Sample one turn of each row, given the token ids that the turn continues.

        Sampling may be a collective, in which every rank must take part. So a rank without waiting rows samples a
        completion of a prompt with a single token, and drops the completion. With tensor parallelism, TRL finds a
        rank's completions by multiplying its place in its group by its own number of prompts. So all ranks must pass
        the same number of prompts.
        """
        args, rows, wanted = self._host.args, len(contexts), 0
        if not on_servers(self._host):
            is_split = args.use_vllm and args.vllm_tensor_parallel_size > 1
            wanted = self._ranks.largest(rows) if is_split else 1
        contexts = [*contexts, *[[self._host._tokenizer.eos_token_id]] * (wanted - rows)]
        ids, log_probs = self._host._generate_single_turn(contexts, None, {}, args.num_generations if first else 1)
        return ids[:rows], log_probs if log_probs is None else log_probs[:rows]

    def _answered(
        self, rows: Sequence[Conversation], ids: Sequence[list[int]], log_probs: Sequence[Any] | None
    ) -> list[Conversation]:
        log_probs = [None] * len(rows) if log_probs is None else log_probs
        answers = [self._conversations.answer(*one) for one in zip(rows, ids, log_probs, strict=True)]
        return self._with_another_turn(rows, answers)

    def _with_another_turn(self, rows: Sequence[Conversation], go_on: Sequence[Any]) -> list[Conversation]:
        """Run one coroutine per row (`go_on`), and return the rows that have another turn."""
        found = self._ranks.agree(self._conversations.run, go_on)
        return [row for row, has_turn in zip(rows, found, strict=True) if has_turn]


class _Turns(Sampler):
    """Mixin for rows with several turns. It keeps the rows of each generation batch until their rewards have come.

    Until then, reward functions may use the environments of the rows, so no other row may use these environments.

    Args:
        host: see `Sampler`.
        rewards: see `Sampler`.
        source: `log_probs` of `InProcess`, or `servers` of `OnServers`.
        conversations: runs tools and environments.
    """

    def __init__(self, host: Host, rewards: Rewards, source: Any, conversations: Conversations):
        super().__init__(host, rewards, source)  # type: ignore[call-arg]  # of the class beside this one
        self._conversations = conversations
        self._rows: dict[int, list[Conversation]] = {}  # generation batch → its rows
        self._taken: list[Conversation] = []  # rows that reward functions may use
        self.needs_token_ids = conversations.environments is None  # an environment may add to its prompt

    def sample(self, prompts: Prompts, new: Sequence[Prompts]) -> Sampled:
        self._conversations.give_back(self._taken)  # by now, the rewards of the last generation batch have come
        self._taken = []
        sampled = super().sample(prompts, new)
        self._taken = self._rows.pop(prompts.number)
        self._conversations.score(self._taken)
        calls = torch.tensor([[row.calls, row.failed_calls] for row in self._taken])
        turns = TurnCounts(
            calls=calls if self._conversations.has_tools else None,
            failed=torch.tensor([row.failure is not None for row in self._taken]),
            failure=next((row.failure for row in self._taken if row.failure is not None), ""),
        )
        return replace(sampled, turns=turns)

    def _new_rows(self, prompts: Prompts) -> list[tuple[Conversation, list[int] | None]]:
        """Make the rows of a generation batch; return each with the token ids of its prompt, if they are known."""
        rows = self._rows[prompts.number] = [Conversation(example) for example in prompts.examples]
        prompt_ids = prompts.ids if prompts.tokenized else [None] * len(rows)
        return list(zip(rows, prompt_ids, strict=True))

    def _of_rows(self, rows: Sequence[Conversation], versions: Tensor) -> Sampled:
        """Return rows that have ended."""
        turns = [row.turns for row in rows if row.turns is not None]
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

    def forget(self) -> None:
        super().forget()  # first, because it ends the conversations that are running
        for rows in (self._taken, *self._rows.values()):
            self._conversations.give_back(rows)
        self._taken = []
        self._rows.clear()


class TurnsInProcess(_Turns, InProcess):
    """Samples rows with several turns in this process."""

    def _sample(self, prompts: Prompts) -> Sampled:
        rows = self._new_rows(prompts)
        with self._timed("generate"):
            Rounds(self._host, self._conversations).sample(rows)
        return self._finished(prompts, self._of_rows([row for row, _ in rows], self._versions(len(rows))))


class TurnsOnServers(_Turns, OnServers):
    """Samples rows with several turns on vLLM servers."""

    def _works(self, prompts: Prompts, order: int) -> Iterator[Coroutine[Any, Any, Work]]:
        sampling = self._servers.sampling()
        for number, row in enumerate(self._new_rows(prompts)):
            yield self._lead(number, *row, order, sampling)

    async def _lead(
        self, number: int, row: Conversation, prompt_ids: list[int] | None, order: int, sampling: dict[str, Any]
    ) -> Work:
        """Sample all turns of a row, each by a request."""
        versions: list[int] = []
        goes_on = await self._conversations.begin(row, prompt_ids)
        while goes_on and row.turns is not None:
            limited = sampling | {"max_tokens": row.turns.room}
            (turn,), added = await self._pool.complete(row.turns.context, 1, limited, order=order, number=number)
            versions += added
            goes_on = await self._conversations.answer(row, turn.token_ids, turn.log_probs)
        return number, [row], versions

    def _sampled(self, prompts: Prompts, first: int, rows: Sequence[Any], versions: Tensor) -> Sampled:
        return self._of_rows(rows, versions)


def new_sampler(
    host: Host,
    rewards: Rewards,
    log_probs: LogProbs,
    *,
    pool: Any,
    conversations: Conversations | None,
) -> Sampler:
    """Build the sampler of a run: a `rollout_func`, vLLM servers or this process, for rows with one or several turns.

    Args:
        host: the trainer.
        rewards: the rewards, which may begin while rows are sampled.
        log_probs: see `InProcess`.
        pool: the servers; used if `on_servers(host)`.
        conversations: runs tools and environments. `None`: rows have one turn.
    """
    if host.rollout_func is not None:
        return ByFunction(host, rewards)
    if on_servers(host):
        if conversations is None:
            return OnServers(host, rewards, pool)
        return TurnsOnServers(host, rewards, pool, conversations)
    if conversations is None:
        return InProcess(host, rewards, log_probs)
    return TurnsInProcess(host, rewards, log_probs, conversations)
