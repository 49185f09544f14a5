"""Measure models: accuracy and pass@k on math or programming problems, with 95 % intervals over the problems.

    python -m dash_trl.evaluation embedded                                      # the tiny model of `make demo`, offline

    python -m dash_trl.evaluation outputs/gsm8k Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --num_samples 16 --k 1 8 16 --temperature 0.6 --use_vllm

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2              # from servers, for models of one shape
    python -m dash_trl.evaluation … --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001

Writes OUTPUT_DIR/<model>.jsonl (all samples), <model>.json (the figures) and pass_at_k.png. The same command again goes
on where an interrupted one was, and samples nothing that is there. docs/evaluation.md has the rest.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from dash_trl.evaluation.arguments import TaskArguments, command_parser
from dash_trl.evaluation.checkpoint import Checkpoint
from dash_trl.evaluation.estimates import CORRECT_ABOVE
from dash_trl.evaluation.figures import figures_of, remarks, table
from dash_trl.evaluation.records import Records
from dash_trl.evaluation.sampler import Draw
from dash_trl.evaluation.servers import check_shapes
from dash_trl.evaluation.tasks import Task, hash_of, model_of
from dash_trl.monitoring import plot_pass_at_k

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

PICTURE = "pass_at_k.png"


@dataclass
class EvaluationArguments(TaskArguments):
    """How often each problem is tried, and where the results go."""

    num_samples: int = field(default=16, metadata={"help": "Completions of each problem."})
    k: list[int] | None = field(
        default=None, metadata={"help": "Of pass@k; at most num_samples. Default: 1, 2, 4, … up to num_samples."}
    )
    output_dir: str = field(default="outputs/evaluation", metadata={"help": "Where the results go."})

    def __post_init__(self) -> None:
        super().__post_init__()
        Draw(self.num_samples, self.temperature, 1, self.seed)
        if self.k is None:
            self.k = [2**i for i in range(self.num_samples.bit_length())]
        self.k = sorted(set(self.k))
        wrong = [k for k in self.k if not 1 <= k <= self.num_samples]
        if wrong or not self.k:
            raise ValueError(
                f"k={wrong or self.k} with num_samples={self.num_samples}: pass@k takes 1 <= k <= num_samples samples "
                f"of each problem. Add --num_samples {max([*wrong, 1])}, or ask for smaller k."
            )


@dataclass(frozen=True)
class Job:
    """One model: its problems, in the form that its tokenizer takes, and its files."""

    label: str
    checkpoint: Checkpoint
    problems: Dataset
    records: Records
    figures: Path

    @property
    def left(self) -> bool:
        return len(self.records.rows) < len(self.problems)


def main(argv: Sequence[str]) -> None:
    parser = command_parser(EvaluationArguments, "dash_trl.evaluation", __doc__)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a directory (of a LoRA adapter, too), a hub name, or 'embedded'"
    )
    arguments, rest = parser.parse_args_into_dataclasses(argv)
    evaluate_models(rest.models, arguments)


def evaluate_models(models: Sequence[str], arguments: EvaluationArguments) -> dict[str, dict[str, Any]]:
    """Each model's figures by its label, which are also printed, written and drawn.

    What can be wrong with models, problems, reward and files is said before any weight is loaded.
    """
    task = arguments.task(models)
    folder = Path(arguments.output_dir)
    ks = arguments.k or []
    with ExitStack() as stack:
        reward = stack.enter_context(task.reward())
        jobs = list(_jobs(models, task, arguments, folder, stack))
        for job in jobs:
            reward.check_columns(job.problems.column_names)
        if arguments.vllm_server_urls and any(job.left for job in jobs):
            check_shapes([job.checkpoint for job in jobs if job.left], arguments.vllm_server_urls)
        length = arguments.length(task)
        results = {}
        for job in jobs:
            if job.left:
                _sample(job, reward, arguments, length, folder)
            rows = [job.records.rows[index]["samples"] for index in range(len(job.problems))]
            results[job.label] = {"model": job.checkpoint.name, **figures_of(rows, ks, seed=arguments.seed)}
            _write(job, results[job.label])
            for remark in remarks(job.label, results[job.label]):
                logger.warning(remark)
    print(f"\n{table(results, ks)}\n\nsamples: {', '.join(str(job.records.path) for job in jobs)}")
    print(f"plot:    {plot_pass_at_k(results, folder / PICTURE, title=Path(task.dataset_name).name)}")
    return results


def _jobs(
    models: Sequence[str], task: Task, arguments: EvaluationArguments, folder: Path, stack: ExitStack
) -> Iterator[Job]:
    """Opens the files of all models, and says of each what is wrong with it."""
    shared = {**arguments.settings(task), "num_samples": arguments.num_samples}
    problems: dict[bool, Dataset] = {}
    checkpoints = [Checkpoint(model_of(model, task)) for model in models]
    for model, label, checkpoint in zip(models, labels(models), checkpoints, strict=True):
        chat = checkpoint.tokenizer.chat_template is not None
        if chat not in problems:
            problems[chat] = task.problems(chat)
        settings = {
            "model": os.path.normpath(model),
            "weights": checkpoint.fingerprint,
            **shared,
            "problems": hash_of(problems[chat]),
        }
        records = stack.enter_context(Records(folder / f"{label}.jsonl", settings))
        figures = folder / f"{label}.json"
        _check_figures(figures, settings)
        yield Job(label, checkpoint, problems[chat], records, figures)


def labels(models: Sequence[str]) -> list[str]:
    """Short names for files and plots: the last part of each, with as many before it as tell them apart."""
    full = [os.path.abspath(model) if os.path.isdir(model) else model for model in models]
    parts = [Path(one).parts for one in full]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["-".join(one[-length:]).strip("/.-~") for one in parts]
        if len(set(short)) == len(short):
            return short
    raise ValueError(f"The models {list(models)} are the same: name each once.")


def _sample(job: Job, reward: Any, arguments: EvaluationArguments, length: int, folder: Path) -> None:
    """Samples and scores what the file of a model lacks."""
    done = job.records.rows
    correct = [sample["reward"] for row in done.values() for sample in row["samples"]]
    correct = [one > CORRECT_ABOVE for one in correct if one is not None]
    with (
        arguments.open_sampler(job.checkpoint, folder) as sampler,
        tqdm(total=len(job.problems), initial=len(done), desc=job.label, unit="problem") as bar,
    ):
        for index, samples in sampler.sample(
            job.problems["prompt"],
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            max_new_tokens=length,
            seed=arguments.seed,
            done=set(done),
        ):
            problem = job.problems[index]
            scores = reward.scores(problem, samples)
            row = {
                "prompt": problem["prompt"],
                **{name: problem[name] for name in ("answer",) if name in problem},
                "samples": [
                    {"text": one.text, "tokens": len(one.token_ids), "truncated": one.truncated, "reward": score}
                    for one, score in zip(samples, scores, strict=True)
                ],
            }
            job.records.add(index, row)
            correct += [score > CORRECT_ABOVE for score in scores if score is not None]
            bar.update()
            bar.set_postfix(accuracy=f"{sum(correct) / len(correct):.3f}" if correct else "–")
    job.records.sort()


def _check_figures(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuses to write over figures of other settings, or over what are none."""
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())["settings"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no figures of an evaluation: choose another --output_dir, or move it.") from error
    different = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
    if different:
        raise ValueError(
            f"{path} has figures of other settings: {', '.join(different)} differ. Choose another --output_dir, or "
            "move it away; nothing is overwritten."
        )


def _write(job: Job, figures: Mapping[str, Any]) -> None:
    text = json.dumps({**figures, "settings": job.records.settings}, indent=2) + "\n"
    partial = job.figures.with_name(f".{job.figures.name}.partial")
    partial.write_text(text)
    os.replace(partial, job.figures)
