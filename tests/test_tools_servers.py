"""Rows of several turns on fake servers, one of which dies in mid-turn; and an interrupt in mid-turn.

`test_vllm.py` has the real servers.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from dash_trl import RewardRunner
from tests.fake_server import SECONDS, Dated, asynchronous, factory, is_idle
from tests.scripted_turns import parsed, written
from tests.tiny import EOS, noting, user
from tests.vllm_run import wait_until

ROWS = 16  # of a window
TURNS = 3  # of a row


class Writer(Dated):
    """Writes turns with its name: two that call `note`, and one that ends.

    Attributes:
        before: called with a prompt, before it is answered. If it raises, the connection is closed.
    """

    def __init__(self, model: str, name: str):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        self.name = name
        self.before = lambda prompt: None
        super().__init__()

    def answer(self, send, request: dict[str, Any], fault: str | None) -> None:
        rollout = request["max_tokens"] > 1
        with self.lock:  # a tokenizer is for one thread at a time
            prompt = self.tokenizer.decode(request["prompt"])
            calls = [("note", {"text": self.name})] if prompt.count("<assistant>") < TURNS else []
            ids = self.tokenizer(text=written(self.name, *calls))["input_ids"]
        self.before(prompt)
        self.send_rows(send, request, [ids], rollout)


writers = factory(Writer)


class Notes:
    """An environment that is rewarded for each note.

    Args:
        made: gets each instance. noted: called with the instance after each note.
    Attributes:
        number: of its prompt. resets: how often it began anew.
    """

    def __init__(self, made: list["Notes"], noted):
        self.resets = 0
        self.noted = noted
        made.append(self)

    def reset(self, number: int, **columns) -> None:
        self.number = number
        self.resets = self.resets + 1
        self.said = []

    def note(self, text: str) -> str:
        """Takes a note.

        Args:
            text: What to note.
        """
        self.said.append(text)
        self.noted(self)
        return "noted"

    def get_reward(self) -> float:
        return float(len(self.said))


def rows_of(rollouts):
    """The messages of each row, and the tokens that are its own."""
    own = (rollouts.tool_mask * rollouts.completion_mask).bool()
    tokens = [ids[mask].tolist() for ids, mask in zip(rollouts.completion_ids, own, strict=True)]
    return [*zip(rollouts.completions, tokens, strict=True)]


def watch_rows():
    return noting("on_rollouts_sampled", rows_of)


def train(
    model: str, output, servers: list[Any], noted=lambda environment: None, *, level: int = 0, **settings
) -> list[Notes]:
    """A run without shuffling; returns the environments."""
    made = settings.pop("made", [])
    settings = {"max_completion_length": 120, "shuffle_dataset": False, **settings}
    numbers = list(range(64))
    problems = Dataset.from_dict({"prompt": [user(f"{number}+1=") for number in numbers], "number": numbers})
    more = {"environment_factory": partial(Notes, made, noted)}
    asynchronous(model, output, servers, level, dataset=problems, more=more, **{"reward": ends, **settings})
    return made


def ends(completion_ids: list[list[int]], **columns) -> list[float]:
    return [float(ids[-1] == EOS) for ids in completion_ids]


def check_rows(watch, tokenizer) -> list[str]:
    """Each row is whole, and its own tokens are those of its turns. Returns the servers that wrote each."""
    rows = [row for window in watch.noted for row in window]
    authors = ["".join(one["content"] for one in row if one["role"] == "assistant") for row, _ in rows]
    noted = {"role": "tool", "name": "note", "content": "noted"}
    for (row, own), (*first, last) in zip(rows, authors, strict=True):
        calls = [(name, ("note", {"text": name})) for name in first]
        assert tokenizer.decode(own) == "".join([*(written(*call) for call in calls), written(last)])
        assert row == [one for call in calls for one in (parsed(*call), noted)] + [parsed(last)]
    return authors


def test_a_row_whose_server_dies_in_mid_turn_goes_on_elsewhere_with_its_earlier_turns(tool_model, tmp_path, writers):
    """Its tools are not called again."""
    dying = writers(tool_model, "a")
    other = writers(tool_model, "b")
    rows = watch_rows()
    dead: list[str] = []

    def dies(prompt: str) -> None:
        if dead or "noted" in prompt:
            dead.append(prompt)
            raise ConnectionError

    dying.before = dies
    notes: list[str] = []
    train(tool_model, tmp_path, [dying, other], lambda environment: notes.append(environment.said[-1]), watch=rows)
    authors = check_rows(rows, other.tokenizer)
    assert len(authors) == ROWS and set(authors) == {"abb", "bbb"}
    assert Counter(notes) == Counter(name for author in authors for name in author[:-1])


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, in a process that a shell has started in the background, too."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    signal.signal(signal.SIGINT, handler)


def test_a_run_after_an_interrupt_uses_no_environment_at_work(tool_model, tmp_path, writers, ctrl_c):
    """A quarter of a window's rows wait for a tool, a quarter for a server, and the others have ended."""
    writer = writers(tool_model, "a")
    rows = watch_rows()
    trainers = []
    made = []
    run_ended = threading.Event()
    end = threading.Event()
    all_began = threading.Barrier(ROWS)  # of the next run
    seen: dict[str, list[Any]] = {"tool": [], "server": [], "end": []}

    def noted(environment: Notes) -> None:
        if environment.number == 0 and not run_ended.is_set():
            seen["tool"].append(environment)
            end.wait(SECONDS)

    def reward(completion, number: int) -> float:
        if not run_ended.is_set():
            seen["end"].append(number)
        return float(number)

    def before(prompt: str) -> None:
        if run_ended.is_set():
            if "noted" not in prompt:
                all_began.wait(SECONDS)
        elif ">1+1=" in prompt and "noted" in prompt:
            seen["server"].append(prompt)
            end.wait(SECONDS)

    def press() -> None:
        wait_until(lambda: [*map(len, seen.values())] == [4, 4, 8])
        ctrl_c()
        while not run_ended.wait(30):  # Python misses a signal that comes just before the thread blocks
            ctrl_c()

    writer.before = before
    threading.Thread(target=press, daemon=True).start()
    settings = {"watch": rows, "made": made, "prepare": trainers.append}
    with RewardRunner(reward) as runner:
        with pytest.raises(KeyboardInterrupt):
            train(tool_model, tmp_path, [writer], noted, reward=runner, **settings)
        assert is_idle(trainers[0].vllm_generation.pool)
        run_ended.set()
        resets = [one.resets for one in made]
        ended = [one for one in made if one.number in (2, 3)]
        trainers[0].train()
    assert check_rows(rows, writer.tokenizer) == ["aaa"] * ROWS
    again = [one for one, before in zip(made, resets, strict=False) if one.resets > before]
    assert not set(seen["tool"]) & set(again) and len(ended) == 8 and set(ended) <= set(again)
    end.set()


