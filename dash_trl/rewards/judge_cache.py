"""`AnswerCache`: what a judge answered, on disk, for all ranks of a host and for later runs."""

import logging
import platform
import sqlite3
from pathlib import Path

from dash_trl._cache import cache_folder

logger = logging.getLogger(__name__)

LOCK_SECONDS = 5.0  # for which a call waits for another process's write; one takes less than a millisecond


class AnswerCache:
    """Answers by the hash of their request, in an SQLite file.

    There is one file per host, since SQLite's locks fail on some network file systems, and a home folder is often on
    one. If the cache fails (no room, not writable, locked, no SQLite file), one warning says so, and this process does
    not use it any more: that costs requests, but no score.

    Args:
        folder: of the files, made when it is first used. None: `judge` in the user's cache folder. It may be deleted
            between runs.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = cache_folder() / "judge" if folder is None else Path(folder)
        self.file = self.folder / f"{platform.node() or 'host'}.sqlite"
        self._connection: sqlite3.Connection | None = None
        self._broken = False

    def get(self, key: bytes) -> str | None:
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: bytes, answer: str) -> None:
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)

    def _execute(self, statement: str, *values: object) -> list[tuple]:
        if self._broken:
            return []
        try:
            if self._connection is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file.touch(0o600)  # explanations tell of prompts and completions
                # Autocommit, and any thread: event loops have their own, and the module serialises the calls.
                self._connection = sqlite3.connect(
                    self.file, LOCK_SECONDS, isolation_level=None, check_same_thread=False
                )
                self._connection.execute("PRAGMA synchronous = OFF")  # no wait for the disk, if the host crashes
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID"
                )
            return self._connection.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._broken = True
            logger.warning(
                f"The judge's cache {self.file} cannot be used ({error}): this process goes on without it. Delete the "
                "file if it is damaged, or name another folder by JudgeReward(cache=...)."
            )
            return []
