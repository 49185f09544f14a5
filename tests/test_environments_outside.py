"""docs/howto/environments.md's OpenEnv environment and `verifiers` taskset: its code, in a training of one step.

`make test` installs neither library: OpenEnv 0.10 needs another `mcp` than vLLM, verifiers 0.4 another `openai` than
the judge, and each brings dozens of packages. There the code runs against stand-ins with the methods that it calls.
To run it against a library:

    python3.11 -m venv --without-pip /tmp/openenv
    echo "$PWD"/.venv/lib/python3.11/site-packages > /tmp/openenv/lib/python3.11/site-packages/dash.pth
    /tmp/openenv/bin/python -m pip install -c constraints.txt openenv   # or verifiers, into a folder of its own
    /tmp/openenv/bin/python -m pytest tests/test_environments_outside.py
"""

import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from dash_trl import DASHTrainer
from tests.scripted_turns import plays, save_tool_model, user, written
from tests.tiny import run

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "environments.md"


def block(beginning: str) -> str:
    """The page's one block of Python with this line."""
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if beginning in one]
    return code


def run_block(beginning: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(block(beginning), names)
    return names


def with_module(monkeypatch: pytest.MonkeyPatch, name: str, contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


# ------------------------------------------------------------------------------------------------------------- OpenEnv


class Client:
    """Stands in for OpenEnv's `GenericEnvClient`, the game on its server included."""

    def __init__(self, base_url: str):
        assert base_url == "http://127.0.0.1:8001"

    def sync(self) -> "Client":
        return self

    def reset(self, number: int) -> SimpleNamespace:
        self.number, self.guesses = number, 0
        return SimpleNamespace(observation={"text": "I think of a number from 1 to 9."}, reward=None, done=False)

    def step(self, action: dict[str, Any]) -> SimpleNamespace:
        if self.gone:
            raise ConnectionError("Failed to connect")
        if not isinstance(action["number"], int):
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.guesses += 1
        if action["number"] == self.number:
            return SimpleNamespace(observation={"text": "right"}, reward=1 / self.guesses, done=True)
        text = "higher" if action["number"] < self.number else "lower"
        return SimpleNamespace(observation={"text": text}, reward=None, done=False)

    gone = False


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[], None]]]:
    """The page's game on a server of this process: its address, and what stops it."""
    import uvicorn

    (tmp_path / "game_server.py").write_text(block("class Game"))
    monkeypatch.syspath_prepend(tmp_path)
    from game_server import app

    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join()

    yield f"http://127.0.0.1:{bound.getsockname()[1]}", stop
    stop()
    sys.modules.pop("game_server")


@pytest.fixture(params=["stand-in", "openenv"])
def guessing(request, tmp_path, monkeypatch) -> Iterator[tuple[type, Callable[[], None]]]:
    """The page's class, and what takes its server away."""
    if request.param == "stand-in":
        with_module(monkeypatch, "openenv", {})
        with_module(monkeypatch, "openenv.core", {"GenericEnvClient": Client})
        yield run_block("class Guessing")["Guessing"], lambda: monkeypatch.setattr(Client, "gone", True)
        return
    pytest.importorskip("openenv")
    names = run_block("class Guessing")
    for names["SERVER"], stop in served(tmp_path, monkeypatch):
        yield names["Guessing"], stop


def plays_the_game(text: str, asked: int) -> list[str]:
    """Of each prompt's rows every second one guesses 5 first; then all guess right."""
    number = int(re.findall(r"Guess (\d)", text)[0])
    calls = [("guess", {"number": guess}) for guess in ((5, number) if asked % 2 == 0 else (number,))]
    return [*(written("", call) for call in calls), written("I have it.")]


def test_an_openenv_environment_plays_each_row_and_gives_its_reward(guessing, tmp_path):
    environment, _ = guessing
    model = save_tool_model(tmp_path / "model")
    numbers, rows = [8, 2, 8, 2], []
    data = Dataset.from_dict({"prompt": [user(f"Guess {one}. ") for one in numbers], "number": numbers})

    def looks_on(completions, prompts, number, **columns):
        rows.extend(zip(completions, prompts, number, strict=True))
        return [None] * len(prompts)  # it does not apply

    trainer = run(
        DASHTrainer,
        model,
        tmp_path,
        dataset=data,
        reward=looks_on,
        in_process=True,
        more={"environment_factory": environment},
        prepare=plays(plays_the_game),
        max_completion_length=200,
    )
    assert len(rows) == 16
    for completion, prompt, number in rows:
        assert prompt == user(f"Guess {number}. I think of a number from 1 to 9.")
        told = [one["content"] for one in completion if one["role"] == "tool"]
        assert told in (["right"], ["higher" if number == 8 else "lower", "right"])
    logs = trainer.state.log_history[0]
    assert logs["rewards/Guessing/mean"] == pytest.approx((1 + 1 / 2) / 2)
    assert logs["tools/call_frequency"] == pytest.approx((1 + 2) / 2)
    assert logs["tools/failure_frequency"] == logs["tools/failed_rows"] == 0.0 and logs["grad_norm"] > 0


