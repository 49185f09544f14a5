"""Samplers turn prompts into decoded completions, by transformers' `generate` or by vLLM servers::

    sample(prompts) ──► token ids ──► _draw: transformers | vLLM servers ──► (index, its completions)

Samples come from the model's own distribution at the given temperature: only the end tokens of the model's
`generation_config` have an effect.

Letters: P prompts, S samples of each.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import unwrap_peft_model
from trl.trainer.utils import pad

from dash_trl.checks import check_prompt_ids, plain_prompt
from dash_trl.multimodal import auto_class
from dash_trl.sampling import WEIGHT_DIR, ServerPool, check_servers, load_checkpoint
from dash_trl.seams import decoded, with_settings
from dash_trl.serve import visible_gpus, vllm_servers
from dash_trl.toy import toy_model
from dash_trl.update import evaluating

BATCH_SIZE = 64
MAX_COMPLETION_LENGTH = 2048  # in tokens, as in the paper
SEED_STRIDE = 1_000_003  # seeds of batches or rows are counted from a multiple of it, so no two runs share them
TOY = "toy"  # the name of the tiny model of `dash_trl.toy`

Drawn = Iterator[tuple[int, list[list[int]]]]  # indices of prompts, and the token ids of their completions


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


class Checkpoint:
    """A model, or a LoRA adapter, of which the constructor reads the config and the tokenizer, but no weights.

    Args:
        name: directory or hub name of the model, directory of the adapter, or "toy".
    Attributes:
        base: name or directory of the full weights: `name` itself, or an adapter's base model.
        config: the config of the base model.
    Raises:
        ValueError: if no model has this name.
    """

    def __init__(self, name: str):
        self.name = self.base = name = toy_model() if name == TOY else name
        adapter = Path(name, "adapter_config.json")  # peft's file
        self.is_adapter = adapter.is_file()
        if self.is_adapter:
            self.base = json.loads(adapter.read_text())["base_model_name_or_path"]
        try:
            self.config = AutoConfig.from_pretrained(self.base)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name!r} is no model. Name a hub model or a folder with a config.json: what save_model() wrote, or a "
                f"checkpoint. {error}"
            ) from error
        own = Path(name, "tokenizer_config.json").is_file()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name if own else self.base)

    def load(self, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
        """Load the model for inference. An adapter is not merged: in bf16, small changes of weights would be lost."""
        model = auto_class(self.config).from_pretrained(self.base, dtype=dtype)
        if self.is_adapter:
            from peft import PeftModel  # imported here, since most runs have no adapter

            model = PeftModel.from_pretrained(model, self.name)
        return model.to(device)


class Sampler(ABC):
    """Samples completions from a model.

    Args:
        tokenizer: the model's. Conversations need its chat template.
        generation_config: the model's. Its end tokens and the tokenizer's end a completion, as in TRL.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig):
        self.tokenizer = tokenizer
        declared = generation_config.eos_token_id
        ends = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
        self.end_tokens = [one for one in dict.fromkeys(ends) if one is not None]

    def sample(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        max_completion_length: int = MAX_COMPLETION_LENGTH,
        seed: int = 0,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Sample completions of prompts, and yield each prompt when it is done.

        Args:
            prompts: P texts or conversations.
            num_samples: S, number of completions of each prompt.
            temperature: sampling temperature; 0 = greedy decoding, with one sample.
            max_completion_length: limit of a completion in tokens.
            seed: seed of all random numbers.
            chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": False}`, as in training.
        Yields:
            The index of a prompt, and its S completions.
        """
        template = {"add_generation_prompt": True, "return_dict": True, **(chat_template_kwargs or {})}
        encode = self.tokenizer
        apply = self.tokenizer.apply_chat_template
        plain = [plain_prompt(one, f"Row {row}") for row, one in enumerate(prompts)]
        ids = [(encode(one) if isinstance(one, str) else apply(one, **template))["input_ids"] for one in plain]
        check_prompt_ids(ids, self.tokenizer, self.end_tokens)
        drawn = self._draw(ids, num_samples, temperature, max_completion_length, seed)
        return (
            (
                index,
                [
                    SampledCompletion(text, row, truncated=not row or row[-1] not in self.end_tokens)
                    for text, row in zip(decoded(self.tokenizer, [""], [], rows), rows, strict=True)
                ],
            )
            for index, rows in drawn
        )

    @abstractmethod
    def _draw(
        self, prompts: list[list[int]], num_samples: int, temperature: float, max_completion_length: int, seed: int
    ) -> Drawn:
        """Yield each prompt when it is done: its index, and the token ids of its completions."""


class LocalSampler(Sampler):
    """Samples by transformers' `generate`, in batches with their own seeds.

    Between two batches, the model's mode and the global random state are as before.

    Args:
        model: a causal language model on any device, unwrapped (`trainer.accelerator.unwrap_model`).
        tokenizer: its tokenizer.
        batch_size: number of rows that are sampled together; the samples depend on it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = BATCH_SIZE):
        super().__init__(tokenizer, model.generation_config)
        self.model = model
        self._inner = unwrap_peft_model(model)
        self.batch_size = batch_size

    def _draw(
        self, prompts: list[list[int]], num_samples: int, temperature: float, max_completion_length: int, seed: int
    ) -> Drawn:
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        ends = self.end_tokens
        filler = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else ends[0]
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
        index = 0
        samples: list[list[int]] = []  # of the prompt with this index
        for start in range(0, len(rows), self.batch_size):
            batch = [torch.tensor(ids, device=self.model.device) for ids in rows[start : start + self.batch_size]]
            input_ids = pad(batch, filler, "left")
            with (
                evaluating(self.model),
                # generate() takes missing options from the model's generation_config.
                with_settings(self._inner, {"generation_config": GenerationConfig()}),
                # Saves the random state of all devices, since manual_seed changes all of them.
                torch.random.fork_rng(devices=range(torch.cuda.device_count())),
                torch.no_grad(),
            ):
                torch.manual_seed(seed * SEED_STRIDE + start)
                generated = self.model.generate(
                    input_ids=input_ids,
                    attention_mask=pad([torch.ones_like(ids) for ids in batch], 0, "left"),
                    max_new_tokens=max_completion_length,
                    pad_token_id=filler,
                    eos_token_id=ends,
                    **how,
                )
            for ids in generated[:, input_ids.shape[1] :].tolist():
                samples.append(ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), None)])
                if len(samples) == num_samples:
                    yield index, samples
                    index += 1
                    samples = []


