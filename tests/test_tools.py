"""Tools and environments: what becomes of each row is what becomes of it with TRL's `GRPOTrainer`.

The turns are scripted.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from tests.doubles import Evaluates
from tests.scripted_turns import (
    END,
    PARTS,
    SMALL,
    Counter,
    Echo,
    Mute,
    add,
    check_as_trl,
    fails,
    fill,
    later,
    parsed,
    plays,
    save_tool_model,
    written,
)
from tests.tiny import EOS, refusal, refused, tiny_tokenizer, user

BUDGET = SMALL["max_completion_length"]
CONTEXT = 512
ITERATIONS = 3
ADD = ("add", {"a": 1, "b": 2})
LATER = ("later", {"text": "x"})
DONE = written("done")
CALL = written("", ADD)
Turns = Sequence[str | list[int]]
PROBLEM = Dataset.from_dict({"prompt": [user("a")]})


tokenizer = functools.cache(tiny_tokenizer)


def length(text: str) -> int:
    """In tokens."""
    return len(tokenizer()(text=text)["input_ids"])


def with_templates(model: str, **templates):
    """The model's tokenizer with other templates."""
    other = PreTrainedTokenizerFast.from_pretrained(model)
    for name, template in templates.items():
        setattr(other, name, template)
    return other


def check(model: str, output: Path, script, *, more, **settings):
    """A step on two rows of a prompt, unless the settings say otherwise."""
    return check_as_trl(model, output, script, more=more, **{**SMALL, "dataset": PROBLEM, **settings})


# ---------------------------------------------------------------------- tools


def value(name: str):
    """Return what is no text.

    Args:
        name: Of what.
    """
    return {"number": 1.5, "nothing": None, "parts": PARTS}[name]


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


# name → the policy's turns
CASES: dict[str, Turns] = {
    "what is said before a call is its content": [written("hm", ADD), DONE],
    "the answers of several calls come in their order": calling(
        ADD, ("fill", {"length": 2}), ("add", {"a": 3, "b": 4})
    ),
    "answers of coroutine functions come last": calling(LATER, ADD, ("later", {"text": "y"})),
    "an error without a text is an empty one": calling(("stops", {})),
    "a failure is the answer, and does not stop the other calls": calling(("fails_later", {}), ("fails", {}), ADD),
    "wrong arguments are an error": calling(("add", {"a": 1, "c": 2})),
    "wrong arguments of a coroutine function are one at once": calling(LATER, ("later", {"word": "x"})),
    "a call of another type is an error of an unknown tool": calling(ADD, kind="other"),
    "no arguments are an empty mapping": ["<function:fails>null</><|im_end|>", DONE],
    "arguments get the types of the tool's schema": calling(("add", {"a": "1", "b": "2"})),
    "a malformed call is text": ["<function:add>{a: 1}</>" + END],
    "a number and None are written as text": calling(("value", {"name": "number"}), ("value", {"name": "nothing"})),
    "a list of parts stays one": calling(("value", {"name": "parts"})),
    "a call that a turn without end makes is answered": [CALL.removesuffix(END), "done"],
    "as many calls as are allowed": [CALL] * ITERATIONS + [DONE],
    "one more is not answered": [CALL] * (ITERATIONS + 1),
    "the turn after an answer is cut to the budget": filling(10, written("x" * 30)),
    "an answer that fills the budget ends the row": filling(0, written("x" * 30)),
    "an answer beyond the budget is taken back": filling(-1, DONE)[:1],
    "a turn without a token ends the row": filling(100, []),
}
# With the prompt, its turns and its answer, a row has as many tokens as the context, or one less.
LONG: dict[str, Turns] = {
    "an answer that fills the context is taken back": [CALL],
    "an answer that leaves a token of the context stays": [CALL, [EOS]],
}
TOOLS = [add, later, fails, fails_later, stops, fill, value]
SCHEMA = (
    "<tools>add:a integer,b integer,;later:text string,;fails:;fails_later:;stops:;fill:length integer,;"
    "value:name string,;"
)


def check_cases(model: str, output: Path, cases: dict[str, Turns], contents: Sequence[str], messages: int) -> None:
    """A window of rows, each of which shares its prompt with a row without a call.

    Args:
        messages: the number of those in all completions, by which the cases are seen to be what they say.
    """
    turns = dict(zip(contents, cases.values(), strict=True))

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
    assert sum(map(len, found.asked[0]["completions"])) == messages


def test_what_becomes_of_a_row(tool_model, tmp_path):
    """The longest rows are apart, since TRL pads all rows to the longest prompt."""
    check_cases(tool_model, tmp_path / "short", CASES, list(CASES), 90)
    used = sum(map(length, (SCHEMA, "<user>", END, "<assistant>", CALL, given("add", "3"))))
    contents = [character * (CONTEXT - left - used) for left, character in enumerate("yz")]
    check_cases(tool_model, tmp_path / "long", LONG, contents, 6)


def calls_twice(text: str, asked: int) -> Turns:
    """The first row of a prompt."""
    return [written("no")] if asked % 2 else [CALL, CALL, DONE]


def test_no_turn_may_call_a_tool(tool_model, tmp_path):
    found = check(tool_model, tmp_path, calls_twice, max_tool_calling_iterations=0, more={"tools": [add]})
    assert found.asked[0]["completions"] == [[parsed("", ADD)], [parsed("no")]]


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


