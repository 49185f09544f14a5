"""Tools and environments: each behaviour of TRL's `GRPOTrainer` is one of `DASHTrainer`'s.

Both trainers run the same tests. The turns are scripted, and what a row has to become of them is written down here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from dash_trl import DASHTrainer
from tests.scripted_turns import (
    END,
    Judge,
    Rows,
    ScriptedTurns,
    add,
    answered,
    fails,
    fill,
    later,
    parsed,
    save_tool_model,
    user,
    written,
)
from tests.tiny import EOS, run, tiny_tokenizer

BUDGET = 200  # tokens of a completion
CONTEXT = 512
ITERATIONS = 3


@pytest.fixture(scope="module", params=(GRPOTrainer, DASHTrainer), ids=lambda kind: kind.__name__)
def kind(request) -> Any:
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tool_model(tmp_path_factory.mktemp("model"))


@functools.cache
def tokens(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text=text)["input_ids"])


tokenizer = functools.cache(tiny_tokenizer)


def with_templates(model: str, **templates: Any) -> Any:
    """The model's tokenizer with other templates."""
    other = PreTrainedTokenizerFast.from_pretrained(model)
    for name, template in templates.items():
        setattr(other, name, template)
    return other


# ---------------------------------------------------------------------- tools


def value(name: str) -> Any:
    """Returns what is no text.

    Args:
        name: Of what.
    """
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    return {"number": 1.5, "nothing": None, "mapping": {"a": 1}, "tuple": (1, 2), "parts": parts}[name]


async def fails_later() -> str:
    """Fails, too."""
    raise KeyError("page")


def stops() -> str:
    """Fails with what ends loops."""
    return next(iter(()))


def given(name: str, *contents: str) -> str:
    """What the template appends: the answers of tools, and the beginning of a turn."""
    return "".join(f"<tool:{name}>{content}{END}" for content in contents) + "<assistant>"


@dataclass(frozen=True)
class Case:
    """The turns of a row, and the expected completion.

    Attributes:
        turns: the policy's turns.
        ids: texts of the completion, by turns of the policy and of its environment.
        messages: the completion that reward functions get.
        calls: number of tool calls.
        failures: number of failed tool calls.
        prompt: number of additional prompt tokens.
    """

    turns: Sequence[str | list[int]]
    ids: Sequence[str]
    messages: Sequence[dict[str, Any]]
    calls: int = 0
    failures: int = 0
    prompt: int = 0


DONE, CALL = ("done",), ("", ("add", {"a": 1, "b": 2}))


def one_call(
    *calls: Any, answers: Sequence[tuple[str, Any]], texts: Any = None, failures: int = 0, **kind: str
) -> Case:
    """Returns a case with one message with calls, their answers in order, and a last turn.

    Args:
        texts: texts of the answers in the completion; None = their contents.
    """
    first = written("", *calls, **kind)
    appended = given(answers[0][0], *(texts or [content for _, content in answers]))
    messages = [parsed("", *calls, **kind), *answered(*answers), parsed(*DONE)]
    return Case([first, written(*DONE)], [first, appended, written(*DONE)], messages, len(calls), failures)


def failed(name: str, *calls: Any, error: str, **kind: str) -> Case:
    return one_call(*calls, answers=[(name, str({"error": error}))], failures=1, **kind)


def repeated(times: int, *, calls: int, last: tuple) -> Case:
    """Returns a case with several turns that each make a call, and a last turn."""
    first, appended = written(*CALL), given("add", "3")
    messages = [parsed(*CALL), *answered(("add", "3"))] * times
    return Case(
        [first] * times + [written(*last)],
        [first, appended] * times + [written(*last)],
        [*messages, parsed(*last)],
        calls,
    )


def filled(room: int, *, then: str | list[int]) -> tuple[list[str | list[int]], list[str], list[dict[str, Any]]]:
    """Returns turns, texts and messages of a call after which `room` tokens are left; no message of the last turn."""
    call, contents = ("fill", {"length": 40}), "z" * 40
    appended = given("fill", contents)
    words = "y" * (BUDGET - room - len(tokens(written("", call))) - len(tokens(appended)))
    first = written(words, call)
    return [first, then], [first, appended], [parsed(words, call), *answered(("fill", contents))]


