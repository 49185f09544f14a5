"""What makes a checkpoint whole, and its run: a JSON file that is written last, with the checksums of the other files.

    output_dir/_run.json                    {"runs": {"A": 4, "B": 9223372036854775807}}    B goes on from step 4 of A
    output_dir/checkpoint-6/_files.json     {"runs": {"A": 4, "B": 6}, "files": {name: [size, CRC-32]}}

`_run.json` has the last step of each run (`train()`) that counts. While `_files.json` has no files, its checkpoint is
incomplete. Without it, the checkpoint is of another trainer, and a run of its own.
"""

import json
import secrets
import shutil
import sys
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

# `push_to_hub` leaves out names that begin with an underscore.
RUN = "_run.json"
LIST = "_files.json"
# Of a file with more than `MOST` bytes, each k-th chunk counts, so that this takes a second.
CHUNK = 1 << 20
MOST = 1 << 30


def new_run(checkpoint: str | None) -> dict[str, int]:
    """Return the runs that lead to a new one, which is the last, each with its last step that counts."""
    name = f"{datetime.now():%F %T} {secrets.token_hex(2)}"
    return {**(runs_of(Path(checkpoint)) if checkpoint else {}), name: sys.maxsize}


def begin(folder: Path, runs: dict[str, int]) -> None:
    """Empty the folder of a checkpoint that is to be saved, and mark it as incomplete."""
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / LIST, {"runs": runs})


def finish(folder: Path, runs: dict[str, int]) -> None:
    """List the files of a saved checkpoint, which makes it whole."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != LIST]
    write(folder / LIST, {"runs": runs, "files": {name: checksum(folder / name) for name in names}})


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, which appears with its content complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def find(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the last checkpoint in a folder (or the folder itself) that is whole and of the folder's run.

    Returns:
        The checkpoint, or `None`; the reason why each later checkpoint does not count.
    """
    current = _read(folder / RUN).get("runs")
    reasons = []
    found = {int(end): path for path in folder.glob("checkpoint-*") if (end := path.name[11:]).isdigit()}
    for _, path in sorted(found.items(), reverse=True) or [(0, folder)]:
        name, step = [*runs_of(path).items()][-1]
        if current and step > current.get(name, -1):
            reasons.append(
                f"{path} is of another run ({name}), or incomplete"
                if found
                else f"the run in {path} has saved none yet"
            )
        elif damaged := _damaged(path):
            is_none = not found and not (path / LIST).exists()
            reasons.append(
                f"{path} {'has no checkpoint' if path.exists() else 'does not exist'}"
                if is_none
                else f"in {path}, {damaged[0]} is missing, damaged or incomplete (without {LIST}, this is not checked)"
            )
        else:
            return path, reasons
    return None, reasons


def _damaged(checkpoint: Path) -> list[str]:
    files = _read(checkpoint / LIST).get("files", {LIST: []})  # [] is the checksum of a file that does not exist
    wrong = [name for name, known in files.items() if checksum(checkpoint / name) != known]
    return wrong or [TRAINER_STATE_NAME][bool(_read(checkpoint / TRAINER_STATE_NAME)) :]


def runs_of(checkpoint: Path) -> dict[str, int]:
    """Return the runs that led to a checkpoint, each with its last step that counts."""
    return _read(checkpoint / LIST).get("runs") or {checkpoint.name: 0}


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if it cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def checksum(path: Path) -> list[int]:
    """Return size and CRC-32 of a file; empty if there is no file."""
    if not path.is_file():
        return []
    size = path.stat().st_size
    crc = 0
    with path.open("rb") as file:
        for start in range(0, size, CHUNK * (1 + size // MOST)):
            file.seek(start)
            crc = zlib.crc32(file.read(CHUNK), crc)
    return [size, crc]