def test_the_reward_of_a_row_begins_when_it_ends(tool_model, tmp_path, writers):
    """Another row of its window goes on until then. An environment owns another reward."""
    writer = writers(tool_model, "a")
    rewarded = threading.Event()
    waited = []

    def before(prompt: str) -> None:
        if ">0+1=" in prompt and "noted" in prompt:
            waited.append(rewarded.wait(SECONDS))

    def reward(completion, number: int) -> float:
        rewarded.set()
        return float(number)

    writer.before = before
    train(tool_model, tmp_path, [writer], reward=reward)
    assert waited and all(waited)


@pytest.mark.parametrize("level", [0, 2])
def test_rounds_of_a_window_leave_the_environments_of_later_ones_alone(tool_model, tmp_path, writers, level):
    """All rows of a prompt get the same reward: each window samples as much as it may."""
    writer = writers(tool_model, "a")
    rows = watch_rows()
    rewarded = []

    def reward(number: list[int], environments: list[Notes], **columns) -> list[float]:
        rewarded.extend((one.number, len(one.said)) for one in environments)
        return list(map(float, number))

    settings = {"max_steps": 3, "max_num_gen_batches": 3, "watch": rows, "level": level, "reward": reward}
    made = train(tool_model, tmp_path, [writer], **settings)
    assert sorted(rewarded) == [(number, TURNS - 1) for number in range(36) for _ in range(4)]
    assert check_rows(rows, writer.tokenizer) == ["aaa"] * 4 * 36
    assert level or len(made) == ROWS  # those of earlier rounds are used again
