"""`Turns`: the tokens and messages of a row of several turns, by TRL's rules; a pure state machine.

    sampled: the policy's turn ──► its calls of tools ──► answered: what they said ──► sampled ──► …
                                        └── none, or no room for the answer: the row has ended

Tokens go in and out: what the policy sampled is never tokenized again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

# Of a token; known ones have 128. An answer with more for each token that has room is too long without counting.
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class TurnRules:
    """
    Attributes:
        most_tokens: of a completion, the answers of tools included; TRL's `max_completion_length`.
        context: tokens that the sampler has positions for; None = no limit.
        most_rounds: of tool calls in a row, TRL's `max_tool_calling_iterations`; None = no limit.
        parse: (token ids of a turn, token ids before it, tools) → the policy's message.
        encode: tool messages → their token ids, up to the point where the policy's next turn begins.
    """

    most_tokens: int
    context: int | None
    most_rounds: int | None
    parse: Callable[[list[int], list[int], Sequence[Any]], Message]
    encode: Callable[[list[Message]], list[int]]


class Turns:
    """The completion of one prompt, as far as it has come.

    Args:
        prompt_ids: token ids of the prompt. tools: those that the prompt names.
    Attributes:
        completion_ids: token ids so far.
        own: for each of them, 1 = the policy sampled it, 0 = a tool said it.
        log_probs: for each of them; 0 for a tool's. `None` if the sampler reports none.
        messages: the policy's and the tools', in order.
        rounds: of tool calls that were answered.
    """

    def __init__(self, rules: TurnRules, prompt_ids: list[int], tools: Sequence[Any]):
        self._rules, self.prompt_ids, self._tools = rules, prompt_ids, tools
        self.completion_ids: list[int] = []
        self.own: list[int] = []
        self.log_probs: list[float | None] | None = []
        self.messages: list[Message] = []
        self.rounds = 0

    @property
    def context(self) -> list[int]:
        """The token ids that the next turn continues."""
        return self.prompt_ids + self.completion_ids

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        room = self._rules.most_tokens - len(self.completion_ids)
        return room if self._rules.context is None else min(room, self._rules.context - len(self.context))

    def sampled(self, ids: list[int], log_probs: list[float | None] | None) -> list[Mapping[str, Any]]:
        """Appends a turn of the policy, cut to `max_completion_length`.

        Returns:
            The tool calls in it that are to be answered; none if the row has ended.
        """
        ids = ids[: self._rules.most_tokens - len(self.completion_ids)]
        calls: list[Mapping[str, Any]] = []
        if ids or not self.messages:
            message = self._rules.parse(ids, self.context, self._tools)
            self.messages.append(message)
            calls = message.get("tool_calls") or []
        self._append(ids, 1, None if log_probs is None else log_probs[: len(ids)])
        return calls if self._rules.most_rounds is None or self.rounds < self._rules.most_rounds else []

    def never_began(self, token: int, message: Message) -> None:
        """Nothing is sampled for this row. Other rows need it to have a token and a message; the token is not own."""
        self.messages = [message]
        self._append([token], 0, None)

    def answered(self, messages: list[Message]) -> bool:
        """Appends the answers of tools, if there is room for all of them. Else the row ends as it was.

        Returns:
            Whether the policy has another turn.
        """
        if sum(len(str(one["content"])) for one in messages) > MOST_CHARACTERS * self._rules.most_tokens:
            return False
        ids = self._rules.encode(messages)
        context = self._rules.context
        too_long = len(self.completion_ids) + len(ids) > self._rules.most_tokens
        if too_long or context is not None and len(self.context) + len(ids) >= context:
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
