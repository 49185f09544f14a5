"""Samples a teacher's solutions for supervised fine-tuning (SFT-M) and keeps the correct ones.

    python examples/traces.py toy                         # the toy model after RL, on the toy problems

    dash_trl serve Qwen/Qwen2.5-7B-Instruct --servers 2                         # and in another terminal:
    python examples/traces.py Qwen/Qwen2.5-7B-Instruct --dataset_name nlile/hendrycks-MATH-benchmark \\
        --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001 --output outputs/traces_qwen2.5-7b-instruct.jsonl

    dash_trl sft --completions outputs/traces.jsonl                                                   # learns from them

This is `dash_trl eval TEACHER` on the training split, with the same flags. Correct samples that end
within --max_completion_length are written to the file OUTPUT, with the columns `prompt` and `completion`. All samples
and the teacher's accuracy are in OUTPUT_DIR.
"""

import io
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import train_math

from dash_trl.evaluation import CORRECT_ABOVE, EvaluationArguments, command_parser, evaluate_models
from dash_trl.toy import cached_model, toy_defaults, toy_model

FATES = ("kept", "wrong", "cut off", "failed")


@dataclass
class TraceArguments(EvaluationArguments):
    """Arguments of the command: how the teacher is sampled, and where the traces are written."""

    output: str = field(default="outputs/traces.jsonl", metadata={"help": "The file of the traces that are kept."})
    output_dir: str = field(default="", metadata={"help": "Folder of all samples. Default: OUTPUT without suffix."})
    dataset_test_split: str = field(default="train", metadata={"help": "Split whose problems are sampled."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature; 0.7 is the paper's."})
    num_samples: int = field(default=1, metadata={"help": "Completions of each problem; all correct ones are kept."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_dir = self.output_dir or str(Path(self.output).with_suffix(""))


def main(argv: Sequence[str]) -> None:
    parser = command_parser(TraceArguments, "examples/traces.py", __doc__)
    parser.add_argument("teacher", metavar="TEACHER", help="a directory or hub name; or 'toy'")
    script, rest = parser.parse_args_into_dataclasses(argv)
    task = script.task([rest.teacher])
    (label,) = evaluate_models([toy_teacher() if rest.teacher == "toy" else rest.teacher], task)
    _, *lines = Path(script.output_dir, f"{label}.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["index"])
    count = Counter(fate(one) for row in rows for one in row["samples"])
    summary = ", ".join(f"{count[one]} {one}" for one in FATES)
    if not count["kept"]:
        raise ValueError(
            f"No trace is kept: of {count.total()} there are {summary}. Look at them in {script.output_dir}. A teacher "
            "that knows the problems, a prompt that asks for the answer's form, or a larger --max_completion_length "
            "may help."
        )
    with open(script.output, "w", encoding="utf-8") as file:
        for row in rows:
            for text in (one["text"] for one in row["samples"] if fate(one) == "kept"):
                completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
                file.write(json.dumps({"prompt": row["prompt"], "completion": completion}, ensure_ascii=False) + "\n")
    print(f"{count.total()} traces of {len(rows)} problems: {summary}\ntraces:  {script.output}")


def fate(one: Mapping[str, Any]) -> str:
    """Return the one of `FATES` that applies to a sample.

    A sample that was cut off is dropped even if it is correct, since a model should not learn to stop there.
    """
    if one["reward"] is None:
        return "failed"
    if one["reward"] <= CORRECT_ABOVE:
        return "wrong"
    return "cut off" if one["truncated"] else "kept"


def toy_teacher() -> str:
    """Return the directory of the toy model after the default run of `train_math.py`, made once and cached."""
    settings = {**toy_defaults(), "model": Path(toy_model()).name}
    del settings["output_dir"]

    def make(folder: Path) -> None:
        with redirect_stdout(io.StringIO()):  # its output names files that are moved afterwards
            train_math.main(["--output_dir", str(folder)])

    return cached_model("teacher", settings, make)


if __name__ == "__main__":
    main(sys.argv[1:])