def cut(room: int) -> Case:
    """Returns a case whose last turn is longer than the remaining room."""
    turns, ids, messages = filled(room, then=written("x" * 30))
    return Case(turns, [*ids, "x" * room], [*messages, *([parsed("x" * room)] if room else [])], 1)


def overlong() -> Case:
    """Returns a case whose tool answer is one token longer than the remaining room."""
    turns, ids, messages = filled(-1, then=written(*DONE))
    return Case(turns[:1], ids[:1], messages[:1], 1)


def no_turn() -> Case:
    """Returns a case in which nothing is sampled after a tool's answer."""
    _, ids, messages = filled(100, then=[])
    return Case([ids[0], []], ids, messages, 1)


CASES: dict[str, Case] = {
    "a row without a call is one message": Case([written(*DONE)], [written(*DONE)], [parsed(*DONE)]),
    "an answer and another turn are appended": one_call(CALL[1], answers=[("add", "3")]),
    "what is said before a call is its content": Case(
        [written("hm", CALL[1]), written(*DONE)],
        [written("hm", CALL[1]), given("add", "3"), written(*DONE)],
        [parsed("hm", CALL[1]), *answered(("add", "3")), parsed(*DONE)],
        1,
    ),
    "a coroutine function is awaited": one_call(("later", {"text": "x"}), answers=[("later", "xx")]),
    "the answers of several calls come in their order": one_call(
        ("add", {"a": 1, "b": 2}), ("fill", {"length": 2}), ("add", {"a": 3, "b": 4}),
        answers=[("add", "3"), ("fill", "zz"), ("add", "7")],
    ),
    "answers of coroutine functions come last": one_call(
        ("later", {"text": "x"}), ("add", {"a": 1, "b": 2}), ("later", {"text": "y"}),
        answers=[("add", "3"), ("later", "xx"), ("later", "yy")],
    ),
    "a tool that raises answers with its error": failed("fails", ("fails", {}), error="no such page"),
    "so does a coroutine function": failed("fails_later", ("fails_later", {}), error="'page'"),
    "an error without a text is an empty one": failed("stops", ("stops", {}), error=""),
    "a failure does not stop the other calls": one_call(
        ("fails_later", {}), ("fails", {}), ("add", {"a": 1, "b": 2}),
        answers=[
            ("fails", "{'error': 'no such page'}"),
            ("add", "3"),
            ("fails_later", str({"error": "'page'"})),
        ],
        failures=2,
    ),
    "an unknown tool is an error": failed("subtract", ("subtract", {"a": 1}), error="Tool subtract not found."),
    "wrong arguments are an error": failed(
        "add", ("add", {"a": 1, "c": 2}), error="add() got an unexpected keyword argument 'c'"
    ),
    "wrong arguments of a coroutine function are one at once": one_call(
        ("later", {"text": "x"}), ("later", {"word": "x"}),
        answers=[("later", str({"error": "later() got an unexpected keyword argument 'word'"})), ("later", "xx")],
        failures=1,
    ),
    "arguments that are no mapping are an error": failed(
        "add", ("add", 5), error="tests.scripted_turns.add() argument after ** must be a mapping, not int"
    ),
    "a call of another type is an error of an unknown tool": failed(
        "unknown", ("add", {"a": 1, "b": 2}), error="Unsupported tool call type: other", kind="other"
    ),
    "no arguments are an empty mapping": Case(
        ["<function:fails>null</><|im_end|>", written(*DONE)],
        ["<function:fails>null</><|im_end|>", given("fails", "{'error': 'no such page'}"), written(*DONE)],
        [parsed("", ("fails", {})), *answered(("fails", "{'error': 'no such page'}")), parsed(*DONE)],
        1,
        1,
    ),
    "arguments get the types of the tool's schema": Case(
        [written("", ("add", {"a": "1", "b": "2"})), written(*DONE)],
        [written("", ("add", {"a": "1", "b": "2"})), given("add", "3"), written(*DONE)],
        [parsed(*CALL), *answered(("add", "3")), parsed(*DONE)],
        1,
    ),
    "a malformed call is text": Case(
        ["<function:add>{a: 1}</>" + END], ["<function:add>{a: 1}</>" + END], [parsed("<function:add>{a: 1}</>")]
    ),
    "a number is written as text": one_call(("value", {"name": "number"}), answers=[("value", "1.5")]),
    "so is None": one_call(("value", {"name": "nothing"}), answers=[("value", "None")]),
    "so is a mapping": one_call(("value", {"name": "mapping"}), answers=[("value", "{'a': 1}")]),
    "so is a tuple": one_call(("value", {"name": "tuple"}), answers=[("value", "(1, 2)")]),
    "a list of parts stays one": one_call(
        ("value", {"name": "parts"}), answers=[("value", value("parts"))], texts=["onetwo"]
    ),
    "a call that a turn without end makes is answered": Case(
        [written(*CALL, end=""), written("done", end="")],
        [written(*CALL, end=""), given("add", "3"), written("done", end="")],
        [parsed(*CALL), *answered(("add", "3")), parsed(*DONE)],
        1,
    ),
    "as many calls as are allowed": repeated(ITERATIONS, calls=ITERATIONS, last=DONE),
    "one more is not answered": repeated(ITERATIONS, calls=ITERATIONS, last=CALL),
    "the turn after an answer is cut to the budget": cut(room=10),
    "an answer that fills the budget ends the row": cut(room=0),
    "an answer beyond the budget is taken back": overlong(),
    "a turn without a token ends the row": no_turn(),
    "an answer that fills the context is taken back": Case(
        [written(*CALL)], [written(*CALL)], [parsed(*CALL)], 1, prompt=CONTEXT
    ),
    "an answer that leaves a token of the context stays": Case(
        [written(*CALL), [EOS]],
        [written(*CALL), given("add", "3"), END],
        [parsed(*CALL), *answered(("add", "3")), parsed("")],
        1,
        prompt=CONTEXT - 1,
    ),
}  # fmt: skip
SHORT = {name: case for name, case in CASES.items() if not case.prompt}
TOOLS = [add, later, fails, fails_later, stops, fill, value]
SCHEMA = (
    "<tools>add:a integer,b integer,;later:text string,;fails:;fails_later:;stops:;fill:length integer,;"
    "value:name string,;"
)


