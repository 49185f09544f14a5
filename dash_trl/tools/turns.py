"""`Turns` collects the tokens and messages of a row of several turns, by TRL's rules::

    sampled: the policy's turn ──► its tool calls ──► answered: the answers of the tools ──► sampled ──► …
                                        └── no calls, or no room for the answers: the row has ended

Text that the policy sampled is never tokenized again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = Callable[..., Any]  # or a coroutine function; of the user, or a method of an environment
Content = str | list[dict[str, str]]  # of a tool's message: a text, or text blocks

# Upper bound of the characters in one token; the longest known token has 128. If the answers of tools have more than
# `MOST_CHARACTERS` × `most_tokens` characters, they cannot fit into a completion and are not tokenized.
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class TurnRules:
    """The limits of a row, and the functions that convert between token ids and messages.

    Attributes:
        most_tokens: limit of tokens in a completion, with the answers of tools; TRL's `max_completion_length`.
        context: the sampler's limit of tokens in prompt and completion together; infinite = no limit.
        most_rounds: limit of rounds of tool calls, TRL's `max_tool_calling_iterations`.
        parse: function: token ids of a turn, token ids before the turn, tools → the policy's message.
        encode: function: tool messages → their token ids, with the tokens that begin the policy's next turn.
    """

    most_tokens: int
    context: float
    most_rounds: int
    parse: Callable[[list[int], list[int], Sequence[Tool]], Message]
    encode: Callable[[list[Message]], list[int]]


@dataclass(eq=False)
class Turns:
    """The turns of one row so far: the token ids and messages after its prompt.

    Attributes:
        completion_ids: the completion's token ids so far.
        own: one entry per token id, 1 = the policy sampled the token, 0 = it belongs to a tool's answer.
        log_probs: the sampler's log-probs, one per token id; 0 for tokens of a tool's answer. None if the sampler
            reports none, or if the row `never_began`.
        messages: the messages of the policy and the tools, in order.
        rounds: number of answered rounds of tool calls.
    """

    rules: TurnRules
    prompt_ids: list[int]
    tools: Sequence[Tool]
    completion_ids: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    log_probs: list[float | None] | None = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rounds: int = 0

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def room(self) -> int:
        return int(min(self.rules.most_tokens - len(self.completion_ids), self.rules.context - len(self.context)))

    def sampled(self, ids: list[int], log_probs: list[float | None] | None) -> list[Mapping[str, Any]]:
        """Append a turn of the policy, cut to `most_tokens`, and return the tool calls that need an answer.

        If there are none, the row has ended: the turn has no calls, or the row has had `most_rounds` rounds.
        """
        ids = ids[: self.rules.most_tokens - len(self.completion_ids)]
        calls: list[Mapping[str, Any]] = []
        if ids or not self.messages:
            message = self.rules.parse(ids, self.context, self.tools)
            self.messages.append(message)
            calls = message.get("tool_calls") or []
        self._append(ids, 1, None if log_probs is None else log_probs[: len(ids)])
        return calls if self.rounds < self.rules.most_rounds else []

    def never_began(self, token: int) -> None:
        """Set an empty message and a completion of one token, because each row needs a token.

        The environment of the row failed before the first turn. The token does not count as sampled by the policy.
        """
        self.messages = [{"role": "assistant", "content": ""}]
        self._append([token], 0, None)

    def answered(self, messages: list[Message]) -> bool:
        """Append the answers of tools, one message per call, and return whether the policy has another turn.

        If the answers do not all fit into the row, the row ends without them.
        """
        if sum(len(str(one["content"])) for one in messages) > MOST_CHARACTERS * self.rules.most_tokens:
            return False
        ids = self.rules.encode(messages)
        too_long = len(self.completion_ids) + len(ids) > self.rules.most_tokens
        if too_long or len(self.context) + len(ids) >= self.rules.context:
            return False
        self.messages += messages
        self._append(ids, 0, [0.0] * len(ids))
        self.rounds += 1
        return self.room > 0

    def _append(self, ids: list[int], own: int, log_probs: list[float | None] | list[float] | None) -> None:
        self.completion_ids = self.completion_ids + ids
        self.own = self.own + [own] * len(ids)
        known = self.log_probs is not None and log_probs is not None
        self.log_probs = [*self.log_probs, *log_probs] if known else None  # type: ignore[misc]
