"""What a user can get wrong, said before it costs time: each check raises a `ValueError` with value, reason, remedy."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import AutoConfig, PretrainedConfig, ProcessorMixin

from dash_trl.callbacks import ROLLOUT_EVENTS, DASHCallback, misspelt
from dash_trl.config import DASHConfig

logger = logging.getLogger(__name__)

# A chat template adds a system prompt and role markers; longer than this none was seen. Prompts whose UTF-8 bytes plus
# this fit into the context need not be tokenised to know that their tokens fit.
TEMPLATE_TOKENS = 512


def check_arguments(
    model: Any, args: Any, train_dataset: Any, eval_dataset: Any, processing_class: Any, others: Mapping[str, Any]
) -> None:
    """Everything that can be known from `DASHTrainer`'s arguments before a weight is loaded."""
    check_config(args)
    check_supported(processing_class, **{name: others.get(name) for name in ("tools", "environment_factory")})
    check_callbacks(others.get("callbacks") or ())
    check_dataset(train_dataset, "train_dataset")
    check_dataset(eval_dataset, "eval_dataset")
    check_batch(train_dataset, args)
    check_model(model, args)


def check_config(args: Any) -> None:
    """Refuse a config that is not a `DASHConfig`, or that asks for something that is not installed."""
    if not isinstance(args, DASHConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, which lacks DASH's options. Pass a dash_trl.DASHConfig: it takes all "
            "fields of trl.GRPOConfig."
        )
    if args.use_vllm and args.vllm_mode == "colocate" and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "use_vllm=True with vllm_mode='colocate', but the package vllm is not installed. Install it (`pip install "
            "dash_trl[vllm]`), name servers with vllm_server_urls, or set use_vllm=False to sample with transformers."
        )

    correction = args.vllm_importance_sampling_correction and args.use_vllm
    if args.loss_type == "vespo" and correction and not args.vllm_importance_sampling_mode.startswith("token_"):
        raise ValueError(
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} has one ratio per sequence, but "
            "loss_type='vespo' weighs tokens. Use 'token_truncate' or 'token_mask'."
        )


def check_supported(processing_class: Any, **features: Any) -> None:
    """Refuse what `DASHTrainer` does not train: tools, environments, vision-language models."""
    for name, value in features.items():
        if value:
            raise ValueError(
                f"{name} is set, but DASHTrainer trains single-turn text completions only: a tool's tokens would need "
                "credit of their own. Use trl.GRPOTrainer for it."
            )
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, a multimodal processor, but DASHTrainer trains "
            "text models only: images cannot be re-packed. Pass a tokenizer, or use trl.GRPOTrainer."
        )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse a callback (an instance or a class) with rollout events that is no `DASHCallback`: it gets none."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, DASHCallback):
            continue
        for name in dir(kind):
            if event := misspelt(name, ROLLOUT_EVENTS):
                raise ValueError(
                    f"{kind.__name__}.{name} would never be called: {event} is sent to DASHCallbacks only. Derive "
                    f"{kind.__name__} from dash_trl.DASHCallback instead of {kind.__mro__[1].__name__}."
                )


def check_model(model: Any, args: DASHConfig) -> None:
    """Refuse a model that is not there, or that is a vision-language model, before any weight is loaded."""
    if isinstance(model, str):
        try:
            revision = (args.model_init_kwargs or {}).get("revision")
            config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=args.trust_remote_code)
        except (OSError, ValueError) as error:
            looks_local = os.path.isdir(model) or model.startswith((".", "/", "~")) or model.count("/") > 1
            place = "that directory" if looks_local else "a directory or a model on the Hugging Face Hub"
            raise ValueError(
                f"model={model!r} cannot be loaded: {place} with a config.json was not found or could not be read "
                f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the spelling and, for a hub model, the "
                "network and your access."
            ) from error
    else:
        config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and hasattr(config, "vision_config"):
        raise ValueError(
            f"model={getattr(config, 'name_or_path', '') or model!r} is a vision-language model "
            f"({config.model_type}), but DASHTrainer trains text models only: images cannot be re-packed. Use a text "
            "model, or trl.GRPOTrainer."
        )


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset that is empty, has images, or has no `prompt` column (what TRL samples from)."""
    if isinstance(dataset, Mapping):
        for split, part in dataset.items():
            check_dataset(part, f"{name}[{split!r}]")
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
    suspects = [prompt for prompt in dataset["prompt"] if len(_text(prompt).encode()) + TEMPLATE_TOKENS >= context]
    # The longest few decide; tokenising them all would take minutes where most prompts are near the limit.
    suspects = sorted(suspects, key=lambda prompt: len(_text(prompt)), reverse=True)[:100]
    return [len(ids) for ids in tokenize(suspects)[0]] if suspects else []


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(message.get("content", "")) for message in prompt)
