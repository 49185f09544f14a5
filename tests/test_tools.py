"""Tools and environments: what becomes of each row, and each mistake. Both are what they are with TRL's `GRPOTrainer`.

The turns are scripted.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from dash_trl import DASHTrainer
from tests.scripted_turns import (
    END,
    PARTS,
    Counter,
    Echo,
    Judge,
    Mute,
    add,
    answered,
    fails,
    fill,
    later,
    parsed,
    plays,
    save_tool_model,
    user,
    written,
)
from tests.test_tools_training import check_as_trl
from tests.tiny import EOS, refusal, run, tiny_tokenizer

BUDGET = 200  # tokens of a completion
CONTEXT = 512
ITERATIONS = 3
DONE, CALL = written("done"), written("", ("add", {"a": 1, "b": 2}))
Turns = Sequence[str | list[int]]
SMALL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": BUDGET,
    "shuffle_dataset": False,
    "dataset": Dataset.from_dict({"prompt": [user("a")]}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tool_model(tmp_path_factory.mktemp("model"))


tokenizer = functools.cache(tiny_tokenizer)


def length(text: str) -> int:
    """In tokens."""
    return len(tokenizer()(text=text)["input_ids"])


def with_templates(model: str, **templates: Any) -> Any:
    """The model's tokenizer with other templates."""
    other = PreTrainedTokenizerFast.from_pretrained(model)
    for name, template in templates.items():
        setattr(other, name, template)
    return other


def check(model: str, output: Path, script: Any, *, more: Any, **settings: Any) -> Any:
    """A step on two rows of a prompt, unless the settings say otherwise."""
    return check_as_trl(model, output, script, more=more, **{**SMALL, **settings})


# ---------------------------------------------------------------------- tools


def value(name: str) -> Any:
    """Returns what is no text.

    Args:
        name: Of what.
    """
    return {"number": 1.5, "nothing": None, "mapping": {"a": 1}, "tuple": (1, 2), "parts": PARTS}[name]


async def fails_later() -> str:
    """Fails, too."""
    raise KeyError("page")


def stops() -> str:
    """Fails with what ends loops."""
    return next(iter(()))


def given(name: str, *contents: str) -> str:
    """What the template appends: the answers of tools, and the beginning of a turn."""
    return "".join(f"<tool:{name}>{content}{END}" for content in contents) + "<assistant>"


def calling(*calls: tuple[str, Any], **kind: str) -> Turns:
    return [written("", *calls, **kind), DONE]


def filling(room: int, then: str | list[int]) -> Turns:
    """A call after whose answer so many tokens are left, and a last turn."""
    call = ("fill", {"length": 40})
    used = length(written("", call)) + length(given("fill", "z" * 40))
    return [written("y" * (BUDGET - room - used), call), then]


