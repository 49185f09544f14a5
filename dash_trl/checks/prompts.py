"""Checks datasets, the prompts in them, and the results of a `rollout_func`."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.trainer.utils import remove_none_values

from dash_trl.config import DASHConfig
from dash_trl.rewards import BATCH
from dash_trl.update import OFF_POLICY_LOSSES


def check_dataset(dataset: object, name: str, own_rollouts: bool, *, environments: bool, conversations: bool) -> None:
    """Check the columns and the prompts of a dataset. Prompts of a stream are checked before they are sampled from.

    Args:
        own_rollouts: True = there is a `rollout_func`, which may take prompts of any form.
        environments: True = there are environments, which may give the prompts.
        conversations: True = prompts must be conversations, because a chat template adds tools to them.
    Raises:
        ValueError: if the dataset is empty, lacks the column `prompt` or has a column that would hide an argument of
            reward functions, or if a prompt cannot be used.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        return  # None, or a type that TRL refuses itself
    columns = dataset.column_names or ["prompt"]  # the columns of a stream may be unknown
    if "prompt" not in columns and not environments:
        raise ValueError(
            f"{name} has the columns {columns}, but no 'prompt'. Rename the column with the problem, or load the data "
            "with dash_trl.load_math_dataset, which knows the columns of GSM8K and MATH."
        )
    if images := sorted({"image", "images"}.intersection(columns)):
        raise ValueError(
            f"{name} has the column {images[0]!r}, but DASHTrainer trains on text only, so no prompt would show it. "
            "Remove the column if the prompts make sense without images, or use trl.GRPOTrainer."
        )
    if taken := sorted({*BATCH}.intersection(columns)):
        raise ValueError(
            f"{name} has the columns {taken}, but the trainer itself passes arguments of these names to reward "
            "functions. Rename them, e.g. with `dataset.rename_column`."
        )
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise ValueError(
                f"{name} is empty (columns: {columns}), so there is no prompt to sample from. Check the split."
            )
        if not own_rollouts and "prompt" in columns:
            # A transform may be slow, and may need all columns. So only its first row is checked here.
            looked_at = (
                dataset.select(range(1)) if dataset.format["type"] == "custom" else dataset.select_columns("prompt")
            )
            for row, prompt in enumerate(one for rows in looked_at.iter(1000) for one in rows["prompt"]):
                plain_prompt(prompt, f"Row {row} of {name}")
                if conversations and isinstance(prompt, str):
                    raise ValueError(
                        f"{name} has texts as prompts (row {row}: {prompt!r:.80}), but tools and environments need "
                        "conversations, because a chat template adds the tools. Write each prompt as "
                        "[{'role': 'user', 'content': '…'}]."
                    )


