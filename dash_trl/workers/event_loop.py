"""`EventLoop`: `run(coroutine)` ──► the loop's thread ──► its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CLOSE_SECONDS = 5.0  # for a loop to answer


class EventLoop:
    """An asyncio loop on a daemon thread: many requests at once while the main thread waits for all of them.

    Not on the main thread, where a notebook runs a loop of its own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name="dash_trl event loop").start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for the coroutine; cancels it when the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine, without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], Any]) -> None:
        """Runs a function soon on the loop's thread; does not wait for it."""
        self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Cancels what runs, runs one more coroutine, to close what lives in the loop, and ends the thread.

        A loop that something blocks is left alone.
        """
        if self._loop.is_running():
            cancelled = asyncio.run_coroutine_threadsafe(self._cancel_others(), self._loop)
            try:
                cancelled.result(CLOSE_SECONDS)
            except TimeoutError:
                return
            if last is not None:
                self.run(last())
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _cancel_others(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
