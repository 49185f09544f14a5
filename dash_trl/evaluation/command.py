"""Measure models: accuracy and pass@k on math or programming problems, with 95 % intervals over the problems.

    python -m dash_trl.evaluation toy                                      # the tiny model of `make demo`, offline

    python -m dash_trl.evaluation Qwen/Qwen2.5-0.5B-Instruct outputs/gsm8k \\
        --dataset_name openai/gsm8k --dataset_config main --num_samples 16 --k 1 8 16 --temperature 0.6 --use_vllm

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2   # or use servers: all models must have one shape
    python -m dash_trl.evaluation … --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001

Writes OUTPUT_DIR/<model>.jsonl (all samples), <model>.json (the figures) and pass_at_k.png. To continue an interrupted
command, run it again: it samples only what is missing. For more see docs/howto/evaluate.md.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from dash_trl.evaluation.checkpoint import Checkpoint
from dash_trl.evaluation.figures import comparison, differences, figures_of, remarks, table
from dash_trl.evaluation.records import Records
from dash_trl.evaluation.reward import Reward, scored_samples
from dash_trl.evaluation.sampler import Draw
from dash_trl.evaluation.samplers import check_shapes
from dash_trl.evaluation.tasks import Task, TaskArguments, command_parser, hash_of, model_of
from dash_trl.monitoring import plot_pass_at_k

logger = logging.getLogger(__name__)
SHOWN = 500  # characters of a prompt that the command prints


@dataclass
class EvaluationArguments(TaskArguments):
    """Flags of the command: those of `TaskArguments`, and flags for samples, pass@k and the folder of results."""

    num_samples: int = field(default=16, metadata={"help": "Number of completions of each problem."})
    k: list[int] | None = field(
        default=None,
        metadata={"help": "Values of k for pass@k; at most num_samples. Default: 1, 2, 4, … up to num_samples."},
    )
    output_dir: str = field(default="outputs/evaluation", metadata={"help": "Folder of the results."})

    def __post_init__(self) -> None:
        super().__post_init__()
        Draw(self.num_samples, self.temperature, 1, self.seed)  # raises now if the settings contradict each other
        self.k = sorted(set(self.k or (2**i for i in range(self.num_samples.bit_length()))))
        if not 1 <= self.k[0] <= self.k[-1] <= self.num_samples:
            raise ValueError(
                f"k={self.k} with num_samples={self.num_samples}: pass@k takes 1 <= k <= num_samples samples of each "
                f"problem. Add --num_samples {self.k[-1]}, or ask for other k."
            )


@dataclass(frozen=True)
class Job:
    """What is needed to measure one model: the problems with prompts for its tokenizer, and the file of its samples."""

    label: str
    checkpoint: Checkpoint
    problems: Dataset
    records: Records

    @property
    def left(self) -> bool:
        """Whether samples are missing in the file."""
        return len(self.records.rows) < len(self.problems)


def main(argv: Sequence[str]) -> None:
    parser = command_parser(EvaluationArguments, "dash_trl.evaluation", __doc__)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a directory (of a LoRA adapter, too), a hub name, or 'toy'"
    )
    arguments, rest = parser.parse_args_into_dataclasses(argv)
    evaluate_models(rest.models, arguments)


def evaluate_models(models: Sequence[str], arguments: EvaluationArguments) -> dict[str, dict[str, Any]]:
    """Measures models; prints, writes and plots their figures, and returns them by label.

    Models, problems, reward function and files are checked before any weight is loaded.

    Args:
        models: directories, hub names, or "toy".
        arguments: the arguments of the command.
    Returns:
        Label of a model → its figures; see `figures_of`.
    Raises:
        ValueError: if a model, dataset, reward function or server does not exist or cannot be used.
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
        # The user sees a wrong template here. In the figures it only looks like a weak model.
        print(f"first prompt: {shown(jobs[0].problems[0]['prompt'])}")
        results, compared = {}, []
        first: list[Any] | None = None
        for job in jobs:
            if job.left:
                _sample(job, reward, arguments, arguments.length(task), folder)
            rows = [job.records.rows[index]["samples"] for index in range(len(job.problems))]
            figures = {"model": job.checkpoint.name, **figures_of(rows, ks, seed=arguments.seed)}
            if first is None:
                first = rows
            else:
                found = differences(rows, first, ks, seed=arguments.seed)
                figures["difference"] = {"from": jobs[0].label, **found}
                compared.append(comparison(job.label, jobs[0].label, found))
            results[job.label] = figures
            (folder / f"{job.label}.json").write_text(
                json.dumps({**figures, "settings": job.records.settings}, indent=2) + "\n"
            )
            for remark in remarks(job.label, figures):
                logger.warning(remark)
    print("\n".join(["", table(results, ks), *([""] if compared else []), *compared]))
    print(f"\nsamples: {', '.join(str(job.records.path) for job in jobs)}")
    print(f"plot:    {plot_pass_at_k(results, folder / 'pass_at_k.png', title=Path(str(task.dataset_name)).name)}")
    return results


def _jobs(
    models: Sequence[str], task: Task, arguments: EvaluationArguments, folder: Path, stack: ExitStack
) -> Iterator[Job]:
    """Yields a job for each model, after checking the model and opening the file of its samples."""
    shared = {**arguments.settings(task), "num_samples": arguments.num_samples}
    checkpoints = [Checkpoint(model_of(model)) for model in models]
    for model, label, checkpoint in zip(models, labels(models), checkpoints, strict=True):
        problems = task.problems(chat=checkpoint.tokenizer.chat_template is not None)
        settings = {
            "model": os.path.normpath(model),
            "weights": checkpoint.fingerprint,
            **shared,
            "problems": hash_of(problems),
        }
        yield Job(label, checkpoint, problems, stack.enter_context(Records(folder / f"{label}.jsonl", settings)))


def labels(models: Sequence[str]) -> list[str]:
    """Returns short names of models for files and plots.

    A name consists of the last parts of the model's path, as many parts as are needed to make all names different.

    Args:
        models: directories or hub names.
    Raises:
        ValueError: if a model is named twice.
    """
    parts = [Path(os.path.abspath(model) if os.path.isdir(model) else model).parts for model in models]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["-".join(one[-length:]).strip("/.-~") for one in parts]
        if len(set(short)) == len(short):
            return short
    raise ValueError(f"The models {list(models)} are the same: name each once.")


def shown(prompt: str | list[dict[str, Any]]) -> str:
    """Returns a prompt, or the last message of a conversation, as one line: its first `SHOWN` characters."""
    return repr((prompt if isinstance(prompt, str) else prompt[-1]["content"])[:SHOWN])


def _sample(job: Job, reward: Reward, arguments: EvaluationArguments, length: int, folder: Path) -> None:
    """Samples and scores the problems that are missing in the file of a model's samples."""
    done = set(job.records.rows)
    with (
        arguments.open_sampler(job.checkpoint, folder) as sampler,
        tqdm(total=len(job.problems), initial=len(done), desc=job.label, unit="problem") as bar,
    ):
        for index, row in scored_samples(
            sampler,
            job.problems,
            reward,
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            max_completion_length=length,
            seed=arguments.seed,
            done=done,
            chat_template_kwargs=arguments.chat_template_kwargs,
        ):
            job.records.add(index, row)
            bar.update()
    job.records.sort()
