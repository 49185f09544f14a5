"""Conversations with tools whose turns come from a script: a tokenizer for them, and runs that are compared with TRL's.

A message is `<role>content<|im_end|>`, a call `<function:add>{"a": 1, "b": 2}</>`. So prompts and turns are short.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from dash_trl import DASHTrainer
from tests.contract import ByTokens, check_logs, first, second
from tests.tiny import EOS, corrects, log_probs, run, save_tiny_model, user

END = "<|im_end|>"
# As in GPT-OSS's template, a result is named after the call before it.
TEMPLATE = """
{%- set last = namespace(called="") %}
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}:
    {%- for name, value in tool.function.parameters.properties.items() %}{{ name }} {{ value.type }},{% endfor %};
{%- endfor %}{% endif %}
{%- for one in messages %}
    {%- if one.role == "tool" %}<tool:{{ last.called }}>{% else %}<{{ one.role }}>{% endif %}
    {%- if one.content is string %}{{ one.content }}
    {%- else %}{% for part in one.content %}{{ part.text }}{% endfor %}{% endif %}
    {%- for call in one.tool_calls or [] %}
        {%- set last.called = call.function.name %}<function:{{ call.function.name }}>
        {{- call.function.arguments | tojson }}</>
    {%- endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ mark }}<assistant>{% endif %}"""
# A call of another type than "function" is one that trainers do not know.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<(?P<type>function|other):(?P<name>\w+)>",
            "close": "</>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "{type}", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


SMALL = {  # a step on two rows of a prompt
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 200,
    "shuffle_dataset": False,
}


def save_tool_model(directory: Path, **settings) -> str:
    """A tiny model whose tokenizer knows tools."""
    path = save_tiny_model(directory, **settings)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def written(content: str, *calls: tuple[str, Any], kind: str = "function") -> str:
    """A turn of the policy: text, then calls (name, arguments)."""
    return content + "".join(f"<{kind}:{name}>{json.dumps(arguments)}</>" for name, arguments in calls) + END


def parsed(content: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    """The message that a turn is."""
    of_calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": of_calls} if of_calls else {})


def answered(*contents: tuple[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of tools for (name, content) pairs."""
    return [{"role": "tool", "name": name, "content": content} for name, content in contents]


class ScriptedTurns:
    """Answers prompts with the turns of a script: the first turn of a row, and the later turns.

    A prompt for a later turn must begin with exactly the tokens of the earlier turns.

    Args:
        script: takes the text of the prompt and how often it was asked before; returns turns, each a text or token ids.
        noise: standard deviation of the noise on the model's log-probs; None = no log-probs.
        anchor: a text that a prompt contains once for each turn of the policy.
    """

    def __init__(
        self,
        script: Callable[[str, int], Sequence[str | list[int]]],
        noise: float | None = None,
        anchor: str = "<assistant>",
    ):
        self.script = script
        self.noise = noise
        self.anchor = anchor
        self.prompts: list[str] = []  # prompts of first turns
        self._asked: dict[str, int] = {}
        self._rest: list[tuple[list[int], list[list[int]]]] = []  # (beginning of a later prompt, remaining turns)

    def prepare(self, trainer) -> None:
        """Makes `trainer` sample these turns; its transformer does not run."""

        def sampled(prompt_ids: list[list[int]], *args, **kwargs) -> tuple[list[list[int]], Any]:
            trainer._last_loaded_step = trainer.state.global_step  # as if sampled with the current weights
            turns = [self.turn(trainer._tokenizer, prompt) for prompt in prompt_ids]
            if self.noise is None:
                return turns, None
            return turns, [self._log_probs(trainer, *row) for row in zip(prompt_ids, turns, strict=True)]

        trainer._generate_single_turn = sampled

    def turn(self, tokenizer, prompt: list[int]) -> list[int]:
        prompt, text = list(prompt), tokenizer.decode(prompt)
        if self.anchor not in text:
            return [tokenizer.eos_token_id]  # a rank without waiting rows only takes part in the collective
        if text.count(self.anchor) == 1:
            self.prompts.append(text)
            asked = self._asked[text] = self._asked.get(text, -1) + 1
            turns = [
                tokenizer(text=turn)["input_ids"] if isinstance(turn, str) else turn
                for turn in self.script(text, asked)
            ]
        else:
            places = (place for place, (start, _) in enumerate(self._rest) if prompt[: len(start)] == start)
            place = next(places, None)
            assert place is not None, f"this does not go on with what was sampled: {text}"
            turns = self._rest.pop(place)[1]
        turn, *rest = turns
        if rest:
            self._rest.append((prompt + turn, rest))
        return list(turn)

    def _log_probs(self, trainer, prompt: list[int], turn: list[int]) -> list[float]:
        chance = random.Random(str(turn))
        return [value + chance.gauss(0.0, self.noise) for value in log_probs(trainer.model, prompt, turn)]


