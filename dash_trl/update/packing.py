"""Packing: distributes survivors over few micro-batches.

Every rank computes the plan of all ranks from one gathered table of lengths, so they need no further collective.

Letters: R ranks, M rows per rank (dropped rows included).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dash_trl.rollout import CHECKSUM, COMPLETION, PROMPT

# Most cells per token of the budget in a pass's tables, such as token ids. All rows are as wide as the longest row.
# At 30 bytes per cell, this is 0.5 kB per token. Qwen2.5-0.5B keeps 86 kB per token for the backward pass, even with
# gradient checkpointing: 24 layers × 896 numbers × 4 bytes (float32 weights under bf16; bf16 weights: half of it).
CELLS_PER_TOKEN = 16
# Number of copied keys that take the memory of a computed token. A layer of a model with as many heads of keys as of
# queries keeps keys and values of a copy, and 12 times as much for a token. The backward pass adds gradients of copies.
COPIES_PER_TOKEN = 12


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one model pass.

    Attributes:
        rows: for each rank, the indices of its rows. A rank without rows runs a dummy row.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of rows of the pass's tensors. It is the same on every rank, because TRL gathers metrics per row."""
        return max(1, *(len(rows) for rows in self.rows))


def plan_share(
    lengths: Tensor,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    width: int = 0,
    padding_free: bool = True,
    min_shared: int | None = None,
) -> list[MicroBatch]:
    """Distribute the survivors of a share (the rows of a window that one optimizer step uses) over micro-batches.

    All ranks get the same number of micro-batches, because a pass is a collective under ZeRO-3 and FSDP, and a backward
    pass is a collective under DDP. Only a single row may exceed the budget of tokens, or `CELLS_PER_TOKEN` times the
    budget with padding.

    Args:
        lengths: [R, M, 4] int, see `RolloutBatch.lengths`. A dropped row has completion length 0.
        max_rows: number of rows of TRL's micro-batches, used if `max_tokens` is `None`.
        max_tokens: token budget of a micro-batch. `None`: `max_rows` × `width`, as in TRL, and never more micro-batches
            than with `max_rows` rows each.
        width: see `Part.width`.
        padding_free: False = passes are padded, and the budget counts padding.
        min_shared: rows that share at least this number of prompt tokens stay together as far as they fit. `None`: no
            row shares its prompt.
    Returns:
        The micro-batches, in the order in which they run; rows are indices into M.
    """
    budget = max_rows * width if max_tokens is None else max_tokens

    def pack(prompts: list[int], completions: list[int], same: list[int]) -> list[list[int]]:
        """Pack the rows of one rank into bins; `same` has a checksum of each row's prompt."""
        rows = [row for row, completion in enumerate(completions) if completion > 0]
        if not padding_free:
            return _sorted_bins(rows, prompts, completions, budget)
        # A family: all rows that can share one prompt, or a single row. A unit: rows of a family that stay together in
        # a bin.
        families: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            shares = min_shared is not None and prompts[row] > min_shared
            families.setdefault((prompts[row], same[row]) if shares else (row,), []).append(row)

        def tokens(unit: Sequence[int]) -> int:
            """Count the tokens that the model computes for a unit. Each row computes the last prompt token again."""
            trunk = prompts[unit[0]] - 1
            copied = max_tokens is None and len(unit) > 1
            return trunk + copied * trunk * len(unit) // COPIES_PER_TOKEN + sum(completions[row] + 1 for row in unit)

        units = [unit for family in families.values() for unit in _within(family, tokens, budget)]
        sizes = dict(enumerate(map(tokens, units)))
        bins = [[row for one in held for row in units[one]] for held in fitted_bins(range(len(units)), sizes, budget)]
        bins = [part for held in bins for part in _sorted_bins(held, prompts, completions, CELLS_PER_TOKEN * budget)]
        ordered = [row for family in families.values() for row in family]
        if max_tokens is None and len(bins) > -(-len(rows) // max_rows):  # units of several rows may fit badly
            bins = [ordered[first : first + max_rows] for first in range(0, len(ordered), max_rows)]
        # If units of one family are in the same bin, their rows share the prompt, too. So they must be adjacent.
        order = {row: place for place, row in enumerate(ordered)}
        return [sorted(held, key=order.__getitem__) for held in bins]

    # Convert column by column. One list per row would trigger Python's garbage collector, which takes longer than the
    # packing.
    columns = (lengths[..., column].tolist() for column in (PROMPT, COMPLETION, CHECKSUM))
    packed = [*map(pack, *columns)]
    count = max(map(len, packed))
    # A rank with fewer bins runs its dummy rows first. So the last pass of a rank with survivors has survivors.
    aligned = [[()] * (count - len(bins)) + [tuple(rows) for rows in bins] for bins in packed]
    return [MicroBatch(rows) for rows in zip(*aligned, strict=True)]


def _within(family: Sequence[int], tokens: Callable[[Sequence[int]], int], max_tokens: int) -> Iterator[list[int]]:
    """Split a family into units of at most `max_tokens` tokens. A row with more tokens is a unit of its own."""
    unit: list[int] = []
    for row in family:
        if unit and tokens([*unit, row]) > max_tokens:
            yield unit
            unit = []
        unit.append(row)
    yield unit


def fitted_bins(rows: Sequence[int], tokens: dict[int, int], max_tokens: int) -> list[list[int]]:
    """Distribute rows over as few bins of at most `max_tokens` tokens as best-fit-decreasing finds.

    The number of bins is at most 11/9 of the smallest possible number, plus 1. A row with more tokens gets its own bin.

    Args:
        rows: indices of rows, units or trees.
        tokens: row → its number of tokens.
        max_tokens: token budget of a bin.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(rows, key=tokens.__getitem__, reverse=True):
        at = bisect_left(room, (tokens[row], -1))
        if at == len(room):
            left = max_tokens
            index = len(bins)
            bins.append([])
        else:
            left, index = room.pop(at)
        bins[index].append(row)
        insort(room, (left - tokens[row], index))
    return bins


def _sorted_bins(rows: list[int], prompts: list[int], completions: list[int], budget: int) -> list[list[int]]:
    """Pack the rows of one rank into bins of rows with similar lengths; `budget` counts padding."""
    bins: list[list[int]] = []
    prompt = completion = 0
    for row in sorted(rows, key=lambda row: (-completions[row], -prompts[row], row)):
        wide = max(prompt, prompts[row]) + max(completion, completions[row])
        if not bins or (len(bins[-1]) + 1) * wide > budget:
            bins.append([])
            prompt = completion = 0
        bins[-1].append(row)
        prompt = max(prompt, prompts[row])
        completion = max(completion, completions[row])
    return bins
