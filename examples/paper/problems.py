"""Writes the problems of the toy evaluations "out" and "code", and the base model of "code", as files."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from toy_programs import PROGRAM_LESSONS, PROGRAM_WARM_UP, program_dataset

from dash_trl.toy import arithmetic_dataset, toy_model


def write_problems(folder: Path) -> None:
    """Writes the toy problems with an added `=` (new to all models), the programs, and a link to the model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = arithmetic_dataset("test")
    prompts = [[{**message, "content": f"{message['content']}="}] for (message,) in rows["prompt"]]
    rows.remove_columns("prompt").add_column("prompt", prompts).to_json(folder / "toy_shifted.jsonl")
    program_dataset("test").to_json(folder / "toy_code.jsonl")
    model = folder / "base_code"
    model.unlink(missing_ok=True)
    model.symlink_to(toy_model(settings=PROGRAM_WARM_UP, lessons=PROGRAM_LESSONS))
