"""Train with process rewards: every episode of a completion gets the credit of its progress.

    accelerate launch examples/train_math_process.py           # no arguments: the embedded model, offline

    accelerate launch examples/train_math_process.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --process_weight 0.5

`train_math.py` with a `ProcessRewardCallback`: its flags and YAML keys, and those of `ProcessArguments`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from train_math import MathArguments, main

from dash_trl.process_rewards import (
    EPISODE_MARKERS,
    ESTIMATORS,
    AnswerLogProbValue,
    CreditSettings,
    ProcessRewardCallback,
    line_starts,
)


@dataclass
class ProcessArguments:
    """What becomes of V(prefix)."""

    estimator: str = field(default="centered_return", metadata={"choices": list(ESTIMATORS)})
    process_weight: float = field(default=1.0, metadata={"help": "Weight of the process part of the advantage."})
    value_space: str = field(default="log", metadata={"choices": ["log", "probability"]})
    force_prompt: str | None = field(default=None, metadata={"help": "Text that asks for the answer now."})


def make_callbacks(script: MathArguments, own: ProcessArguments) -> list[ProcessRewardCallback]:
    embedded = script.dataset_name is None  # its steps are lines, and its answers follow these words
    force_prompt = own.force_prompt or ("The answer is " if embedded else None)
    return [
        ProcessRewardCallback(
            AnswerLogProbValue(force_prompt, space=own.value_space, closing="<|im_end|>" if embedded else ""),
            estimator=own.estimator,
            settings=CreditSettings(process_weight=own.process_weight),
            markers=line_starts if embedded else EPISODE_MARKERS,
            min_episode_tokens=1 if embedded else 16,
        )
    ]


if __name__ == "__main__":
    main(sys.argv[1:], (ProcessArguments,), make_callbacks)
