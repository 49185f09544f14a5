"""Packing: distributes survivors over micro-batches with similar numbers of tokens.

All ranks get the same number of micro-batches. Every rank computes the plan of all ranks from one gathered table of
lengths, so the ranks need no further collective to agree on the plan.

Letters: R ranks, M rows per rank (dropped rows included), S micro-steps.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one model pass.

    Attributes:
        rows: for each rank, the indices of the rows that the rank runs. A rank without rows runs a dummy row.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of rows of the pass's tensors. It is the same on every rank, because TRL gathers metrics per row."""
        return max(1, *(len(rows) for rows in self.rows))


def plan_share(
    lengths: Tensor,
    micro_steps: int,
    last_must_run: bool = False,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    width: int = 0,
    padding_free: bool = True,
    min_shared: int | None = None,
) -> list[list[MicroBatch]]:
    """Distribute the survivors of a share over its micro-steps.

    A share is the rows of a window that one optimizer step uses. All ranks get the same number of
    micro-batches in each micro-step, because a pass is a collective under ZeRO-3 and FSDP, and a backward pass is a
    collective under DDP. If there are fewer micro-batches than micro-steps, the first micro-steps stay empty, because
    gradients are synchronised in the last micro-step. If there are more micro-batches than micro-steps, a micro-step
    runs several micro-batches. So no micro-batch exceeds its budget (`max_tokens` or `max_rows`), unless it is a single
    row of more tokens.

    Args:
        lengths: [R, M, 4] int, see `RolloutBatch.lengths`; the third column is not used. A dropped row has completion
            length 0.
        micro_steps: S, at least 1.
        last_must_run: True = the last micro-step runs a pass even if this share has no survivor (then with dummy
            rows). Pass True if an earlier share of the same optimizer step has run passes, because DDP synchronises
            gradients, and DeepSpeed steps the optimizer, in the last micro-step.
        max_rows: number of rows of TRL's micro-batches, used if `max_tokens` is `None`.
        max_tokens: largest number of tokens of a micro-batch. If `padding_free`, only tokens that the model computes
            are counted; otherwise, padding is counted, too. `None`: a micro-batch has at most `max_rows` rows or, if
            that takes fewer micro-batches, at most `max_rows` × `width` tokens, as TRL's padded micro-batches have.
        width: see `Part.width`.
        padding_free: True = passes are padding-free, False = padded.
        min_shared: rows whose common prompt lets them share at least this number of tokens are kept in one micro-batch
            as far as they fit. `None`: no row shares its prompt.
    Returns:
        S lists of micro-batches, in the order in which they run; rows are indices into M.
    """
    # Convert column by column. One list per row would trigger Python's garbage collector, which takes longer than the
    # packing.
    packed = []
    for columns in zip(*(lengths[..., column].tolist() for column in (0, 1, -1)), strict=True):
        budgets = [max_tokens] if max_tokens is not None else [None, max_rows * width]
        plans = [
            _pack(*columns, max_rows=max_rows, max_tokens=budget, padding_free=padding_free, min_shared=min_shared)
            for budget in budgets
        ]
        packed.append(min(plans, key=len))
    count = max(int(last_must_run), *map(len, packed))
    # A rank with fewer bins runs its dummy rows first. So the last pass of a rank with survivors has survivors.
    aligned = [[()] * (count - len(bins)) + [tuple(rows) for rows in bins] for bins in packed]
    micro_batches = map(MicroBatch, zip(*aligned, strict=True))
    # The last micro-steps get ⌈count / S⌉ micro-batches, the first ones ⌊count / S⌋.
    return [list(islice(micro_batches, (count + step) // micro_steps)) for step in range(micro_steps)]


def _pack(
    prompts: list[int],
    completions: list[int],
    same: list[int],
    *,
    max_rows: int,
    max_tokens: int | None,
    padding_free: bool,
    min_shared: int | None,
) -> list[list[int]]:
    """Pack the rows of one rank into bins; see `plan_share`.

    Args:
        prompts: number of prompt tokens of each row.
        completions: number of completion tokens of each row; 0 for a dropped row.
        same: checksum of each row's prompt; see `RolloutBatch.lengths`.
        max_rows: see `plan_share`.
        max_tokens: see `plan_share`.
        padding_free: see `plan_share`.
        min_shared: see `plan_share`.
    Returns:
        Lists of row indices, one list per bin.
    """
    rows = [row for row, completion in enumerate(completions) if completion > 0]
    if not padding_free:
        return _sorted_bins(rows, prompts, completions, max_rows=max_rows, max_tokens=max_tokens)
    # A family: all rows that can share one prompt, or a single row. A unit: rows of a family that stay together in a
    # bin if possible.
    families: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        shares = min_shared is not None and prompts[row] > min_shared
        families.setdefault((prompts[row], same[row]) if shares else (row,), []).append(row)

    def tokens(unit: Sequence[int]) -> int:
        """Count the tokens that the model computes for a unit. The last prompt token is computed again in each row."""
        return prompts[unit[0]] - 1 + sum(completions[row] + 1 for row in unit)

    if max_tokens is None:
        units = [
            family[first : first + max_rows]
            for family in families.values()
            for first in range(0, len(family), max_rows)
        ]
        bins = balanced_bins(units, tokens, count=-(-len(rows) // max_rows), max_rows=max_rows)
    else:
        units = [unit for family in families.values() for unit in _within(family, tokens, max_tokens)]
        sizes = dict(enumerate(map(tokens, units)))
        bins = [[units[one] for one in held] for held in fitted_bins(range(len(units)), sizes, max_tokens)]
    if min_shared is None:
        return [[row for unit in held for row in unit] for held in bins]
    # If units of one family are in the same bin, their rows share the prompt, too. So they must be adjacent.
    order = {row: place for place, row in enumerate(row for family in families.values() for row in family)}
    return [sorted((row for unit in held for row in unit), key=order.__getitem__) for held in bins]


def _within(family: Sequence[int], tokens: Callable[[Sequence[int]], int], max_tokens: int) -> Iterator[list[int]]:
    """Split a family into units of at most `max_tokens` tokens. A row with more tokens is a unit of its own."""
    unit: list[int] = []
    for row in family:
        if unit and tokens([*unit, row]) > max_tokens:
            yield unit
            unit = []
        unit.append(row)
    yield unit


def balanced_bins(
    units: Sequence[list[int]], tokens: Callable[[Sequence[int]], int], *, count: int, max_rows: int
) -> list[list[list[int]]]:
    """Fill bins with nearly equal token sums (longest processing time first, Graham 1969).

    As long as `max_rows` has no effect, the fullest bin has at most 4/3 of the tokens of the fullest bin in the best
    distribution. If no bin has room for a whole unit, the unit is split, so that `count` bins are enough.

    Args:
        units: lists of at most `max_rows` rows. The rows of a unit stay in one bin if possible.
        tokens: function that takes a unit and returns its number of tokens.
        count: number of bins.
        max_rows: the largest number of rows in a bin.
    Returns:
        Lists of units, one list per bin.
    """
    bins: list[list[list[int]]] = [[] for _ in range(count)]
    open_bins = {max_rows: [(0, index) for index in range(count)]}  # free rows → a heap of (tokens, bin)
    waiting = [(-tokens(unit), place, unit) for place, unit in enumerate(units)]
    heapq.heapify(waiting)
    while waiting:
        _, place, unit = heapq.heappop(waiting)
        if len(unit) > (widest := max(open_bins)):
            unit, rest = unit[:widest], unit[widest:]
            heapq.heappush(waiting, (-tokens(rest), place, rest))
        room = min((room for room in open_bins if room >= len(unit)), key=lambda room: open_bins[room][0])
        load, index = heapq.heappop(open_bins[room])
        if not open_bins[room]:
            del open_bins[room]
        bins[index].append(unit)
        if room > len(unit):
            heapq.heappush(open_bins.setdefault(room - len(unit), []), (load + tokens(unit), index))
    return bins


def fitted_bins(rows: Sequence[int], tokens: dict[int, int], max_tokens: int) -> list[list[int]]:
    """Distribute rows over as few bins of at most `max_tokens` tokens as best-fit-decreasing finds.

    The number of bins is at most 11/9 of the smallest possible number, plus 1. A row with more than `max_tokens` tokens
    gets a bin of its own.

    Args:
        rows: indices of rows, or of units or trees, which are distributed in the same way.
        tokens: row → its number of tokens.
        max_tokens: token budget of a bin.
    Returns:
        Lists of rows, one list per bin.
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
    """Pack the rows of one rank into bins of rows with similar lengths, for padded passes.

    A bin with n rows has n × (longest prompt + longest completion) tokens, padding included. If `max_tokens` is set, a
    bin has at most `max_tokens` tokens; otherwise, it has at most `max_rows` rows.
    """
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
