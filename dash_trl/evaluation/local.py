"""Sampling from a loaded model by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from dash_trl.evaluation.sampler import Draw, Drawn, Sampler, end_tokens
from dash_trl.update import evaluating

BATCH_SIZE = 64


class LocalSampler(Sampler):
    """Samples in batches of fixed composition: the S rows of every prompt, in order, cut into `batch_size`.

    A batch draws all its rows from one stream of random numbers, its own. So a resumed run draws the batches whole that
    hold a prompt which is left, and no other, and gets the same rows. The model's mode and the global random state are
    between two batches what they were before.

    Args:
        model: a causal language model on any device; unwrapped (`trainer.accelerator.unwrap_model`).
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = BATCH_SIZE):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least one row.")
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
            longest = replace(draw, max_new_tokens=max(map(draw.room, batch)))
            for index, ids in zip(batch, self._generate([prompts[i] for i in batch], longest, number), strict=True):
                if index in left:
                    drawn[index].append(ids[: draw.room(index)])
                    if len(drawn[index]) == draw.num_samples:
                        yield index, drawn.pop(index)

    def _generate(self, batch: list[list[int]], draw: Draw, number: int) -> list[list[int]]:
        tokenizer, ends = self.tokenizer, self.end_tokens
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        # Neutral values, not absent ones: generate() fills absent ones from the model's generation_config.
        sampling = {"do_sample": True, "temperature": draw.temperature, "top_k": 0, "top_p": 1.0, "min_p": None}
        if draw.temperature == 0:
            sampling = {"do_sample": False}
        width = max(map(len, batch))
        device = self.model.device
        with _inference(self.model, draw.stream(number)):
            generated = self.model.generate(
                input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in batch], device=device),
                attention_mask=torch.tensor(
                    [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=device
                ),
                max_new_tokens=draw.max_new_tokens,
                repetition_penalty=1.0,
                pad_token_id=pad,
                eos_token_id=ends,
                **sampling,
            )
        rows = generated[:, width:].tolist()
        lengths = [next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids)) for ids in rows]
        return [ids[:length] for ids, length in zip(rows, lengths, strict=True)]


@contextmanager
def _inference(model: Any, seed: int) -> Iterator[None]:
    """Evaluation mode, no gradients and a seeded RNG inside; all of it as before outside."""
    # All devices, since manual_seed reaches all of them.
    with evaluating(model), torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
        torch.manual_seed(seed)
        yield
