"""Packing: distributes survivors over token-balanced micro-batches, the same number on all ranks.

Every rank computes the plan of all ranks from one gathered table of lengths. So no further collective is needed to
agree on the plan.

Letters: R ranks, M rows per rank (dropped ones included), S micro-steps.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One model pass. A rank without rows runs a masked dummy row.

    Attributes:
        rows: for each rank, the rows that it runs.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of rows of the tensors, the same on every rank, because TRL gathers metrics per row."""
        return max(1, *(len(rows) for rows in self.rows))


def plan_segment(
    lengths: Tensor,
    micro_steps: int,
    last_must_run: bool = False,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    padding_free: bool = True,
    min_shared: int | None = None,
) -> list[list[MicroBatch]]:
    """Distribute the survivors of a segment over its micro-steps.

    A segment is a run of micro-steps of one optimizer step that share one generation batch. All ranks get the same
    number of micro-batches in each micro-step, because a pass is a collective under ZeRO-3 and FSDP, and a backward
    pass is one under DDP. The last micro-step is filled first, because gradients are synchronised there; empty
    micro-steps come first and cost nothing. If a small budget leads to more micro-batches than micro-steps, a
    micro-step runs several. So the budget always holds, except for a single row that is longer.

    Args:
        lengths: [R, M, 4] int, see `RolloutBatch.lengths`; the third column is not used. A dropped row has completion
            length 0.
        micro_steps: S, at least 1.
        last_must_run: an earlier segment of the same optimizer step had real rows. Then the last micro-step must run
            even if this segment keeps no row (with dummies), because DDP synchronises and DeepSpeed steps there.
        max_rows: row budget of a micro-batch, used if `max_tokens` is `None`.
        max_tokens: token budget of a micro-batch. It counts the tokens that the model computes if `padding_free`, else
            the padded rectangle.
        padding_free: rows are laid end to end instead of padded to the longest.
        min_shared: rows with the same prompt stay together as far as they fit, if they can share at least this number
            of prompt tokens. `None`: no row shares its prompt.
    Returns:
        S lists of micro-batches, in the order in which they run; rows are indices into M.
    """
    # Column by column: one list per row would trigger Python's garbage collector, which takes longer than the plan.
    packed = [
        _pack(*columns, max_rows=max_rows, max_tokens=max_tokens, padding_free=padding_free, min_shared=min_shared)
        for columns in zip(*(lengths[..., column].tolist() for column in (0, 1, -1)), strict=True)
    ]
    count = max(int(last_must_run), *map(len, packed))
    # Dummies first, so that the last pass of every rank with rows is a real one.
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
    """Pack the rows of one rank into bins of at most `max_rows` rows or `max_tokens` tokens."""
    rows = [row for row, completion in enumerate(completions) if completion > 0]
    if not padding_free:
        return _sorted_bins(rows, prompts, completions, max_rows=max_rows, max_tokens=max_tokens)
    families: dict[tuple[int, ...], list[int]] = {}  # rows that share their prompt
    for row in rows:
        shares = min_shared is not None and prompts[row] > min_shared
        families.setdefault((prompts[row], same[row]) if shares else (row,), []).append(row)

    def tokens(unit: Sequence[int]) -> int:
        """Count the tokens that the model computes. The last token of a shared prompt is computed in each row."""
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
    # Units of one family that ended up in the same bin share their prompt, too.
    order = {row: place for place, row in enumerate(row for family in families.values() for row in family)}
    return [sorted((row for unit in held for row in unit), key=order.__getitem__) for held in bins]


def _within(family: Sequence[int], tokens: Callable[[Sequence[int]], int], max_tokens: int) -> Iterator[list[int]]:
    """Split rows with the same prompt into units of at most `max_tokens` tokens; a longer row is a unit of its own."""
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

    If `max_rows` does not bind, the largest sum is at most 4/3 of the best possible. A unit that fits into no bin is
    split, so that `count` bins suffice.

    Args:
        units: lists of at most `max_rows` rows each, which should stay together.
        tokens: returns the number of tokens of a unit.
        count: number of bins.
        max_rows: the largest number of rows in a bin.
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
    """Fill few bins of at most `max_tokens` tokens, by best-fit-decreasing.

    It needs at most 11/9 of the fewest possible bins, plus 1. A row longer than the budget gets a bin of its own.

    Args:
        rows: the rows.
        tokens: the number of tokens of each row.
        max_tokens: token budget of a bin.
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
    """Form runs of rows of similar length for a padded layout: rows × (longest prompt + longest completion) ≤
    budget.
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
