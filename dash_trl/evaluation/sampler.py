"""What samplers have in common: prompts in, decoded completions out, and who draws them is a subclass.

    sample(prompts) ──► token ids ──► _draw: transformers | vLLM here | vLLM servers ──► (index, its completions)

Letters: P prompts, S samples of each. Samples come from the model's own distribution at the given temperature: top-k,
top-p and repetition penalties that a model's `generation_config` may ask for are switched off, as in TRL.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, str]]
Drawn = tuple[int, list[list[int]]]  # index of a prompt, token ids of its completions
MAX_COMPLETION_LENGTH = 2048  # tokens; the paper's


@dataclass(frozen=True)
class SampledCompletion:
    """One completion.

    Attributes:
        text: without special tokens. token_ids: up to and including the first end token.
        truncated: it reached `max_completion_length` before an end token.
    """

    text: str
    token_ids: list[int]
    truncated: bool


@dataclass(frozen=True)
class Draw:
    """How completions are drawn: `num_samples` of each prompt, at a temperature (0: greedy), of at most
    `max_completion_length` tokens, which may be another number for each prompt.
    """

    num_samples: int
    temperature: float
    max_completion_length: int | Sequence[int]
    seed: int

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.num_samples < 1 or (self.temperature == 0 and self.num_samples > 1):
            raise ValueError(
                f"temperature={self.temperature} with num_samples={self.num_samples}: greedy decoding (temperature 0) "
                "gives one sample per prompt. Use num_samples=1, or a temperature above 0."
            )

    def room(self, index: int) -> int:
        """The most tokens of a completion of this prompt."""
        most = self.max_completion_length
        return most if isinstance(most, int) else most[index]

    def stream(self, number: int) -> int:
        """The seed of one of its streams (a batch, a request): those of neighbouring seeds have nothing in common."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {number}".encode()).digest()[:8]) >> 1  # fits into int64


class Sampler(AbstractContextManager["Sampler"]):
    """A model that completes prompts; a context manager that gives back what it holds.

    Args:
        tokenizer: with a chat template if prompts are conversations.
        end_tokens: ids that end a completion.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]):
        self.tokenizer = tokenizer
        self.end_tokens = list(end_tokens)

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        max_completion_length: int = MAX_COMPLETION_LENGTH,
        seed: int = 0,
        done: Collection[int] = (),
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """(index of a prompt, its `num_samples` completions), in the order in which they are done.

        Args:
            done: indices of prompts that are not needed any more. What is drawn for the others is what would be drawn
                for them without it, so that an interrupted run goes on with all prompts and those that it has.
        """
        ids = [prompt_ids(prompt, self.tokenizer) for prompt in prompts]
        return self.continuations(ids, Draw(num_samples, temperature, max_completion_length, seed), done=done)

    def continuations(
        self, prefixes: Sequence[Sequence[int]], draw: Draw, *, done: Collection[int] = ()
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """`sample` of token ids, such as prompts with the beginning of a completion: what comes behind each of them."""
        left = set(range(len(prefixes))).difference(done)
        drawn = self._draw(list(map(list, prefixes)), draw, left) if left else iter(())
        return ((index, self.completions(rows)) for index, rows in drawn)

    def completions(self, rows: Sequence[list[int]]) -> list[SampledCompletion]:
        return [
            SampledCompletion(text, ids, truncated=not ids or ids[-1] not in self.end_tokens)
            for text, ids in zip(self.tokenizer.batch_decode(rows, skip_special_tokens=True), rows, strict=True)
        ]

    @abstractmethod
    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        """(index, token ids of its completions) of those that are left, at least one, as they are done."""

    def close(self) -> None:  # noqa: B027 (one that holds nothing has nothing to give back)
        """Gives back what it holds."""

    def __exit__(self, *exception: object) -> None:
        self.close()


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokenizer's end of sequence and those that the model declares, as TRL takes them."""
    declared = generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*declared, *own]))
