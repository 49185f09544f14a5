"""Rollouts between sampling and loss, in CPU memory. A row is one completion, and each stage has its own class::

    RolloutBatch ──► ScoredRollouts ──► CreditedRollouts ──► Survivors ──► micro-batches
      sampled          + rewards          + advantages        without the dropped rows; + log-probs where needed

Letters: B rows of this rank, P prompt tokens (left-padded), T completion tokens (right-padded), F reward functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# Number of prompt tokens of a dummy row. Every rank takes part in every pass, so a rank without rows runs a dummy row.
# Two prompt tokens give the LM head a position to predict from.
DUMMY_PROMPT_TOKENS = 2

# Smallest number of completion columns. If there were only one column, TRL would treat values per token as values per
# sequence in its metrics, and average them over all rows, dummy rows included.
COMPLETION_COLUMNS = 2

# The fields that the sampler fills, under TRL's names.
SAMPLED_FIELDS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
)

# The fields that model passes compute if the loss needs them.
LOG_PROB_FIELDS = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")


@dataclass(kw_only=True)
class RolloutBatch:
    """The sampled rows of one generation batch on one rank, on the CPU.

    Fields have the names of TRL's `_generate_and_score_completions`; an unused field is `None`.

    Attributes:
        prompt_ids: [B, P] int64, left-padded.
        prompt_mask: [B, P] int64, 1 = token, 0 = padding.
        completion_ids: [B, T] int64, right-padded.
        completion_mask: [B, T] int64, 1 = token, 0 = padding.
        group: [B] int64, index of a row's prompt among the prompts of the generation batch, over all ranks.
        policy_version: [B, 2] int64, the optimizer steps that made the oldest and the newest weights that may have
            sampled the row. They differ if the sampler got new weights meanwhile.
        tool_mask: [B, T], 1 = token written by the policy. Set by tools, environments, `env_mask` of a `rollout_func`,
            or a callback (`on_rollouts_sampled`).
        sampling_per_token_logps: [B, T], the sampler's log-probs.
        old_per_token_logps: [B, T], the old log-probs, for `Survivors` only; for all rows if several optimizer steps
            use a window whose rewards are awaited by group.
        ref_per_token_logps: [B, T], the reference model's log-probs for the same rows.
        importance_sampling_ratio: [B, T] (token modes) or [B, 1] (sequence modes), the weights of TRL's importance
            sampling correction for the same rows.
        examples: the dataset's example for each row.
        completions: the completion of each row as reward functions get it: a text, or a list of messages.
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
        """Return a batch with the rows at these indices, in their order."""
        chosen: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        lists = {"examples": self.examples, "completions": self.completions}
        chosen |= {name: [values[row] for row in rows.tolist()] for name, values in lists.items() if values}
        return replace(self, **chosen)

    def with_log_probs(self, **known: Tensor) -> Self:
        """Return the same rows with log-prob fields that model passes have computed."""
        return replace(self, **known)  # type: ignore[arg-type]  # they are fields of tensors

    def with_rewards(self, rewards: Tensor) -> ScoredRollouts:
        """Return the same rows with their rewards, [B, F]."""
        return ScoredRollouts(**_fields(self), rewards=rewards)

    def tensors(self) -> dict[str, Any]:
        """Return the tensor fields that are set, by name."""
        return {name: value for name, value in _fields(self).items() if isinstance(value, Tensor)}

    @property
    def loss_mask(self) -> Tensor:
        """[B, T]: 1 = a token that the loss counts."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    def lengths(self) -> Tensor:
        """Count the tokens of each row, and compute a checksum of its prompt. All ranks plan passes from this table.

        Returns:
            [B, 4] int64: the numbers of prompt tokens, completion tokens and loss tokens, and the checksum.
        """
        counts = [mask.sum(dim=1) for mask in (self.prompt_mask, self.completion_mask, self.loss_mask)]
        prompts = (self.prompt_ids * self.prompt_mask).numpy()
        sums = torch.tensor([zlib.crc32(row.tobytes()) for row in prompts], dtype=torch.long)
        return torch.stack([*counts, sums], dim=1)

    def validate(self, *, like: dict[str, Tensor], culprit: str) -> None:
        """Check the device, dtype, shape and values of each field after a callback.

        Args:
            like: the tensor fields before the callback ran, by name.
            culprit: the callback and event, for the error.
        Raises:
            ValueError: if a field is unusable.
        """
        for name in {**like, **self.tensors()}:
            now, reason = getattr(self, name), None
            before = [like[name].shape] if name in like else []
            if name == "advantages":
                before = [self.completion_ids.shape[:1], self.completion_ids.shape]
            if not isinstance(now, Tensor) or now.device.type != "cpu":
                reason = f"is {now!r:.80}; rollouts are tensors on the CPU"
            elif name in like and (now.dtype != like[name].dtype or now.shape not in before):
                reason = (
                    f"has dtype {now.dtype} and shape {tuple(now.shape)}; it needs {like[name].dtype} and "
                    f"{' or '.join(map(str, map(tuple, before)))}"
                )
            elif name == "advantages" and not now.isfinite().all():
                reason = "is not finite; give a row without a usable reward the advantage 0"
            elif name not in like and (name not in SAMPLED_FIELDS or hasattr(self, "rewards")):
                reason = "was None; only on_rollouts_sampled may set tool_mask or the sampler's log-probs"
            elif name not in like and (
                now.shape != self.completion_ids.shape or now.is_floating_point() == (name == "tool_mask")
            ):
                reason = (
                    f"has dtype {now.dtype} and shape {tuple(now.shape)}; it needs the shape of completion_mask, "
                    "integers or bools for a mask, and floats for log-probs"
                )
            if not reason and name.endswith("_mask") and (bad := now[(now != 0) & (now != 1)]).numel():
                reason = f"holds {bad[0].item()}; a mask is 1 where a token counts, else 0"
            if reason:
                raise ValueError(
                    f"{culprit} left `{name}` unusable: it {reason}. The batch has {len(self)} rows and "
                    f"{self.completion_ids.shape[1]} completion tokens; change values in place."
                )


@dataclass(kw_only=True)
class ScoredRollouts(RolloutBatch):
    """Rows with their rewards.

    Attributes:
        rewards: [B, F] float32; NaN = this function does not apply to this row. A row whose values are all NaN is
            unscored: no function applied to it, or one failed (exception, timeout, NaN, ±inf).
    """

    rewards: Tensor

    def with_advantages(self, advantages: Tensor) -> CreditedRollouts:
        """Return the same rows with their advantages, [B] or [B, T]."""
        return CreditedRollouts(**_fields(self), advantages=advantages)

    @property
    def scored(self) -> Tensor:
        """[B] bool: True = at least one reward function applied and none failed; an infinite reward is a failure."""
        return ~self.rewards.isnan().all(dim=1) & ~self.rewards.isinf().any(dim=1)


@dataclass(kw_only=True)
class CreditedRollouts(ScoredRollouts):
    """Rows with their advantages.

    Attributes:
        advantages: [B], or [B, T] for per-token credit; finite.
    """

    advantages: Tensor

    def mean_advantages(self) -> Tensor:
        """Return one advantage per row, [B]. Per-token advantages are averaged over the row's loss tokens."""
        if self.advantages.dim() == 1:
            return self.advantages
        return (self.advantages * self.loss_mask).sum(dim=1) / self.loss_mask.sum(dim=1).clamp(min=1)

    def survivors(self, rows: Tensor) -> Survivors:
        """Return `Survivors` of the rows at these indices, without texts, because optimizer steps need none."""
        return Survivors(**{name: value[rows] for name, value in self.tensors().items()})


