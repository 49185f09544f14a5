"""`Sampler`: base class of samplers, which turn prompts into decoded completions. A subclass draws the tokens::

    sample(prompts) ──► token ids ──► _draw: transformers | vLLM here | vLLM servers ──► (index, its completions)

Samples come from the model's own distribution at the given temperature. As in TRL, top-k, top-p and repetition
penalties of the model's `generation_config` are switched off.

Letters: P prompts, S samples of each.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, str]]
Drawn = tuple[int, list[list[int]]]  # index of a prompt, token ids of its completions
MAX_COMPLETION_LENGTH = 2048  # in tokens, as in the paper


@dataclass(frozen=True)
class SampledCompletion:
    """One completion.

    Attributes:
        text: the text, without special tokens.
        token_ids: the token ids, up to and including the first end token.
        truncated: True = the completion reached `max_completion_length` without an end token.
    """

    text: str
    token_ids: list[int]
    truncated: bool


@dataclass(frozen=True)
class Draw:
    """Settings for drawing completions.

    Args:
        num_samples: S, number of completions of each prompt.
        temperature: sampling temperature; 0 = greedy decoding, with one sample.
        max_completion_length: limit of a completion in tokens; one number, or a list with one number for each prompt.
        seed: seed of all random numbers.
    Raises:
        ValueError: if the settings contradict each other.
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
        """Returns the limit of tokens for completions of the prompt with this index."""
        most = self.max_completion_length
        return most if isinstance(most, int) else most[index]

    def stream(self, number: int) -> int:
        """Returns a seed of a batch or request, by its number. Hashed, so nearby seeds or numbers are independent."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {number}".encode()).digest()[:8]) >> 1  # fits into int64


class Sampler(AbstractContextManager["Sampler"]):
    """Samples completions from a model. It is a context manager that frees its resources at the end.

    Args:
        tokenizer: the tokenizer of the model. It needs a chat template if prompts are conversations.
        end_tokens: token ids that end a completion.
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Samples completions of prompts. Prompts are returned in the order in which they are done.

        Args:
            prompts: P texts or conversations.
            num_samples: S, number of completions of each prompt.
            temperature: sampling temperature; 0 = greedy decoding, with one sample.
            max_completion_length: limit of a completion in tokens.
            seed: seed of all random numbers.
            done: indices of prompts to leave out. To continue an interrupted run, pass the same prompts, and the
                indices of the prompts that are finished: the samples of the other prompts do not depend on `done`.
            chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": False}`. Pass those of
                training (TRL's option of this name), or the model gets other prompts than in training.
        Returns:
            An iterator over pairs: the index of a prompt, and the S completions of this prompt.
        """
        ids = [prompt_ids(prompt, self.tokenizer, chat_template_kwargs) for prompt in prompts]
        return self.continuations(ids, Draw(num_samples, temperature, max_completion_length, seed), done=done)

    def continuations(
        self, prefixes: Sequence[Sequence[int]], draw: Draw, *, done: Collection[int] = ()
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Samples continuations of prefixes in token ids. A prefix may be a prompt with the beginning of a completion.

        Args:
            prefixes: P lists of token ids.
            draw: settings for drawing.
            done: see `sample`.
        Returns:
            See `sample`; the completions do not contain the prefix.
        """
        left = set(range(len(prefixes))).difference(done)
        drawn = self._draw(list(map(list, prefixes)), draw, left) if left else iter(())
        return ((index, self.completions(rows)) for index, rows in drawn)

    def completions(self, rows: Sequence[list[int]]) -> list[SampledCompletion]:
        """Decodes the token ids of completions."""
        return [
            SampledCompletion(text, ids, truncated=not ids or ids[-1] not in self.end_tokens)
            for text, ids in zip(self.tokenizer.batch_decode(rows, skip_special_tokens=True), rows, strict=True)
        ]

    @abstractmethod
    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        """Yields each prompt in `left` when it is done: (index, token ids of its completions). `left` is not empty."""

    def close(self) -> None:  # noqa: B027 (a sampler without resources has nothing to do here)
        """Frees the sampler's resources."""

    def __exit__(self, *exception: object) -> None:
        self.close()


def prompt_ids(prompt: Prompt, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids of a prompt. The chat template formats a prompt that is a conversation."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    settings = {"add_generation_prompt": True, "return_dict": True, **(chat_template_kwargs or {})}
    return tokenizer.apply_chat_template(prompt, **settings)["input_ids"]


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Returns the token ids that end a completion, as in TRL: those of the generation config, and the tokenizer's."""
    declared = generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*declared, *own]))
