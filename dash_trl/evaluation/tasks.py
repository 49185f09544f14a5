"""The flags that all commands for measuring models share: the problems, the reward function, and the sampler.

The columns of the dataset determine the reward function::

    name of a dataset ──► columns ──► answers: MathAccuracyReward
                                  └──► tests: CodeReward in its sandbox
    toy ──► the problems of the tiny model of `dash_trl.toy`
"""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from datasets import Dataset
from transformers import HfArgumentParser

from dash_trl.data import has_tests, load_code_dataset, load_math_dataset, select_split
from dash_trl.evaluation.checkpoint import TOY, Checkpoint
from dash_trl.evaluation.reward import Reward
from dash_trl.evaluation.samplers import BATCH_SIZE, MAX_COMPLETION_LENGTH, Sampler, open_sampler
from dash_trl.rewards import DEFAULT_NAME, CodeReward, MathAccuracyReward, load_reward
from dash_trl.sampling import WEIGHT_DIR
from dash_trl.toy import arithmetic_dataset, arithmetic_reward

TOY_LENGTH = 64  # in tokens


@dataclass
class Task:
    """The problems, and the reward function that decides which completions are correct: that of training, or your own.

    Raises:
        ValueError: from its methods, if a dataset, split or reward function does not exist or does not fit.
    """

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A hub name or a local path: GSM8K, MATH-500, AIME, MBPP+, or what has "
            f"their columns; or {TOY}, the default of the toy model."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset on the hub, such as 'main'."}
    )
    dataset_test_split: str = field(
        default="test", metadata={"help": "Test split of the dataset, or a part of it: 'test[:100]'."}
    )
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "A name in dash_trl.data.PROMPT_TEMPLATES, or a text with {problem}; as in training."},
    )
    problem_column: str | None = field(
        default=None, metadata={"help": "The column with the problems, if it has another name than in those datasets."}
    )
    answer_column: str | None = field(
        default=None,
        metadata={"help": "The column with the gold answers, if it has another name than in those datasets."},
    )
    reward_path: str | None = field(
        default=None, metadata={"help": "A Python file with a reward function that says what is correct (> 0.5)."}
    )
    reward_name: str = field(
        default=DEFAULT_NAME,
        metadata={"help": "Name in the file of --reward_path: a function, a class, or a RewardRunner."},
    )

    @property
    def is_toy(self) -> bool:
        """Whether the problems are those of the toy model."""
        return self.dataset_name == TOY

    @cached_property
    def has_tests(self) -> bool:
        """Whether the problems are programming problems."""
        if self.is_toy or self.answer_column is not None:
            return False
        return has_tests(str(self.dataset_name), config=self.dataset_config)

    def problems(self, chat: bool, split: str | None = None, completion: bool = False) -> Dataset:
        """Loads the problems: rows with a `prompt` and the columns that the reward function reads.

        Args:
            chat: True = make each prompt a conversation, for a tokenizer with a chat template. The prompts of toy
                problems are always conversations.
            split: a split, or a part of it, such as "train[:100]". None: `dataset_test_split`.
            completion: True = add a column with solutions, for supervised fine-tuning.
        """
        split = split or self.dataset_test_split
        if self.is_toy:
            splits = {name: arithmetic_dataset(name, completion=completion) for name in ("train", "test")}
            return select_split(splits, split, TOY)
        load: Callable[..., Dataset] = load_code_dataset
        if not self.has_tests:
            load = partial(load_math_dataset, answer_column=self.answer_column)
        return load(
            str(self.dataset_name),
            config=self.dataset_config,
            split=split,
            prompt_template=self.prompt_template,
            chat=chat,
            completion=completion,
            problem_column=self.problem_column,
        )

    def reward(self) -> Reward:
        """Returns the reward function, as a context manager."""
        if self.reward_path is not None:
            return Reward(load_reward(self.reward_path, self.reward_name))
        if self.has_tests:
            return Reward(CodeReward())
        return Reward(arithmetic_reward if self.is_toy else MathAccuracyReward())


@dataclass
class TaskArguments(Task):
    """A task, and the options of the sampler."""

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

    def __post_init__(self) -> None:
        if isinstance(given := self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = dict(json.loads(given))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"chat_template_kwargs={given!r} is no JSON object ({error}): write it like "
                    "'{\"enable_thinking\": false}'."
                ) from error

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

    def open_sampler(self, checkpoint: Checkpoint, folder: Path) -> AbstractContextManager[Sampler]:
        """Returns the sampler that these arguments choose.

        Args:
            checkpoint: the model.
            folder: the directory of the results; weights for servers are written there.
        """
        return open_sampler(
            checkpoint,
            use_vllm=self.use_vllm,
            server_urls=self.vllm_server_urls or (),
            batch_size=self.per_device_eval_batch_size,
            weight_dir=folder / WEIGHT_DIR,
        )


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
