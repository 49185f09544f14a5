"""Train a model on programming problems, with unit tests in a sandbox as the reward.

    accelerate launch examples/train_code.py                   # no arguments: a tiny model writes one-line functions

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 examples/train_code.py \\
        --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset_name google-research-datasets/mbpp \\
        --use_vllm --vllm_mode colocate --output_dir outputs/mbpp

This is `train_math.py` with other toy problems; it has the same flags and YAML keys. The dataset is a hub name or a
local path, with the columns of MBPP, or with `prompt` and `tests` (docs/howto/code-rewards.md).
"""

import sys
from dataclasses import replace
from typing import Any

from toy_programs import PROGRAM_LESSONS, PROGRAM_WARM_UP, program_dataset
from train_math import Mathematics, main

from dash_trl import CodeReward
from dash_trl.evaluation import TOY
from dash_trl.toy import toy_defaults, toy_model


class Programming(Mathematics):
    """The task of this script: a program gets the reward 1 if it passes its tests."""

    def __init__(self, script: Any):
        super().__init__(script)
        self.toy_reward = CodeReward()

    @staticmethod
    def toy_defaults() -> dict[str, Any]:
        return toy_defaults() | {
            "output_dir": "outputs/toy_code",
            "max_completion_length": 24,
            "max_steps": 40,
        }

    def toy_model(self, progress: bool) -> str:
        return toy_model(settings=PROGRAM_WARM_UP, lessons=PROGRAM_LESSONS, progress=progress)

    def toy_problems(self, split: str, seed: int = 0, completion: bool = False) -> Any:
        return program_dataset(split, seed=seed, completion=completion)


# The toy datasets by name.
TASKS: dict[str, type[Mathematics]] = {TOY: Mathematics, "toy_code": Programming}


def task_of(script: Any) -> Mathematics:
    """Returns the task of a dataset, for `sft.py`. `Mathematics` also loads programming datasets, by their columns."""
    if script.dataset_name in TASKS:
        return TASKS[script.dataset_name](replace(script, dataset_name=TOY))
    return Mathematics(script)


if __name__ == "__main__":
    main(sys.argv[1:], make_task=Programming)
