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

import argparse
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import HfArgumentParser

from dash_trl.evaluation.checkpoint import EMBEDDED, Checkpoint
from dash_trl.evaluation.estimates import CORRECT_ABOVE
from dash_trl.evaluation.figures import figures_of, remarks, table
from dash_trl.evaluation.local import BATCH_SIZE
from dash_trl.evaluation.opening import open_sampler
from dash_trl.evaluation.records import Records
from dash_trl.evaluation.sampler import Draw
from dash_trl.evaluation.servers import check_shapes
from dash_trl.evaluation.tasks import EMBEDDED_SETS, Task, hash_of, model_of
from dash_trl.monitoring import plot_pass_at_k
from dash_trl.rewards import DEFAULT_NAME

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

PICTURE = "pass_at_k.png"
WEIGHT_DIR = "_vllm_weights"


@dataclass
class EvaluationArguments:
    """What is measured, how it is sampled, and where the results go."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A hub name or a local path: GSM8K, MATH-500, AIME, OlympiadBench, MBPP+, HumanEval+, or what has "
            f"their columns; or one of {', '.join(EMBEDDED_SETS)}, the default of the model 'embedded'."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The hub's name for a part of the data set."})
    dataset_test_split: str = field(default="test", metadata={"help": "Its split, or a part of it: 'test[:100]'."})
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "A name in dash_trl.data.PROMPT_TEMPLATES, or a text with {problem}; as in training."},
    )
    num_samples: int = field(default=16, metadata={"help": "Completions of each problem."})
    k: list[int] | None = field(
        default=None, metadata={"help": "Of pass@k; at most num_samples. Default: 1, 2, 4, … up to num_samples."}
    )
    temperature: float = field(default=1.0, metadata={"help": "0 decodes greedily, with one sample."})
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens of a completion. Default: 2048, or what an embedded problem needs."}
    )
    seed: int = field(default=0, metadata={"help": "Of the samples and of the intervals."})
    use_vllm: bool = field(default=False, metadata={"help": "Sample by vLLM in this process; else by transformers."})
    vllm_server_urls: list[str] | None = field(
        default=None, metadata={"help": "Sample from these servers (python -m dash_trl.serve); they get the weights."}
    )
    per_device_eval_batch_size: int = field(
        default=BATCH_SIZE, metadata={"help": "Rows that transformers samples side by side. The samples depend on it."}
    )
    reward_path: str | None = field(
        default=None, metadata={"help": "A Python file with a reward function that says what is correct (> 0.5)."}
    )
    reward_name: str = field(
        default=DEFAULT_NAME, metadata={"help": "What it is called there: a function, a class, or a RewardAgent."}
    )
    output_dir: str = field(default="outputs/evaluation", metadata={"help": "Where the results go."})

    def __post_init__(self) -> None:
        Draw(self.num_samples, self.temperature, self.max_completion_length or 1, self.seed)
        if self.k is None:
            self.k = [2**i for i in range(self.num_samples.bit_length())]
        self.k = sorted(set(self.k))
        wrong = [k for k in self.k if not 1 <= k <= self.num_samples]
        if wrong or not self.k:
            raise ValueError(
                f"k={wrong or self.k} with num_samples={self.num_samples}: pass@k takes 1 <= k <= num_samples samples "
                f"of each problem. Add --num_samples {max([*wrong, 1])}, or ask for smaller k."
            )
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ValueError(f"max_completion_length={self.max_completion_length}: a completion has at least 1 token.")
        if self.backend != "transformers" and self.per_device_eval_batch_size != BATCH_SIZE:
            raise ValueError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size} has no effect with vLLM: leave it out."
            )
        if self.reward_path is None and self.reward_name != DEFAULT_NAME:
            raise ValueError(f"reward_name={self.reward_name!r} has no effect without --reward_path, its file.")

    @property
    def backend(self) -> str:
        return "servers" if self.vllm_server_urls else "vllm" if self.use_vllm else "transformers"

    def task(self, models: Sequence[str]) -> Task:
        name = self.dataset_name
        if name is None:
            others = [model for model in models if model != EMBEDDED]
            if others:
                raise ValueError(
                    f"There is no dataset for {others[0]!r}: add --dataset_name, a hub name such as openai/gsm8k (with "
                    f"--dataset_config main), a local path, or one of {', '.join(EMBEDDED_SETS)}."
                )
            name = EMBEDDED
        copied = {one.name: getattr(self, one.name) for one in fields(Task) if one.name != "dataset_name"}
        return Task(name, **copied)

    def settings(self) -> dict[str, Any]:
        """What samples depend on, beside the model, the problems and the reward."""
        names = ("dataset_config", "dataset_test_split", "prompt_template", "num_samples", "temperature", "seed")
        local = {"batch_size": self.per_device_eval_batch_size} if self.backend == "transformers" else {}
        return {**{name: getattr(self, name) for name in names}, "sampler": self.backend, **local}


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
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    parser = HfArgumentParser(
        EvaluationArguments,
        prog="python -m dash_trl.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        length = arguments.max_completion_length or task.max_completion_length
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
    shared = {
        "dataset_name": task.dataset_name,
        **arguments.settings(),
        "max_completion_length": arguments.max_completion_length or task.max_completion_length,
        **task.reward_settings(),
    }
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
        open_sampler(
            job.checkpoint,
            backend="vllm" if arguments.use_vllm else "transformers",
            server_urls=arguments.vllm_server_urls or (),
            batch_size=arguments.per_device_eval_batch_size,
            weight_dir=folder / WEIGHT_DIR,
        ) as sampler,
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
