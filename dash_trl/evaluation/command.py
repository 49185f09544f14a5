"""Measure models: accuracy and pass@k on math or programming problems, with 95 % intervals over the problems.

    python -m dash_trl.evaluation toy                                      # the tiny model of `make demo`, offline

    python -m dash_trl.evaluation Qwen/Qwen2.5-0.5B-Instruct outputs/gsm8k \\
        --dataset_name openai/gsm8k --dataset_config main --num_samples 16 --k 1 8 16 --temperature 0.6 --use_vllm

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2   # or use servers: all models must have one shape
    python -m dash_trl.evaluation … --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001

Writes OUTPUT_DIR/<model>.jsonl (all samples), <model>.json (the figures) and pass_at_k.png, and replaces earlier files
of these names. For more see docs/howto/evaluate.md.
"""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from dash_trl.evaluation.checkpoint import TOY, Checkpoint
from dash_trl.evaluation.figures import comparison, differences, figures_of, remark, table
from dash_trl.evaluation.reward import Reward, scored_samples
from dash_trl.evaluation.samplers import BATCH_SIZE, MAX_COMPLETION_LENGTH, Draw, open_sampler
from dash_trl.evaluation.tasks import Task
from dash_trl.monitoring import plot_pass_at_k
from dash_trl.sampling import WEIGHT_DIR
from dash_trl.toy import toy_model

logger = logging.getLogger(__name__)
TOY_LENGTH = 64  # in tokens
SHOWN = 500  # characters of a prompt that the command prints


@dataclass
class EvaluationArguments(Task):
    """Flags of the command: those of `Task`, and flags for samples, pass@k and the folder of results."""

    num_samples: int = field(default=16, metadata={"help": "Number of completions of each problem."})
    k: list[int] | None = field(
        default=None,
        metadata={"help": "Values of k for pass@k; at most num_samples. Default: 1, 2, 4, … up to num_samples."},
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Sampling temperature. 0 decodes greedily, with one sample."}
    )
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Limit of a completion in tokens. Default: 2048; for toy problems 64."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of the chat template, as in training: '{\"enable_thinking\": false}'."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the samples and of the intervals."})
    use_vllm: bool = field(
        default=False, metadata={"help": "Start vLLM servers and sample from them; else sample by transformers."}
    )
    vllm_server_urls: list[str] | None = field(
        default=None, metadata={"help": "Sample from these servers (python -m dash_trl.serve); they get the weights."}
    )
    per_device_eval_batch_size: int = field(
        default=BATCH_SIZE, metadata={"help": "Rows that transformers samples side by side. The samples depend on it."}
    )
    output_dir: str = field(default="outputs/evaluation", metadata={"help": "Folder of the results."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(given := self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = dict(json.loads(given))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"chat_template_kwargs={given!r} is no JSON object ({error}): write it like "
                    "'{\"enable_thinking\": false}'."
                ) from error
        Draw(self.num_samples, self.temperature, 1, self.seed)  # raises now if the settings contradict each other
        self.k = sorted(set(self.k or (2**i for i in range(self.num_samples.bit_length()))))
        if not 1 <= self.k[0] <= self.k[-1] <= self.num_samples:
            raise ValueError(
                f"k={self.k} with num_samples={self.num_samples}: pass@k takes 1 <= k <= num_samples samples of each "
                f"problem. Add --num_samples {self.k[-1]}, or ask for other k."
            )

    def task(self, models: Sequence[str]) -> Self:
        """Returns these arguments with a dataset. With the toy model and no dataset, the problems are the toy's.

        Raises:
            ValueError: if no dataset is given and the toy model is not among the models.
        """
        if self.dataset_name is not None:
            return self
        if TOY not in models:
            raise ValueError(
                f"There is no dataset for {models[0]!r}: add --dataset_name, a hub name such as openai/gsm8k (with "
                f"--dataset_config main), a local path, or {TOY}."
            )
        return replace(self, dataset_name=TOY)

    @property
    def length(self) -> int:
        """The limit of tokens for a completion."""
        return self.max_completion_length or (TOY_LENGTH if self.is_toy else MAX_COMPLETION_LENGTH)


def command_parser(arguments: type, module: str, description: str | None) -> HfArgumentParser:
    """Returns the parser of a command, and sets up logging so that dash_trl's messages are printed.

    Args:
        arguments: the dataclass of the flags.
        module: the usage line shows the command `python -m <module>`.
        description: text of the help.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    return HfArgumentParser(
        arguments,
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


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
    arguments, ks = arguments.task(models), arguments.k or []
    folder = Path(arguments.output_dir)
    results: dict[str, dict[str, Any]] = {}
    compared: list[str] = []
    with arguments.reward() as reward:
        found = [Checkpoint(toy_model() if model == TOY else model) for model in models]
        jobs = dict(zip(labels(models), found, strict=True))
        problems = [arguments.problems(chat=one.tokenizer.chat_template is not None) for one in found]
        reward.check_columns(problems[0].column_names)
        # The user sees a wrong template here. In the figures it only looks like a weak model.
        print(f"first prompt: {str(problems[0][0]['prompt'])[:SHOWN]!r}")
        folder.mkdir(parents=True, exist_ok=True)
        for (label, checkpoint), rows in zip(jobs.items(), problems, strict=True):
            samples = _sample(label, checkpoint, rows, reward, arguments)
            figures = {"model": checkpoint.name, **figures_of(samples, ks, seed=arguments.seed)}
            if not results:
                first, first_label = samples, label
            else:
                difference = differences(samples, first, ks, seed=arguments.seed)
                figures["difference"] = {"from": first_label, **difference}
                compared.append(comparison(label, first_label, difference))
            results[label] = figures
            settings = json.dumps({**figures, "settings": asdict(arguments)}, indent=2)
            (folder / f"{label}.json").write_text(f"{settings}\n")
            if said := remark(label, figures):
                logger.warning(said)
    print("\n".join(["", table(results, ks), *([""] if compared else []), *compared]))
    print(f"\nsamples: {', '.join(str(folder / f'{label}.jsonl') for label in results)}")
    title = Path(str(arguments.dataset_name)).name
    print(f"plot:    {plot_pass_at_k(results, folder / 'pass_at_k.png', title=title)}")
    return results


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


def _sample(
    label: str, checkpoint: Checkpoint, problems: Dataset, reward: Reward, arguments: EvaluationArguments
) -> list[list[dict[str, Any]]]:
    """Samples and scores problems, and writes each problem to the file as soon as it is done.

    Returns:
        The samples of each problem.
    """
    folder = Path(arguments.output_dir)
    samples: dict[int, list[dict[str, Any]]] = {}
    with (
        open_sampler(
            checkpoint,
            use_vllm=arguments.use_vllm,
            server_urls=arguments.vllm_server_urls or (),
            batch_size=arguments.per_device_eval_batch_size,
            weight_dir=folder / WEIGHT_DIR,
        ) as sampler,
        (folder / f"{label}.jsonl").open("w", encoding="utf-8") as file,
    ):
        file.write(json.dumps({"settings": {"model": checkpoint.name, **asdict(arguments)}}) + "\n")
        done = scored_samples(
            sampler,
            problems,
            reward,
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            max_completion_length=arguments.length,
            seed=arguments.seed,
            chat_template_kwargs=arguments.chat_template_kwargs,
        )
        for index, row in tqdm(done, total=len(problems), desc=label, unit="problem"):
            file.write(json.dumps({"index": index, **row}, ensure_ascii=False) + "\n")
            samples[index] = row["samples"]
    return [samples[index] for index in range(len(problems))]
