"""Checks datasets, the prompts in them, and the results of a `rollout_func`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from trl.trainer.utils import remove_none_values

from dash_trl.config import DASHConfig
from dash_trl.update import OFF_POLICY_LOSSES

# Arguments that TRL passes to each reward function beside the columns of the dataset.
TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments")


def check_dataset(
    dataset: Any, name: str, own_rollouts: bool, *, environments: bool = False, conversations: bool = False
) -> None:
    """Checks the columns and the prompts of a dataset. Prompts of a stream are checked before they are sampled from.

    Args:
        dataset: a dataset, or None.
        name: name of the dataset, for errors.
        own_rollouts: True = there is a `rollout_func`, which may take prompts of any form.
        environments: True = there are environments, so the dataset needs no prompts: an environment may give them.
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
    if taken := sorted({*TAKEN}.intersection(columns)):
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


def plain_prompt(prompt: Any, place: str) -> Any:
    """Checks that a prompt is a text or a conversation, and not empty. Joins the text parts of each message.

    Chat templates of text models know texts only. Many of them write a list of parts as nothing, or as Python code.

    Args:
        prompt: the prompt.
        place: the dataset and row of the prompt, for the error.
    Returns:
        The prompt, in which the content of each message is a text.
    Raises:
        ValueError: if the prompt is neither a text nor a conversation of texts, or is empty.
    """
    plain: Any = list(map(_plain_message, prompt)) if isinstance(prompt, list) else prompt
    if not plain or not isinstance(plain, str | list) or isinstance(plain, list) and None in plain:
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


def _plain_message(message: Any) -> dict[str, Any] | None:
    """Returns a message whose content is a text; None if it has other content. A tool call needs no content.

    `datasets` gives each message the keys of all messages, with None where a message has no such key. On these, the
    templates of Llama 3.1 and gpt-oss fail, and others write "null" among the arguments of a tool call. So keys without
    a value are left out (https://github.com/huggingface/trl/pull/5376).
    """
    if not isinstance(message, Mapping) or message.get("role") is None:
        return None
    content = "" if message.get("content") is None and message.get("tool_calls") else message.get("content")
    if isinstance(content, list):
        texts: list[Any] = [
            part.get("type") == "text" and part.get("text") for part in content if isinstance(part, Mapping)
        ]
        right = len(texts) == len(content) > 0 and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if right else None
    return remove_none_values({**message, "content": content}) if isinstance(content, str) else None


def check_prompt_ids(
    prompt_ids: list[list[int]],
    tokenizer: Any,
    ends: Collection[int],
    context: int | None = None,
) -> None:
    """Checks that the model has room for a completion of each prompt, and that prompts begin once and go on.

    Args:
        prompt_ids: token ids of the prompts.
        tokenizer: the tokenizer.
        ends: ids of the tokens that end a completion.
        context: largest number of tokens of prompt and completion together; None = unknown.
    Raises:
        ValueError: if a prompt is empty, fills the context, ends with an end token, or begins with `bos_token` twice,
            because a text from a chat template already has the token that the tokenizer adds.
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
    if bos is not None and any(ids[:2] == [bos, bos] for ids in prompt_ids):
        raise ValueError(
            f"A prompt begins with the token {bos} (bos_token) twice: its text has one, and the tokenizer adds one. "
            "Pass conversations instead of texts that a chat template has made, or remove bos_token from the texts."
        )
    # For some models, the token with which a text begins ends it, too.
    if any(len(ids) > 1 and ids[-1] in ends for ids in prompt_ids):
        raise ValueError(
            f"A prompt ends with an end token ({ends}; eos_token), so the model would continue after an end. Remove it "
            "from the text or from the chat template, or load the tokenizer with add_eos_token=False."
        )


def check_tokens(rows: Iterable[Sequence[int]], config: Any, name: str) -> None:
    """Raises a `ValueError` if a row has a token that is not in the model's vocabulary.

    Args:
        rows: lists of token ids.
        config: the model's configuration.
        name: what has the token, for the error.
    """
    vocabulary = config.get_text_config().vocab_size
    if (largest := max(max(ids, default=0) for ids in rows)) >= vocabulary:
        raise ValueError(
            f"{name} has the token {largest}, but the model has {vocabulary} embeddings. Use the model's tokenizer. If "
            "you have added tokens to it, call model.resize_token_embeddings(len(tokenizer))."
        )


def checked_rollouts(rollout_func: Callable[..., Any], prompts: list, trainer: Any) -> dict[str, Any]:
    """Calls a user's `rollout_func` and checks the result.

    Args:
        rollout_func: as given to `DASHTrainer`.
        prompts: first argument of `rollout_func`.
        trainer: second argument of `rollout_func`.
    Returns:
        The result of `rollout_func`.
    Raises:
        ValueError: if the result lacks rows, tokens or log-probs that are needed, or if its log-probs or its `env_mask`
            do not have the lengths of the completions.
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


def check_batch(dataset: Any, args: DASHConfig) -> None:
    """Checks that the training dataset can fill a window. With too few prompts, TRL would train on nothing.

    Args:
        dataset: the training dataset.
        args: the configuration.
    Raises:
        ValueError: if the dataset has too few prompts.
    """
    if isinstance(dataset, Dataset):
        needed = args.generation_batch_size // args.num_generations
        if len(dataset) < needed:
            raise ValueError(
                f"train_dataset has {len(dataset)} prompts, but one generation batch takes {needed} "
                f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}), so no "
                "batch could be filled. Lower per_device_train_batch_size or steps_per_generation, or add data."
            )


def check_first_step(batches: int, args: DASHConfig) -> None:
    """Checks that a stream of prompts is long enough for one optimizer step.

    Otherwise, Transformers would read the stream again and again without ever making a step.

    Args:
        batches: number of micro-batches that a rank got for the first optimizer step.
        args: the configuration.
    Raises:
        ValueError: if there are fewer micro-batches than `gradient_accumulation_steps`.
    """
    if batches < args.gradient_accumulation_steps:
        raise ValueError(
            f"train_dataset is a stream that ends after {batches} micro-batches, but an optimizer step takes "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Transformers makes no step from fewer, "
            f"so there would never be one. {args.generation_batch_size // args.num_generations} prompts make "
            f"{args.steps_per_generation * args.num_iterations} micro-batches. Use more prompts (or "
            "`dataset.repeat(None)`), or lower gradient_accumulation_steps."
        )