@dataclass(kw_only=True)
class Survivors(CreditedRollouts):
    """The rows that the filter kept. Only these rows take part in optimizer steps."""

    @classmethod
    def of_tokens(
        cls, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], *, pad_token_id: int
    ) -> Survivors:
        """Build rows for a model pass from B lists of token ids. Rewards, advantages and policy versions are 0."""
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

    def micro_batch(self, rows: list[int], *, size: int, pad_token_id: int, trimmed: bool = True) -> dict[str, Tensor]:
        """Build the inputs of one model pass.

        Args:
            rows: indices into this batch; may be empty.
            size: number of rows of the result, at least `len(rows)`. It must be the same on all ranks, because TRL
                gathers metrics per row. Masked dummy rows fill up the result; without `rows`, the first has a prompt
                for the model.
            pad_token_id: token id of the padding.
            trimmed: True = trim to the longest prompt and completion among `rows`, False = keep the window's width.
        Returns:
            TRL's model inputs, [size, …]: the tensor fields that are set, except `group`, `policy_version` and
            `rewards`.
        """
        chosen = torch.tensor(rows, dtype=torch.long)
        prompt = self.prompt_ids.shape[1]
        completion = self.completion_ids.shape[1]
        if trimmed:
            prompt = int(self.prompt_mask[chosen].sum(dim=1).max()) if rows else DUMMY_PROMPT_TOKENS
            completion = int(self.completion_mask[chosen].sum(dim=1).max()) if rows else 0
        completion = max(completion, COMPLETION_COLUMNS)
        inputs = {}
        for name, value in self.tensors().items():
            if name in ("group", "policy_version", "rewards"):
                continue
            # TRL's VESPO multiplies the ratios of all columns, without a mask.
            filler = pad_token_id if name.endswith("_ids") else int(name == "importance_sampling_ratio")
            value = _of_width(name, value[chosen], like=self, prompt=prompt, completion=completion, filler=filler)
            dummies = value.new_full((size - len(rows), *value.shape[1:]), filler)
            inputs[name] = torch.cat([value, dummies])
        if not rows:
            inputs["prompt_mask"][0] = 1
        return inputs