def plain_prompt(prompt: object, place: str) -> Any:
    """Return a prompt with the text parts of each message joined, because chat templates of text models need texts.

    Raises:
        ValueError: if the prompt is neither a text nor a conversation of texts, or is empty; `place` names it.
    """
    try:
        plain = list(map(_plain_message, prompt)) if isinstance(prompt, list) else prompt
    except (AttributeError, KeyError, TypeError):
        plain = None
    if not plain or not isinstance(plain, str | list):
        raise ValueError(
            f"{place} has the prompt {prompt!r}, which is neither a text nor a conversation. Write it as a text or as "
            "[{'role': 'user', 'content': '…'}], where the content may also be a list of "
            "{'type': 'text', 'text': '…'}, or drop it, e.g. with `dataset.filter`."
        )
    if isinstance(plain, list) and plain[-1]["role"] == "assistant":
        raise ValueError(
            f"{place} has the prompt {prompt!r}, which ends with a message of the assistant. The chat template closes "
            "it, so another answer would begin. If the model should continue it, make the prompt a text: "
            "tokenizer.apply_chat_template(prompt, tokenize=False, continue_final_message=True)."
        )
    return plain


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message whose content is a text; an error if it has other content. A tool call needs no content.

    `datasets` gives each message the keys of all messages. Some chat templates fail on keys without a value, or write
    "null" into a tool call, so these keys are left out (https://github.com/huggingface/trl/pull/5376).
    """
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    elif isinstance(content, list) and {part["type"] for part in content} == {"text"}:
        content = "".join(part["text"] for part in content)
    if message["role"] is None or not isinstance(content, str):
        raise TypeError
    return remove_none_values({**message, "content": content})


def check_prompt_ids(
    prompt_ids: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    context: float | None = None,
) -> None:
    """Raise a `ValueError` if a prompt is empty, ends with one of `ends`, or leaves no room in the `context`.

    A prompt must not begin with `bos_token` twice, either: a text from a chat template already has the token that the
    tokenizer adds. With `context=None`, the context is unknown.
    """
    if not all(prompt_ids):
        raise ValueError(
            "A prompt has no token: the tokenizer, or its chat template, writes it as nothing. See what "
            "tokenizer.apply_chat_template(prompt, tokenize=False) returns, and correct the prompt or the template."
        )
    if context is not None and (longest := max(map(len, prompt_ids))) >= context:
        raise ValueError(
            f"A prompt has {longest} tokens, but the model's context is {context}, so nothing can be sampled after it. "
            "Drop such prompts (e.g. with `dataset.filter`) or shorten them, or use a model with a longer context."
        )
    bos = tokenizer.bos_token_id
    if any(ids[:2] == [bos, bos] for ids in prompt_ids):
        raise ValueError(
            f"A prompt begins with the token {bos} (bos_token) twice: its text has one, and the tokenizer adds one. "
            "Pass conversations instead of texts that a chat template has made, or remove bos_token from the texts."
        )
    # For some models, the token with which a text begins ends it, too.
    # Most chat templates write a line end after each message.
    several = [ids[-2:] for ids in prompt_ids if len(ids) > 1]
    if any(ids[1] in ends or ids[0] in ends and not tokenizer.decode(ids[1:]).strip() for ids in several):
        raise ValueError(
            f"A prompt ends with an end token ({ends}; eos_token), so the model would continue after an end. Remove it "
            "from the text or from the chat template, load the tokenizer with add_eos_token=False, or make the text "
            "with apply_chat_template(..., add_generation_prompt=True)."
        )


def check_tokens(rows: Iterable[Sequence[int]], config: PreTrainedConfig, name: str) -> None:
    """Raise a `ValueError` if a row of token ids has a token outside the model's vocabulary; `name` names the rows."""
    vocabulary = config.get_text_config().vocab_size
    if (largest := max(map(max, rows))) >= vocabulary:
        raise ValueError(
            f"{name} has the token {largest}, but the model has {vocabulary} embeddings. Use the model's tokenizer. If "
            "you have added tokens to it, call model.resize_token_embeddings(len(tokenizer))."
        )


def checked_rollouts(rollout_func: Callable[..., Any], prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
    """Call a user's `rollout_func(prompts, trainer)`, check its result and return it.

    Raises:
        ValueError: if rows, tokens or needed log-probs are missing, or if log-probs or `env_mask` do not have the
            lengths of the completions.
    """
    output = rollout_func(prompts, trainer)
    if missing := [name for name in ("prompt_ids", "completion_ids", "logprobs") if name not in output]:
        raise ValueError(
            f"rollout_func returned {sorted(output)} without {missing}: return all three. 'logprobs' may be None, if "
            "the loss does not need the sampler's log-probs."
        )
    for name in ("prompt_ids", "completion_ids"):
        if len(output[name]) != len(prompts) or not all(map(len, output[name])):
            raise ValueError(
                f"rollout_func returned {len(output[name])} {name} for {len(prompts)} prompts, or an empty one: return "
                "at least one token for each prompt, such as the end-of-sequence token."
            )
        check_tokens(output[name], trainer.model.config, f"rollout_func's {name}")
    loss = trainer.args.loss_type
    correct = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    cause = f"loss_type={loss!r}" if loss in OFF_POLICY_LOSSES else correct and "vllm_importance_sampling_correction"
    if cause and output["logprobs"] is None:
        raise ValueError(
            f"{cause} needs the sampler's log-probs, but rollout_func returned none: return the log-probs of all "
            "completion tokens as 'logprobs', or use another loss and correction."
        )
    for name in ("logprobs", "env_mask"):
        rows = output.get(name)
        if rows is not None and list(map(len, rows)) != list(map(len, output["completion_ids"])):
            raise ValueError(
                f"rollout_func returned {name} of other lengths than completion_ids: return one number for each token "
                "of each completion (logprobs: NaN = unknown; env_mask: 1 = written by the policy, else 0)."
            )
    return output


def check_batch(dataset: object, args: DASHConfig) -> None:
    """Raise a `ValueError` if the dataset has too few prompts for a window: TRL would train on nothing."""
    needed = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts, but one generation batch takes {needed} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}), so no "
            "batch could be filled. Lower per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation, or add data."
        )


def check_first_step(batches: int, args: DASHConfig) -> None:
    """Raise a `ValueError` if a stream gives fewer micro-batches (`batches`) than an optimizer step takes.

    Otherwise, Transformers would read the stream again and again without ever making a step.
    """
    if batches < args.gradient_accumulation_steps:
        raise ValueError(
            f"train_dataset is a stream that ends after {batches} micro-batches, but an optimizer step takes "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Transformers makes no step from fewer, "
            f"so there would never be one. {args.generation_batch_size // args.num_generations} prompts make "
            f"{args.steps_per_generation * args.num_iterations} micro-batches. Use more prompts (or "
            "`dataset.repeat(None)`), or lower gradient_accumulation_steps."
        )
