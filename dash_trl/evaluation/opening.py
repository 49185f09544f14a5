"""`open_sampler`: by the name of a model, samples of it from wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dash_trl.embedded import embedded_model
from dash_trl.evaluation.checkpoint import EMBEDDED, Checkpoint
from dash_trl.evaluation.local import BATCH_SIZE, LocalSampler
from dash_trl.evaluation.sampler import Sampler

BACKENDS = ("transformers", "vllm")


def open_sampler(
    model: str | Path | Checkpoint,
    *,
    backend: str = "transformers",
    server_urls: Sequence[str] = (),
    batch_size: int = BATCH_SIZE,
    weight_dir: str | Path | None = None,
) -> Sampler:
    """A sampler of a model, as a context manager.

        with open_sampler("Qwen/Qwen2.5-0.5B-Instruct", server_urls=["http://127.0.0.1:8000"]) as sampler:
            for index, samples in sampler.sample(prompts, num_samples=16, max_new_tokens=1024):
                ...

    Args:
        model: a directory or hub name; the directory of a LoRA adapter; or "embedded".
        backend: "transformers", or "vllm" within this process.
        server_urls: vLLM servers (`python -m dash_trl.serve`) to sample from, in place of either. They get the model's
            weights if they hold others of the same shape, and keep them.
        batch_size: rows that transformers samples side by side; on the others it has no effect.
        weight_dir: where the weights for servers are written, seen by them under the same path. None: a temporary
            directory of this machine.
    Raises:
        ValueError: no such model or backend; servers of a model of another shape.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} does not exist: choose one of {BACKENDS}, or give server_urls.")
    if not isinstance(model, Checkpoint):
        model = Checkpoint(embedded_model() if model == EMBEDDED else str(model))
    if server_urls:
        from dash_trl.evaluation.servers import ServerSampler

        return ServerSampler(model, server_urls, weight_dir=weight_dir)
    if backend == "vllm":
        from dash_trl.evaluation.engine import VLLMSampler

        return VLLMSampler(model)
    return LocalSampler(model.load_here(), model.tokenizer, batch_size)
