"""Conversations with tools whose turns come from a script: a tokenizer for them, and trainers that sample them.

A message is `<role>content<|im_end|>`, a call `<function:add>{"a": 1, "b": 2}</>`. So prompts and turns are short.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl.trainer.utils import pad

from dash_trl import DASHCallback, DASHTrainer
from tests.tiny import EOS, log_probs, save_tiny_model

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


def save_tool_model(directory: Path, **settings: Any) -> str:
    """A tiny model whose tokenizer knows tools."""
    path = save_tiny_model(directory, **settings)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def written(content: str, *calls: tuple[str, Any], kind: str = "function") -> str:
    """A turn of the policy: text, then calls (name, arguments)."""
    return content + "".join(f"<{kind}:{name}>{json.dumps(arguments)}</>" for name, arguments in calls) + END


def parsed(content: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    """The message that a turn is."""
    of_calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": of_calls} if of_calls else {})


def answered(*contents: tuple[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of tools for (name, content) pairs."""
    return [{"role": "tool", "name": name, "content": content} for name, content in contents]


class ScriptedTurns:
    """Answers prompts with the turns of a script: the first turn of a row, and the later turns.

    A prompt for a later turn must begin with exactly the tokens of the earlier turns.

    Args:
        script: takes the text of the prompt and how often it was asked before; returns turns, each a text or token ids.
        noise: standard deviation of the noise on the model's log-probs; None = no log-probs.
        anchor: a text that a prompt contains once for each turn of the policy.
        generated: True = the turns come from the model's `generate`; then each turn has to end.
    """

    def __init__(
        self,
        script: Callable[[str, int], Sequence[str | list[int]]],
        noise: float | None = None,
        anchor: str = "<assistant>",
        generated: bool = False,
    ):
        self.script, self.noise, self.anchor, self.generated = script, noise, anchor, generated
        self.prompts: list[str] = []  # prompts of first turns
        self._asked: dict[str, int] = {}
        self._rest: list[tuple[list[int], list[list[int]]]] = []  # (beginning of a later prompt, remaining turns)

    def prepare(self, trainer: Any) -> None:
        """Makes `trainer` sample these turns; its transformer does not run."""

        def sampled(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
            trainer._last_loaded_step = trainer.state.global_step  # as if sampled with the current weights
            turns = [self.turn(trainer._tokenizer, prompt) for prompt in prompt_ids]
            if self.noise is None:
                return turns, None
            return turns, [self._log_probs(trainer, *row) for row in zip(prompt_ids, turns, strict=True)]

        def generated(input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
            rows = zip(input_ids, attention_mask.bool(), strict=True)
            turns = [torch.tensor(self.turn(trainer._tokenizer, ids[real].tolist())) for ids, real in rows]
            padded = pad(turns, padding_value=trainer._tokenizer.pad_token_id).to(input_ids.device)
            return torch.cat([input_ids, padded], dim=1)

        if self.generated:
            trainer.model.generate = generated
        else:
            trainer._generate_single_turn = sampled

    def turn(self, tokenizer: Any, prompt: list[int]) -> list[int]:
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

    def _log_probs(self, trainer: Any, prompt: list[int], turn: list[int]) -> list[float]:
        chance = random.Random(str(turn))
        return [value + chance.gauss(0.0, self.noise) for value in log_probs(trainer.model, prompt, turn)]


def plays(script: Any, *others: Callable[[Any], None], **options: Any) -> Callable[[Any], None]:
    """Returns a `prepare` for several runs: each run begins the script anew. It also calls `others`."""

    def prepare(trainer: Any) -> None:
        ScriptedTurns(script, **options).prepare(trainer)
        for one in others:
            one(trainer)

    return prepare


RANDOM_CALLS = {"add": {"a": 1, "b": 2}, "later": {"text": "x"}, "fails": {}, "fill": {"length": 60}}


class RandomTurns:
    """A script of random turns: the number of calls, their tools and what is said differ from row to row.

    Args:
        turns: at most so many of a row call a tool.
        calls: name of a tool → its arguments. ends: the share of rows with an end.
    """

    def __init__(self, turns: int = 3, calls: Mapping[str, Any] = RANDOM_CALLS, ends: float = 0.7):
        self.turns, self.calls, self.ends = turns, calls, ends

    def __call__(self, text: str, asked: int) -> list[str | list[int]]:
        chance = random.Random(f"{text} {asked}")
        script: list[str | list[int]] = []
        for _ in range(chance.randint(0, self.turns)):
            names = chance.sample(sorted(self.calls), chance.choice((1, 1, 2)))
            words = "".join(chance.choice("the answer is 12") for _ in range(chance.randint(0, 8)))
            script.append(written(words.strip() or "so", *((name, self.calls[name]) for name in names)))
        last = [chance.randrange(4, 260) for _ in range(chance.randint(0, 16))]
        return [*script, [*last, EOS if chance.random() < self.ends else 77]]


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
    """Returns a long text.

    Args:
        length: Its tokens.
    """
    return "z" * length


PARTS = [{"type": "text", "text": " par"}, {"type": "text", "text": "ts"}]


class Counter:
    """Counts, and owns its reward."""

    def __init__(self) -> None:
        self.total, self.columns = 0, {}

    def reset(self, **columns: Any) -> Any:
        self.total, self.columns = 0, columns
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


class Rows(DASHCallback):
    """Callback that records the rows of each window: token ids, own tokens (1 = the policy's), and log-probs."""

    def __init__(self) -> None:
        self.windows: list[list[tuple[Any, ...]]] = []

    def add(self, ids: Any, real: Any, own: Any, log_probs: Any) -> None:
        tables = (ids, real if own is None else own, log_probs)
        self.windows.append(
            [
                tuple(None if one is None else one[i][mask].tolist() for one in tables)
                for i, mask in enumerate(real.bool())
            ]
        )

    def on_rollouts_sampled(self, args: Any, state: Any, control: Any, rollouts: Any, **kwargs: Any) -> None:
        log_probs = rollouts.sampling_per_token_logps
        self.add(rollouts.completion_ids, rollouts.completion_mask, rollouts.tool_mask, log_probs)

    def prepare(self, trainer: Any) -> None:
        """Makes this callback see the windows of `trainer`, which may be TRL's."""
        if isinstance(trainer, DASHTrainer):
            trainer.add_callback(self)
            return
        score = trainer._generate_and_score_completions

        def scored(inputs: Any) -> Any:
            found = score(inputs)
            if trainer.model.training:
                names = ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
                self.add(*(found.get(name) for name in names))
            return found

        trainer._generate_and_score_completions = scored


class Judge:
    """A reward function that records its arguments; the reward depends on a row's tokens."""

    IGNORED = ("trainer_state", "log_extra", "log_metric")
    __name__ = "judge"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.environments: list[list[Any]] = []  # of each call

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.environments.append(list(columns.pop("environments", ())))
        asked = {name: value for name, value in columns.items() if name not in self.IGNORED}
        states = [(type(one).__name__, vars(one)) for one in self.environments[-1]]
        self.asked.append(deepcopy(asked | {"completion_ids": completion_ids, "states": states}))
        return [random.Random(str(ids)).random() for ids in completion_ids]
