"""What a model is measured on, and who samples: the flags of every command that measures models."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from dash_trl.evaluation.checkpoint import EMBEDDED, Checkpoint
from dash_trl.evaluation.local import BATCH_SIZE
from dash_trl.evaluation.opening import open_sampler
from dash_trl.evaluation.sampler import Draw, Sampler
from dash_trl.evaluation.tasks import EMBEDDED_SETS, Task
from dash_trl.rewards import DEFAULT_NAME

WEIGHT_DIR = "_vllm_weights"


@dataclass
class TaskArguments:
    """The problems, the reward, and how completions are sampled."""

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

    def __post_init__(self) -> None:
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ValueError(f"max_completion_length={self.max_completion_length}: a completion has at least 1 token.")
        Draw(1, self.temperature, 1, self.seed)
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

    def length(self, task: Task) -> int:
        return self.max_completion_length or task.max_completion_length

    def settings(self, task: Task) -> dict[str, Any]:
        """What samples depend on, beside the model, the problems and how many there are of each."""
        names = ("dataset_config", "dataset_test_split", "prompt_template", "temperature", "seed")
        return {
            "dataset_name": task.dataset_name,
            **{name: getattr(self, name) for name in names},
            "sampler": self.backend,
            **({"batch_size": self.per_device_eval_batch_size} if self.backend == "transformers" else {}),
            "max_completion_length": self.length(task),
            **task.reward_settings(),
        }

    def open_sampler(self, checkpoint: Checkpoint, folder: Path) -> Sampler:
        """
        Args:
            folder: of the results; servers that get weights find them in it.
        """
        return open_sampler(
            checkpoint,
            backend="vllm" if self.use_vllm else "transformers",
            server_urls=self.vllm_server_urls or (),
            batch_size=self.per_device_eval_batch_size,
            weight_dir=folder / WEIGHT_DIR,
        )


def command_parser(arguments: type, module: str, description: str | None) -> HfArgumentParser:
    """The parser of `python -m <module>`, whose log is printed from now on."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    return HfArgumentParser(
        arguments,
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
