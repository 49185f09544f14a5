"""Token ids become completions, and the rows of a window, as TRL's `_generate_and_score_completions` makes them.

    token ids ──► decoded: texts, messages ──► Sampled ──► to_rollouts: padded, truncated rows masked ──► RolloutBatch

Letters: B rows of this rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer.utils import pad

from dash_trl.rollout import RolloutBatch
from dash_trl.update import NO_LOG_PROB


@dataclass(frozen=True)
class Prompts:
    """The prompts of a generation batch, a row for each completion that is to be sampled.

    Attributes:
        number: of the batch, from 0, in the order in which the batches were announced.
        examples: B rows of the dataset.
        tokenized: what TRL's `_tokenize_prompts` returned, its token ids first; empty where a `rollout_func` samples,
            and where an environment may add to each prompt.
    """

    number: int
    examples: list[dict[str, Any]]
    tokenized: tuple[Any, ...] = ()

    @property
    def prompts(self) -> list[Any]:
        """B texts or conversations."""
        return [example["prompt"] for example in self.examples]

    @property
    def ids(self) -> list[list[int]]:
        """B lists of token ids."""
        return self.tokenized[0]


@dataclass(frozen=True)
class TurnCounts:
    """What tools and environments did in a window's rows on this rank.

    Attributes:
        calls: [B, 2] int64: calls of tools, and how many of them failed; `None` if there is no tool.
        failed: [B] bool: a tool or the environment of the row hung or failed. The row is unscored.
        failure: of one of these rows, in words; empty if there is none.
    """

    calls: Tensor | None
    failed: Tensor
    failure: str


@dataclass(frozen=True)
class Sampled:
    """What a sampler gives of a window's rows on this rank.

    Attributes:
        prompt_ids, completion_ids: B lists of token ids.
        completions: B texts, or lists of messages, see `decoded`.
        prompts: B texts or conversations: those of the dataset, and what an environment has added.
        policy_version: [B, 2] int64, see `RolloutBatch`.
        log_probs: B lists with one for each completion token, `None` or NaN where it is not known. `None`: none is.
        own_tokens: B lists, 1 = a token that the policy wrote, 0 = one of its environment. `None`: it wrote all.
        columns: of a `rollout_func`: name → a list with a value for each row, or one value for all.
        turns: of tools and environments, if there are any.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[Any]
    policy_version: Tensor
    _: KW_ONLY
    prompts: list[Any]
    log_probs: list[list[float | None]] | None = None
    own_tokens: list[list[int]] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    turns: TurnCounts | None = None

    def examples(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the dataset with the columns of a `rollout_func`; a list that is too short leaves rows out."""
        rows = [dict(example) for example in examples]
        for name, values in self.columns.items():
            for row, value in zip(rows, values if isinstance(values, list) else [values] * len(rows), strict=False):
                row[name] = value
        return rows


def decoded(
    tokenizer: Any,
    prompts: Sequence[Any],
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    *,
    tools: Sequence[Any] = (),
) -> list[Any]:
    """The completions as reward functions get them, the same for some rows as for all.

    Args:
        tokenizer: where it can parse a response (reasoning, …), the message has those parts.
        prompts: B texts or conversations. tools: that the prompts name.
    Returns:
        B texts; of conversations B lists with one message each.
    """
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        rows = zip(completion_ids, prompt_ids, strict=True)
        return [[_parsed(tokenizer, ids, prompt, tools)] for ids, prompt in rows]
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


def _parsed(tokenizer: Any, ids: list[int], prompt: list[int], tools: Sequence[Any]) -> dict[str, Any]:
    """TRL's message; its text if JSON in it is too deep, as TRL has it for other mistakes of the policy."""
    try:
        return parse_response(tokenizer, ids, prefix=prompt, tools=list(tools))
    except RecursionError:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def is_truncated(completion_ids: Sequence[list[int]], end_ids: Collection[int]) -> Tensor:
    """[B] bool: the completion ends with another token than an end of sequence or padding (`end_ids`)."""
    return torch.tensor([int(ids[-1]) not in end_ids for ids in completion_ids], dtype=torch.bool)


def to_rollouts(
    sampled: Sampled,
    examples: list[dict[str, Any]],
    *,
    group: Tensor,
    pad_token_id: int,
    masked: Tensor | None = None,
    pad_to_multiple_of: int | None = None,
) -> RolloutBatch:
    """The rows as tensors, on the CPU.

    Args:
        examples: see `Sampled.examples`.
        group: [B] int64, see `RolloutBatch`.
        masked: [B] bool, True = no token of this completion counts (TRL's `mask_truncated_completions`).
        pad_to_multiple_of: tokens; the widths of prompts and completions are multiples of it.
    """

    def table(rows: Sequence[Sequence[Any]], side: str, padding: float, dtype: torch.dtype = torch.long) -> Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype, device="cpu") for row in rows]  # a rollout_func's may be tensors
        return pad(tensors, padding_value=padding, padding_side=side, pad_to_multiple_of=pad_to_multiple_of)

    def ones(rows: Sequence[Sequence[Any]], side: str) -> Tensor:
        return table([[1] * len(row) for row in rows], side, 0)

    counts = 1 if masked is None else (~masked).long().unsqueeze(1)
    own, log_probs = sampled.own_tokens, None
    if sampled.log_probs is not None:
        known = [[torch.nan if one is None else one for one in row] for row in sampled.log_probs]
        log_probs = table(known, "right", 0.0, torch.float32)
        log_probs = log_probs.masked_fill(log_probs <= NO_LOG_PROB, torch.nan)
    return RolloutBatch(
        prompt_ids=table(sampled.prompt_ids, "left", pad_token_id),
        prompt_mask=ones(sampled.prompt_ids, "left"),
        completion_ids=table(sampled.completion_ids, "right", pad_token_id),
        completion_mask=ones(sampled.completion_ids, "right") * counts,
        tool_mask=None if own is None else table(own, "right", 1) * counts,
        sampling_per_token_logps=log_probs,
        group=group,
        policy_version=sampled.policy_version,
        examples=examples,
        completions=sampled.completions,
    )
