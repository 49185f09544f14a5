"""What a model is measured on: problems, and the reward that says what is correct, the one that training uses.

name of a data set ──► columns ──► answers: MathAccuracyReward
                              └──► tests: CodeReward in its sandbox
embedded… ──► the problems that the tiny models of `dash_trl.embedded` know
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash_trl.data import has_tests, load_code_dataset, load_math_dataset
from dash_trl.embedded import (
    PROGRAM_LESSONS,
    PROGRAM_WARM_UP,
    arithmetic_dataset,
    arithmetic_reward,
    embedded_model,
    program_dataset,
)
from dash_trl.evaluation.checkpoint import EMBEDDED
from dash_trl.evaluation.sampler import SampledCompletion
from dash_trl.rewards import CodeReward, MathAccuracyReward, RewardAgent, load_reward, raise_mistakes

if TYPE_CHECKING:
    from datasets import Dataset

PATIENCE = 120.0  # seconds for a completion; the sandbox ends a program in one minute
BROKEN_AFTER = 10  # problems in a row on which a reward function raised for every sample
MAX_COMPLETION_LENGTH = 2048  # tokens, the paper's


@dataclass(frozen=True)
class Embedded:
    """A data set of `dash_trl.embedded`: the split "test", which no embedded model was trained on."""

    problems: Callable[[], Any]
    max_completion_length: int
    code: bool = False


def _with_equals_sign() -> Dataset:
    """Out of distribution: the test problems, each with a sign behind it that no model was trained on."""
    from datasets import Dataset

    problems = arithmetic_dataset("test")
    prompts = [[{**message, "content": f"{message['content']}="}] for (message,) in problems["prompt"]]
    return Dataset.from_dict({"prompt": prompts, "answer": problems["answer"]})


EMBEDDED_SETS = {
    EMBEDDED: Embedded(lambda: arithmetic_dataset("test"), 64),
    "embedded_shifted": Embedded(_with_equals_sign, 64),
    "embedded_code": Embedded(lambda: program_dataset("test"), 24, code=True),
}


@dataclass(frozen=True)
class Task:
    """The problems by their name, as in the command's flags; a reward of one's own in place of the data set's.

    Raises:
        ValueError: from its methods, for a data set, split or reward that is not there, or that does not fit.
    """

    dataset_name: str
    dataset_config: str | None = None
    dataset_test_split: str = "test"
    prompt_template: str | None = None
    reward_path: str | None = None
    reward_name: str = "compute_score"

    def __post_init__(self) -> None:
        if self.dataset_name in EMBEDDED_SETS:
            for name in ("dataset_config", "prompt_template"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect with dataset_name={self.dataset_name!r}: leave "
                        "it out."
                    )

    @property
    def is_embedded(self) -> bool:
        return self.dataset_name in EMBEDDED_SETS

    @property
    def max_completion_length(self) -> int:
        known = EMBEDDED_SETS.get(self.dataset_name)
        return MAX_COMPLETION_LENGTH if known is None else known.max_completion_length

    def has_tests(self) -> bool:
        known = EMBEDDED_SETS.get(self.dataset_name)
        if known is not None:
            return known.code
        return has_tests(self.dataset_name, config=self.dataset_config, split=self.dataset_test_split)

    def problems(self, chat: bool) -> Dataset:
        """Rows with a `prompt`, and the columns that the reward reads.

        Args:
            chat: conversations, for a tokenizer with a chat template.
        """
        known = EMBEDDED_SETS.get(self.dataset_name)
        if known is None:
            return (load_code_dataset if self.has_tests() else load_math_dataset)(
                self.dataset_name,
                config=self.dataset_config,
                split=self.dataset_test_split,
                prompt_template=self.prompt_template,
                chat=chat,
            )
        if not chat:
            raise ValueError(
                f"dataset_name={self.dataset_name!r} has conversations, but the model's tokenizer has no chat "
                "template: it is for models that were trained on these problems."
            )
        return _part(known.problems(), self.dataset_test_split, self.dataset_name)

    def reward(self) -> Reward:
        if self.reward_path is not None:
            return Reward(load_reward(self.reward_path, self.reward_name))
        if self.has_tests():
            return Reward(CodeReward())
        return Reward(arithmetic_reward if self.dataset_name in EMBEDDED_SETS else MathAccuracyReward())

    def reward_settings(self) -> dict[str, Any]:
        """What the scores depend on beside the problems."""
        if self.reward_path is None:
            return {"reward": None}
        digest = hashlib.sha256(Path(self.reward_path).expanduser().read_bytes()).hexdigest()[:16]
        return {"reward": f"{self.reward_path}:{self.reward_name}", "reward_file": digest}


def model_of(name: str, task: Task) -> str:
    """The directory of a model; of the one that knows the task, where it is called "embedded"."""
    if name != EMBEDDED:
        return name
    if task.dataset_name == "embedded_code":
        return embedded_model(settings=PROGRAM_WARM_UP, lessons=PROGRAM_LESSONS)
    return embedded_model()


def hash_of(problems: Dataset) -> str:
    """Of all rows: samples of other problems under the same name are not these samples."""
    digest = hashlib.sha256()
    for row in problems:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


class Reward:
    """One reward function of any form, as training calls it; a context manager that ends its workers.

    Args:
        function: of any form (`dash_trl.rewards.forms`), or a `RewardAgent` of one.
    Raises:
        ValueError: for several functions, or a reward model.
    """

    def __init__(self, function: Any):
        self.agent = function if isinstance(function, RewardAgent) else RewardAgent(function, timeout=PATIENCE)
        if len(self.agent.rewards) != 1 or len(self.agent.own) != 1:
            raise ValueError(
                f"An evaluation needs one reward function, which says what is correct, but there are "
                f"{len(self.agent.rewards)}, or it is a reward model. Name one with --reward_name."
            )
        (self._function,) = self.agent.own
        self._raised = 0  # problems in a row

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises a ValueError if the function asks for a column that there is not."""
        if not self._function.form.batch:
            self._function.form.check_columns(columns)

    def scores(self, row: dict[str, Any], samples: Sequence[SampledCompletion]) -> list[float | None]:
        """Of the samples of one problem; None where it failed (an exception, None, NaN, ±inf).

        Raises:
            ValueError: it returned no list of numbers.
            RuntimeError: it raised on every sample of `BROKEN_AFTER` problems in a row; the cause is the last error.
        """
        chat = not isinstance(row["prompt"], str)
        self._function.group_size = lambda: len(samples)
        rewards = self._function(
            prompts=[row["prompt"]] * len(samples),
            completions=[[{"role": "assistant", "content": one.text}] if chat else one.text for one in samples],
            completion_ids=[one.token_ids for one in samples],
            **{name: [value] * len(samples) for name, value in row.items() if name != "prompt"},
        )
        raise_mistakes([self._function])
        self._raised = self._raised + 1 if all(self._function.raised) else 0
        if self._raised == BROKEN_AFTER:
            raise RuntimeError(
                f"The reward function '{self._function.name}' raised on every sample of {BROKEN_AFTER} problems in a "
                f"row; at last it {self._function.failure}. Correct it."
            ) from self._function.error
        return rewards

    def __enter__(self) -> Reward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.agent.close()


def _part(problems: Dataset, split: str, name: str) -> Dataset:
    """`test`, or a part of it, as `datasets` writes it: "test[:100]"."""
    from datasets import ReadInstruction, concatenate_datasets

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"test": len(problems)})
    except ValueError as error:
        raise ValueError(f"{name!r} has no split {split!r}: use 'test', or a part of it, 'test[:100]'.") from error
    return concatenate_datasets([problems.select(range(part.from_ or 0, part.to)) for part in parts])