def content_of(name: str, case: Case) -> str:
    """A prompt as long as the case asks for, its first answer included."""
    used = len(tokens(f"{SCHEMA}<user>{name}{END}<assistant>")) + sum(map(len, map(tokens, case.ids[:1])))
    return name + "z" * (case.prompt - used - len(tokens(given("add", "3"))))


def train(kind: Any, model: str, output: Any, script: Any, *others: Any, more: Any, **settings: Any) -> Any:
    """A step on two rows of a prompt, unless the settings say otherwise.

    Args:
        script: see `ScriptedTurns`, or one of these. others: prepare the trainer, too.
    """
    turns = script if isinstance(script, ScriptedTurns) else ScriptedTurns(script)

    def prepare(trainer: Any) -> None:
        for one in (turns, *others):
            one.prepare(trainer)

    defaults: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    defaults |= {"num_generations": 2, "max_completion_length": BUDGET, "shuffle_dataset": False}
    defaults |= {"dataset": Dataset.from_dict({"prompt": [user("a")]})}
    return run(kind, model, output, in_process=True, prepare=prepare, more=more, **{**defaults, **settings})


def play(kind: Any, model: str, output: Any, cases: dict[str, Case]) -> SimpleNamespace:
    """A window of cases, each of which shares its prompt with a row without a call."""
    contents = {content_of(name, case): case for name, case in cases.items()}

    def script(text: str, asked: int) -> Sequence[str | list[int]]:
        content = text.removeprefix(f"{SCHEMA}<user>").removesuffix(f"{END}<assistant>")
        return contents[content].turns if asked == 0 else [written("no")]

    turns, rows, judge = ScriptedTurns(script), Rows(), Judge()
    trainer = train(
        kind,
        model,
        output,
        turns,
        rows,
        reward=judge,
        dataset=Dataset.from_dict({"prompt": list(map(user, contents)), "case": list(cases)}),
        per_device_train_batch_size=2 * len(cases),
        max_tool_calling_iterations=ITERATIONS,
        more={"tools": TOOLS},
    )
    (asked,), (window,) = judge.asked, rows.windows
    return SimpleNamespace(asked=asked, window=window, prompts=turns.prompts, log=trainer.state.log_history[0])


