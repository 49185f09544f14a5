"""What makes a checkpoint whole, and which run it is of: a JSON file that is written last.

    output_dir/_run.json                     {"runs": {"A": 4, "B": null}}       run B goes on from step 4 of run A
    output_dir/checkpoint-6/_files.json      {"runs": {"A": 4, "B": 6}, "stride": 1, "files": {name: [size, CRC-32]}}

Each `train()` is a run with a name of its own. A checkpoint is of the run in its folder if the folder's file names the
checkpoint's last run, with at least as many steps. Without "files", a checkpoint is incomplete.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

RUN, LIST = "_run.json", "_files.json"  # `push_to_hub` leaves out names that begin with an underscore
CHUNK = 1 << 20
MOST = 4 << 30  # about as many bytes of a checkpoint are read for its checksums; of a larger one, each k-th MiB

Runs = dict[str, int | None]  # name of a run → the number of its last step that counts; `None`: all do


def new_run(checkpoint: str | None) -> tuple[Runs, str]:
    """Return the runs that lead to a new one, and the name of the new one.

    Args:
        checkpoint: folder of the checkpoint with which it begins.
    """
    return _runs(Path(checkpoint)) if checkpoint else {}, f"{datetime.now():%F %T} {secrets.token_hex(2)}"


def begin(folder: Path, runs: Runs) -> None:
    """Empty the folder of a checkpoint that is to be saved, and mark it as incomplete."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder / LIST, {"runs": runs})


def finish(folder: Path, runs: Runs) -> None:
    """List the files of a checkpoint that has been saved."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LIST]
    stride = 1 + sum(path.stat().st_size for path in paths) // MOST
    files = {str(path.relative_to(folder)): _checksum(path, stride) for path in paths}
    write(folder / LIST, {"runs": runs, "stride": stride, "files": files})


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, which appears with its content complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    os.replace(part, path)


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if it cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _runs(checkpoint: Path) -> Runs:
    """Return the runs of a checkpoint. One without a list is a run of its own."""
    return _read(checkpoint / LIST).get("runs") or {checkpoint.name: None}


def _checksum(path: Path, stride: int) -> list[int]:
    """Return size and checksum of a file, of which each `stride`-th MiB is read."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for start in range(0, size, stride * CHUNK):
            file.seek(start)
            crc = zlib.crc32(file.read(CHUNK), crc)
    return [size, crc]


def damage(checkpoint: Path) -> str | None:
    """Return the first file of a checkpoint that is missing or damaged, with what is wrong; `None` if it is whole.

    A checkpoint of another trainer has no list: only its `trainer_state.json` is read.
    """
    content = _read(checkpoint / LIST)
    known = content.get("files", {})
    if (checkpoint / LIST).exists() and not known:
        return f"its saving was not completed, since {LIST} lists no files"
    for name, sums in known.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if _checksum(checkpoint / name, content["stride"]) != sums:
            return f"{name} is damaged"
    return None if _read(checkpoint / TRAINER_STATE_NAME) else f"{TRAINER_STATE_NAME} is missing or damaged"


def checkpoints(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the checkpoints in a folder, the latest first, each with the reason why a run cannot go on from it."""
    current = _read(folder / RUN).get("runs")
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda one: int(one.name.rpartition("-")[2]), reverse=True):
        name, step = list(_runs(path).items())[-1]
        if current is None or name in current and (current[name] is None or step is None or step <= current[name]):
            yield path, damage(path)
        else:
            yield path, f"it is of another run ({name})"