# name → (the policy's turns, the number of messages of the completion)
CASES: dict[str, tuple[Turns, int]] = {
    "a row without a call is one message": ([DONE], 1),
    "an answer and another turn are appended": (calling(("add", {"a": 1, "b": 2})), 3),
    "what is said before a call is its content": ([written("hm", ("add", {"a": 1, "b": 2})), DONE], 3),
    "a coroutine function is awaited": (calling(("later", {"text": "x"})), 3),
    "the answers of several calls come in their order": (
        calling(("add", {"a": 1, "b": 2}), ("fill", {"length": 2}), ("add", {"a": 3, "b": 4})),
        5,
    ),
    "answers of coroutine functions come last": (
        calling(("later", {"text": "x"}), ("add", {"a": 1, "b": 2}), ("later", {"text": "y"})),
        5,
    ),
    "a tool that raises answers with its error": (calling(("fails", {})), 3),
    "so does a coroutine function": (calling(("fails_later", {})), 3),
    "an error without a text is an empty one": (calling(("stops", {})), 3),
    "a failure does not stop the other calls": (
        calling(("fails_later", {}), ("fails", {}), ("add", {"a": 1, "b": 2})),
        5,
    ),
    "an unknown tool is an error": (calling(("subtract", {"a": 1})), 3),
    "wrong arguments are an error": (calling(("add", {"a": 1, "c": 2})), 3),
    "wrong arguments of a coroutine function are one at once": (
        calling(("later", {"text": "x"}), ("later", {"word": "x"})),
        4,
    ),
    "arguments that are no mapping are an error": (calling(("add", 5)), 3),
    "a call of another type is an error of an unknown tool": (calling(("add", {"a": 1, "b": 2}), kind="other"), 3),
    "no arguments are an empty mapping": (["<function:fails>null</><|im_end|>", DONE], 3),
    "arguments get the types of the tool's schema": (calling(("add", {"a": "1", "b": "2"})), 3),
    "a malformed call is text": (["<function:add>{a: 1}</>" + END], 1),
    "a number and None are written as text": (
        calling(("value", {"name": "number"}), ("value", {"name": "nothing"})),
        4,
    ),
    "so are a mapping and a tuple": (calling(("value", {"name": "mapping"}), ("value", {"name": "tuple"})), 4),
    "a list of parts stays one": (calling(("value", {"name": "parts"})), 3),
    "a call that a turn without end makes is answered": ([CALL.removesuffix(END), "done"], 3),
    "as many calls as are allowed": ([CALL] * ITERATIONS + [DONE], 2 * ITERATIONS + 1),
    "one more is not answered": ([CALL] * (ITERATIONS + 1), 2 * ITERATIONS + 1),
    "the turn after an answer is cut to the budget": (filling(10, written("x" * 30)), 3),
    "an answer that fills the budget ends the row": (filling(0, written("x" * 30)), 2),
    "an answer beyond the budget is taken back": (filling(-1, DONE)[:1], 1),
    "a turn without a token ends the row": (filling(100, []), 2),
}
# With the prompt, its turns and its answer, a row has as many tokens as the context, or one less.
LONG: dict[str, tuple[Turns, int]] = {
    "an answer that fills the context is taken back": ([CALL], 1),
    "an answer that leaves a token of the context stays": ([CALL, [EOS]], 3),
}
TOOLS = [add, later, fails, fails_later, stops, fill, value]
SCHEMA = (
    "<tools>add:a integer,b integer,;later:text string,;fails:;fails_later:;stops:;fill:length integer,;"
    "value:name string,;"
)
ERRORS = {
    "no such page",
    "'page'",
    "",
    "Tool subtract not found.",
    "add() got an unexpected keyword argument 'c'",
    "later() got an unexpected keyword argument 'word'",
    "tests.scripted_turns.add() argument after ** must be a mapping, not int",
    "Unsupported tool call type: other",
}
ANSWERS = {"3", "7", "xx", "yy", "zz", "z" * 40, "1.5", "None", "{'a': 1}", "(1, 2)"}


def check_cases(model: str, output: Path, cases: dict[str, tuple[Turns, int]], contents: Sequence[str]) -> set[str]:
    """A window of rows, each of which shares its prompt with a row without a call. Returns what tools answered."""
    turns = {content: case for content, (case, _) in zip(contents, cases.values(), strict=True)}

    def script(text: str, asked: int) -> Turns:
        content = text.removeprefix(f"{SCHEMA}<user>").removesuffix(f"{END}<assistant>")
        return turns[content] if asked == 0 else [written("no")]

    found = check(
        model,
        output,
        script,
        dataset=Dataset.from_dict({"prompt": list(map(user, contents))}),
        per_device_train_batch_size=2 * len(cases),
        max_tool_calling_iterations=ITERATIONS,
        more={"tools": TOOLS},
    )
    completions = found.asked[0]["completions"]
    assert completions[1::2] == [[parsed("no")]] * len(cases)
    assert found.asked[0]["prompts"][::2] == list(map(user, contents)), "as they were"
    for (name, (_, messages)), completion in zip(cases.items(), completions[::2], strict=True):
        assert len(completion) == messages, name
    return {str(one["content"]) for completion in completions for one in completion if one["role"] == "tool"}


def test_what_becomes_of_a_row(model, tmp_path):
    """The longest rows are apart, since TRL pads all rows to the longest prompt."""
    found = check_cases(model, tmp_path / "short", CASES, list(CASES))
    assert found == ANSWERS | {str(PARTS)} | {str({"error": text}) for text in ERRORS}
    used = sum(map(length, (SCHEMA, "<user>", END, "<assistant>", CALL, given("add", "3"))))
    contents = [character * (CONTEXT - left - used) for left, character in enumerate("yz")]
    assert check_cases(model, tmp_path / "long", LONG, contents) == {"3"}