@pytest.fixture(scope="module")
def played(kind, model, tmp_path_factory) -> SimpleNamespace:
    return play(kind, model, tmp_path_factory.mktemp("run"), SHORT)


@pytest.fixture(scope="module")
def played_long(kind, model, tmp_path_factory) -> SimpleNamespace:
    """Apart, since TRL pads all rows to the longest prompt."""
    long = {name: case for name, case in CASES.items() if name not in SHORT}
    return play(kind, model, tmp_path_factory.mktemp("run"), long)


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_a_row(played, played_long, name):
    case, played = CASES[name], played if name in SHORT else played_long
    place = played.asked["case"].index(name)
    own = [1 - number % 2 for number, text in enumerate(case.ids) for _ in tokens(text)]
    assert played.asked["completions"][place] == list(case.messages)
    assert played.asked["completion_ids"][place] == [token for text in case.ids for token in tokens(text)]
    assert played.window[place][:2] == (played.asked["completion_ids"][place], own)
    assert played.asked["completions"][place + 1] == [parsed("no")]
    assert played.asked["prompts"][place] == user(content_of(name, case)), "as it was"


def test_the_prompt_has_the_schemas_of_the_tools(played):
    assert len(played.prompts) == 2 * len(SHORT)
    assert all(text.startswith(f"{SCHEMA}<user>") for text in played.prompts)


def test_calls_and_failures_are_logged(played):
    calls, failures = (sum(getattr(case, name) for case in SHORT.values()) for name in ("calls", "failures"))
    assert played.log["tools/call_frequency"] == pytest.approx(calls / (2 * len(SHORT)))
    assert played.log["tools/failure_frequency"] == pytest.approx(failures / calls)


