"""Datasets, their prompts, and what a `rollout_func` makes of these."""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from dash_trl.config import DASHConfig
from dash_trl.update import OFF_POLICY_LOSSES


def check_dataset(dataset: Any, name: str, own_rollouts: bool, *, environments: bool = False) -> None:
    """Refuse a dataset that is empty, has images, or has no `prompt` column, or no prompt in its first row.

    The other rows are checked as they are sampled.

    Args:
        own_rollouts: there is a `rollout_func`, which may make of the prompts what it likes.
        environments: there are environments, whose observations may be the whole prompts.
    """
    if isinstance(dataset, Mapping):
        for split, part in dataset.items():
            check_dataset(part, f"{name}[{split!r}]", own_rollouts, environments=environments)
    if not isinstance(dataset, Dataset | IterableDataset):
        return  # None, or a type that TRL refuses itself
    columns = dataset.column_names or ["prompt"]  # a stream's may be unknown
    if "prompt" not in columns and not environments:
        raise ValueError(
            f"{name} has the columns {columns}, but no 'prompt'. Rename the column with the problem, or load the data "
            "with dash_trl.load_math_dataset, which knows GSM8K's and MATH's columns."
        )
    if images := {"image", "images"} & set(columns):
        raise ValueError(
            f"{name} has the column {sorted(images)[0]!r}, but DASHTrainer trains text models only. Remove the column, "
            "or use trl.GRPOTrainer."
        )
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise ValueError(
                f"{name} is empty (columns: {columns}), so there is no prompt to sample from. Check the split."
            )
        if not own_rollouts and "prompt" in columns:
            check_prompt(dataset[0]["prompt"], f"Row 0 of {name}")


def check_conversations(dataset: Any, name: str) -> None:
    """Refuse prompts that are texts, in which a chat template cannot name tools."""
    for part in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        if isinstance(part, Dataset) and "prompt" in part.column_names and isinstance(part[0]["prompt"], str):
            raise ValueError(
                f"{name} has texts as prompts (row 0: {part[0]['prompt']!r:.80}), but tools and environments need "
                "conversations, to which the chat template adds the tools. Write each prompt as "
                "[{'role': 'user', 'content': '…'}]."
            )


def check_prompt(prompt: Any, place: str) -> None:
    """Refuse what is neither a text nor a conversation, or is empty: TRL would fail on it deep in a tokenizer."""
    right = all(map(_is_message, prompt)) if isinstance(prompt, list) else isinstance(prompt, str)
    if not (right and prompt):
        raise ValueError(
            f"{place} has the prompt {prompt!r}, which is neither a text nor a conversation. Write it as a text or as "
            "[{'role': 'user', 'content': '…'}], or drop it, e.g. with `dataset.filter`."
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") is not None and "content" in message


def check_prompt_lengths(prompt_ids: list[list[int]], context: int | None) -> None:
    """Refuse a prompt that leaves no room for an answer in the model's context.

    Args:
        context: `max_position_embeddings`; `None` = unknown.
    """
    longest = max(map(len, prompt_ids))
    if context is not None and longest >= context:
        raise ValueError(
            f"A prompt has {longest} tokens, but the model's context is {context}, so nothing can be sampled after it. "
            "Drop or shorten such prompts (e.g. `dataset.filter`), or use a model with a longer context."
        )


def checked_rollouts(rollout_func: Callable[..., Any], prompts: list, trainer: Any) -> dict[str, Any]:
    """What a user's `rollout_func` returns, if TRL can use it."""
    output = rollout_func(prompts, trainer)
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
    if log_probs is not None and list(map(len, log_probs)) != list(map(len, output["completion_ids"])):
        raise ValueError(
            "rollout_func returned logprobs of other lengths than completion_ids: return one for each token of each "
            "completion, NaN where it is not known."
        )
    mask = output.get("env_mask")
    if mask is not None and (
        list(map(len, mask)) != list(map(len, output["completion_ids"]))
        or any({*map(float, row)} - {0, 1} for row in mask)
    ):
        raise ValueError(
            "rollout_func returned an env_mask that does not fit completion_ids: return 1 for each token that the "
            "policy wrote and 0 for each of its environment, in as many rows and of the same lengths."
        )
    return output


def check_batch(dataset: Any, args: DASHConfig) -> None:
    """Refuse a dataset with fewer prompts than one generation batch needs: TRL would train on nothing."""
    if args.max_skipped_epochs and not isinstance(dataset, Dataset):
        raise ValueError(
            f"max_skipped_epochs={args.max_skipped_epochs} remembers what came of each row of train_dataset, and a "
            "stream's rows have no numbers. Pass a datasets.Dataset, or leave the option out."
        )
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
