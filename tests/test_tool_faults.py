"""Faults of tools and environments: each costs its own row at most, and the run goes on. `test_backends.py` has more.

Every row is accounted for once, and what hangs is left alone after its time.
"""

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from datasets import Dataset

from dash_trl import ProcessTool
from dash_trl.tools import ToolCalls
from tests.scripted_turns import SMALL, Judge, answered, parsed, plays, written
from tests.tiny import corrects, load, noting, refused, user

TIMEOUT = 1.0  # of calls that wait for what never comes; others may take as long as they like
NEVER = threading.Event()


@pytest.fixture(autouse=True)
def hung_threads_end():
    NEVER.clear()
    yield
    NEVER.set()


# ---------------------------------------------------------------------- what becomes of a row


def raises(error: BaseException):
    raise error


class Written:
    """An object whose text is made by a function."""

    def __init__(self, text: Callable[[], Any]):
        self.text = text

    def __str__(self) -> str:
        return self.text()


class Gone:
    """For an expected answer: the row is unscored, and its completion ends with the call."""


GONE = Gone()
NO_ROOM = Gone()  # for its answer: a row ends, too, but it is scored


def error(text: str) -> str:
    return str({"error": text})


# name → (what a function does, what the policy reads)
FATES: dict[str, tuple[Callable[[], Any], Any]] = {
    "raises": (lambda: raises(ValueError("no")), error("no")),
    "exits": (lambda: raises(SystemExit(3)), error("SystemExit: 3")),
    "is cancelled": (lambda: raises(asyncio.CancelledError("so")), error("CancelledError: so")),
    "is closed": (lambda: raises(GeneratorExit()), error("GeneratorExit: ")),
    "hangs": (lambda: NEVER.wait() and "late", GONE),
    "a text that fails": (lambda: Written(lambda: None), error("__str__ returned non-string (type NoneType)")),
    "a text that hangs": (lambda: Written(lambda: NEVER.wait() and ""), GONE),
    "half a character": (lambda: "a\ud800b", "a?b"),
    "half a character in a block": (lambda: [{"type": "text", "text": "\udcff"}], [{"type": "text", "text": "?"}]),
    "a block without text": (lambda: [{"type": "text"}], "[{'type': 'text'}]"),
    "no blocks": (list, "[]"),
    "bytes": (lambda: b"\xff", "b'\\xff'"),
    "too much text": (lambda: "z" * 20_000_000, NO_ROOM),
}


def act(fate: str):
    """Acts.

    Args:
        fate: What happens.
    """
    return FATES[fate][0]()


async def act_later(fate: str):
    """Acts later.

    Args:
        fate: What happens.
    """
    if fate == "hangs":
        await asyncio.Event().wait()
    return act(fate)


def act_apart_of() -> Callable[..., Any]:
    """A tool for worker processes, which do not import this file, and torch with it."""

    def act_apart(fate: str):
        """Acts in another process.

        Args:
            fate: What happens.
        """
        import os
        import signal
        import threading

        if fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "hangs":
            threading.Event().wait()
        return f"{fate} there"

    return act_apart


APART = {"works": "works there", "dies": error("killed by SIGKILL"), "hangs": error(f"took more than {TIMEOUT:g} s")}
OF_ENVIRONMENTS = ["", "raises", "exits", "is cancelled", "hangs"]
ROWS: list[tuple[str, str]] = [  # where, fate
    *(("act", fate) for fate in FATES),
    *(("act_later", fate) for fate in FATES if fate != "a text that hangs"),
    *(("act_apart", fate) for fate in APART),
    *(("method", fate) for fate in ("raises", "hangs", "exits")),
    *((where, fate) for where in ("reset", "get_reward") for fate in OF_ENVIRONMENTS),
    *(("reset", fate) for fate in ("too much text", "bytes", "half a character")),
    *(("get_reward", fate) for fate in ("NaN", "None")),
]


class Fated:
    """An environment to which a row's fate happens.

    Attributes:
        rows: that it was reset for. failed: in one of them; it is in an unknown state.
    """

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.failed: list[str] = []

    def reset(self, where: str, fate: str, **columns):
        self.where = where
        self.fate = fate
        self.rows.append(f"{where}: {fate}")
        return self._meets("reset")

    def method(self, fate: str):
        """Acts.

        Args:
            fate: What happens.
        """
        if fate == "hangs":
            self.failed.append(self.rows[-1])
        return act(fate)

    def get_reward(self):
        if self.fate in ("NaN", "None"):
            return float("nan") if self.fate == "NaN" else None
        return 1.0 if self._meets("get_reward") is None else 0.0

    def _meets(self, where: str):
        if self.where != where or not self.fate:
            return None
        self.failed.append(self.rows[-1])
        return act(self.fate)