class ServerSampler(Sampler):
    """Samples from vLLM servers, by one request per prompt. A failed request is repeated on another server.

    The servers of the pool have models of the checkpoint's shape, and get and keep its weights (`load_checkpoint`). For
    errors, see there and `check_servers`. `seed` has no effect: timing decides which requests share a batch, which
    changes the last bits of the logits.
    """

    def __init__(self, checkpoint: Checkpoint, pool: ServerPool, weight_dir: str | Path | None):
        model = checkpoint.load(check_servers(pool, checkpoint.config, checkpoint.name).dtype)
        model = model.merge_and_unload() if checkpoint.is_adapter else model
        super().__init__(checkpoint.tokenizer, model.generation_config)
        self.pool = pool
        load_checkpoint(pool, model, len(self.tokenizer), weight_dir)

    def _draw(
        self, prompts: list[list[int]], num_samples: int, temperature: float, max_completion_length: int, seed: int
    ) -> Drawn:
        sampling = {
            "temperature": temperature,
            "max_tokens": max_completion_length,
            "stop_token_ids": self.end_tokens,
        }

        async def draw(index: int, prompt: list[int]) -> tuple[int, list[list[int]]]:
            completions, _ = await self.pool.complete(prompt, num_samples, sampling)
            return index, [completion.token_ids for completion in completions]

        yield from self.pool.as_completed(starmap(draw, enumerate(prompts)))


@contextmanager
def open_sampler(
    model: str | Path | Checkpoint,
    *,
    use_vllm: bool = False,
    server_urls: Sequence[str] = (),
    batch_size: int = BATCH_SIZE,
    weight_dir: str | Path = WEIGHT_DIR,
) -> Iterator[Sampler]:
    """Context manager that loads a model and gives a sampler of it::

        with open_sampler("Qwen/Qwen2.5-0.5B-Instruct", server_urls=["http://127.0.0.1:8000"]) as sampler:
            for index, samples in sampler.sample(prompts, num_samples=16, max_completion_length=1024):
                ...

    Args:
        model: a directory or hub name of a model or LoRA adapter, "toy", or a `Checkpoint`.
        use_vllm: True = start a vLLM server on each visible GPU, and stop them on exit.
        server_urls: vLLM servers (`dash_trl serve`) to sample from. They get the model's weights and keep them.
        batch_size: see `LocalSampler`.
        weight_dir: where the weights for servers are written; servers must see it under the same path.
    Raises:
        ValueError: if the model does not exist, or servers have a model of another shape.
        PoolError: see `check_servers` and `load_checkpoint`.
        WeightMismatch: see `load_checkpoint`.
    """
    if not isinstance(model, Checkpoint):
        model = Checkpoint(str(model))
    with ExitStack() as stack:
        own = use_vllm and not server_urls
        if own:
            server_urls = stack.enter_context(vllm_servers(model.base, max(1, len(visible_gpus()))))
        if not server_urls:
            # On a CPU, half precision is slow or missing.
            place = ("auto", "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
            yield LocalSampler(model.load(*place), model.tokenizer, batch_size)
            return
        pool = ServerPool(server_urls)
        stack.callback(pool.cancel)
        yield ServerSampler(model, pool, None if own and not model.is_adapter else weight_dir)
