"""Datasets and their prompts, looked at as they are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from dash_trl.config import DASHConfig
from dash_trl.update import OFF_POLICY_LOSSES

logger = logging.getLogger(__name__)

# A chat template adds a system prompt and role markers; longer than this none was seen. Prompts whose UTF-8 bytes plus
# this fit into the context need not be tokenised to know that their tokens fit.
TEMPLATE_TOKENS = 512


def check_dataset(dataset: Any, name: str, own_rollouts: bool = False) -> None:
    """Refuse a dataset that is empty, has images, or has no `prompt` column, or no prompts in it, to sample from.

    `own_rollouts`: a `rollout_func` may make of the prompts what it likes.
    """
    if isinstance(dataset, Mapping):
        for split, part in dataset.items():
            check_dataset(part, f"{name}[{split!r}]", own_rollouts)
    if not isinstance(dataset, Dataset | IterableDataset):
        return  # None, or a type that TRL refuses itself
    columns = dataset.column_names
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(
            f"{name} is empty (columns: {columns}), so there is no prompt to sample from. Check the split."
        )
    if columns is not None and "prompt" not in columns:
        raise ValueError(
            f"{name} has the columns {columns}, but no 'prompt'. Rename the column with the problem, or load the data "
            "with dash_trl.load_math_dataset, which knows GSM8K's and MATH's columns."
        )
    images = {"image", "images"} & set(columns or ())
    if images:
        raise ValueError(
            f"{name} has the column {sorted(images)[0]!r}, but DASHTrainer trains text models only. Remove the column, "
            "or use trl.GRPOTrainer."
        )
    if isinstance(dataset, Dataset) and not own_rollouts:
        for row in np.flatnonzero(_of_each_prompt(dataset, _suspicious)).tolist():
            prompt = dataset.select_columns("prompt").with_format(None)[row]["prompt"]
            check_prompt(prompt, f"Row {row} of {name}")


def check_prompt(prompt: Any, place: str) -> None:
    """Refuse what is neither a text nor a conversation, or is empty: TRL would fail on it deep in a tokenizer."""
    flaw = None
    if isinstance(prompt, str):
        flaw = None if prompt else "is empty"
    elif not isinstance(prompt, list):
        flaw = "is neither a text nor a list of messages"
    elif not prompt:
        flaw = "is an empty list of messages"
    elif not all(isinstance(one, Mapping) and one.get("role") is not None and "content" in one for one in prompt):
        flaw = "has a message without role or content"
    if flaw is not None:
        raise ValueError(
            f"{place} has the prompt {prompt!r}, which {flaw}. Write it as a text or as [{{'role': 'user', 'content': "
            "'…'}], or drop it, e.g. with `dataset.filter`."
        )


def checked_rollouts(rollout_func: Callable[..., Any], prompts: list, trainer: Any) -> dict[str, Any]:
    """What a user's `rollout_func` returns, if TRL can use it."""
    output = rollout_func(prompts, trainer)
    needed = {"prompt_ids", "completion_ids", "logprobs"}
    if not isinstance(output, Mapping) or not needed <= output.keys():
        found = sorted(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise ValueError(f"rollout_func returned {found}, but has to return a dict with {sorted(needed)}.")
    for name in ("prompt_ids", "completion_ids"):
        if len(output[name]) != len(prompts) or not all(map(len, output[name])):
            raise ValueError(
                f"rollout_func returned {len(output[name])} {name} for {len(prompts)} prompts, or an empty one: return "
                "at least one token for each, such as the end-of-sequence token."
            )
    log_probs, loss = output["logprobs"], trainer.args.loss_type
    correct = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if log_probs is None and (loss in OFF_POLICY_LOSSES or correct):
        cause = f"loss_type={loss!r}" if loss in OFF_POLICY_LOSSES else "vllm_importance_sampling_correction=True"
        raise ValueError(
            f"{cause} needs the sampler's log-probs, but rollout_func returned none: return those of every completion "
            "token as 'logprobs', or use another loss and correction."
        )
    if log_probs is not None:
        for row, (ids, reported) in enumerate(zip_longest(output["completion_ids"], log_probs, fillvalue=())):
            if len(ids) != len(reported):
                raise ValueError(
                    f"rollout_func returned {len(reported)} logprobs for the {len(ids)} completion_ids of row {row}: "
                    "return one for each token, NaN where it is not known."
                )
    return dict(output)


def check_batch(dataset: Any, args: DASHConfig) -> None:
    """Refuse a dataset with fewer prompts than one generation batch needs: TRL would train on nothing."""
    if isinstance(dataset, Dataset):
        needed = args.generation_batch_size // args.num_generations
        if len(dataset) < needed:
            raise ValueError(
                f"train_dataset has {len(dataset)} prompts, but one generation batch takes {needed} "
                f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}), so no "
                "batch could be filled. Lower per_device_train_batch_size or steps_per_generation, or add data."
            )


