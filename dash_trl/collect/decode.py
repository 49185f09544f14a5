"""Turns token ids into rows of tensors, as TRL's `_generate_and_score_completions` does::

    token ids ──► seams.decoded: messages ──► Sampled ──► to_rollouts: padded, truncated rows masked ──► RolloutBatch

Letters: B rows of this rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from dash_trl.rollout import RolloutBatch, Rows
from dash_trl.update import NO_LOG_PROB


@dataclass(frozen=True)
class Prompts:
    """The prompts of a generation batch, with one row per completion that this rank samples.

    Attributes:
        number: number of the batch, from 0, in the order in which batches are announced.
        examples: B rows of the dataset.
        tokenized: the tuple of TRL's `_tokenize_prompts`, which begins with the B lists of token ids. Empty if prompts
            are tokenized later, by a `rollout_func` or after environments have added text.
    """

    number: int
    examples: Rows
    tokenized: tuple = ()

    @property
    def prompts(self) -> list[Any]:
        """B texts or conversations."""
        return [example["prompt"] for example in self.examples]

    @property
    def ids(self) -> list[list[int]]:
        """B lists of token ids; empty lists if the prompts are tokenized later."""
        return self.tokenized[0] if self.tokenized else [[]] * len(self.examples)


@dataclass(frozen=True)
class Sampled:
    """This rank's rows of a generation batch, as the sampler returns them.

    Attributes:
        prompt_ids: B lists of token ids.
        completion_ids: B lists of token ids.
        completions: B texts or lists of messages; see `seams.decoded`.
        policy_version: [B, 2] int64; see `RolloutBatch`.
        prompts: B texts or conversations, including the text that environments added.
        log_probs: B lists of the sampler's log-probs, one per completion token; `None` or NaN = unknown. `None` instead
            of the lists: all are unknown.
        own_tokens: B lists with a number per completion token, 1 = the policy wrote it, 0 = a tool or an environment
            wrote it. `None`: the policy wrote all tokens.
        columns: extra fields of a `rollout_func`: name → a list with a value per row, or one value for all rows.
        calls: B pairs: the numbers of tool calls and of failed tool calls. Empty: there are no tools.
        failures: B texts that say how a tool or the environment of an unscored row failed; `None`: neither failed.
            Empty: there are neither tools nor environments.
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
    calls: list[tuple[int, int]] = field(default_factory=list)
    failures: list[str | None] = field(default_factory=list)

    @property
    def failed(self) -> Tensor | None:
        """[B] bool: True = a tool or the environment of the row failed. `None`: there are no tools or environments."""
        return torch.tensor([one is not None for one in self.failures]) if self.failures else None

    def lengths(self) -> list[int]:
        """Return the number of tokens that the policy wrote in each row."""
        own = self.own_tokens
        return [len(ids) for ids in self.completion_ids] if own is None else list(map(sum, own))

    def examples(self, examples: Sequence[Mapping[str, Any]]) -> Rows:
        """Add the extra fields of a `rollout_func` to the B rows of the dataset.

        As in TRL, if a column has too few values, the last rows do not get it.
        """
        rows = [dict(example) for example in examples]
        for name, values in self.columns.items():
            for row, value in zip(rows, values if isinstance(values, list) else [values] * len(rows), strict=False):
                row[name] = value
        return rows


def is_truncated(completion_ids: Sequence[list[int]], end_ids: Collection[int]) -> Tensor:
    """Return which completions do not end with an end-of-sequence or padding token, [B] bool, True = truncated.

    Args:
        completion_ids: B lists of token ids.
        end_ids: ids of the end-of-sequence and padding tokens.
    """
    return torch.tensor([int(ids[-1]) not in end_ids for ids in completion_ids], dtype=torch.bool)


def to_rollouts(
    sampled: Sampled,
    examples: Rows,
    *,
    group: Tensor,
    pad_token_id: int,
    masked: Tensor | None = None,
    pad_to_multiple_of: int | None = None,
) -> RolloutBatch:
    """Convert sampled rows to padded tensors on the CPU.

    Args:
        examples: the return value of `Sampled.examples`.
        group: [B] int64; see `RolloutBatch`.
        masked: [B] bool, True = no token of this completion counts in the loss (TRL's `mask_truncated_completions`).
        pad_to_multiple_of: pad prompts and completions to a multiple of this number of tokens.
    """

    def table(rows: Sequence[Sequence[float]], side: str, padding: float, dtype: torch.dtype = torch.long) -> Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype, device="cpu") for row in rows]  # a rollout_func may return tensors
        return pad(tensors, padding_value=padding, padding_side=side, pad_to_multiple_of=pad_to_multiple_of)

    def ones(rows: Sequence[Sequence[int]], side: str) -> Tensor:
        return table([[1] * len(row) for row in rows], side, 0)

    counts = 1 if masked is None else (~masked).long().unsqueeze(1)
    own = sampled.own_tokens
    log_probs = None
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
