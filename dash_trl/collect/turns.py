"""`Rounds` samples rows with several turns, which call tools or act in an environment, in this process::

    sample a turn of all rows that wait ──► run their tools, in parallel ──► sample a turn ──► …

All ranks run the same number of rounds, because sampling may be a collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dash_trl.host import Host, on_servers
from dash_trl.tools import Conversation, Conversations


@dataclass(frozen=True)
class Rounds:
    """Samples rows with several turns in this process. All ranks call every method at the same point."""

    host: Host
    conversations: Conversations

    def sample(self, rows: Sequence[Conversation]) -> None:
        begin = [self.conversations.begin(row) for row in rows]
        self._sample_rounds(self._with_another_turn(rows, begin))

    def go_on(
        self, rows: Sequence[Conversation], ids: Sequence[list[int]], log_probs: Sequence[list[float | None]] | None
    ) -> tuple:
        """Sample the remaining turns of rows whose first turn is sampled already, for TRL's evaluation.

        Args:
            ids: token ids of each first turn.
            log_probs: the sampler's log-probs of each first turn, if known.
        Returns:
            The tuple of TRL's `_tool_call_loop`.
        """
        self._sample_rounds(self._answered(rows, ids, log_probs))
        turns = [row.turns for row in rows]
        return (
            [one.own for one in turns],
            [one.messages for one in turns],
            [one.completion_ids for one in turns],
            None if log_probs is None else [one.log_probs for one in turns],
            [row.calls for row in rows],  # TRL adds them up when they are gathered
            [row.failed_calls for row in rows],
            [[] for _ in rows],  # images
        )

    def _sample_rounds(self, waiting: list[Conversation]) -> None:
        while self.host.ranks.sum(torch.tensor(len(waiting))):  # ranks may have different numbers of waiting rows
            contexts = [row.turns.context for row in waiting]
            waiting = self._answered(waiting, *self._generate(contexts))

    def _generate(self, contexts: list[list[int]]) -> tuple[list[list[int]], list[Any] | None]:
        """Sample one turn of each row, given the token ids that the turn continues.

        Sampling may be a collective, so a rank without waiting rows samples a dummy completion and drops it. With
        tensor parallelism, TRL finds a rank's completions by multiplying its place by its number of prompts, so all
        ranks pass the same number.
        """
        args = self.host.args
        rows = len(contexts)
        wanted = 0
        if not on_servers(self.host):
            is_split = args.use_vllm and args.vllm_tensor_parallel_size > 1
            wanted = self.host.ranks.largest(rows) if is_split else 1
        contexts = [*contexts, *[[self.host._tokenizer.eos_token_id]] * (wanted - rows)]
        ids, log_probs = self.host._generate_single_turn(contexts, None, {}, 1)  # 1: no groups
        return ids[:rows], log_probs if log_probs is None else log_probs[:rows]

    def _answered(
        self, rows: Sequence[Conversation], ids: Sequence[list[int]], log_probs: Sequence[Any] | None
    ) -> list[Conversation]:
        log_probs = [None] * len(rows) if log_probs is None else log_probs
        answers = [self.conversations.answer(*one) for one in zip(rows, ids, log_probs, strict=True)]
        return self._with_another_turn(rows, answers)

    def _with_another_turn(self, rows: Sequence[Conversation], go_on: Sequence[Any]) -> list[Conversation]:
        """Run one coroutine per row (`go_on`), and return the rows that have another turn."""
        found = self.host.ranks.agree(self.conversations.calls.run, go_on)
        return [row for row, has_turn in zip(rows, found, strict=True) if has_turn]