def test_what_openenv_refuses_is_the_models_mistake_and_a_lost_server_unscores_the_row(guessing):
    environment, take_away = guessing
    game = environment()
    assert "from 1 to 9" in game.reset(number=5, prompt=[])
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        game.guess("five")
    assert game.get_reward() == 0.0
    assert game.guess(5) == "right" and game.get_reward() > 0.0
    take_away()
    with pytest.raises(Exception, match="connect"):
        game.guess(5)
    assert math.isnan(game.get_reward())


# ----------------------------------------------------------------------------------------------------------- verifiers

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 15)


class Sums(vf.Taskset[Sum]):
    def load(self):
        return [Sum(SumData(prompt=f"{i} + {3 * i} = ", answer=str(4 * i)), self.config.task) for i in range(8)]
"""


class SumStandIn:
    """A task as `SUMS` makes it: `score` writes its rewards into the trace."""

    def __init__(self, number: int):
        self.data = SimpleNamespace(prompt_text=f"{number} + {3 * number} = ", system_prompt=None, answer=4 * number)

    async def score(self, trace: SimpleNamespace) -> None:
        assert trace.task.data is self.data and trace.nodes[0].message.content == self.data.prompt_text
        assert trace.nodes[1].sampled and trace.nodes[1].parent == 0
        reply = trace.nodes[1].message.content
        scores = {"right": float(f"boxed{{{self.data.answer}}}" in reply), "brief": float(len(reply) < 15)}
        trace.rewards = {name: SimpleNamespace(score=score) for name, score in scores.items()}
        trace.reward = scores["right"] + 0.5 * scores["brief"]


@pytest.fixture(params=["stand-in", "verifiers"])
def taskset(request, tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """What the page's code makes of the taskset "my-sums"."""
    if request.param == "stand-in":
        made = "TasksetConfig Trace TraceTask AgentInfo AgentConfig MessageNode UserMessage AssistantMessage".split()
        stand_in: dict[str, Any] = dict.fromkeys(made, SimpleNamespace)
        stand_in["load_taskset"] = lambda config: map(SumStandIn, range(8))
        with_module(monkeypatch, "verifiers", {})
        with_module(monkeypatch, "verifiers.v1", stand_in)
        sys.modules["verifiers"].v1 = sys.modules["verifiers.v1"]
        names = run_block("def taskset_reward")
        names["reward_funcs"].close()
        names["reward_funcs"] = names["taskset_reward"]  # a worker process has no stand-in
        yield names
        return
    pytest.importorskip("verifiers")
    (tmp_path / "my_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    names = run_block("def taskset_reward")
    with names["reward_funcs"]:
        yield names
    sys.modules.pop("my_sums")


def answers(prompts: list, trainer: Any) -> dict[str, list]:
    """Of each prompt's four rows: right and short, right and long, wrong and short, wrong and long."""
    tokenizer = trainer.processing_class
    texts = []
    for row, prompt in enumerate(prompts):
        number = int(prompt[0]["content"].split()[0])
        padding = ", as far as I can see" * (row % 2)
        texts.append(f"\\boxed{{{4 * number + row % 4 // 2}}}{padding}")
    completions = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    asked = tokenizer([prompt[0]["content"] for prompt in prompts])["input_ids"]
    return {"prompt_ids": asked, "completion_ids": completions, "logprobs": None}


def test_a_single_turn_taskset_of_verifiers_is_a_data_set_and_a_reward(taskset, tiny_model, tmp_path):
    data = taskset["train_dataset"]
    assert data[3]["prompt"] == [{"role": "user", "content": "3 + 9 = "}] and data["task"] == list(range(8))
    settings = dict(dataset=data, reward=taskset["reward_funcs"], rollouts=answers, max_completion_length=64)
    logs = run(DASHTrainer, tiny_model, tmp_path, **settings).state.log_history[0]
    assert logs["rewards/taskset_reward/mean"] == pytest.approx((1.5 + 1.0 + 0.5 + 0.0) / 4)
    assert logs["rewards/taskset_reward/right"] == logs["rewards/taskset_reward/brief"] == 0.5
    assert logs["filter/dropped_unscored"] == 0.0 and logs["grad_norm"] > 0
