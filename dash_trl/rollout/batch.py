"""Rollouts between sampling and loss, in CPU memory. A row is one completion, and each stage fills more fields::

    sampled ──► + rewards ──► + advantages ──► + dropped ──► survivors: + log-probs where needed ──► micro-batches

Letters: B rows of this rank, P prompt tokens (left-padded), T completion tokens (right-padded), F reward functions.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

# Columns of `RolloutBatch.lengths`
PROMPT = 0
COMPLETION = 1
LOSS = 2
CHECKSUM = -1

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

# The tensor fields that are no inputs of a model pass.
NO_INPUTS = ("group", "policy_version", "rewards", "dropped", "silent")


@dataclass(kw_only=True)
class RolloutBatch:
    """Rows of one generation batch on one rank, on the CPU.

    Fields have the names of TRL's `_generate_and_score_completions`; a field that is unused or not known yet is `None`.

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
        rewards: [B, F] float32; NaN = this function does not apply to this row. A row whose values are all NaN is
            unscored: no function applied to it, or one failed (exception, timeout, NaN, ±inf).
        advantages: [B], or [B, T] for per-token credit; finite.
        dropped: [B] int64, the result of `filter_rows`.
        silent: [B] bool, True = `compute_advantages` gave 0 to all rows of the group.
        old_per_token_logps: [B, T], the old log-probs, of survivors only; of all rows if several optimizer steps use a
            window whose rewards are awaited by group.
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
    rewards: Tensor = None  # type: ignore[assignment]  # known after sampling, as the next three
    advantages: Tensor = None  # type: ignore[assignment]
    dropped: Tensor = None  # type: ignore[assignment]
    silent: Tensor = None  # type: ignore[assignment]
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def rows(self, rows: Tensor) -> Self:
        """Return a batch with the rows at these indices, in their order."""
        chosen = {name: value[rows] for name, value in self.tensors().items()}
        lists = {"examples": self.examples, "completions": self.completions}
        chosen |= {name: [values[row] for row in rows.tolist()] for name, values in lists.items() if values}
        return replace(self, **chosen)

    def tensors(self) -> dict[str, Any]:
        """Return the tensor fields that are set, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def loss_mask(self) -> Tensor:
        """[B, T]: 1 = a token that the loss counts."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def scored(self) -> Tensor:
        """[B] bool: True = at least one reward function applied and none failed; an infinite reward is a failure."""
        return ~self.rewards.isnan().all(dim=1) & ~self.rewards.isinf().any(dim=1)

    def mean_advantages(self) -> Tensor:
        """Return one advantage per row, [B]. Per-token advantages are averaged over the row's loss tokens."""
        if self.advantages.dim() == 1:
            return self.advantages
        return (self.advantages * self.loss_mask).sum(dim=1) / self.loss_mask.sum(dim=1).clamp(min=1)

    def lengths(self) -> Tensor:
        """Count the tokens of each row, and compute a checksum of its prompt. All ranks plan passes from this table.

        Returns:
            [B, 4] int64, the columns `PROMPT`, `COMPLETION`, `LOSS` (tokens that the loss counts) and `CHECKSUM`.
        """
        counts = [mask.sum(dim=1) for mask in (self.prompt_mask, self.completion_mask, self.loss_mask)]
        prompts = (self.prompt_ids * self.prompt_mask).numpy()
        sums = torch.tensor([zlib.crc32(row.tobytes()) for row in prompts], dtype=torch.long)
        return torch.stack([*counts, sums], dim=1)

    def validate(self, *, like: dict[str, Tensor], caller: str) -> None:
        """Check the device, dtype, shape and values of each field after a callback.

        Args:
            like: the tensor fields before the callback ran, by name.
            caller: the callback and event, for the error.
        Raises:
            ValueError: if a field is unusable.
        """
        for name in {**like, **self.tensors()}:
            now = getattr(self, name)
            reason = None
            before = [like[name].shape] if name in like else []
            if name == "advantages":
                before = [self.completion_ids.shape[:1], self.completion_ids.shape]
            if not isinstance(now, Tensor) or now.device.type != "cpu" or now.requires_grad:
                reason = f"is {now!r:.80}; rollouts are tensors on the CPU without gradients"
            elif name in like and (now.dtype != like[name].dtype or now.shape not in before):
                reason = (
                    f"has dtype {now.dtype} and shape {tuple(now.shape)}; it needs {like[name].dtype} and "
                    f"{' or '.join(map(str, map(tuple, before)))}"
                )
            elif name == "advantages" and not now.isfinite().all():
                reason = "is not finite; give a row without a usable reward the advantage 0"
            elif name not in like and (name not in SAMPLED_FIELDS or self.rewards is not None):
                reason = "was None; only on_rollouts_sampled may set tool_mask or the sampler's log-probs"
            elif name not in like and (
                now.shape != self.completion_ids.shape or now.is_floating_point() == (name == "tool_mask")
            ):
                reason = (
                    f"has dtype {now.dtype} and shape {tuple(now.shape)}; it needs the shape of completion_mask, "
                    "integers or bools for a mask, and floats for log-probs"
                )
            elif name.endswith(("_ids", "_mask")):
                right = now
                if name == "prompt_mask" or self.rewards is not None:
                    right = like[name]
                elif name == "completion_mask":
                    right = like[name] * (now.cummin(dim=1).values > 0)  # 0 for padding, and after a gap
                elif name == "tool_mask":
                    right = now > 0
                if (now != right).any():
                    reason = (
                        "is no mask of 0 and 1, counts padding, leaves tokens out before others, or has changed after "
                        "on_rollouts_sampled, when tokens are counted; to take some out of the loss, set tool_mask to 0"
                    )
            if reason:
                raise ValueError(
                    f"{caller} left `{name}` unusable: it {reason}. The batch has {len(self)} rows and "
                    f"{self.completion_ids.shape[1]} completion tokens; change values in place."
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
            TRL's model inputs, [size, …]: the tensor fields that are set, except `NO_INPUTS`.
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
            if name not in NO_INPUTS:
                widths = {"prompt": prompt, "completion": completion, "more_rows": size - len(rows)}
                inputs[name] = _padded(name, value[chosen], self, pad_token_id, **widths)
        if not rows:
            inputs["prompt_mask"][0] = 1
        return inputs


def concatenated(batches: Sequence[RolloutBatch], pad_token_id: int) -> RolloutBatch:
    """Concatenate batches, padded to common widths of prompts and of completions.

    If only some batches have a `tool_mask`, the others get a mask that leaves all tokens in the loss. If only some have
    advantages per token, the advantages per row of the others are repeated in every column.
    """
    widths = {
        "prompt": max(one.prompt_ids.shape[1] for one in batches),
        "completion": max(one.completion_ids.shape[1] for one in batches),
    }
    has_mask = any(one.tool_mask is not None for one in batches)
    per_token = any(one.advantages.dim() == 2 for one in batches)
    wide = []
    for one in batches:
        values = one.tensors()
        if has_mask:
            values.setdefault("tool_mask", torch.ones_like(one.completion_mask))
        if per_token and one.advantages.dim() == 1:
            values["advantages"] = one.advantages.unsqueeze(1).expand_as(one.completion_ids)
        padded = {name: _padded(name, value, one, pad_token_id, **widths) for name, value in values.items()}
        wide.append(replace(one, **padded))  # type: ignore[arg-type]
    return joined(wide)


def _padded(
    name: str,
    value: Tensor,
    batch: RolloutBatch,
    pad_token_id: int,
    *,
    prompt: int,
    completion: int,
    more_rows: int = 0,
) -> Tensor:
    """Pad or trim rows of a field of `batch` to numbers of prompt and completion columns, and add rows of padding.

    The padding of ratios is 1, because TRL's VESPO multiplies the ratios of all columns, without a mask.
    """
    filler = pad_token_id if name.endswith("_ids") else int(name == "importance_sampling_ratio")
    sizes: tuple[int, ...] = (0, more_rows)
    if name in ("prompt_ids", "prompt_mask"):
        sizes = (prompt - value.shape[1], 0, *sizes)
    elif value.shape[1:] == batch.completion_ids.shape[1:] and name not in NO_INPUTS:
        sizes = (0, completion - value.shape[1], *sizes)
    elif value.dim() == 2:
        sizes = (0, 0, *sizes)
    return pad(value, sizes, value=filler)


Table = TypeVar("Table")  # a dataclass


def joined(parts: Sequence[Table]) -> Table:
    """Concatenate the tensors and lists of instances of one dataclass; other fields come from the first instance."""
    found: dict[str, Any] = {}
    for name, value in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if isinstance(value, Tensor):
            found[name] = torch.cat(values)
        elif isinstance(value, list):
            found[name] = [row for rows in values for row in rows]
    return replace(parts[0], **found)  # type: ignore[type-var]