def test_completions_are_as_long_as_their_own_tokens(played):
    lengths = [sum(own) for _, own, _ in played.window]
    ended = [sum(own) for ids, own, _ in played.window if ids[-1] == EOS]
    prompts = sum(len(tokens(text)) for text in played.prompts)
    log = {name.removeprefix("completions/"): value for name, value in played.log.items()}
    assert log["mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert (log["min_length"], log["max_length"]) == (min(lengths), max(lengths))
    assert log["mean_terminated_length"] == pytest.approx(sum(ended) / len(ended))
    assert (log["min_terminated_length"], log["max_terminated_length"]) == (min(ended), max(ended))
    assert log["clipped_ratio"] == pytest.approx(1 - len(ended) / len(lengths))
    assert log["num_tokens"] == prompts + sum(lengths)


def calls_twice(text: str, asked: int) -> list[str]:
    return [written(*CALL), written(*CALL), written(*DONE)]


@pytest.mark.parametrize(("limit", "calls"), [(None, 2), (1, 1), (0, 0)])
def test_the_number_of_turns_with_calls_may_be_limited(kind, model, tmp_path, limit, calls):
    judge = Judge()
    settings = {"reward": judge, "max_tool_calling_iterations": limit, "more": {"tools": [add]}}
    log = train(kind, model, tmp_path, calls_twice, **settings).state.log_history[0]
    assert log["tools/call_frequency"] == calls and log["tools/failure_frequency"] == 0
    (completion, _) = judge.asked[0]["completions"]
    assert len(completion) == 2 * calls + 1 and completion[-1] == parsed(*(DONE if calls == 2 else CALL))


def test_a_window_without_a_call_logs_no_failure(kind, model, tmp_path):
    log = train(kind, model, tmp_path, lambda *_: [written(*DONE)], more={"tools": [add]}).state.log_history[0]
    assert log["tools/call_frequency"] == log["tools/failure_frequency"] == 0


def test_an_evaluation_calls_tools_too(kind, model, tmp_path):
    judge = Judge()
    settings = {"reward": judge, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    settings |= {"eval_dataset": Dataset.from_dict({"prompt": [user("b")]}), "more": {"tools": [add]}}
    trainer = train(kind, model, tmp_path, calls_twice, **settings)
    (log,) = (one for one in trainer.state.log_history if "eval_reward" in one)
    assert log["eval_tools/call_frequency"] == 2 and log["eval_tools/failure_frequency"] == 0
    assert [len(completion) for completion in judge.asked[-1]["completions"]] == [5, 5]


def test_log_probs_of_a_sampler_are_those_of_own_tokens(kind, model, tmp_path):
    """Those of others are 0, and a turn that is cut loses its own."""
    rows, (turns, *_) = Rows(), filled(10, then=written("x" * 30))
    script = ScriptedTurns(lambda *_: turns, noise=0.0)
    train(kind, model, tmp_path, script, rows, more={"tools": [fill]})
    for ids, own, log_probs in rows.windows[0]:
        assert len(ids) == len(own) == len(log_probs) == BUDGET
        assert [log_prob != 0 for log_prob in log_probs] == [bool(one) for one in own]


def test_arguments_of_the_template_reach_prompts_and_answers(kind, model, tmp_path):
    judge, turns = Judge(), ScriptedTurns(calls_twice)
    settings = {"reward": judge, "chat_template_kwargs": {"mark": "!"}, "more": {"tools": [add]}}
    train(kind, model, tmp_path, turns, **settings)
    assert all(text.endswith(f"<user>a{END}!<assistant>") for text in turns.prompts)
    completion, appended = tokenizer().decode(judge.asked[0]["completion_ids"][0]), f"<tool:add>3{END}!<assistant>"
    assert completion == written(*CALL) + appended + written(*CALL) + appended + written(*DONE)


def test_a_template_that_loses_prefixes_is_replaced_by_trls_for_training(kind, model, tmp_path):
    """Qwen3's drops earlier thoughts; TRL also knows how to parse its calls."""
    own = with_templates(model, chat_template=qwen3_chat_template, response_template=None)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.config.max_position_embeddings = 2048
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    appended = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    judge, turns = Judge(), ScriptedTurns(lambda *_: [call, written(*DONE)], anchor="<|im_start|>assistant\n")
    more = {"tools": [add], "processing_class": own}
    train(kind, model, tmp_path, turns, loaded=loaded, reward=judge, more=more)
    assert '"description": "Adds two numbers."' in turns.prompts[0]
    assert judge.asked[0]["completions"] == [[parsed(*CALL), *answered(("add", "3")), parsed(*DONE)]] * 2
    assert own.decode(judge.asked[0]["completion_ids"][0]) == call + appended + written(*DONE)


# ---------------------------------------------------------------------- environments

PARTS = [{"type": "text", "text": " parts"}]


class Counter:
    """Counts, and owns its reward."""

    def __init__(self) -> None:
        self.total, self.columns = 0, []

    def reset(self, **columns: Any) -> Any:
        self.total = 0
        self.columns.append(columns)
        return {"text": " text", "parts": PARTS}.get(columns.get("observed"))

    def count(self, step: int) -> int:
        """Counts on.

        Args:
            step: By how much.
        """
        self.total += step
        return self.total

    async def count_later(self, step: int) -> int:
        """Counts on later.

        Args:
            step: By how much.
        """
        return self.count(step)

    def look(self) -> str:
        """Looks."""
        return "counter"

    def _hidden(self) -> None:
        raise AssertionError

    @property
    def trap(self) -> None:
        raise AssertionError("a property is no tool, and is not evaluated")

    def get_reward(self) -> float:
        return float(self.total)


class Echo:
    """Owns its reward, and gives it later."""

    def reset(self, **columns: Any) -> str:
        self.said = ""
        return f"echo {columns}"

    def shout(self, text: str) -> str:
        """Shouts.

        Args:
            text: What.
        """
        self.said = text.upper()
        return self.said

    def look(self) -> str:
        """Looks."""
        return "echo"

    async def get_reward(self) -> float:
        return float(len(self.said))


class Mute:
    """Owns no reward."""

    def reset(self, **columns: Any) -> None: ...

    def look(self) -> str:
        """Looks."""
        return "mute"


class Factory:
    """Makes environments and keeps them."""

    def __init__(self, kind: type):
        self.kind, self.made = kind, []

    def __call__(self) -> Any:
        self.made.append(self.kind())
        return self.made[-1]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# observed, prompt, the prompt with it
OBSERVATIONS = [
    ("nothing", user("a"), user("a")),
    ("text", user("b"), user("b text")),
    ("parts", user("c"), user([part("c"), *PARTS])),
    ("text", user([part("d")]), user([part("d"), part(" text")])),
    ("parts", user([part("e")]), user([part("e"), *PARTS])),
    ("text", user("f") + user("g"), user("f") + user("g text")),
]
COUNTED = [
    parsed("", ("count", {"step": 2})),
    *answered(("count", "2")),
    parsed("", ("count_later", {"step": 3}), CALL[1]),
    *answered(("add", "3"), ("count_later", "5")),
    parsed(*DONE),
]
HIDDEN = ["_hidden", "reset", "get_reward", "trap"]


@pytest.fixture(scope="module")
def counted(kind, model, tmp_path_factory) -> SimpleNamespace:
    """Two windows of one environment, with a tool beside it; the second row of each prompt calls what is no tool."""

    def script(text: str, asked: int) -> list[str]:
        if asked % 2:
            return [written("", *((name, {}) for name in HIDDEN)), written(*DONE)]
        first, second = written("", ("count", {"step": 2})), written("", ("count_later", {"step": 3}), CALL[1])
        return [first, second, written(*DONE)]

    def rows():
        for number, (observed, prompt, _) in enumerate(OBSERVATIONS):
            yield {"prompt": prompt, "observed": observed, "number": number}

    factory, judge, turns = Factory(Counter), Judge(), ScriptedTurns(script)
    trainer = train(
        kind,
        model,
        tmp_path_factory.mktemp("run"),
        turns,
        dataset=IterableDataset.from_generator(rows),
        reward=judge,
        reward_weights=[0.5],
        max_completion_length=2 * BUDGET,
        per_device_train_batch_size=2 * len(OBSERVATIONS),
        max_steps=2,
        more={"environment_factory": factory, "tools": [add]},
    )
    return SimpleNamespace(factory=factory, judge=judge, prompts=turns.prompts, logs=trainer.state.log_history)


def test_an_observation_is_appended_to_the_last_message(counted):
    """A text or a list of parts, to a text or a list; the dataset's own rows stay as they are."""
    expected = [prompt for _, _, prompt in OBSERVATIONS for _ in range(2)]
    assert [asked["prompts"] for asked in counted.judge.asked] == [expected] * 2
    assert counted.prompts[2].endswith(f"<user>b text{END}<assistant>")


def test_reset_gets_the_columns_of_the_row(counted):
    of_row = [
        {"prompt": prompt, "observed": observed, "number": number}
        for number, (observed, prompt, _) in enumerate(OBSERVATIONS)
    ]
    resets = [columns for environment in counted.factory.made for columns in environment.columns]
    assert sorted(resets, key=lambda columns: columns["number"]) == [one for one in of_row for _ in range(4)]


def test_environments_are_made_once_and_reset_for_each_row(counted):
    rows = 2 * len(OBSERVATIONS)
    assert len(counted.factory.made) == rows
    assert all(len(environment.columns) == 2 for environment in counted.factory.made)
    for environments in counted.judge.environments:
        assert len({id(environment) for environment in environments}) == rows


def test_methods_are_tools_beside_the_others(counted):
    schema = "<tools>add:a integer,b integer,;count:step integer,;count_later:step integer,;look:;<user>"
    assert all(text.startswith(schema) for text in counted.prompts)
    for asked in counted.judge.asked:
        assert asked["completions"][::2] == [COUNTED] * len(OBSERVATIONS)


def test_private_names_and_the_trainer_s_own_methods_are_no_tools(counted):
    errors = answered(*((name, str({"error": f"Tool {name} not found."})) for name in HIDDEN))
    for completion in counted.judge.asked[0]["completions"][1::2]:
        assert completion[1:-1] == errors
    log = counted.logs[0]
    assert log["tools/call_frequency"] == (3 + 4) / 2 and log["tools/failure_frequency"] == pytest.approx(4 / 7)


def test_reward_functions_get_the_environments(counted):
    for asked in counted.judge.asked:
        assert [(name, state["total"]) for name, state in asked["states"]] == [("Counter", 5), ("Counter", 0)] * 6
        assert asked["number"] == [number for number in range(6) for _ in range(2)]


def test_an_environment_s_reward_has_weight_1_beside_the_functions(counted):
    for log in counted.logs[:2]:
        assert log["rewards/Counter/mean"] == pytest.approx(2.5)
        assert log["reward"] == pytest.approx(0.5 * log["rewards/judge/mean"] + 2.5)


@pytest.fixture(scope="module")
def mixed(kind, model, tmp_path_factory) -> SimpleNamespace:
    """A window with four environments of three classes, whose rows have no prompt."""
    calls = {"count": {"step": 4}, "shout": {"text": "hey"}, "look": {}}

    def script(text: str, asked: int) -> list[str]:
        if asked % 2:
            return [written(*DONE)]
        return [written("", *calls.items()), written(*DONE)]

    factories = {"counter": Factory(Counter), "twin": Factory(Counter), "echo": Factory(Echo), "mute": Factory(Mute)}
    judge, turns, rows = Judge(scores=False), ScriptedTurns(script), Rows()
    trainer = train(
        kind,
        model,
        tmp_path_factory.mktemp("run"),
        turns,
        dataset=Dataset.from_dict(
            {"environment": ["counter", "echo", "twin", "mute"], "observed": ["text", "", "parts", ""]}
        ),
        reward=judge,
        per_device_train_batch_size=8,
        more={"environment_factory": factories},
    )
    return SimpleNamespace(
        factories=factories, asked=judge.asked[0], prompts=turns.prompts, log=trainer.state.log_history[0], rows=rows
    )


def test_a_row_without_a_prompt_begins_with_the_observation(mixed):
    columns = {"observed": ""}
    texts = [user(" text"), user(f"echo {columns}"), user([part(""), *PARTS]), user("")]
    assert mixed.asked["prompts"] == [text for text in texts for _ in range(2)]


def test_the_column_environment_chooses_and_is_not_given_to_reset(mixed):
    for name, observed in (("counter", "text"), ("twin", "parts")):
        assert [one.columns for one in mixed.factories[name].made] == [[{"observed": observed}]] * 2
    assert [len(factory.made) for factory in mixed.factories.values()] == [2] * 4
    names = [name for name, _ in mixed.asked["states"]]
    assert names == ["Counter"] * 2 + ["Echo"] * 2 + ["Counter"] * 2 + ["Mute"] * 2
    assert mixed.asked["environment"] == [name for name in ("counter", "echo", "twin", "mute") for _ in range(2)]


def test_a_prompt_has_the_tools_of_its_environment_only(mixed):
    counter = "<tools>count:step integer,;count_later:step integer,;look:;"
    schemas = [counter, "<tools>look:;shout:text string,;", counter, "<tools>look:;"]
    assert [text.partition("<user>")[0] for text in mixed.prompts[::2]] == schemas


def test_a_call_reaches_the_row_s_own_environment(mixed):
    """A tool of another one is not found."""
    found = {"Counter": {"count": "4", "look": "counter"}, "Echo": {"shout": "HEY", "look": "echo"}}
    found["Mute"] = {"look": "mute"}
    for (kind_name, _), completion in zip(mixed.asked["states"][::2], mixed.asked["completions"][::2], strict=True):
        for message in completion[1:-1]:
            missing = str({"error": f"Tool {message['name']} not found."})
            assert message["content"] == found[kind_name].get(message["name"], missing)
    assert mixed.log["tools/call_frequency"] == 3 / 2 and mixed.log["tools/failure_frequency"] == pytest.approx(5 / 12)


def test_each_class_that_owns_its_reward_has_one_column(mixed):
    """Of its own rows; a row that nothing scores is not counted."""
    means = {name: value for name, value in mixed.log.items() if name.endswith("/mean") and name.startswith("rewards/")}
    assert sorted(means) == ["rewards/Counter/mean", "rewards/Echo/mean", "rewards/judge/mean"]
    assert means["rewards/Counter/mean"] == 2 and means["rewards/Echo/mean"] == 1.5
    assert mixed.log["reward"] == pytest.approx((4 + 0 + 4 + 0 + 3 + 0) / 6)


class OwnsItsData:
    """Has no tools."""

    def reset(self, **columns: Any) -> str:
        return "guess"


@pytest.mark.parametrize("can_parse", [True, False])
def test_an_environment_may_own_the_prompts(kind, model, tmp_path, can_parse):
    """Without a dataset. Without tools, no calls are counted, and nobody answers what looks like one."""
    judge, more = Judge(), {"environment_factory": OwnsItsData, "train_dataset": None}
    if not can_parse:
        more["processing_class"] = with_templates(model, response_template=None)
    script = [written(*CALL)]
    log = train(kind, model, tmp_path, lambda *_: script, reward=judge, more=more).state.log_history[0]
    assert judge.asked[0]["prompts"] == [user("guess")] * 2
    message = parsed(*CALL) if can_parse else parsed(written(*CALL, end=""))
    assert judge.asked[0]["completions"] == [[message]] * 2
    assert not any(name.startswith("tools/") and name.endswith("frequency") for name in log)


def test_an_environment_may_be_the_only_reward(kind, model, tmp_path):
    more = {"environment_factory": Counter, "reward_funcs": None}
    script = [written("", ("count", {"step": 4})), written(*DONE)]
    log = train(kind, model, tmp_path, lambda _, asked: script[asked:], more=more).state.log_history[0]
    assert log["rewards/Counter/mean"] == log["reward"] == 2 and log["grad_norm"] > 0


class NoOwner(Counter):
    """Takes back the reward of its base."""

    get_reward = None  # type: ignore[assignment]


class ClassOwner(Mute):
    @classmethod
    def get_reward(cls) -> float:
        return 7.0


@pytest.mark.parametrize("environment", [NoOwner, ClassOwner])
def test_a_reward_that_is_no_plain_method_is_none(kind, model, tmp_path, environment):
    """Reward functions are asked as without it."""
    judge, more = Judge(), {"environment_factory": environment}
    log = train(kind, model, tmp_path, lambda *_: [written(*DONE)], reward=judge, more=more).state.log_history[0]
    assert len(judge.asked) == 1 and log["reward"] == log["rewards/judge/mean"] < 1


# ---------------------------------------------------------------------- mistakes


class NoReset:
    pass


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no reset": (lambda model: {"environment_factory": NoReset}, {}, "reset"),
    "no reward": (lambda model: {"tools": [add], "reward_funcs": None}, {}, "reward"),
    "no dataset": (lambda model: {"tools": [add], "train_dataset": None}, {}, "train_dataset"),
    "no dataset for several": (
        lambda model: {"environment_factory": {"a": Counter}, "train_dataset": None},
        {},
        "train_dataset",
    ),
    "no end": (
        lambda model: {"environment_factory": Counter, "train_dataset": None},
        {"max_steps": -1},
        "max_steps",
    ),
    "an unknown environment": (
        lambda model: {
            "environment_factory": {"a": Counter},
            "train_dataset": Dataset.from_dict({"prompt": [user("a")], "environment": ["b"]}),
        },
        {},
        "'b'",
    ),
    "a template without tools": (
        lambda model: {
            "tools": [add],
            "processing_class": with_templates(
                model, chat_template="{% for one in messages %}{{ one.content }}{% endfor %}", response_template=None
            ),
        },
        {},
        "template",
    ),
    "a template that nobody can parse": (
        lambda model: {"tools": [add], "processing_class": with_templates(model, response_template=None)},
        {},
        "response",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(kind, model, tmp_path, name):
    arguments, settings, named = MISTAKES[name]
    with pytest.raises(ValueError, match=named):
        train(kind, model, tmp_path, calls_twice, more=arguments(model), **settings)
