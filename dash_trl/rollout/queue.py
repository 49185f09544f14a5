"""`PromptQueue` hands out prompts in the order of the epochs, ahead of training and in any number::

    epochs    |------------- 0 -------------|------------- 1 -------------|
    windows   n, first  | n, more | n + 1, first | n + 1, more | n + 2 …

A run has a queue if windows are sampled ahead (`async_level`), or with dynamic sampling (`max_num_gen_batches`), in
which a window takes more prompts in each further round. Without a queue, Transformers reads the prompts itself.

Letters: G rows that belong together: the rows of a group; without dynamic sampling, the rows of a generation batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

Rows = list[dict[str, Any]]  # of the dataset, such as an item of a rank's dataloader: its rows of a generation batch
Place = tuple[int, int]  # a prompt's epoch, and its position among this rank's prompts of the epoch, from 0


class QueuedRows(Rows):
    """Dataset rows, G for each prompt, with the place (`Place`) of each prompt."""

    def __init__(self, rows: Rows, places: list[Place]):
        super().__init__(rows)
        self.places = places


@dataclass(eq=False, kw_only=True)
class PromptQueue:
    """Hands out every prompt of an epoch once, then the prompts of the next epoch.

    Transformers still counts epochs in micro-steps, but nothing is read from its iterators. All ranks call the same
    methods in the same order, with the same numbers of prompts, and each rank reads its own prompts. Without dynamic
    sampling, the groups of a generation batch count as one prompt, because a group may have rows on two ranks.

    Attributes:
        rows: G.
        prompts: number of this rank's prompts in a generation batch.
        window_batches: number of micro-steps of a window.
        accumulation: number of micro-steps of an optimizer step.
        ahead: number of windows whose prompts are taken ahead.
        first: function that returns with how many prompts of this rank the next window begins.
        open_epoch: function of an epoch and a number k. It returns an iterator over the epoch without its first k
            generation batches, which yields each generation batch `window_batches` times.
        place: place of the next prompt.
    """

    rows: int
    prompts: int
    window_batches: int
    accumulation: int
    ahead: int
    first: Callable[[], int]
    open_epoch: Callable[[int, int], Iterator[Rows]]

    def __post_init__(self) -> None:
        self.place: Place = (0, 0)
        self._windows: dict[int, QueuedRows] = {}  # window → its first rows, from the window in use on
        self._to_read_again: dict[int, list[Place]] = {}  # window of a checkpoint → places of its prompts
        self._source: Iterator[Rows] | None = None
        self._read = deque[Rows]()  # prompts that were read but not handed out, G rows each

    def read(self, count: int, *, micro_step: int, state: Any) -> Iterator[Rows]:
        """Return, for each micro-step of the optimizer step that begins, the first rows of its window.

        Args:
            micro_step: number of micro-steps before this optimizer step.
        """
        if self._to_read_again:
            self._read_again()
        now = micro_step // self.window_batches
        last = (micro_step + count - 1) // self.window_batches
        later = (state.max_steps - state.global_step - 1) * self.accumulation  # micro-steps of later optimizer steps
        end = (micro_step + count + later - 1) // self.window_batches
        self._windows = {window: rows for window, rows in self._windows.items() if window >= now}
        for window in range(now, max(last, min(last + self.ahead, end)) + 1):
            if window not in self._windows:
                self._windows[window] = self.take(self.first())
        return iter([self._windows[one // self.window_batches] for one in range(micro_step, micro_step + count)])

    def upcoming(self, micro_step: int) -> list[QueuedRows]:
        """Return the first rows of each window that may be sampled ahead, at a micro-step of the last `read`."""
        now = micro_step // self.window_batches
        return [self._windows[one] for one in range(now + 1, now + 1 + self.ahead) if one in self._windows]

    def take(self, prompts: int) -> QueuedRows:
        """Take this rank's next prompts, for a new window or for another round of a window."""
        rows: Rows = []
        places: list[Place] = []
        while len(places) < prompts:
            rows += self._next()
            epoch, number = self.place
            places.append(self.place)
            self.place = epoch, number + 1
        return QueuedRows(rows, places)

    def close(self) -> None:
        """Drop the prompts that were read, and release the dataloader's workers."""
        self._windows = {}
        self._to_read_again = {}
        self._source = None
        self._read.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the next place, and the places of the windows' prompts."""
        return {"place": self.place, "windows": {window: rows.places for window, rows in self._windows.items()}}

    def begin(self, epoch: int, batches: int) -> None:
        """Begin at a position in the dataset: after `epoch` epochs and `batches` micro-batches of a rank. Call it
        before `read`.
        """
        self.place = epoch, batches // self.window_batches * self.prompts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint.

        The dataloader does not exist yet, so the next `read` reads the prompts of the checkpoint's windows again.
        """
        self.close()
        self.place = state["place"]
        self._to_read_again = state["windows"]

    def _read_again(self) -> None:
        windows = self._to_read_again
        self._to_read_again = {}
        wanted = {place for places in windows.values() for place in places}
        end = self.place
        epoch, number = min(wanted | {end})
        others = number % self.prompts
        self.place = epoch, number - others
        self.take(others)
        found: dict[Place, Rows] = {}
        while self.place < end:
            one = self.take(1)
            found[one.places[0]] = list(one)
        for window, places in windows.items():
            self._windows[window] = QueuedRows([row for place in places for row in found[place]], places)

    def _next(self) -> Rows:
        """Return the G rows of the next prompt. At the end of an epoch, open the next epoch and move `place` to it."""
        opened = 0
        while not self._read:
            if self._source is None:
                self._source = self.open_epoch(self.place[0], self.place[1] // self.prompts)
            batch = next(self._source, None)
            if batch is not None:
                # Skip the repetitions of the same rows.
                next(islice(self._source, self.window_batches - 1, self.window_batches - 1), None)
                size = self.rows
                self._read.extend(batch[first : first + size] for first in range(0, len(batch), size))
            elif opened:
                raise ValueError(
                    f"Epoch {self.place[0]} of train_dataset has too few prompts for a generation batch. A stream must "
                    "yield its rows again each time it is read, as IterableDataset.from_generator does."
                )
            else:
                self.place = self.place[0] + 1, 0
                self._source = None
                opened += 1
        return self._read.popleft()
