"""A teacher's solutions for supervised fine-tuning (SFT-M): sampled, and kept if the reward calls them correct.

    python examples/traces.py embedded                         # the embedded model after RL, on the embedded problems

    python -m dash_trl.serve Qwen/Qwen2.5-7B-Instruct --servers 2                         # and in another terminal:
    python examples/traces.py Qwen/Qwen2.5-7B-Instruct --dataset_name nlile/hendrycks-MATH-benchmark \\
        --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001 --output outputs/traces_qwen2.5-7b-instruct.jsonl

    accelerate launch examples/sft.py --completions outputs/traces.jsonl                              # learns from them

Writes OUTPUT, with the columns `prompt`, `completion` and those of the reward, and beside it all that was sampled, in
OUTPUT's name with .samples.jsonl: an interrupted run goes on from there. The problems, prompts and rewards are those of
`train_math.py` and, where there are tests, of `train_code.py`.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from datasets import ReadInstruction, concatenate_datasets
from tqdm.auto import tqdm
from train_code import EMBEDDED, task_of
from train_math import WITHOUT_EFFECT, MathArguments, Mathematics
from train_math import main as train
from transformers import HfArgumentParser

from dash_trl.embedded import cached_model
from dash_trl.evaluation import CORRECT_ABOVE, Checkpoint, Records, Reward, SampledCompletion, hash_of, open_sampler

FATES = ("kept", "wrong", "cut off", "failed")
PAPER_LENGTH = 2048


@dataclass
class TraceArguments(MathArguments):
    """The dataset, the prompt and the reward as of `train_math.py`; how the teacher is sampled."""

    output: str = field(default="outputs/traces.jsonl", metadata={"help": "The file of the traces that are kept."})
    temperature: float = field(default=0.7, metadata={"help": "The paper's."})
    num_samples: int = field(default=1, metadata={"help": "Completions of each problem; all correct ones are kept."})
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens of a completion. Default: 2048, or what an embedded problem needs."}
    )
    seed: int = 0
    use_vllm: bool = field(default=False, metadata={"help": "Sample by vLLM in this process; else by transformers."})
    vllm_server_urls: list[str] | None = field(
        default=None, metadata={"help": "Sample from these servers (python -m dash_trl.serve)."}
    )
    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Rows that transformers samples side by side. The samples depend on it."}
    )


READ = {"dataset_name", "dataset_config", "dataset_train_split", "prompt_template", "reward_path", "reward_name"}
READ |= {one.name for one in fields(TraceArguments)} - {one.name for one in fields(MathArguments)}


def main(argv: Sequence[str]) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    parser = HfArgumentParser(
        TraceArguments, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("teacher", metavar="TEACHER", help="a directory or hub name; or 'embedded'")
    script, rest = parser.parse_args_into_dataclasses(argv)
    if rest.teacher == "embedded" and script.dataset_name is None:
        script = replace(script, dataset_name="embedded")
    check_arguments(rest.teacher, script)
    output = Path(script.output)
    samples = output.with_suffix(".samples.jsonl")
    if output.exists() and not samples.exists():
        raise ValueError(
            f"{output} exists, and {samples}, from which it would be made, does not: choose another --output."
        )
    task = task_of(script)
    with Reward(task.reward()) as reward:
        teacher = Checkpoint(embedded_teacher(task) if rest.teacher == "embedded" else rest.teacher)
        problems = load_problems(task, script, chat=teacher.tokenizer.chat_template is not None)
        reward.check_columns(problems.column_names)
        length = script.max_completion_length or (
            task.embedded_defaults()["max_completion_length"] if script.dataset_name in EMBEDDED else PAPER_LENGTH
        )
        with Records(samples, settings(rest.teacher, teacher, script, length, hash_of(problems))) as records:
            if len(records.rows) < len(problems):
                sample(teacher, problems, reward, script, length, records)
            rows = records.rows
            write(output, problems, rows)
    count = Counter(fate(one) for row in rows.values() for one in row["samples"])
    print(f"{count.total()} traces of {len(problems)} problems: " + ", ".join(f"{count[one]} {one}" for one in FATES))
    print(f"traces:  {output}\nsamples: {samples}")


def check_arguments(teacher: str, script: TraceArguments) -> None:
    """Refuse what would be ignored, and a teacher without problems."""
    given = {one.name: getattr(script, one.name) for one in fields(script) if getattr(script, one.name) != one.default}
    for name in given.keys() - READ:
        reason = WITHOUT_EFFECT.get(name, "traces are of the training split, and nothing is trained")
        raise ValueError(f"{name}={given[name]!r} has no effect: {reason}. Remove it.")
    if script.dataset_name is None:
        raise ValueError(
            f"There are no problems for {teacher!r}: add --dataset_name, a hub name such as openai/gsm8k (with "
            f"--dataset_config main), a local path, or one of {', '.join(EMBEDDED)}."
        )
    if script.dataset_name in EMBEDDED:
        for name in sorted(given.keys() & {"dataset_config", "prompt_template"}):
            raise ValueError(
                f"{name}={given[name]!r} has no effect with dataset_name={script.dataset_name!r}: remove it."
            )
    if script.reward_path is None and "reward_name" in given:
        raise ValueError(f"reward_name={script.reward_name!r} has no effect without --reward_path, its file.")
    if (script.use_vllm or script.vllm_server_urls) and "per_device_eval_batch_size" in given:
        raise ValueError(
            f"per_device_eval_batch_size={script.per_device_eval_batch_size} has no effect with vLLM: leave it out."
        )


def embedded_teacher(task: Mathematics) -> str:
    """The embedded model after the default run of `train_math.py` (or `train_code.py`), made once and cached."""
    settings = {**task.embedded_defaults(), "model": Path(task.embedded_model(progress=True)).name}
    del settings["output_dir"]

    def make(folder: Path) -> None:
        with redirect_stdout(io.StringIO()) as said:  # it names files that will have been moved
            train(["--output_dir", str(folder)], make_task=type(task))
        print("The teacher:", *(line for line in said.getvalue().splitlines() if "accuracy" in line), sep="\n")

    return cached_model("teacher", settings, make)


def load_problems(task: Mathematics, script: TraceArguments, chat: bool) -> Any:
    if script.dataset_name not in EMBEDDED:
        return task.load(script.dataset_train_split, chat)
    if not chat:
        raise ValueError(
            f"dataset_name={script.dataset_name!r} has conversations, but the teacher's tokenizer has no chat "
            "template: it is for models that were trained on these problems."
        )
    problems = task.embedded_problems("train")
    try:
        parts = ReadInstruction.from_spec(script.dataset_train_split).to_absolute({"train": len(problems)})
    except ValueError as error:
        raise ValueError(
            f"{script.dataset_name!r} has no split {script.dataset_train_split!r}: use 'train', or a part of it, such "
            "as 'train[:100]'."
        ) from error
    return concatenate_datasets([problems.select(range(part.from_ or 0, part.to)) for part in parts])


def settings(
    teacher: str, checkpoint: Checkpoint, script: TraceArguments, length: int, problems: str
) -> dict[str, Any]:
    """What the samples and their rewards depend on."""
    names = READ - {"output", "use_vllm", "vllm_server_urls", "per_device_eval_batch_size", "max_completion_length"}
    sampler = "servers" if script.vllm_server_urls else "vllm" if script.use_vllm else "transformers"
    local = {"per_device_eval_batch_size": script.per_device_eval_batch_size} if sampler == "transformers" else {}
    return {
        "teacher": teacher,
        "weights": checkpoint.fingerprint,
        **{name: getattr(script, name) for name in sorted(names)},
        "max_completion_length": length,
        "sampler": sampler,
        **local,
        "problems": problems,
    }


def sample(
    teacher: Checkpoint, problems: Any, reward: Reward, script: TraceArguments, length: int, records: Records
) -> None:
    """Samples and scores what the file of samples lacks."""
    count = Counter(fate(one) for row in records.rows.values() for one in row["samples"])
    with (
        open_sampler(
            teacher,
            backend="vllm" if script.use_vllm else "transformers",
            server_urls=script.vllm_server_urls or (),
            batch_size=script.per_device_eval_batch_size,
        ) as sampler,
        tqdm(total=len(problems), initial=len(records.rows), desc="traces", unit="problem") as bar,
    ):
        for index, drawn in sampler.sample(
            problems["prompt"],
            num_samples=script.num_samples,
            temperature=script.temperature,
            max_new_tokens=length,
            seed=script.seed,
            done=set(records.rows),
        ):
            scores = reward.scores(problems[index], drawn)
            row = [scored(one, score) for one, score in zip(drawn, scores, strict=True)]
            records.add(index, {"samples": row})
            count.update(map(fate, row))
            bar.update()
            bar.set_postfix({one: count[one] for one in FATES if count[one]}, refresh=False)
    records.sort()


def scored(one: SampledCompletion, score: float | None) -> dict[str, Any]:
    return {"text": one.text, "tokens": len(one.token_ids), "truncated": one.truncated, "reward": score}


def fate(one: Mapping[str, Any]) -> str:
    """What becomes of a sample. One that was cut off may be correct, but where it ends nobody should learn to end."""
    if one["reward"] is None:
        return "failed"
    if one["reward"] <= CORRECT_ABOVE:
        return "wrong"
    return "cut off" if one["truncated"] else "kept"


def write(output: Path, problems: Any, rows: Mapping[int, Mapping[str, Any]]) -> None:
    """The kept traces, in one step.

    Raises:
        ValueError: there is none, or there is a file of others.
    """
    lines = []
    for index, problem in enumerate(problems):
        for text in (one["text"] for one in rows[index]["samples"] if fate(one) == "kept"):
            completion = text if isinstance(problem["prompt"], str) else [{"role": "assistant", "content": text}]
            line = {"prompt": problem["prompt"], "completion": completion, **problem}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    if not lines:
        count = Counter(fate(one) for row in rows.values() for one in row["samples"])
        raise ValueError(
            f"No trace is kept: of {count.total()} there are "
            + ", ".join(f"{count[one]} {one}" for one in FATES[1:])
            + ". Look at them beside the output, in *.samples.jsonl. A teacher that knows the problems, a prompt that "
            "asks for the answer's form, or a larger --max_completion_length may help."
        )
    content = "".join(lines)
    if output.exists() and output.read_text(encoding="utf-8") != content:
        raise ValueError(f"{output} has other rows than these traces: choose another --output, or move it away.")
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, output)


if __name__ == "__main__":
    main(sys.argv[1:])
