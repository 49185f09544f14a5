"""Rollouts between birth and loss: one row per completion, in CPU memory, and at each stage what is known of it.

    RolloutBatch ──► ScoredRollouts ──► CreditedRollouts ──► Survivors ──► micro-batches
      sampled          + rewards          + advantages        without the dropped rows; + log-probs where needed

Letters: B rows of this rank, P prompt tokens (left-padded), T completion tokens (right-padded), F reward functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# A micro-batch with no real row still has to run the model (every rank runs every pass). The shortest row that gives
# the LM head one position to predict from has two tokens.
DUMMY_PROMPT_TOKENS = 2

# TRL takes a figure with one column for one per sequence and averages it over rows, dummies included: completions have
# at least this many columns.
COMPLETION_COLUMNS = 2

# What is known of a row when it has been sampled, under TRL's names.
SAMPLED_FIELDS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
)

# What model passes find of rows where the loss asks for it.
LOG_PROB_FIELDS = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")


@dataclass(kw_only=True)
class RolloutBatch:
    """The sampled rows of one generation batch on one rank, on the CPU.

    A field's first dimension is always B. Names are those of TRL's `_generate_and_score_completions`. What a run does
    not have (`tool_mask`, log-probs of the sampler) is `None` in all of its batches.

    Attributes:
        prompt_ids, prompt_mask: [B, P] int64, left-padded; mask 1 = token, 0 = padding.
        completion_ids, completion_mask: [B, T] int64, right-padded; mask 1 = token, 0 = padding.
        group: [B] int64, which prompt of the (global) generation batch a row answers.
        policy_version: [B, 2] int64, the optimizer steps of the oldest and of the newest weights that may have sampled
            the row: those of its request's dispatch and end, which differ if new weights came while it was in flight.
        tool_mask: [B, T], 1 = written by the policy; only with tools or environments, and where a `rollout_func`
            returned `env_mask`.
        sampling_per_token_logps: [B, T], the sampler's log-probs, where the sampler reports them.
        old_per_token_logps, ref_per_token_logps: [B, T], where the loss asks for them: of `Survivors`, or of all rows
            where these are not known yet when the first optimizer step takes some.
        importance_sampling_ratio: as these, [B, T] (token modes) or [B, 1] (sequence modes), where the sampler is
            corrected.
        examples: the B dataset rows. completions: the B completions as the reward functions see them.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    group: Tensor
    policy_version: Tensor
    tool_mask: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def rows(self, rows: Tensor) -> Self:
        """The given rows (indices), in that order."""
        chosen = rows.tolist()
        values: dict[str, Any] = {
            name: value[rows] if isinstance(value, Tensor) else [value[row] for row in chosen] if value else value
            for name, value in _fields(self).items()
        }
        return type(self)(**values)

    def with_log_probs(self, **known: Tensor) -> Self:
        """The same rows with what model passes found of them: `old_per_token_logps`, …"""
        return type(self)(**{**_fields(self), **known})

    def with_rewards(self, rewards: Tensor) -> ScoredRollouts:
        """The same rows at the next stage; see `ScoredRollouts.rewards`."""
        return ScoredRollouts(**_fields(self), rewards=rewards)

    def tensors(self) -> dict[str, Any]:
        """The tensor fields that are set, by name."""
        return {name: value for name, value in _fields(self).items() if isinstance(value, Tensor)}

    @property
    def loss_mask(self) -> Tensor:
        """[B, T], 1 = a token that the loss counts."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    def lengths(self) -> Tensor:
        """[B, 4] int64: prompt tokens, completion tokens, loss tokens of each row, and a checksum of its prompt.

        Rows whose checksums differ have different prompts.
        """
        counts = [mask.sum(dim=1) for mask in (self.prompt_mask, self.completion_mask, self.loss_mask)]
        prompts = (self.prompt_ids * self.prompt_mask).numpy()
        sums = torch.tensor([zlib.crc32(row.tobytes()) for row in prompts], dtype=torch.long)
        return torch.stack([*counts, sums], dim=1)

    def validate(self, *, like: dict[str, Tensor], culprit: str) -> None:
        """Raise if a callback left a field with another dtype, device or shape than the rows allow.

        Args:
            like: the fields before the callback ran.
            culprit: the callback and event to name.
        Raises:
            ValueError: names the callback, the field, and what is wrong with it.
        """
        for name in {**like, **self.tensors()}:
            now, reason = getattr(self, name), None
            if not isinstance(now, Tensor):
                reason = f"was removed (it is now {type(now).__name__})"
            elif now.device.type != "cpu":
                reason = f"is on {now.device}; rollouts live on the CPU"
            elif name in like and now.dtype != like[name].dtype:
                reason = f"changed its dtype from {like[name].dtype} to {now.dtype}"
            elif name == "advantages" and now.shape not in (self.completion_ids.shape[:1], self.completion_ids.shape):
                reason = f"has shape {tuple(now.shape)}; it must be (rows,) or (rows, completion tokens)"
            elif name == "advantages" and not now.isfinite().all():
                reason = "is not finite; give a row without a usable reward the advantage 0"
            elif name != "advantages" and name in like and now.shape != like[name].shape:
                reason = f"changed its shape from {tuple(like[name].shape)} to {tuple(now.shape)}"
            elif name not in like:
                reason = self._misplaced(name, now)
            if not reason and name.endswith("_mask") and (bad := now[(now != 0) & (now != 1)]).numel():
                reason = f"holds {bad[0].item()}; a mask is 1 where a token counts, else 0"
            if reason:
                raise ValueError(
                    f"{culprit} left `{name}` unusable: it {reason}. The batch has {len(self)} rows and "
                    f"{self.completion_ids.shape[1]} completion tokens; change values in place."
                )

    def _misplaced(self, name: str, value: Tensor) -> str | None:
        """What is wrong with a field that was None before the callback ran."""
        if name not in SAMPLED_FIELDS or hasattr(self, "rewards"):
            return "was None; what is not sampled can be set in on_rollouts_sampled only: tool_mask, or log-probs"
        if value.shape != self.completion_ids.shape or value.is_floating_point() == (name == "tool_mask"):
            return f"has dtype {value.dtype} and shape {tuple(value.shape)}; a mask is like completion_mask"
        return None


@dataclass(kw_only=True)
class ScoredRollouts(RolloutBatch):
    """Rows whose reward functions have spoken.

    Attributes:
        rewards: [B, F] float32; NaN = this function does not apply to this row. A row of NaN only is unscored: no
            function applied, or one failed (exception, timeout, NaN, ±inf).
    """

    rewards: Tensor

    def with_advantages(self, advantages: Tensor) -> CreditedRollouts:
        """The same rows at the next stage; see `CreditedRollouts.advantages`."""
        return CreditedRollouts(**_fields(self), advantages=advantages)

    @property
    def scored(self) -> Tensor:
        """[B] bool: at least one reward function applied, and none failed (an infinite reward is a failed one)."""
        return ~self.rewards.isnan().all(dim=1) & ~self.rewards.isinf().any(dim=1)


@dataclass(kw_only=True)
class CreditedRollouts(ScoredRollouts):
    """Rows with their credit.

    Attributes:
        advantages: [B], or [B, T] for per-token credit; finite.
    """

    advantages: Tensor

    def mean_advantages(self) -> Tensor:
        """[B]: the advantage of a row, averaged over its loss tokens where it has one per token."""
        if self.advantages.dim() == 1:
            return self.advantages
        return (self.advantages * self.loss_mask).sum(dim=1) / self.loss_mask.sum(dim=1).clamp(min=1)

    def survivors(self, rows: Tensor) -> Survivors:
        """The given rows (indices), in that order: the tensors that optimizer steps need, and no texts."""
        return Survivors(**{name: value[rows] for name, value in self.tensors().items()})


@dataclass(kw_only=True)
class Survivors(CreditedRollouts):
    """The rows that the filter kept: what the optimizer steps of a generation window are made of."""

    @classmethod
    def of_tokens(
        cls, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], *, pad_token_id: int
    ) -> Survivors:
        """Rows of which nothing is known yet but their tokens: for a pass over them."""
        prompts, prompt_mask = _padded(prompt_ids, "left", pad_token_id)
        completions, completion_mask = _padded(completion_ids, "right", pad_token_id)
        none = torch.zeros(len(prompts))
        return cls(
            prompt_ids=prompts,
            prompt_mask=prompt_mask,
            completion_ids=completions,
            completion_mask=completion_mask,
            group=none.long(),
            policy_version=torch.zeros(len(prompts), 2, dtype=torch.long),
            rewards=none.unsqueeze(1),
            advantages=none,
        )

    def micro_batch(
        self, rows: list[int], *, size: int, pad_token_id: int, trim_prompts: bool = True
    ) -> dict[str, Tensor]:
        """The inputs of one model pass, trimmed to the longest prompt and completion among `rows`.

        Args:
            rows: indices into this batch; may be empty.
            size: rows of the result, the same on all ranks (TRL gathers row-shaped metrics); at least `len(rows)`.
                The difference is filled with masked dummy rows, which have no token and no weight; if `rows` is empty
                the first dummy has two prompt tokens, so that there is something to run.
            pad_token_id: fills padding.
            trim_prompts: `False` keeps the prompts' width, as it was when the completions were sampled.
        Returns:
            TRL's model inputs: the set fields among `prompt_ids` … `importance_sampling_ratio`, [size, ·].
        """
        width, chosen = self.completion_ids.shape[1], torch.tensor(rows, dtype=torch.long)
        prompt = int(self.prompt_mask[chosen].sum(dim=1).max()) if rows else DUMMY_PROMPT_TOKENS
        if not trim_prompts:
            prompt = self.prompt_mask.shape[1]
        longest = int(self.completion_mask[chosen].sum(dim=1).max()) if rows else 0
        completion = max(longest, COMPLETION_COLUMNS)
        inputs = {}
        for name, value in self.tensors().items():
            if name in ("group", "policy_version", "rewards"):
                continue
            filler = pad_token_id if name.endswith("_ids") else 0
            if name in ("prompt_ids", "prompt_mask"):
                value = value[:, max(value.shape[1] - prompt, 0) :][chosen] if rows else value.new_zeros(0, prompt)
            elif value.dim() == 2 and value.shape[1] == width:
                value = value[:, :completion][chosen]
                value = pad(value, (0, max(completion - width, 0)), value=filler)
            else:
                value = value[chosen]
            dummies = value.new_full((size - len(rows), *value.shape[1:]), filler)
            inputs[name] = torch.cat([value, dummies])
        if not rows:
            inputs["prompt_mask"][0] = 1
        return inputs


Rollouts = TypeVar("Rollouts", bound=RolloutBatch)


def widened(batches: Sequence[Rollouts], pad_token_id: int) -> list[Rollouts]:
    """The same rows with as many columns in each batch, so that they can be `joined`."""
    prompt = max(one.prompt_ids.shape[1] for one in batches)
    completion = max(one.completion_ids.shape[1] for one in batches)

    def wide(rollouts: Rollouts) -> Rollouts:
        values = _fields(rollouts)
        for name, value in rollouts.tensors().items():
            fill = pad_token_id if name.endswith("_ids") else 0
            if name in ("prompt_ids", "prompt_mask"):
                values[name] = pad(value, (prompt - value.shape[1], 0), value=fill)
            elif value.shape[1:] == rollouts.completion_ids.shape[1:] and name not in ("policy_version", "rewards"):
                values[name] = pad(value, (0, completion - value.shape[1]), value=fill)
        return type(rollouts)(**values)

    return [wide(one) for one in batches]


def _padded(rows: Sequence[list[int]], side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """[B, longest] int64 each: the tokens, and 1 where one is."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tokens]
    ids = pad_sequence(tokens, batch_first=True, padding_side=side, padding_value=pad_token_id)
    return ids, pad_sequence(masks, batch_first=True, padding_side=side)