def calls_twice(text: str, asked: int) -> Turns:
    """The first row of a prompt."""
    return [written("no")] if asked % 2 else [CALL, CALL, DONE]


def test_no_turn_may_call_a_tool(model, tmp_path):
    found = check(model, tmp_path, calls_twice, max_tool_calling_iterations=0, more={"tools": [add]})
    assert found.asked[0]["completions"] == [[parsed("", ("add", {"a": 1, "b": 2}))], [parsed("no")]]
    assert found.log[0]["tools/call_frequency"] == found.log[0]["tools/failure_frequency"] == 0


def test_a_template_that_loses_prefixes_is_replaced_by_trls_for_training(tmp_path):
    """Qwen3's drops earlier thoughts; TRL also knows how to parse its calls."""
    model = save_tool_model(tmp_path / "model", max_position_embeddings=2048)
    own = with_templates(model, chat_template=qwen3_chat_template, response_template=None)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    appended = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    options = {"anchor": "<|im_start|>assistant\n"}
    more = {"tools": [add], "processing_class": own}
    found = check(model, tmp_path, lambda *_: [call, DONE], options=options, more=more)
    assert '"description": "Adds two numbers."' in found.prompts[0]
    assert own.decode(found.asked[0]["completion_ids"][0]) == call + appended + DONE


# ---------------------------------------------------------------------- environments


class NoOwner(Counter):
    """Takes back the reward of its base."""

    get_reward = None  # type: ignore[assignment]


class ClassOwner(Mute):
    """Its reward is no plain method, and none."""

    @classmethod
    def get_reward(cls) -> float:
        return 7.0


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
HIDDEN = ["_hidden", "reset", "get_reward", "trap"]


def test_an_environment_of_a_run(model, tmp_path):
    """Two windows, with a tool beside it; the second row of each prompt calls what is no tool.

    An observation, a text or a list of parts, is appended to the last message, of a text or a list.
    """
    adds, rows = ("add", {"a": 1, "b": 2}), 2 * len(OBSERVATIONS)

    def script(text: str, asked: int) -> Turns:
        if asked % 2:
            return calling(*((name, {}) for name in HIDDEN))
        return [written("", ("count", {"step": 2})), *calling(("count_later", {"step": 3}), adds)]

    def examples():
        for number, (observed, prompt, _) in enumerate(OBSERVATIONS):
            yield {"prompt": prompt, "observed": observed, "number": number}

    found = check(
        model,
        tmp_path,
        script,
        dataset=IterableDataset.from_generator(examples),
        max_completion_length=2 * BUDGET,
        per_device_train_batch_size=rows,
        max_steps=2,
        more={"environment_factory": Counter, "tools": [add]},
    )
    schema = "<tools>add:a integer,b integer,;count:step integer,;count_later:step integer,;look:;<user>"
    assert all(text.startswith(schema) for text in found.prompts)
    assert found.prompts[2].endswith(f"<user>b text{END}<assistant>")
    errors = answered(*((name, str({"error": f"Tool {name} not found."})) for name in HIDDEN))
    for asked, environments in zip(found.asked, found.environments, strict=True):
        assert asked["prompts"] == [prompt for _, _, prompt in OBSERVATIONS for _ in range(2)]
        assert all(completion[1:-1] == errors for completion in asked["completions"][1::2])
        expected = [(total, columns) for columns in examples() for total in (5, 0)]
        assert [(state["total"], state["columns"]) for _, state in asked["states"]] == expected
        assert len(set(map(id, environments))) == rows
    assert set(map(id, found.environments[0])) == set(map(id, found.environments[1])), "made once"


MIXED = {"counter": Counter, "echo": Echo, "twin": Counter, "mute": Mute, "no owner": NoOwner, "class": ClassOwner}


