"""`Environments`: a pool of a user's environments, one instance for each row that is being sampled.

lease ──► reset: an observation for the prompt ──► its methods are tools ──► get_reward ──► give_back
            └── raised, or over its time: the instance is not used again
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

NO_PROMPT = [{"role": "user", "content": ""}]  # TRL's, where the environment's observation is the whole prompt


class Environments:
    """
    Args:
        factories: name → what makes an instance; one without a name is called `None`.
        tools: name → the tools that prompts of this environment name.
        pool: name → TRL's idle instances, which evaluations use.
    """

    def __init__(
        self,
        factories: Mapping[str | None, Callable[[], Any]],
        tools: Mapping[str | None, Sequence[Any]],
        pool: MutableMapping[str | None, list[Any]],
    ):
        self.tools = tools
        self.factories, self._pool = factories, pool
        self._idle: dict[str | None, list[Any]] = {name: [] for name in factories}
        self._take_back()

    def name_of(self, example: Mapping[str, Any]) -> str | None:
        """The environment of a dataset row: its column `environment`, if there are several."""
        name = None if None in self.factories else example.get("environment")
        if name not in self.factories:
            raise ValueError(
                f"A row has environment={name!r}, which is not among the environments passed to environment_factory: "
                f"{list(self.factories)}. Correct the column 'environment', or add a factory of that name."
            )
        return name

    def lease(self, name: str | None) -> Any:
        """An idle instance, or None."""
        try:
            return self._idle[name].pop()
        except IndexError:
            return None

    def give_back(self, name: str | None, instance: Any) -> None:
        self._idle[name].append(instance)

    def retire(self, instance: Any) -> None:
        """TRL uses this one of its idle instances no more."""
        for pool in self._pool.values():
            pool[:] = [one for one in pool if one is not instance]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it TRL has the idle instances, for an evaluation."""
        for name, pool in self._pool.items():
            while (instance := self.lease(name)) is not None:  # another thread may lease some, too
                pool.append(instance)
        try:
            yield
        finally:
            self._take_back()

    def _take_back(self) -> None:
        for name, pool in self._pool.items():
            self._idle[name] += pool
            pool.clear()

    def reset_arguments(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """TRL's: the columns of the row, without the one that names the environment if there are several."""
        several = None not in self.factories
        return {name: value for name, value in example.items() if not (several and name == "environment")}


def methods_of(instance: Any) -> list[Callable[..., Any]]:
    """The tools of an environment: its public methods but `reset` and `get_reward`."""
    names = (name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction))
    return [getattr(instance, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


def owns_reward(kind: type) -> bool:
    """Whether an environment's class scores its rows, by TRL's rule: its `get_reward` is a plain method."""
    return inspect.isfunction(getattr(kind, "get_reward", None))


def observed(prompt: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned at the end of its last message; a text, or a list of text blocks."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
