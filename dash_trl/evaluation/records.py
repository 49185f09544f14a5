"""A JSONL file that an interrupted run goes on with: its settings in the first line, then a line per problem.

    {"settings": {"model": …, "seed": 0}}
    {"index": 0, …}
    {"index": 1, …}                       ◄── the half line that an interrupt leaves at the end is dropped

What a run adds to a file of other settings would be neither's, so such a file is refused, and so is any file that is
not of this form: nothing is overwritten.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

logger = logging.getLogger(__name__)

SHOWN_CHARS = 60  # of a value that an error shows


class Records:
    """The rows of such a file by their index; a context manager that closes it.

        with Records("samples.jsonl", {"model": model, "seed": 0}) as records:
            for index, samples in sampler.sample(prompts, seed=0, done=records.rows):
                records.add(index, {"text": samples[0].text})
            records.sort()

    Args:
        path: of the file; it and its directory are made where they do not exist.
        settings: all that a row depends on, as JSON; what differs from the file's is named in the error.
    Attributes:
        rows: index → row, of the file and of what was added since; read only.
    Raises:
        ValueError: a file of other settings, of another form, or one that another process writes.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path = Path(path)
        self.settings: dict[str, Any] = json.loads(_line(settings))  # tuples are lists there
        self._rows: dict[int, dict[str, Any]] = {}
        self.rows: Mapping[int, dict[str, Any]] = MappingProxyType(self._rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("a+b")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written ({error}): choose another file.") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        """A row, which is in the file when this returns."""
        self._append({"index": index, **row})
        self._rows[index] = dict(row)

    def sort(self) -> None:
        """The file's rows by their index, once all are there: servers finish them in any order."""
        if list(self._rows) == sorted(self._rows):
            return
        sorted_path = self.path.with_name(f".{self.path.name}.sorted")
        lines = [{"settings": self.settings}, *({"index": i, **self._rows[i]} for i in sorted(self._rows))]
        sorted_path.write_bytes(b"".join(map(_line, lines)))
        os.replace(sorted_path, self.path)
        self._file.close()
        self._file = self.path.open("a+b")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, what: Mapping[str, Any]) -> None:
        self._file.write(_line(what))
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, by whatever
        except BlockingIOError as error:
            raise ValueError(f"Another process is writing {self.path}: wait for it, or choose another file.") from error
        except OSError:
            pass  # a file system without locks

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole, newline, rest = content.rpartition(b"\n")
        first = _line({"settings": self.settings})
        if rest and (newline or not first.startswith(rest)):
            if not newline:
                raise ValueError(self._foreign(1))
            logger.warning(f"{self.path} ends with half a line, of a run that was interrupted: it is dropped.")
        lines = whole.split(b"\n") if newline else []
        for number, line in enumerate(lines, 1):
            self._take(number, line, alone=len(lines) == 1)
        self._file.truncate(len(content) - len(rest) if self._rows else 0)
        if not self._rows:
            self._append({"settings": self.settings})

    def _take(self, number: int, line: bytes, alone: bool) -> None:
        try:
            row = json.loads(line)
            if number == 1:
                theirs = dict(row["settings"])
                if not alone:  # else nothing was done with them
                    self._compare(theirs)
            else:
                self._rows[int(row.pop("index"))] = row
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(self._foreign(number)) from error

    def _compare(self, theirs: dict[str, Any]) -> None:
        differences = [
            f"{name} is {_shown(theirs, name)} there and {_shown(self.settings, name)} here"
            for name in {**theirs, **self.settings}
            if name not in theirs or name not in self.settings or theirs[name] != self.settings[name]
        ]
        if differences:
            raise ValueError(
                f"{self.path} is of other settings: {'; '.join(differences)}. Give these settings to go on with it, or "
                "choose another file or directory; nothing is overwritten."
            )

    def _foreign(self, number: int) -> str:
        return (
            f"Line {number} of {self.path} is none of a file of records (settings in the first line, then rows with an "
            "`index`): choose another file or directory, or move that one away; nothing is overwritten."
        )


def _line(what: Mapping[str, Any]) -> bytes:
    return json.dumps(what, ensure_ascii=False).encode() + b"\n"


def _shown(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "missing"
    text = repr(settings[name])
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
