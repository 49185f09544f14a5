"""`Records`: a JSONL file with the settings of a run and its results, from which an interrupted run continues::

    {"settings": {"model": …, "seed": 0}}
    {"index": 0, …}
    {"index": 1, …}                       ◄── if an interrupt leaves an incomplete line at the end, it is dropped

The first line has the settings; each further line has one row, such as the samples of a problem. If a file has another
form, or rows that belong to other settings, opening it raises an error, and nothing is overwritten. A file without rows
gets the new settings.
"""

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Records(AbstractContextManager["Records"]):
    """Reads and writes a file of rows with an index. It is a context manager that closes the file at the end::

        with Records("samples.jsonl", {"model": model, "seed": 0}) as records:
            for index, samples in sampler.sample(prompts, seed=0, done=records.rows):
                records.add(index, {"text": samples[0].text})
            records.sort()

    Args:
        path: path of the file. The file and its directory are created if they do not exist.
        settings: everything that a row depends on, in a form that can be written as JSON.
    Attributes:
        rows: index → row, for the rows that the file had when it was opened and the rows added since.
    Raises:
        ValueError: if the file has another form, or rows that belong to other settings (the message names them), or if
            another process has opened it.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path = Path(path)
        self.settings: dict[str, Any] = json.loads(_line(settings))  # in JSON, tuples become lists
        self.rows: dict[int, dict[str, Any]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        """Adds a row and writes it to the file at once.

        Args:
            index: index of the row.
            row: content of the row, without the index, in a form that can be written as JSON.
        """
        self._append({"index": index, **row})
        self.rows[index] = dict(row)

    def sort(self) -> None:
        """Sorts the rows of the file by index. Call it after the last `add`: samplers finish problems in any order."""
        sorted_path = self.path.with_name(f".{self.path.name}.sorted")
        lines = [{"settings": self.settings}, *({"index": i, **self.rows[i]} for i in sorted(self.rows))]
        sorted_path.write_bytes(b"".join(map(_line, lines)))
        os.replace(sorted_path, self.path)
        self._file.close()
        self._file = self.path.open("a+b")

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, what: Mapping[str, Any]) -> None:
        self._file.write(_line(what))
        self._file.flush()

    def _read(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the file is closed
        except BlockingIOError as error:
            raise ValueError(f"Another process is writing {self.path}: wait for it, or choose another file.") from error
        self._file.seek(0)
        *lines, half = self._file.read().split(b"\n")
        first = _line({"settings": self.settings})
        try:
            found = [json.loads(line) for line in lines]
            theirs = dict(found[0]["settings"]) if found else {}
            self.rows |= {int(row.pop("index")): row for row in found[1:]}
            if not found and not first.startswith(half):
                raise ValueError("one line without an end")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a file of records, with settings in the first line, then rows with an `index` "
                f"({error}): choose another file or directory, or move this file away; nothing is overwritten."
            ) from error
        if self.rows:  # without rows, the settings of the file do not matter
            self._compare(theirs)
        if half:
            logger.warning(f"{self.path} ends with half a line of an interrupted run; this half line is dropped.")
        self._file.truncate(self._file.tell() - len(half) if self.rows else 0)
        if not self.rows:
            self._append({"settings": self.settings})

    def _compare(self, theirs: dict[str, Any]) -> None:
        differences = [
            f"{name} is {theirs.get(name, 'missing')!r} there and {self.settings.get(name, 'missing')!r} here"
            for name in {**theirs, **self.settings}
            if theirs.get(name, "missing") != self.settings.get(name, "missing")
        ]
        if differences:
            raise ValueError(
                f"{self.path} has other settings: {'; '.join(differences)}. Use the settings of the file to continue "
                "it, or choose another file or directory; nothing is overwritten."
            )


def _line(what: Mapping[str, Any]) -> bytes:
    return json.dumps(what, ensure_ascii=False).encode() + b"\n"