# observed, prompt
OBSERVATIONS = [
    ("nothing", user("a")),
    ("text", user("b")),
    ("parts", user("c")),
    ("text", user([part("d")])),
    ("parts", user([part("e")])),
    ("text", user("f") + user("g")),
]
HIDDEN = ["_hidden", "reset", "get_reward", "trap"]


def test_an_environment_of_a_run(tool_model, tmp_path):
    """Two windows, with a tool beside it; the second row of each prompt calls what is no tool. Prompts are TRL's.

    An observation, a text or a list of parts, is appended to the last message, of a text or a list.
    """
    rows = 2 * len(OBSERVATIONS)

    def script(text: str, asked: int) -> Turns:
        if asked % 2:
            return calling(*((name, {}) for name in HIDDEN))
        return [written("", ("count", {"step": 2})), *calling(("count_later", {"step": 3}), ADD)]

    def examples():
        for number, (observed, prompt) in enumerate(OBSERVATIONS):
            yield {"prompt": prompt, "observed": observed, "number": number}

    found = check(
        tool_model,
        tmp_path,
        script,
        dataset=IterableDataset.from_generator(examples),
        max_completion_length=2 * BUDGET,
        per_device_train_batch_size=rows,
        max_steps=2,
        more={"environment_factory": Counter, "tools": [add]},
    )
    assert found.prompts[2].endswith(f"look:;<user>b text{END}<assistant>")
    for asked, environments in zip(found.asked, found.environments, strict=True):
        assert [state["total"] for _, state in asked["states"]] == [5, 0] * len(OBSERVATIONS)
        assert len(set(map(id, environments))) == rows
    assert set(map(id, found.environments[0])) == set(map(id, found.environments[1])), "made once"


MIXED = {"counter": Counter, "echo": Echo, "twin": Counter, "mute": Mute, "no owner": NoOwner, "class": ClassOwner}


def test_environments_of_a_run(tool_model, tmp_path):
    """A window with six environments of five classes. A row that has no prompt begins with the observation.

    Each class that owns its reward has one column, of its own rows.
    """
    calls = {"count": {"step": 4}, "shout": {"text": "hey"}, "look": {}}
    found = check(
        tool_model,
        tmp_path,
        lambda text, asked: [DONE] if asked % 2 else calling(*calls.items()),
        dataset=Dataset.from_dict({"environment": list(MIXED), "observed": ["text", "", "parts", "", "", ""]}),
        per_device_train_batch_size=2 * len(MIXED),
        more={"environment_factory": MIXED},
    )
    assert found.asked[0]["prompts"][2] == user("echo {'observed': ''}")
    assert found.log[0]["tools/failure_frequency"] == pytest.approx(8 / 18), "a tool of another one is not found"
    assert found.log[0]["rewards/Counter/mean"] == 2 and found.log[0]["rewards/Echo/mean"] == 1.5


class OwnsItsData:
    """Has no tools."""

    def reset(self, **columns) -> str:
        return "guess"


def test_an_environment_may_own_the_prompts(tool_model, tmp_path):
    """Without a dataset. Without tools, no calls are counted, and nobody answers what looks like one."""
    more = {"environment_factory": OwnsItsData, "train_dataset": None}
    for other in ({}, {"processing_class": with_templates(tool_model, response_template=None)}):  # which cannot parse
        found = check(tool_model, tmp_path, calls_twice, more=more | other)
        assert [len(completion) for completion in found.asked[0]["completions"]] == [1, 1]
        assert not any(name.startswith("tools/") and name.endswith("frequency") for name in found.log[0])


def test_an_environment_may_be_the_only_reward(train, tool_model, tmp_path):
    more = {"environment_factory": Counter, "reward_funcs": None}
    script = lambda text, asked: [DONE] if asked else calling(("count", {"step": 4}))  # noqa: E731
    log = check(tool_model, tmp_path, script, reward_weights=None, more=more).log[0]
    assert log["rewards/Counter/mean"] == log["reward"] == 2 and log["grad_norm"] > 0
    settings = {**SMALL, "dataset": PROBLEM, "in_process": True, "reward_pipeline": True}
    assert "an environment that has get_reward" in refusal(train, model=tool_model, more=more, **settings)


def test_an_evaluation_before_the_rewards_of_a_window_changes_none(train, tool_model):
    def script(text: str, asked: int) -> Turns:
        return calling(("count", {"step": 7 if "<user>eval" in text else 4}))

    callback = Evaluates("on_rollouts_sampled")
    settings = {**SMALL, "dataset": PROBLEM, "eval_dataset": Dataset.from_dict({"prompt": [user("eval")]})}
    settings |= {"more": {"environment_factory": Counter}, "prepare": plays(script, callback.prepare)}
    log = train(model=tool_model, in_process=True, callbacks=[callback], **settings).state.log_history
    assert (log[0]["eval_rewards/Counter/mean"], log[1]["rewards/Counter/mean"]) == (7, 4)


def test_an_unknown_environment_and_one_for_all_rows(train, tool_model):
    dataset = PROBLEM.add_column("environment", ["b"])
    settings = {**SMALL, "model": tool_model, "in_process": True, "dataset": dataset, "prepare": plays(calls_twice)}
    for factory, said in (
        ({"a": Counter}, "environment='b', which is not among"),
        (functools.cache(Counter), "one environment for sev"),
    ):
        refused(said, train, more={"environment_factory": factory}, **settings)