def check_first_step(batches: int, args: DASHConfig) -> None:
    """Refuse a stream that is over before its first optimizer step: Transformers would read it again and again for one.

    Args:
        batches: a rank's micro-batches for that step.
    """
    if batches < args.gradient_accumulation_steps:
        raise ValueError(
            f"train_dataset, a stream, ends after {batches} micro-batches, but an optimizer step takes "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and Transformers takes none with the "
            f"rest of a stream: there would never be one. {args.generation_batch_size // args.num_generations} prompts "
            f"make {args.steps_per_generation * args.num_iterations} micro-batches. Use more prompts (or "
            "`dataset.repeat(None)`), or lower gradient_accumulation_steps."
        )


def check_prompt_lengths(lengths: list[int], context: int | None, max_completion_length: int) -> None:
    """Refuse a prompt that leaves no room for an answer in the model's context.

    Args:
        lengths: tokens of each prompt.
        context: `max_position_embeddings`; `None` = unknown.
        max_completion_length: tokens that may be sampled after it.
    """
    if context is None or not lengths:
        return
    longest = max(lengths)
    if longest >= context:
        raise ValueError(
            f"A prompt has {longest} tokens, but the model's context is {context}, so nothing can be sampled after it. "
            "Drop or shorten such prompts (e.g. `dataset.filter`), or use a model with a longer context."
        )
    if longest + max_completion_length > context:
        logger.warning(
            f"A prompt of {longest} tokens and max_completion_length={max_completion_length} exceed the model's "
            f"context of {context}: completions that run so long leave the positions that the model was trained on."
        )


def long_prompt_lengths(dataset: Any, tokenize: Any, context: int | None) -> list[int]:
    """The token counts of the prompts that might not fit (judged by their bytes: a token has at least one).

    Args:
        dataset: a map-style dataset; a streamed one is checked as it is sampled.
        tokenize: TRL's `_tokenize_prompts`: a list of prompts → (their token ids, …).
    """
    if context is None or not isinstance(dataset, Dataset):
        return []
    sizes = _of_each_prompt(dataset, _bytes)
    # The longest few decide; tokenising them all would take minutes where most prompts are near the limit.
    longest = np.argsort(-sizes, kind="stable")[:100]
    suspects = dataset.with_format(None).select(longest[sizes[longest] + TEMPLATE_TOKENS >= context])
    return [len(ids) for ids in tokenize(list(suspects["prompt"]))[0]] if len(suspects) else []


def _of_each_prompt(dataset: Dataset, measure: Callable[[pa.Array], np.ndarray]) -> np.ndarray:
    """[rows]: `measure` of the prompts as they are stored, since Python objects of all of them would take seconds.

    It takes the offsets of texts and lists, and never the texts. Empty where a transform makes the prompts as they are
    read: those are checked as they are sampled.
    """
    if dataset.format["type"] == "custom":
        return np.zeros(0)
    stored = np.concatenate([measure(chunk) for chunk in dataset.data.column("prompt").chunks])
    order = dataset._indices  # of `shuffle` and `select`, which leave the table as it is
    return stored if order is None else stored[order.column(0).to_numpy()]


def _bytes(prompts: pa.Array) -> np.ndarray:
    """[rows]: UTF-8 bytes of each text, or of all contents of each conversation."""
    if _is_text(prompts.type):
        return pc.binary_length(prompts).to_numpy(zero_copy_only=False)
    messages = _messages(prompts)
    if messages is None or not _is_text(messages.type.field("content").type):
        return np.array([len(_text(prompt).encode()) for prompt in prompts.to_pylist()])
    sizes = pc.fill_null(pc.binary_length(pc.struct_field(messages, "content")), 0)
    return np.bincount(_rows(prompts), weights=sizes, minlength=len(prompts))


def _suspicious(prompts: pa.Array) -> np.ndarray:
    """[rows] bool: the prompts that `check_prompt` may refuse; all of a kind that is not known here."""
    if _is_text(prompts.type):
        return _truth(pc.equal(pc.binary_length(prompts), 0))
    messages = _messages(prompts)
    if messages is None:
        return np.ones(len(prompts), dtype=bool)
    found = _truth(pc.equal(pc.list_value_length(prompts), 0))
    found[_rows(prompts)[_truth(pc.is_null(pc.struct_field(messages, "role")))]] = True
    return found


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _messages(prompts: pa.Array) -> pa.Array | None:
    """The messages of all conversations, one after the other; None if these are no conversations."""
    kind = prompts.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return None
    fields = {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
    return prompts.flatten() if {"role", "content"} <= fields else None


def _rows(prompts: pa.Array) -> np.ndarray:
    """Of each message, the row that it is in."""
    return np.repeat(np.arange(len(prompts)), pc.fill_null(pc.list_value_length(prompts), 0))


def _truth(values: pa.Array) -> np.ndarray:
    """As a mask that may be written to; a null is suspicious."""
    return np.array(pc.fill_null(values, True).to_numpy(zero_copy_only=False))


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(message.get("content", "")) for message in prompt)
