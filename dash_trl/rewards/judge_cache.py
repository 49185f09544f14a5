"""`AnswerCache`: stores a judge's answers on disk, so that all ranks of a host and later runs can reuse them."""

import logging
import platform
import sqlite3
from pathlib import Path

from dash_trl._cache import cache_folder

logger = logging.getLogger(__name__)

LOCK_SECONDS = 5.0  # longest wait for another process that writes; a write takes less than a millisecond


class AnswerCache:
    """An SQLite file with a judge's answers. The key of an answer is the hash of the request.

    Each host has its own file, because SQLite's locks fail on some network file systems, and a home folder is often on
    such a file system. If the cache fails (disk full, not writable, locked, not an SQLite file), this process warns
    once and stops using the cache. The judge then gets more requests, but no score is lost.

    Args:
        folder: the folder of the files. It is created at the first use, and may be deleted between runs. None = the
            folder `judge` in the user's cache folder.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = cache_folder() / "judge" if folder is None else Path(folder)
        self.file = self.folder / f"{platform.node() or 'host'}.sqlite"
        self._connection: sqlite3.Connection | None = None
        self._broken = False

    def get(self, key: bytes) -> str | None:
        """Looks up the answer to a request.

        Args:
            key: the hash of the request.

        Returns:
            The answer; None if no answer is stored, or if the cache has failed.
        """
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: bytes, answer: str) -> None:
        """Stores an answer; does nothing if the cache has failed.

        Args:
            key: the hash of the request.
            answer: the answer to the request.
        """
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)

    def _execute(self, statement: str, *values: object) -> list[tuple]:
        if self._broken:
            return []
        try:
            if self._connection is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file.touch(0o600)  # private: explanations quote prompts and completions
                # `isolation_level=None` commits each statement. Several event loops, each on its own thread, use this
                # connection; sqlite3 makes their calls one after the other.
                self._connection = sqlite3.connect(
                    self.file, LOCK_SECONDS, isolation_level=None, check_same_thread=False
                )
                self._connection.execute("PRAGMA synchronous = OFF")  # do not wait for the disk: a crash may lose rows
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID"
                )
            return self._connection.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._broken = True
            logger.warning(
                f"The judge's cache {self.file} cannot be used ({error}). This process continues without it. Delete "
                "the file if it is damaged, or set another folder with JudgeReward(cache=...)."
            )
            return []
