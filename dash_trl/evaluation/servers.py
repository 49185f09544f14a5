"""Sampling from vLLM servers, with many prompts in flight, from whichever checkpoint they are given."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dash_trl.evaluation.checkpoint import Checkpoint
from dash_trl.evaluation.sampler import Draw, Drawn, Sampler, end_tokens
from dash_trl.sampling import ServerPool, check_servers, load_checkpoint, takes_seeds

# Neutral values of what a server would take from the model's generation_config.
OWN_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerSampler(Sampler):
    """A request per prompt, with a seed of its own; a failed one is made again on another server.

    Not repeatable in spite of the seeds: which requests share a batch depends on timing, and so do the last bits of
    the logits. Servers on a CPU get none (`takes_seeds`).

    Args:
        urls: servers of models of the checkpoint's shape. They keep its weights.
        weight_dir: see `open_sampler`.
    Raises:
        ValueError, PoolError, WeightMismatch: see `check_servers` and `load_checkpoint`.
    """

    def __init__(self, checkpoint: Checkpoint, urls: Sequence[str], *, weight_dir: str | Path | None = None):
        super().__init__(checkpoint.tokenizer, end_tokens(checkpoint.generation_config, checkpoint.tokenizer))
        self.pool = ServerPool(urls)
        dtype = check_servers(self.pool, checkpoint.config, checkpoint.name)
        self._takes_seeds = takes_seeds(self.pool)
        self._temporary = tempfile.TemporaryDirectory(prefix="dash_trl_weights_") if weight_dir is None else None
        folder = self._temporary.name if self._temporary is not None else str(weight_dir)
        try:
            load_checkpoint(self.pool, checkpoint.load(dtype), len(self.tokenizer), folder)
        except BaseException:
            self.close()
            raise

    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        indices = sorted(left)
        jobs = []
        for index in indices:
            sampling = {
                **OWN_DISTRIBUTION,
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
        if self._temporary is not None:
            self._temporary.cleanup()


def check_shapes(checkpoints: Sequence[Checkpoint], urls: Sequence[str]) -> None:
    """Whether the servers can hold each of these models; raises as `check_servers`, before weights are loaded."""
    pool = ServerPool(urls)
    for checkpoint in checkpoints:
        check_servers(pool, checkpoint.config, checkpoint.name)