def together(*parts: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `prepare` that calls others."""

    def prepare(trainer) -> None:
        for one in parts:
            one(trainer)

    return prepare


def plays(script, *others: Callable[[Any], None], **options) -> Callable[[Any], None]:
    """Return a `prepare` for several runs: each run begins the script anew. It also calls `others`."""
    return together(lambda trainer: ScriptedTurns(script, **options).prepare(trainer), *others)


RANDOM_CALLS = {"add": {"a": 1, "b": 2}, "later": {"text": "x"}, "fails": {}, "fill": {"length": 60}}


class RandomTurns:
    """A script of random turns: the number of calls, their tools and what is said differ from row to row.

    Args:
        turns: at most so many of a row call a tool.
        calls: name of a tool → its arguments.
    """

    def __init__(self, turns: int = 3, calls: Mapping[str, Any] = RANDOM_CALLS):
        self.turns = turns
        self.calls = calls

    def __call__(self, text: str, asked: int) -> list[str | list[int]]:
        chance = random.Random(f"{text} {asked}")
        script: list[str | list[int]] = []
        for _ in range(chance.randint(0, self.turns)):
            names = chance.sample(sorted(self.calls), chance.choice((1, 1, 2)))
            words = "".join(chance.choice("the answer is 12") for _ in range(chance.randint(0, 8)))
            script.append(written(words.strip() or "so", *((name, self.calls[name]) for name in names)))
        last = [chance.randrange(4, 260) for _ in range(chance.randint(0, 16))]
        return [*script, [*last, EOS if chance.random() < 0.7 else 77]]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(text: str) -> str:
    """Repeats a text.

    Args:
        text: What to repeat.
    """
    return text * 2


def fails() -> str:
    """Always fails."""
    raise RuntimeError("no such page")


def fill(length: int) -> str:
    """Return a long text.

    Args:
        length: Its tokens.
    """
    return "z" * length


PARTS = [{"type": "text", "text": " par"}, {"type": "text", "text": "ts"}]


class Counter:
    """Counts, and owns its reward."""

    def __init__(self) -> None:
        self.total = 0
        self.columns = {}

    def reset(self, **columns):
        self.total = 0
        self.columns = columns
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

    def reset(self, **columns) -> str:
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

    def reset(self, **columns) -> None: ...

    def look(self) -> str:
        """Looks."""
        return "mute"


class Judge:
    """A reward function that records its arguments; the reward depends on a row's tokens."""

    IGNORED = ("trainer_state", "log_extra", "log_metric")
    __name__ = "judge"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.environments: list[list[Any]] = []  # of each call

    def __call__(self, completion_ids: list[list[int]], **columns) -> list[float]:
        self.environments.append(list(columns.pop("environments", ())))
        asked = {name: value for name, value in columns.items() if name not in self.IGNORED}
        states = [(type(one).__name__, vars(one)) for one in self.environments[-1]]
        self.asked.append(deepcopy(asked | {"completion_ids": completion_ids, "states": states}))
        return [random.Random(str(ids)).random() for ids in completion_ids]


def check_as_trl(
    model: str,
    folder: Path,
    script,
    *others: Callable[[Any], None],
    more,
    options: dict[str, Any] | None = None,
    **settings,
) -> SimpleNamespace:
    """Compares the log, the tables, the prompts, and what reward functions got. Returns those of `DASHTrainer`.

    The log has the norm of the gradient: so rows have the same loss tokens and log-probs.

    Args:
        script, options: see `ScriptedTurns`. others: prepare the trainer, too. more: arguments of the trainer.
    """
    found = []
    for kind in (ByTokens, DASHTrainer):
        judge = Judge()
        turns = ScriptedTurns(script, **(options or {}))
        own = {"gradient_filter_threshold": None} if kind is DASHTrainer else {}
        defaults = {
            "learning_rate": 1e-3,
            "loss_type": "dapo",
            "reward": [first, second, judge],
            "reward_weights": [1.0, 0.5, 1.0],
        }
        torch.manual_seed(0)
        output = folder / kind.__name__
        settings_of_it = {**defaults, **settings, **own}
        trainer = run(
            kind, model, output, in_process=True, prepare=together(turns.prepare, *others), more=more, **settings_of_it
        )
        log = trainer.state.log_history
        found.append(SimpleNamespace(trainer=trainer, log=log, prompts=turns.prompts, **vars(judge)))
    trl, dash = found
    check_logs([trl.trainer, dash.trainer])
    assert dash.prompts == trl.prompts and len(dash.asked) == len(trl.asked)
    for one, other in zip(trl.asked, dash.asked, strict=True):
        assert other == one
    return dash


TOOLS = [add, later, fails, fill]

OF_ENVIRONMENTS = {"add": {"a": 1, "b": 2}, "count": {"step": 2}, "count_later": {"step": 1}, "shout": {"text": "hey"}}

LONGEST = 150  # tokens of a completion: some answers do not fit


def problems(count: int) -> Dataset:
    names = ["counter", "echo", "twin", "mute"]
    return Dataset.from_dict(
        {
            "prompt": [user(f"{number} + {3 * number} = ") for number in range(count)],
            "environment": [names[number % 4] for number in range(count)],
            "observed": [("text", "")[number // 4 % 2] for number in range(count)],
        }
    )


SEVERAL = {"environment_factory": {"counter": Counter, "twin": Counter, "echo": Echo, "mute": Mute}, "tools": [add]}

# name → (arguments of the trainer, of the script, settings)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one call, truncated rows are masked": (
        {"tools": TOOLS},
        {},
        {"max_tool_calling_iterations": 1, "mask_truncated_completions": True, "chat_template_kwargs": {"mark": "!"}},
    ),
    "environments": (SEVERAL, {"calls": OF_ENVIRONMENTS}, {}),
    "tools and a sampler's log-probs": (
        {"tools": TOOLS},
        {"noise": 0.1, "also": [corrects]},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05},
    ),
}


def check_tools_contract(model: str, folder: Path, name: str) -> None:
    """Two steps, and their evaluations."""
    arguments, of_script, settings = SCENARIOS[name]
    options = dict(of_script)
    turns = RandomTurns(calls=options.pop("calls", RANDOM_CALLS))
    also = options.pop("also", ())
    defaults = {
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "max_completion_length": LONGEST,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "dataset": problems(12),
        "eval_dataset": problems(2),
        "log_completions": True,
        "num_completions_to_print": 1,
    }
    dash = check_as_trl(model, folder, turns, *also, more=arguments, options=options, **{**defaults, **settings})
    for prefix in ("", "eval_"):
        assert any(log.get(f"{prefix}tools/call_frequency", 0) > 0 for log in dash.log)
