"""`Conversations` runs the work before, between and after the turns of rows. Any sampler may sample the turns::

    begin: environment, reset, prompt ──► [sampled] ──► answer: run tools ──► [sampled] ──► … ──► end: get_reward

The work between two turns of a row is a coroutine, so many rows wait for their tools at the same time.
"""

import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dash_trl.tools.calls import HANGS, ToolCalls
from dash_trl.tools.environments import NO_PROMPT, Environments, methods_of, observed, owns_reward
from dash_trl.tools.turns import Tool, TurnRules, Turns

logger = logging.getLogger(__name__)

ASK = object()  # value of `Conversation.reward` until `get_reward` is called


@dataclass(eq=False)
class Conversation:
    """One row of several turns, with its environment, tools and reward.

    Attributes:
        prompt_ids: token ids of the prompt; empty = not known yet.
        prompt: the messages before the first turn.
        turns: the turns so far, from `Conversations.begin` on.
        name: name of the row's environment, if environments have names.
        tools: the row's tools by name, including methods of the environment.
        failure: describes the failed call, so that the row is unscored; None = no call has failed.
        reward: value of the environment's `get_reward`; NaN = a call failed, `ASK` = it was not called.
        in_use: True = a call of the environment may still run, so no other row may use it.
        began: True = `begin` leased or made the environment; False = TRL made it, or there are no environments.
    """

    example: Mapping[str, Any]
    prompt_ids: list[int]
    prompt: Any = field(init=False)
    turns: Turns = field(init=False)
    name: str | None = None
    environment: Any = None
    tools: dict[str, Tool] = field(default_factory=dict)
    failure: str | None = None
    reward: Any = ASK
    in_use: bool = True
    began: bool = False
    calls: int = 0
    failed_calls: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.example["prompt"] if "prompt" in self.example else deepcopy(NO_PROMPT)