def expected(where: str, fate: str) -> tuple[list[dict[str, Any]], bool]:
    """What becomes of a row: its completion, and whether it is scored."""
    if where == "reset":
        return [parsed("" if fate else "no")], not fate
    if where == "get_reward":
        return [parsed("no")], fate in ("", "None")
    read = APART[fate] if where == "act_apart" else FATES[fate][1]
    turns = [parsed("", (where, {"fate": fate}))]
    if not isinstance(read, Gone):
        turns += [*answered((where, read)), parsed("done")]
    return turns, read is not GONE


def script(text: str, asked: int) -> Sequence[str]:
    """The first row of a prompt meets its fate."""
    where, _, fate = text.partition("<user>")[2].partition("<|im_end|>")[0].partition(": ")
    if asked or where in ("reset", "get_reward", "fine"):
        return [written("no")]
    return [written("", (where, {"fate": fate})), written("done")]


def rows_of(rollouts) -> list[tuple[dict[str, Any], Any, list[float]]]:
    """The rows of a window: their columns, completion, rewards."""
    return [*zip(rollouts.examples, rollouts.completions, rollouts.rewards.tolist(), strict=True)]


def problems(rows: Sequence[tuple[str, str]]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [user(f"{where}: {fate}") for where, fate in rows],
            "where": [where for where, _ in rows],
            "fate": [fate for _, fate in rows],
        }
    )


@pytest.fixture
def train(train, tool_model) -> Callable[..., Any]:
    defaults = {**SMALL, "tool_timeout": 600.0, "prepare": plays(script), "reward": Judge(), "in_process": True}
    return partial(train, model=tool_model, **defaults)


def test_what_becomes_of_a_row(train):
    """Rows that hang are by themselves, so that no other call runs out of time on a busy machine."""
    hanging = [row for row in ROWS if "hangs" in row[1]]
    check_window(train, [row for row in ROWS if row not in hanging], 600.0, "raises")
    check_window(train, hanging, TIMEOUT, "hangs")


def check_window(train, rows: Sequence[tuple[str, str]], timeout: float, evaluated: str) -> None:
    """A window with these rows, an evaluation with a call that fails, and a window in which nothing happens."""
    made: list[Fated] = []

    def factory() -> Fated:
        made.append(Fated())
        return made[-1]

    seen = noting("on_rewards", rows_of)
    fine = [("fine", f"{number}") for number in range(len(rows))]
    trainer = train(
        dataset=problems([*rows, *fine]),
        eval_dataset=problems([("method", evaluated), ("fine", "")]),
        per_device_train_batch_size=2 * len(rows),
        per_device_eval_batch_size=4,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        callbacks=[seen],
        tool_timeout=timeout,
        prepare=plays(lambda text, asked: script(text, asked % 2)),
        more={
            "environment_factory": factory,
            "tools": [act, act_later, ProcessTool(act_apart_of(), timeout=timeout, max_concurrency=2)],
        },
    )
    first, second = seen.noted
    own = [(columns["where"], columns["fate"]) for columns, _, _ in first]
    assert own == [row for row in rows for _ in range(2)]
    for number, (row, (_, completion, rewards)) in enumerate(zip(own, first, strict=True)):
        turns, scored = expected(*row)
        if number % 2 and row[0] not in ("reset", "get_reward"):
            turns = [parsed("no")]
            scored = True
        assert (completion, math.isfinite(rewards[0])) == (turns, scored), row
    assert all(math.isfinite(rewards[0]) for _, _, rewards in second)
    log = trainer.state.log_history
    assert log[0]["tools/failed_rows"] > 0 and log[2]["tools/failed_rows"] == 0
    for environment in made:
        assert all(row == environment.rows[-1] for row in environment.failed), "it was not used again"


# ---------------------------------------------------------------------- whole runs


def numbers(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [user(f"fine: {one}") for one in range(count)], "number": range(count)})


