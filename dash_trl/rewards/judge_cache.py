"""`AnswerCache`: what a judge answered, on disk, for all ranks of a host and for later runs."""

from __future__ import annotations

import logging
import platform
import sqlite3
import time
from pathlib import Path

from dash_trl._cache import cache_folder

logger = logging.getLogger(__name__)

LOCK_SECONDS = 5.0  # for which a write waits for another process's; one takes less than a millisecond


class AnswerCache:
    """Answers by the hash of their request, in an SQLite file.

    One file per host: SQLite's write-ahead log, with which readers and writers do not wait for each other, must not be
    shared over a network, and a home folder often is. A cache that fails (no room, not writable, locked, no SQLite
    file) is said once and not used any more in this process: it costs requests, but no score.

    Args:
        folder: of the files, made when it is first used. None: `judge` in the user's cache folder. It may be deleted
            between runs.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = cache_folder() / "judge" if folder is None else Path(folder)
        self._connection: sqlite3.Connection | None = None
        self._broken = False

    @property
    def file(self) -> Path:
        return self.folder / f"{platform.node() or 'host'}.sqlite"

    def get(self, key: bytes) -> str | None:
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: bytes, answer: str) -> None:
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, answer)

    def close(self) -> None:
        """It opens again when it is used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _execute(self, statement: str, *values: object) -> list[tuple]:
        if self._broken:
            return []
        try:
            if self._connection is None:
                self._connection = self._open()
            return self._connection.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._broken = True
            logger.warning(
                f"The judge's cache {self.file} cannot be used ({error}): this process goes on without it. Delete the "
                "file if it is damaged, or name another folder by JudgeReward(cache=...)."
            )
            return []

    def _open(self) -> sqlite3.Connection:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Autocommit, and any thread: event loops have threads of their own, and the module serialises the calls.
        connection = sqlite3.connect(self.file, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._log_ahead(connection)
            connection.execute("PRAGMA synchronous = NORMAL")  # no wait for the disk: a lost answer is asked again
            connection.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer TEXT) WITHOUT ROWID")
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _log_ahead(connection: sqlite3.Connection) -> None:
        """Kept in the file. SQLite does not wait where two processes do this to a new file at once: tried again."""
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(0.01)
