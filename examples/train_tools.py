"""Train a model that calls a tool: a calculator.

    accelerate launch examples/train_tools.py                  # no arguments: a tiny model learns it, offline
    accelerate launch examples/train_tools.py --noise          # the control: a tool that answers with random numbers

    accelerate launch examples/train_tools.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name openai/gsm8k --dataset_config main --max_completion_length 1024

This is `train_math.py` with `tools=[calculator]`; it has the same flags and YAML keys, and those of `ToolArguments`.
The toy model knows how to call the calculator, but often guesses the answer or calls it with a wrong number. The
numbers are too large for it to add. A model of your own needs a chat template that supports tools.

In 40 steps, the sampled accuracy rises from 0.28–0.30 to 0.91–0.93 (--seed 0, 1, 2). With --noise it stays at 0.00.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toy_tools import (
    CALCULATOR_LESSONS,
    CALCULATOR_WARM_UP,
    calculator,
    calculator_dataset,
    noisy_calculator,
)
from train_math import MathArguments, Mathematics, main

from dash_trl.toy import toy_defaults, toy_model


@dataclass
class ToolArguments(MathArguments):
    """The arguments of `train_math.py`, plus the choice of the tool."""

    noise: bool = field(default=False, metadata={"help": "The tool answers every call with a random number."})


class ToolUse(Mathematics):
    """The task of this script: sums with a calculator as the tool."""

    Arguments = ToolArguments

    @staticmethod
    def toy_defaults() -> dict[str, Any]:
        return toy_defaults() | {
            "output_dir": "outputs/toy_tools",
            "max_completion_length": 96,  # the tool's answers count, too
            "max_steps": 40,
            "max_tool_calling_iterations": 4,
            "per_device_eval_batch_size": 128,
            "num_generations_eval": 2,
        }

    def toy_model(self, progress: bool) -> str:
        return toy_model(settings=CALCULATOR_WARM_UP, lessons=CALCULATOR_LESSONS, progress=progress)

    def toy_problems(self, split: str, seed: int = 0, completion: bool = False) -> Any:
        return calculator_dataset(split, seed=seed)

    def tools(self) -> list[Callable[..., Any]]:
        return [noisy_calculator() if self.script.noise else calculator]


if __name__ == "__main__":
    main(sys.argv[1:], make_task=ToolUse)
