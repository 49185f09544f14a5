"""The samplers: transformers' `generate`, vLLM in this process, and vLLM servers. `open_sampler` chooses one."""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dash_trl.evaluation.checkpoint import TOY, Checkpoint
from dash_trl.evaluation.sampler import Draw, Drawn, Sampler, end_tokens
from dash_trl.sampling import ServerPool, check_servers, load_checkpoint, takes_seeds
from dash_trl.serve import CPU_CACHE_GIB, CPU_SEQUENCES, visible_gpus
from dash_trl.toy import toy_model
from dash_trl.update import evaluating

BATCH_SIZE = 64
BACKENDS = ("transformers", "vllm")


class LocalSampler(Sampler):
    """Samples by transformers' `generate`, in batches of fixed composition.

    The rows of all prompts, S rows per prompt, are cut in order into batches of `batch_size` rows. Each batch has its
    own seed. So a resumed run draws only those batches that contain missing prompts, and gets the same rows as an
    uninterrupted run. Between two batches, the model's mode and the global random state are as before.

    Args:
        model: a causal language model on any device, unwrapped (`trainer.accelerator.unwrap_model`).
        tokenizer: the tokenizer of the model.
        batch_size: number of rows that are sampled together; the samples depend on it.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = BATCH_SIZE):
        super().__init__(tokenizer, end_tokens(model.generation_config, tokenizer))
        self.model = model
        self.batch_size = batch_size

    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        rows = [index for index in range(len(prompts)) for _ in range(draw.num_samples)]
        drawn: dict[int, list[list[int]]] = {index: [] for index in left}
        for number, start in enumerate(range(0, len(rows), self.batch_size)):
            batch = rows[start : start + self.batch_size]
            if left.isdisjoint(batch):
                continue
            longest = replace(draw, max_completion_length=max(map(draw.room, batch)))
            for index, ids in zip(batch, self._generate([prompts[i] for i in batch], longest, number), strict=True):
                if index in left:
                    drawn[index].append(ids[: draw.room(index)])
                    if len(drawn[index]) == draw.num_samples:
                        yield index, drawn.pop(index)

    def _generate(self, batch: list[list[int]], draw: Draw, number: int) -> list[list[int]]:
        tokenizer, ends = self.tokenizer, self.end_tokens
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        # Neutral values must be given: generate() takes missing ones from the model's generation_config.
        sampling = {"do_sample": True, "temperature": draw.temperature, "top_k": 0, "top_p": 1.0, "min_p": None}
        if draw.temperature == 0:
            sampling = {"do_sample": False}
        width, device = max(map(len, batch)), self.model.device
        # Saves the random state of all devices, since manual_seed changes all of them.
        rng = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
        with evaluating(self.model), rng, torch.no_grad():
            torch.manual_seed(draw.stream(number))
            generated = self.model.generate(
                input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in batch], device=device),
                attention_mask=torch.tensor(
                    [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=device
                ),
                max_new_tokens=draw.max_completion_length,
                repetition_penalty=1.0,
                pad_token_id=pad,
                eos_token_id=ends,
                **sampling,
            )
        rows = generated[:, width:].tolist()
        return [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), None)] for ids in rows]


class VLLMSampler(Sampler):
    """Samples by vLLM in this process. All prompts enter the engine at once, each with its own seed."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint.tokenizer, end_tokens(checkpoint.generation_config, checkpoint.tokenizer))
        from vllm import LLM

        gpus = visible_gpus()
        options: dict[str, Any] = {}
        if gpus:
            config = checkpoint.config.get_text_config()
            heads = [config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 0]
            options["tensor_parallel_size"] = math.gcd(len(gpus), *heads)
        else:  # with the options of `dash_trl.serve` for a server without a GPU
            options |= {"dtype": "float32", "enforce_eager": True, "max_num_seqs": CPU_SEQUENCES}
            options["enable_chunked_prefill"] = False  # together with seeds it would crash the engine (`takes_seeds`)
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)  # read by the engine's process
        with tempfile.TemporaryDirectory(prefix="dash_trl_merged_") as merged:
            path = checkpoint.base
            if checkpoint.is_adapter:
                checkpoint.load("auto").save_pretrained(merged)
                checkpoint.tokenizer.save_pretrained(merged)
                path = merged
            self._llm: Any = LLM(path, disable_log_stats=True, **options)

    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        waiting = {str(index) for index in left}
        for index in sorted(left):
            parameters = SamplingParams(
                n=draw.num_samples,
                temperature=draw.temperature,
                max_tokens=draw.room(index),
                seed=draw.stream(index),
                stop_token_ids=self.end_tokens,
                output_kind=RequestOutputKind.FINAL_ONLY,
                detokenize=False,
            )
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompts[index]), parameters)
        try:
            while waiting:
                for output in engine.step():
                    if output.finished:
                        waiting.discard(output.request_id)
                        yield int(output.request_id), [list(one.token_ids) for one in output.outputs]
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class ServerSampler(Sampler):
    """Samples from vLLM servers, by one request per prompt. A failed request is repeated on another server.

    Each request has its own seed, but the samples are still not reproducible: timing decides which requests share a
    batch, and this changes the last bits of the logits. Servers on a CPU get no seeds (`takes_seeds`).

    Args:
        checkpoint: the model.
        urls: servers with models of the checkpoint's shape. They get its weights and keep them.
        weight_dir: see `open_sampler`.
    Raises:
        ValueError: see `check_servers` and `load_checkpoint`.
        PoolError: see `check_servers` and `load_checkpoint`.
        WeightMismatch: see `load_checkpoint`.
    """

    def __init__(self, checkpoint: Checkpoint, urls: Sequence[str], *, weight_dir: str | Path | None = None):
        super().__init__(checkpoint.tokenizer, end_tokens(checkpoint.generation_config, checkpoint.tokenizer))
        self.pool = ServerPool(urls)
        dtype = check_servers(self.pool, checkpoint.config, checkpoint.name)
        self._takes_seeds = takes_seeds(self.pool)
        self._temporary = tempfile.TemporaryDirectory(prefix="dash_trl_weights_")
        try:
            folder = self._temporary.name if weight_dir is None else weight_dir
            load_checkpoint(self.pool, checkpoint.load(dtype), len(self.tokenizer), folder)
        except BaseException:
            self.close()
            raise

    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        indices = sorted(left)
        jobs = []
        for index in indices:
            sampling = {
                # Neutral values for options that a server would otherwise take from the model's generation_config.
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "temperature": draw.temperature,
                "max_tokens": draw.room(index),
                "stop_token_ids": self.end_tokens,
                **({"seed": draw.stream(index)} if self._takes_seeds else {}),
            }
            jobs += self.pool.completions([(prompts[index], draw.num_samples)], sampling)
        for number, job in enumerate(jobs):
            job.number = number
        for number, completions in self.pool.as_completed(jobs):
            yield indices[number], [completion.token_ids for completion in completions]

    def close(self) -> None:
        self.pool.cancel()
        self._temporary.cleanup()


