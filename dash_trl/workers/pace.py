"""`Pace`: calls start at most so often, whoever makes them."""

from __future__ import annotations

import threading
import time


class Pace:
    """Starts spaced evenly, over all threads.

    Args:
        rate: starts per second.
    """

    def __init__(self, rate: float):
        self._between = 1 / rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait_seconds(self) -> float:
        """How long the caller has to wait before its start, for which the time is kept free."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._between
        return start - now