Rollouts = TypeVar("Rollouts", bound=RolloutBatch)


def widened(batches: Sequence[Rollouts], pad_token_id: int) -> list[Rollouts]:
    """Pad batches to common widths of prompts and of completions, before `joined`.

    If only some batches have a `tool_mask`, the others get a mask that leaves all tokens in the loss.
    """
    if any(one.tool_mask is not None for one in batches):
        batches = [
            replace(one, tool_mask=torch.ones_like(one.completion_mask)) if one.tool_mask is None else one
            for one in batches
        ]
    prompt = max(one.prompt_ids.shape[1] for one in batches)
    completion = max(one.completion_ids.shape[1] for one in batches)

    def wide(rollouts: Rollouts) -> Rollouts:
        values: dict[str, Any] = {
            name: _of_width(
                name,
                value,
                like=rollouts,
                prompt=prompt,
                completion=completion,
                filler=pad_token_id if name.endswith("_ids") else 0,
            )
            for name, value in rollouts.tensors().items()
        }
        return replace(rollouts, **values)

    return [wide(one) for one in batches]


def _of_width(name: str, value: Tensor, *, like: RolloutBatch, prompt: int, completion: int, filler: int) -> Tensor:
    """Pad or trim a field of some rows of `like` to a number of prompt columns and of completion columns."""
    if name in ("prompt_ids", "prompt_mask"):
        return pad(value, (prompt - value.shape[1], 0), value=filler)
    if value.shape[1:] == like.completion_ids.shape[1:] and name not in ("policy_version", "rewards"):
        return pad(value, (0, completion - value.shape[1]), value=filler)
    return value


def _padded(rows: Sequence[list[int]], side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad lists of token ids to a tensor and its mask, [B, longest] int64 each; mask 1 = token."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tokens]
    ids = pad_sequence(tokens, batch_first=True, padding_side=side, padding_value=pad_token_id)
    return ids, pad_sequence(masks, batch_first=True, padding_side=side)


Table = TypeVar("Table")  # a dataclass


def joined(parts: Sequence[Table]) -> Table:
    """Concatenate the tensors and lists of instances of one dataclass; other fields come from the first instance.

    If some have advantages per token, the advantages per row of the others are repeated in every column.
    """
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {}
    for name, value in _fields(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if name == "advantages":
            values = _of_tokens(values)
        if isinstance(value, Tensor):
            found[name] = torch.cat(values)
        elif isinstance(value, list):
            found[name] = [row for rows in values for row in rows]
    return replace(parts[0], **found)  # type: ignore[type-var]


def _of_tokens(advantages: list[Tensor]) -> list[Tensor]:
    most = max((one.shape[1] for one in advantages if one.dim() == 2), default=0)
    return [one.unsqueeze(1).expand(-1, most) if most and one.dim() == 1 else one for one in advantages]


def _fields(table: Any) -> dict[str, Any]:
    return {one.name: getattr(table, one.name) for one in fields(table)}
