"""Packing: survivors → token-balanced micro-batches, the same number on all ranks.

Every rank computes the plan of all ranks from one gathered table of lengths, so no further collective is needed to
agree on it.

Letters: R ranks, M rows per rank (dropped ones included), S micro-steps.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One model pass: which rows each rank runs. A rank without rows runs a masked dummy row."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Rows of the tensors on every rank (TRL gathers row-shaped metrics, so they must agree)."""
        return max(1, *(len(rows) for rows in self.rows))


def plan_segment(
    lengths: Tensor,
    micro_steps: int,
    last_must_run: bool = False,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    padding_free: bool = True,
) -> list[list[MicroBatch]]:
    """Spread the survivors of a segment over its micro-steps.

    A segment is a run of micro-steps of one optimizer step that share one generation batch. All ranks get the same
    number of micro-batches in each micro-step: a pass is a collective under ZeRO-3 and FSDP, and a backward one under
    DDP. The last micro-step is filled first, because gradients are synchronised there; the empty ones come first and
    cost nothing. If the budget is so small that there are more micro-batches than micro-steps, a micro-step holds
    several, so the budget holds; only a single row longer than it exceeds it.

    Args:
        lengths: [R, M, ≥ 2] int, the prompt and completion tokens of each row; a dropped row has completion length 0.
        micro_steps: S >= 1.
        last_must_run: an earlier segment of the same optimizer step had real rows, so the last micro-step has to run
            (with dummies) even if this segment keeps nothing: DDP synchronises and DeepSpeed steps there.
        max_rows: row budget of a micro-batch, used when `max_tokens` is None.
        max_tokens: token budget of a micro-batch: real tokens if `padding_free`, else the padded rectangle.
        padding_free: rows are laid end to end instead of padded to the longest.
    Returns:
        S lists of micro-batches, in the order in which they run; rows are indices into M.
    """
    # Column by column: a list per row would set Python's garbage collector going, which takes longer than the plan.
    packed = [
        _pack(prompts, completions, max_rows=max_rows, max_tokens=max_tokens, padding_free=padding_free)
        for prompts, completions in zip(lengths[..., 0].tolist(), lengths[..., 1].tolist(), strict=True)
    ]
    count = max(int(last_must_run), *map(len, packed))
    # Dummies first: the last pass of a rank that has any row is a real one.
    aligned = [[()] * (count - len(bins)) + [tuple(rows) for rows in bins] for bins in packed]
    micro_batches = map(MicroBatch, zip(*aligned, strict=True))
    # The last micro-steps get ⌈count / S⌉, the first ⌊count / S⌋.
    return [list(islice(micro_batches, (count + step) // micro_steps)) for step in range(micro_steps)]


def _pack(
    prompts: list[int], completions: list[int], *, max_rows: int, max_tokens: int | None, padding_free: bool
) -> list[list[int]]:
    rows = [row for row, completion in enumerate(completions) if completion > 0]
    if not padding_free:
        return _sorted_bins(rows, prompts, completions, max_rows=max_rows, max_tokens=max_tokens)
    tokens = {row: prompts[row] + completions[row] for row in rows}
    if max_tokens is None:
        return balanced_bins(rows, tokens, count=-(-len(rows) // max_rows), max_rows=max_rows)
    return fitted_bins(rows, tokens, max_tokens)


def balanced_bins(rows: Sequence[int], tokens: dict[int, int], *, count: int, max_rows: int) -> list[list[int]]:
    """`count` bins of at most `max_rows` rows and nearly equal token sums (longest processing time first, Graham 1969).

    The largest sum is at most 4/3 of the best possible where `max_rows` does not bind.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in sorted(rows, key=tokens.__getitem__, reverse=True):
        load, index = heapq.heappop(heap)
        bins[index].append(row)
        if len(bins[index]) < max_rows:
            heapq.heappush(heap, (load + tokens[row], index))
    return bins


def fitted_bins(rows: Sequence[int], tokens: dict[int, int], max_tokens: int) -> list[list[int]]:
    """As few bins of at most `max_tokens` tokens as best-fit-decreasing finds (≤ 11/9 of the fewest possible, plus 1).

    A row longer than the budget gets a bin of its own.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(rows, key=tokens.__getitem__, reverse=True):
        at = bisect_left(room, (tokens[row], -1))
        if at == len(room):
            left, index = max_tokens, len(bins)
            bins.append([])
        else:
            left, index = room.pop(at)
        bins[index].append(row)
        insort(room, (left - tokens[row], index))
    return bins


def _sorted_bins(
    rows: list[int], prompts: list[int], completions: list[int], *, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Runs of rows of similar length, for a padded layout: rows × (longest prompt + longest completion) ≤ budget."""
    bins: list[list[int]] = []
    prompt = completion = 0
    for row in sorted(rows, key=lambda row: (-completions[row], -prompts[row], row)):
        size = len(bins[-1]) + 1 if bins else 1
        wide = max(prompt, prompts[row]) + max(completion, completions[row])
        full = size > max_rows if max_tokens is None else size * wide > max_tokens
        if not bins or full:
            bins.append([])
            prompt = completion = 0
        bins[-1].append(row)
        prompt, completion = max(prompt, prompts[row]), max(completion, completions[row])
    return bins
