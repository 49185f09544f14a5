"""`Environments` is a pool of a user's environments, with one instance for each row that is being sampled.

Each instance goes through these steps::

    lease ──► reset: an observation for the prompt ──► its methods are tools ──► get_reward ──► give_back
                └── an error, or a timeout: the instance is not used again
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from dash_trl.tools.turns import Tool

NO_PROMPT = [{"role": "user", "content": ""}]  # as in TRL, if the environment's observation is the whole prompt


@dataclass(eq=False)
class Environments:
    """A pool of environments by name, or an empty one. A single environment without a name has the name None.

    Attributes:
        factories: for each name, the function that makes an instance.
        tools: for each name, the tools that prompts list.
        pool: for each name, TRL's list of idle instances, which TRL uses in evaluations.
    """

    factories: Mapping[str | None, Callable[[], Any]]
    tools: Mapping[str | None, Sequence[Tool]]
    pool: Mapping[str | None, list[Any]]

    def __post_init__(self) -> None:
        self._lock = Lock()  # rows begin on another thread than evaluations
        self._is_evaluating = False

    def name_of(self, example: Mapping[str, Any]) -> str | None:
        """Return the name of an example's environment (its column `environment`); None if environments have no names.

        Raises:
            ValueError: if there is no environment of this name.
        """
        name = None if None in self.factories else example.get("environment")
        if name not in self.factories:
            raise ValueError(
                f"A row has environment={name!r}, which is not among the environments passed to environment_factory: "
                f"{list(self.factories)}. Correct the column 'environment', or add a factory of that name."
            )
        return name

    def lease(self, name: str | None) -> Any:
        """Take an idle instance out of the pool and return it; None if no instance is idle, or TRL uses them."""
        with self._lock:
            return self.pool[name].pop() if self.pool[name] and not self._is_evaluating else None

    def give_back(self, name: str | None, instance: object) -> None:
        self.pool[name].append(instance)

    def remove(self, instance: object) -> None:
        """Remove an instance from TRL's idle instances, so that TRL does not use it again."""
        for pool in self.pool.values():
            pool[:] = [one for one in pool if one is not instance]

    @contextmanager
    def for_evaluation(self) -> Iterator[None]:
        """Context manager for an evaluation, within which TRL has the idle instances."""
        with self._lock:
            self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False


def methods_of(instance: object) -> list[Tool]:
    """Return the tools of an environment: its public methods except `reset` and `get_reward`."""
    names = (name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction))
    return [getattr(instance, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


def owns_reward(kind: type) -> bool:
    """Return whether a class of environments gives rewards: by TRL's rule, if its `get_reward` is a plain method."""
    return inspect.isfunction(getattr(kind, "get_reward", None))


def observed(prompt: list[dict[str, Any]], observation: object) -> list[dict[str, Any]]:
    """Return a prompt with an observation of `reset` (a text, text blocks or None) appended to its last message."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