@dataclass(eq=False)
class Conversations:
    """Runs rows of several turns: environments, tool calls and rewards.

    Attributes:
        tools: the tools that are not methods of an environment.
        tokenize: function: a prompt, and the tools to list in it → token ids.
        end_id: the only token of a completion if the environment failed before the first turn.
        use_environments: function that passes the environments of rows to reward functions.
    """

    rules: Callable[[], TurnRules]
    calls: ToolCalls
    tools: Sequence[Tool]
    environments: Environments
    tokenize: Callable[[object, Sequence[Tool]], list[int]]
    end_id: int
    use_environments: Callable[[list[object]], None]
    _scored: Sequence[Conversation] = ()  # the rows that reward functions score next

    @property
    def has_tools(self) -> bool:
        return any([self.tools, *self.environments.tools.values()])

    @contextmanager
    def for_evaluation(self) -> Iterator[None]:
        """Context manager for evaluations, within which TRL has the idle environments."""
        scored = self._scored
        self._scored = ()
        with self.environments.for_evaluation():
            yield
        self.score(scored)  # a callback may evaluate before training's rewards are known

    def begun(
        self, prompt_ids: Sequence[list[int]], environments: Sequence[object] | None, names: Sequence[str | None] | None
    ) -> list[Conversation]:
        """Make rows for an evaluation, in which TRL has reset the environments and will score the completions."""
        rows = [Conversation({}, ids) for ids in prompt_ids]
        for i, row in enumerate(rows):
            if environments and names:
                row.name = names[i]
                row.environment = environments[i]
            self._set_up(row)
        self._scored = rows
        return rows

    async def begin(self, row: Conversation) -> bool:
        """Lease and reset a row's environment and tokenize its prompt; return False if the environment failed.

        With environments, the prompt is always tokenized, because the observation of `reset` changes it.
        """
        environments = self.environments
        if environments.factories:
            row.name = environments.name_of(row.example)
            row.began = True
            row.environment = environments.lease(row.name)
            if row.environment is None:
                row.environment = await self.calls.call(environments.factories[row.name], {})
            given = row.prompt
            # As in TRL, `reset` gets all columns except the one that names the environment.
            arguments = {key: value for key, value in row.example.items() if row.name is None or key != "environment"}
            try:
                row.prompt = observed(row.prompt, await self.calls.call(row.environment.reset, arguments))
                row.prompt_ids = self.tokenize(row.prompt, self._listed(row))
            except Exception as error:
                self._fail(row, error, "reset")
                row.prompt = given  # if the given prompt itself is wrong, tokenizing it below ends the run
        if not row.prompt_ids:
            row.prompt_ids = self.tokenize(row.prompt, self._listed(row))
        self._set_up(row)
        if row.failure is not None:
            row.turns.never_began(self.end_id)
        return row.failure is None

    def _listed(self, row: Conversation) -> Sequence[Tool]:
        return self.environments.tools.get(row.name, self.tools)

    def _set_up(self, row: Conversation) -> None:
        methods = [] if row.environment is None else methods_of(row.environment)
        row.tools = {tool.__name__: tool for tool in [*self.tools, *methods]}
        row.turns = Turns(self.rules(), row.prompt_ids, self._listed(row))

    async def answer(self, row: Conversation, ids: list[int], log_probs: list[float | None] | None) -> bool:
        """Add a turn of the policy to a row and run the tools that it calls; return whether there is another turn.

        If the row ends without a failure, and `begin` has leased or made its environment, `get_reward` is called, too.
        If the sampler reports no log-probs, `log_probs` is None.
        """
        calls = row.turns.sampled(ids, log_probs)
        if calls:
            row.calls += len(calls)
            try:
                messages, failed = await self.calls.answer(calls, row.tools)
            except HANGS as error:
                self._fail(row, error, " and ".join(str(one.get("function", one).get("name")) for one in calls))
            else:
                row.failed_calls += failed
                if row.turns.answered(messages):
                    return True
        if row.failure is None and row.began and owns_reward(type(row.environment)):
            try:
                row.reward = await self.calls.call(row.environment.get_reward, {})
            except Exception as error:
                self._fail(row, error, "get_reward")
        row.in_use = row.failure is not None
        return False

    def score(self, rows: Sequence[Conversation]) -> None:
        """Set the rows that reward functions score next, and pass them the environments of these rows."""
        self._scored = rows
        if self.environments.factories:
            environments = [row.environment for row in rows]
            if len({*map(id, environments)}) < len(rows):
                raise ValueError(
                    "environment_factory returned one environment for several rows, which would share its state and "
                    "reward: pass the class, or a function that makes a new instance in each call."
                )
            self.use_environments(environments)

    def failed(self, rows: int) -> list[bool]:
        """Return, for each row of an evaluation, whether it is unscored because a tool or an environment failed.

        Without tools, no row can have failed, and `rows` is their number.
        """
        return [row.failure is not None for row in self._scored] or [False] * rows

    def rewards(self, environments: Sequence[object], kind: type) -> list[float | None]:
        """Return the rewards of the environments of a class, None for others. Call `get_reward` where none is known.

        NaN = a call failed.
        """
        found = {id(row.environment): row.reward for row in self._scored if row.reward is not ASK}
        missing = [one for one in environments if type(one) is kind and id(one) not in found]
        values = self.calls.run([self._reward(one) for one in missing])
        found |= zip(map(id, missing), values, strict=True)
        return [found[id(one)] if type(one) is kind else None for one in environments]

    def give_back(self, rows: Sequence[Conversation]) -> None:
        """Give the environments of finished rows back to the pool, except those that may still be at work."""
        for row in rows:
            if row.environment is not None and not row.in_use:
                self.environments.give_back(row.name, row.environment)

    async def _reward(self, instance: Any) -> Any:
        try:
            return await self.calls.call(instance.get_reward, {})
        except Exception as error:
            logger.warning(f"get_reward of a {type(instance).__name__} failed, so its row is unscored: {error!r}")
            error.__traceback__ = None  # see `_fail`
            self.environments.remove(instance)
            return math.nan

    def _fail(self, row: Conversation, error: Exception, what: str) -> None:
        """Mark a row as unscored. Its environment is in an unknown state and does not return to the pool."""
        text = "".join(traceback.format_exception_only(error)).strip()  # does not fail if the error's `__str__` fails
        error.__traceback__ = None  # a thread that hangs keeps the error; a traceback would keep the trainer in memory
        row.failure = f"{what}: {text}"
        row.reward = math.nan
        logger.warning(f"A row is unscored because a call for it failed: {row.failure}")
        if not row.began:
            self.environments.remove(row.environment)


class EnvironmentReward:
    """The reward function of one class of environments (`kind`): returns `get_reward` of each row's environment.

    It returns None (not applicable) for rows with an environment of another class.
    """

    def __init__(self, kind: type, conversations: Conversations):
        self.kind = kind
        self._conversations = conversations
        self.__name__ = kind.__name__

    def __call__(self, environments: Sequence[object], **_: object) -> list[float | None]:
        return self._conversations.rewards(environments, self.kind)