def test_nothing_of_a_run_stays(train):
    """An environment that has failed goes at once, the others with the trainer, but for those in hung calls."""
    made: list[weakref.ref[Any]] = []

    def factory() -> Fated:
        environment = Fated()
        made.append(weakref.ref(environment))
        return environment

    def left() -> int:
        gc.collect()
        return sum(one() is not None for one in made)

    rows = [("reset", "raises"), ("act", "hangs"), ("method", "hangs"), ("fine", "0")]
    more = {"environment_factory": factory, "tools": [act]}
    settings = {"dataset": problems(rows), "per_device_train_batch_size": 8, "max_steps": 2, "tool_timeout": TIMEOUT}
    trainer = train(reward=lambda prompts, **_: [1.0] * len(prompts), more=more, **settings)
    trainer.environments = None
    # Of six that failed, two did so in the last window, and one is in a call; TRL keeps the first.
    assert len(made) == 12 and left() <= 6 + 2 + 1 + 1
    gone = weakref.ref(trainer)
    del trainer
    assert left() <= 1 and gone() is None


class Talkative:
    def reset(self, **columns) -> str:
        return "z" * 200


def test_an_observation_beyond_the_sampler_s_context_fails_its_row(train):
    """A server may have room for less than the model, and would refuse the request."""

    def small(trainer) -> None:
        trainer.vllm_generation.llm.llm_engine.model_config.max_model_len = 150

    prepare = plays(script, corrects, small)
    refused(
        "failed on every row .* the model's context is 150",
        train,
        error=RuntimeError,
        dataset=numbers(1),
        prepare=prepare,
        more={"environment_factory": Talkative},
    )


class Away:
    """Cannot be reset for the second prompt."""

    def reset(self, number: int, **columns) -> None:
        if number == 1:
            raise ConnectionError("away")


def test_a_later_window_whose_rows_all_fail_costs_its_step(train):
    """vLLM in this process is not asked then, and has the weights of the step before."""

    settings = {"dataset": numbers(3), "max_steps": 3, "prepare": plays(script, corrects)}
    trainer = train(more={"environment_factory": Away}, **settings)
    assert [log["tools/failed_rows"] for log in trainer.state.log_history[:3]] == [0, 1, 0]


def test_a_row_of_an_evaluation_whose_tool_hangs_is_unscored(train):
    trainer = train(
        reward=lambda completions, **_: [1000.0 if "tool_calls" in one[-1] else 7.0 for one in completions],
        dataset=problems([("fine", "")]),
        eval_dataset=problems([("act", "hangs"), ("fine", "")]),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        tool_timeout=TIMEOUT,
        more={"tools": [act]},
    )
    assert trainer.state.log_history[1]["eval_reward"] == 7


# ---------------------------------------------------------------------- what the policy writes


def test_what_the_policy_writes_ends_no_run(train, tool_model):
    """JSON that is too deep, and half a character."""
    deep = "<function:act>" + "[" * 3000 + "</>"
    turns = {"deep": deep + "<|im_end|>", "half": '<function:act>{"fate": "\\ud800"}</><|im_end|>'}
    judge = Judge()

    def said(text, asked):
        return [turns["deep" if "deep" in text else "half"], written("done")]

    settings = {"prepare": plays(said), "max_completion_length": 4000, "per_device_train_batch_size": 4}
    loaded = load(tool_model)
    loaded.config.max_position_embeddings = 8192
    rows = problems([(name, "") for name in turns])
    train(loaded=loaded, dataset=rows, more={"tools": [act]}, reward=judge, **settings)
    first = [completion[0] for completion in judge.asked[0]["completions"][::2]]
    assert first == [parsed(deep), parsed("", ("act", {"fate": "\ud800"}))]


def test_calls_of_a_message():
    """A tool that changes its arguments does not change the message; some templates write a name before the answer."""
    calls = ToolCalls(TIMEOUT)
    for name, message, failures in (
        ("sort", answered(("sort", "[1, 2, 3]")), 0),
        ("\ud800", answered(("?", error("Tool ? not found."))), 1),
    ):
        made = [{"type": "function", "function": {"name": name, "arguments": {"values": [3, 1, 2]}}}]
        found = calls.run([calls.answer(made, {"sort": lambda values: values.sort() or values})])
        assert found == [(message, failures)]
        assert made[0]["function"]["arguments"] == {"values": [3, 1, 2]}
