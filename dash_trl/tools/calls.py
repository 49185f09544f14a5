"""`ToolCalls` makes the tool calls of a message. `ProcessTool` is a tool that runs in worker processes.

The kind of a tool decides where its calls run::

    calls ──► a thread (functions), an event loop (coroutine functions), a worker process (`ProcessTool`)
                └─ value, or error ──► a message for the policy        └─ timeout in this process: `Overdue`
"""

import asyncio
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import iscoroutinefunction
from typing import Any

from dash_trl.tools.turns import Content, Message, Tool
from dash_trl.workers import (
    AsyncCalls,
    EventLoop,
    GivenUp,
    Overdue,
    ProcessCalls,
    ThreadCalls,
    Work,
    default_workers,
    together,
)

HANGS = Overdue, GivenUp  # the errors of a call in this process that hangs, or is given up because earlier calls hang
# Largest number of functions that run at a time, and also of coroutine functions. It is high, because most tools only
# wait.
MOST_CALLS = 256


class ProcessTool:
    """A tool that runs in worker processes::

        trainer = DASHTrainer(..., tools=[ProcessTool(run_python, timeout=10)])

    If a call hangs or crashes, its process is killed and the policy gets an error as the answer. The function cannot
    change anything in the trainer's process. The policy sees its name, signature and docstring.

    Args:
        function: the tool; neither a coroutine function nor a method of an environment.
        timeout: seconds for one call, from its start.
        max_concurrency: number of worker processes. None: this process's share of the CPUs, at most 8.
    Raises:
        ValueError: if the function cannot be pickled, or a number is out of range.
    """

    def __init__(self, function: Tool, *, timeout: float = 60.0, max_concurrency: int | None = None):
        self.function = function
        self.timeout = timeout
        self.workers = ProcessCalls([function], max_concurrency or default_workers())
        weakref.finalize(self, self.workers.close)

    def as_function(self) -> Tool:
        """Return a function that stands for the tool, because TRL and Transformers accept only functions.

        `ToolCalls` finds the tool by the function's attribute `process_tool`.
        """

        @functools.wraps(self.function)
        def tool(**arguments: Any) -> Any:
            return self.function(**arguments)

        tool.process_tool = self  # type: ignore[attr-defined]
        return tool


class ToolCalls:
    """Calls tools, and the methods `reset` and `get_reward` of environments, many at a time outside the main thread.

    A function that runs longer than `timeout` seconds continues, but its result is ignored.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._threads = ThreadCalls(MOST_CALLS)
        self._coroutines = AsyncCalls(MOST_CALLS)
        self._loop = EventLoop()  # runs the coroutines that wait for tools
        for one in (self._loop, self._threads, self._coroutines):
            weakref.finalize(self, one.close)

    def run(self, coroutines: Sequence[Work]) -> list[Any]:
        """Run coroutines by `together`. Calls on threads continue after an error, but nobody waits for them."""
        return self._loop.run(together(coroutines))

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function or coroutine function with keyword arguments; return its value or raise its exception.

        Raises:
            Overdue: if the call took longer than `timeout`.
            GivenUp: if the call was given up, because too many earlier calls hang.
        """
        backend = self._coroutines if iscoroutinefunction(function) else self._threads
        return await asyncio.wrap_future(backend.submit(function, arguments, timeout=self.timeout))

    async def answer(self, calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Tool]) -> tuple[list[Message], int]:
        """Make the parsed calls of one message: functions one after the other, then coroutine functions concurrently.

        Return one message per call, in TRL's order (functions first), and the number of failed calls. For errors see
        `call`.
        """
        found: list[tuple[str, Content, bool]] = []  # name, content of the message, True = the call failed
        waiting: list[tuple[str, Work]] = []
        for one in calls:
            name = one.get("name", "unknown")
            try:
                if one["type"] != "function":
                    raise ValueError(f"Unsupported tool call type: {one['type']}")
                name = _encodable(one["function"]["name"])
                if (tool := tools.get(name)) is None:
                    raise ValueError(f"Tool {name} not found.")
                arguments = deepcopy(one["function"]["arguments"])  # a copy, since a tool may change its arguments
                if iscoroutinefunction(tool):
                    waiting.append((name, tool(**arguments)))
                elif (apart := getattr(tool, "process_tool", None)) is not None:
                    # Called without a thread, so that the timeout begins when a worker takes the call.
                    call = apart.workers.submit(apart.function, arguments, timeout=apart.timeout)
                    found.append((name, _written(await asyncio.wrap_future(call)), False))
                else:
                    found.append((name, *await self.call(_calls, {"tool": tool, "arguments": arguments})))
            except HANGS:
                for _, coroutine in waiting:
                    coroutine.close()
                raise
            except Exception as error:
                found.append((name, *_failure(error)))
        made = (self.call(_awaits, {"coroutine": one}) for _, one in waiting)
        for (name, _), outcome in zip(waiting, await asyncio.gather(*made, return_exceptions=True), strict=True):
            if isinstance(outcome, HANGS):
                raise outcome
            found.append((name, *(_failure(outcome) if isinstance(outcome, BaseException) else outcome)))
        messages = [{"role": "tool", "name": name, "content": content} for name, content, _ in found]
        return messages, sum(failed for *_, failed in found)


# The content of a message, and whether the call failed. Both are found where the tool runs, within its time limit,
# because `__str__` may take long.


def _calls(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Content, bool]:
    try:
        return _written(tool(**arguments)), False
    except Exception as error:
        return _failure(error)


async def _awaits(coroutine: Work) -> tuple[Content, bool]:
    try:
        return _written(await coroutine), False
    except Exception as error:
        return _failure(error)


def _failure(error: BaseException) -> tuple[str, bool]:
    return _encodable(str({"error": str(error)})), True


def _written(value: object) -> Content:
    """Return a value as text, or as text blocks, without characters that tokenizers refuse."""
    if (
        isinstance(value, list)
        and value
        and all(
            isinstance(one, dict) and one.get("type") == "text" and isinstance(one.get("text"), str) for one in value
        )
    ):
        return [{**one, "text": _encodable(one["text"])} for one in value]
    return _encodable(str(value))


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cut JSON and file names may contain, by question marks."""
    return text.encode(errors="replace").decode()
