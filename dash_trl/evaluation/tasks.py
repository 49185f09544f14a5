"""`Task`: the flags for problems and their reward function, which the commands for training and for measuring share.

The columns of the dataset determine the reward function::

    name of a dataset ──► columns ──► answers: MathAccuracyReward
                                  └──► tests: CodeReward in its sandbox
    toy ──► the problems of the tiny model of `dash_trl.toy`
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from datasets import Dataset

from dash_trl.data import has_tests, load_code_dataset, load_math_dataset, select_split
from dash_trl.evaluation.checkpoint import TOY
from dash_trl.evaluation.reward import Reward
from dash_trl.rewards import DEFAULT_NAME, CodeReward, MathAccuracyReward, load_reward
from dash_trl.toy import arithmetic_dataset, arithmetic_reward


@dataclass
class Task:
    """The problems, and the reward function that decides which completions are correct: that of training, or your own.

    Raises:
        ValueError: if `reward_name` is given without `reward_path`; from its methods, if a dataset, split or reward
            function does not exist or does not fit.
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

    def __post_init__(self) -> None:
        if self.reward_path is None and self.reward_name != DEFAULT_NAME:
            raise ValueError(f"reward_name={self.reward_name!r} has no effect without --reward_path, its file.")

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