def check_shapes(checkpoints: Sequence[Checkpoint], urls: Sequence[str]) -> None:
    """Checks that servers can load the weights of each of these models. Raises the errors of `check_servers`.

    It needs only the configs of the models, so it finds errors before any weights are loaded.
    """
    pool = ServerPool(urls)
    for checkpoint in checkpoints:
        check_servers(pool, checkpoint.config, checkpoint.name)


def open_sampler(
    model: str | Path | Checkpoint,
    *,
    backend: str = "transformers",
    server_urls: Sequence[str] = (),
    batch_size: int = BATCH_SIZE,
    weight_dir: str | Path | None = None,
) -> Sampler:
    """Loads a model and returns a sampler of it, which is a context manager::

        with open_sampler("Qwen/Qwen2.5-0.5B-Instruct", server_urls=["http://127.0.0.1:8000"]) as sampler:
            for index, samples in sampler.sample(prompts, num_samples=16, max_completion_length=1024):
                ...

    Args:
        model: a directory, a hub name, the directory of a LoRA adapter, "toy", or a `Checkpoint`.
        backend: "transformers", or "vllm" within this process.
        server_urls: vLLM servers (`python -m dash_trl.serve`) to sample from instead of a backend. If they have other
            weights of the same shape, they get the model's weights and keep them.
        batch_size: number of rows that transformers samples together; it has no effect on the other samplers.
        weight_dir: where the weights for servers are written; servers must see it under the same path. None: a
            temporary directory on this machine.
    Raises:
        ValueError: if the model or backend does not exist, or servers have a model of another shape.
        PoolError: see `ServerSampler`.
        WeightMismatch: see `ServerSampler`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} does not exist: choose one of {BACKENDS}, or give server_urls.")
    if not isinstance(model, Checkpoint):
        model = Checkpoint(toy_model() if model == TOY else str(model))
    if server_urls:
        return ServerSampler(model, server_urls, weight_dir=weight_dir)
    if backend == "vllm":
        return VLLMSampler(model)
    return LocalSampler(model.load_here(), model.tokenizer, batch_size)
