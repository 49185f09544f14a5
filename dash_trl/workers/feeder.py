"""`Feeder`: `put(item)` ──► a daemon thread that consumes; its failure is raised by the next put or by finish."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any


class Feeder:
    """A daemon thread that consumes what the main thread puts, at most `ahead` items behind it.

    Args:
        consume: gets an iterator over the items; runs on the thread.
        timeout: seconds for which a put waits for room and `finish` for the end.
    """

    _END = object()

    def __init__(self, consume: Callable[[Iterator[Any]], Any], *, ahead: int, timeout: float):
        self._items: queue.Queue[Any] = queue.Queue(ahead)
        self._timeout = timeout
        self._done: Future[Any] = Future()
        threading.Thread(target=self._work, args=(consume,), daemon=True).start()

    def _work(self, consume: Callable[[Iterator[Any]], Any]) -> None:
        try:
            self._done.set_result(consume(iter(self._items.get, self._END)))
        except BaseException as error:  # relayed to the main thread
            self._done.set_exception(error)
            while not self._items.empty():  # a put that waits for room goes on, and finds the error
                self._items.get_nowait()

    def put(self, item: Any) -> None:
        """Raises what the thread raised, or TimeoutError."""
        try:
            if not self._done.done():
                self._items.put(item, timeout=self._timeout)
        except queue.Full:
            raise TimeoutError(f"nothing was consumed for {self._timeout:g} s") from None
        if self._done.done():
            self._done.result()

    def finish(self) -> Any:
        """The value of `consume`; raises as `put`."""
        self.put(self._END)
        return self._done.result(self._timeout)