def test_environments_of_a_run(model, tmp_path):
    """A window with six environments of five classes. A row that has no prompt begins with the observation.

    Each class that owns its reward has one column, of its own rows.
    """
    calls = {"count": {"step": 4}, "shout": {"text": "hey"}, "look": {}}
    found = check(
        model,
        tmp_path,
        lambda text, asked: [DONE] if asked % 2 else calling(*calls.items()),
        dataset=Dataset.from_dict({"environment": list(MIXED), "observed": ["text", "", "parts", "", "", ""]}),
        per_device_train_batch_size=2 * len(MIXED),
        more={"environment_factory": MIXED},
    )
    texts = [user(" text"), user("echo {'observed': ''}"), user([part(""), *PARTS]), *[user("")] * 3]
    assert found.asked[0]["prompts"][::2] == texts
    names = [name for name, _ in found.asked[0]["states"]]
    assert names == [one.__name__ for one in MIXED.values() for _ in range(2)]
    assert found.log[0]["tools/failure_frequency"] == pytest.approx(8 / 18), "a tool of another one is not found"
    means = {name: found.log[0].get(f"rewards/{name}/mean") for name in ("Counter", "Echo", "NoOwner", "ClassOwner")}
    assert means == {"Counter": 2, "Echo": 1.5, "NoOwner": None, "ClassOwner": None}


class OwnsItsData:
    """Has no tools."""

    def reset(self, **columns: Any) -> str:
        return "guess"


def test_an_environment_may_own_the_prompts(model, tmp_path):
    """Without a dataset. Without tools, no calls are counted, and nobody answers what looks like one."""
    more = {"environment_factory": OwnsItsData, "train_dataset": None}
    cannot_parse = {"processing_class": with_templates(model, response_template=None)}
    call = parsed("", ("add", {"a": 1, "b": 2}))
    for other, message in (({}, call), (cannot_parse, parsed(CALL.removesuffix(END)))):
        found = check(model, tmp_path, calls_twice, more=more | other)
        assert found.asked[0]["prompts"] == [user("guess")] * 2
        assert found.asked[0]["completions"] == [[message], [parsed("no")]]
        assert not any(name.startswith("tools/") and name.endswith("frequency") for name in found.log[0])


def test_an_environment_may_be_the_only_reward(model, tmp_path):
    more = {"environment_factory": Counter, "reward_funcs": None}
    script = lambda text, asked: [DONE] if asked else calling(("count", {"step": 4}))  # noqa: E731
    log = check(model, tmp_path, script, reward_weights=None, more=more).log[0]
    assert log["rewards/Counter/mean"] == log["reward"] == 2 and log["grad_norm"] > 0


# ---------------------------------------------------------------------- mistakes


class NoReset:
    pass


# name → (arguments of the trainer, settings, what the message names)
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no reset": ({"environment_factory": NoReset}, {}, "reset"),
    "no reward": ({"tools": [add], "reward_funcs": None}, {}, "reward"),
    "no dataset": ({"tools": [add], "train_dataset": None}, {}, "train_dataset"),
    "no dataset for several": ({"environment_factory": {"a": Counter}, "train_dataset": None}, {}, "train_dataset"),
    "no end": ({"environment_factory": Counter, "train_dataset": None}, {"max_steps": -1}, "max_steps"),
    "an unknown environment": (
        {
            "environment_factory": {"a": Counter},
            "train_dataset": Dataset.from_dict({"prompt": [user("a")], "environment": ["b"]}),
        },
        {},
        "'b'",
    ),
    "a template without tools": (
        {"tools": [add], "chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}"},
        {},
        "template",
    ),
    "a template that nobody can parse": ({"tools": [add], "chat_template": None}, {}, "response"),
}


@pytest.mark.parametrize("kind", [GRPOTrainer, DASHTrainer])
def test_a_mistake_is_an_error(kind, model, tmp_path):
    for name, (arguments, changed, named) in MISTAKES.items():
        more = dict(arguments)
        if "chat_template" in arguments:
            own = with_templates(model, response_template=None)
            own.chat_template = more.pop("chat_template") or own.chat_template
            more["processing_class"] = own
        settings = {**SMALL, "prepare": plays(calls_twice), "reward": Judge(), **changed}
        assert named in refusal(run, kind, model, tmp_path, in_process=True, more=more, **settings), name