Table = TypeVar("Table")  # a dataclass


def joined(parts: Sequence[Table]) -> Table:
    """The rows of all parts, at least one, as one dataclass; a single part is not copied, since it may be large.

    Tensors and lists are concatenated, dataclasses joined; other fields are the first part's. A tensor with fewer
    columns than another part's is padded, with NaN or, if it has integers, with −1. Advantages of a part with one per
    row, beside another part's with one per token, are repeated in every column.
    """
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {}
    for name, value in _fields(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if name == "advantages":
            values = _of_tokens(values)
        if isinstance(value, Tensor):
            found[name] = _stacked(values)
        elif isinstance(value, list):
            found[name] = sum(values, [])
        elif is_dataclass(value):
            found[name] = joined(values)
    return replace(parts[0], **found)  # type: ignore[type-var]


def _of_tokens(advantages: list[Tensor]) -> list[Tensor]:
    most = max((one.shape[1] for one in advantages if one.dim() == 2), default=0)
    return [one.unsqueeze(1).expand(-1, most) if most and one.dim() == 1 else one for one in advantages]


def _stacked(tables: Sequence[Tensor]) -> Tensor:
    if all(table.dim() == 2 for table in tables):
        most, padding = max(table.shape[1] for table in tables), torch.nan if tables[0].is_floating_point() else -1
        tables = [pad(table, (0, most - table.shape[1]), value=padding) for table in tables]
    return torch.cat(list(tables))


def _fields(table: Any) -> dict[str, Any]:
    return {one.name: getattr(table, one.name) for one in fields(table)}
