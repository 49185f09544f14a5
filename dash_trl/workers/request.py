"""`Request`: the outcomes of a batch of calls as they come, and which of its groups are complete."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any


class Request:
    """What F functions say of N rows; each outcome is kept at its own place, whenever it comes.

    Args:
        functions: F. rows: N. group_size: G adjacent rows are a group; the last one may be smaller.
    Attributes:
        outcomes: [F][N]; None = has not come.
        stop: of its calls; set, once nobody waits for it.
    """

    def __init__(self, functions: int, rows: int, group_size: int):
        self.outcomes: list[list[Any]] = [[None] * rows for _ in range(functions)]
        self.stop = threading.Event()
        self.group_size = group_size
        groups = range(0, rows, group_size)
        self._rows_left = [[min(group_size, rows - start) for start in groups] for _ in range(functions)]
        self._functions_left = [functions] * len(groups)
        self._lock = threading.Lock()
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._handed_out = 0

    def rows_of(self, group: int) -> range:
        return range(len(self.outcomes[0]))[group * self.group_size : (group + 1) * self.group_size]

    def put(self, function: int, first: int, outcomes: Sequence[Any]) -> list[int]:
        """The outcomes of a function for rows from `first` on, each once; from any thread.

        Returns:
            The groups of which it has now said all; each has to be told to `complete`, then or later.
        """
        left, size = self._rows_left[function], self.group_size
        with self._lock:
            self.outcomes[function][first : first + len(outcomes)] = outcomes
            done = []
            for row in range(first, first + len(outcomes)):
                left[row // size] -= 1
                if not left[row // size]:
                    done.append(row // size)
        return done

    def complete(self, function: int, group: int) -> None:
        """A function has nothing more to say of a group."""
        with self._lock:
            self._functions_left[group] -= 1
            last = not self._functions_left[group]
        if last:
            self._complete.put(group)

    def next_groups(self, *, wait: bool = True) -> list[int]:
        """Numbers of the groups that are complete and were not handed out before.

        Args:
            wait: for one, where there is none yet. There has to be one left.
        """
        found: list[int] = []
        while not self._complete.empty() or wait and not found:
            found.append(self._complete.get())
            self._handed_out += 1
        return found

    def wait(self) -> None:
        """Until all groups are complete; where that is interrupted, nothing more is started."""
        try:
            while self._handed_out < len(self._functions_left):
                self.next_groups()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self.stop.set()
