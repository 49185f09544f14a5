"""Train with process rewards: every episode of a completion gets credit for its progress.

    accelerate launch examples/train_math_process.py           # no arguments: the toy model, offline

    accelerate launch examples/train_math_process.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --process_weight 0.5

This is `train_math.py` with a `ProcessRewardCallback`; it has the same flags and YAML keys, and those of
`ProcessArguments`.
"""

import sys
from dataclasses import dataclass, field

from train_math import MathArguments, main

from dash_trl.process_rewards import (
    EPISODE_MARKERS,
    AnswerLogProbValue,
    CreditSettings,
    ProcessRewardCallback,
    line_starts,
)


@dataclass
class ProcessArguments:
    """Flags of the value V(prefix), and of the credit that is computed from it."""

    estimator: str = field(default="grpo_process", metadata={"help": "See docs/concepts/credit.md."})
    process_weight: float = field(default=1.0, metadata={"help": "Weight of the process part of the advantage."})
    skip_silent: bool = field(
        default=True,
        metadata={"help": "No process rewards for groups whose outcome advantages are all 0, so V alone never trains."},
    )
    value_space: str = field(
        default="log", metadata={"choices": ["log", "probability"], "help": "Unit of V of the known answer."}
    )
    force_prompt: str | None = field(default=None, metadata={"help": "Text that asks for the known answer now."})


def make_callbacks(script: MathArguments, own: ProcessArguments) -> list[ProcessRewardCallback]:
    toy = script.is_toy  # a toy solution has one step per line, and its answer follows "The answer is "
    value = AnswerLogProbValue(
        own.force_prompt or ("The answer is " if toy else None),
        space=own.value_space,
        closing="<|im_end|>" if toy else "",
    )
    return [
        ProcessRewardCallback(
            value,
            estimator=own.estimator,
            settings=CreditSettings(process_weight=own.process_weight),
            markers=line_starts if toy else EPISODE_MARKERS,
            skip_silent=own.skip_silent,
        )
    ]


if __name__ == "__main__":
    main(sys.argv[1:], (ProcessArguments,), make_callbacks)
