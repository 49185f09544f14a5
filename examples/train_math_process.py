"""Train with process rewards: every episode of a completion gets credit for its progress.

    accelerate launch examples/train_math_process.py           # no arguments: the toy model, offline

    accelerate launch examples/train_math_process.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --process_weight 0.5
    accelerate launch examples/train_math_process.py --value outcome
    accelerate launch examples/train_math_process.py --value model --value_model outputs/prm      # see train_prm.py

This is `train_math.py` with a `ProcessRewardCallback`; it has the same flags and YAML keys, and those of
`ProcessArguments`.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from train_math import MathArguments, main

from dash_trl.process_rewards import (
    EPISODE_MARKERS,
    ESTIMATORS,
    AnswerLogProbValue,
    CreditSettings,
    OutcomeValue,
    ProcessRewardCallback,
    ProcessRewardModel,
    StepValue,
    ValueEstimator,
    line_starts,
)


@dataclass
class ProcessArguments:
    """Flags of the value V(prefix), and of the credit that is computed from it."""

    value: str = field(
        default="answer",
        metadata={
            "choices": ["answer", "outcome", "model"],
            "help": "V(prefix). answer: the probability of the known answer. outcome: fitted to the outcomes of the "
            "last windows. model: the scores of the steps by a process reward model.",
        },
    )
    value_model: str | None = field(
        default=None, metadata={"help": "Name or folder of the process reward model, for value=model."}
    )
    estimator: str = field(default="centered_return", metadata={"choices": list(ESTIMATORS)})
    process_weight: str | None = field(
        default=None,
        metadata={
            "help": "Weight of the process part of the advantage, a number or auto (by how well V predicts outcomes). "
            "Default: auto if V is fitted, else 1."
        },
    )
    value_space: str = field(default="log", metadata={"choices": ["log", "probability"], "help": "For value=answer."})
    force_prompt: str | None = field(
        default=None, metadata={"help": "Text that asks for the answer now, for value=answer."}
    )

    def __post_init__(self) -> None:
        for name in ("value_space", "force_prompt") if self.value != "answer" else ():
            if (given := getattr(self, name)) != getattr(ProcessArguments, name):
                raise ValueError(f"{name}={given!r} has no effect with --value {self.value}, which forces no answer.")
        if (self.value == "model") != (self.value_model is not None):
            raise ValueError(
                f"--value {self.value} with --value_model {self.value_model}: --value model needs a --value_model, and "
                "other values have none."
            )

    def settings(self) -> CreditSettings | None:
        """Returns the settings with `process_weight`, or None for the callback's defaults if it is not given.

        `CreditSettings` checks a weight that is not a number.
        """
        if self.process_weight is None:
            return None
        weight: Any = self.process_weight
        with suppress(ValueError):
            weight = float(weight)
        return CreditSettings(process_weight=weight)


def make_callbacks(script: MathArguments, own: ProcessArguments) -> list[ProcessRewardCallback]:
    toy = script.is_toy  # a toy solution has one step per line, and its answer follows "The answer is "
    force_prompt = own.force_prompt or ("The answer is " if toy else None)
    value: ValueEstimator
    if own.value_model is not None:
        model = ProcessRewardModel(own.value_model)

        def lowest_so_far(prompts: list[str], steps: list[list[str]], **columns: Any) -> list[list[float]]:
            return [[*accumulate(scores, min)] for scores in model(prompts, steps, **columns)]

        in_unit = own.estimator == "gae" or own.process_weight == "auto"  # they need V in the unit of the outcome
        value = StepValue(lowest_so_far, rewards=False) if in_unit else StepValue(model)
    elif own.value == "outcome":
        value = OutcomeValue()
    else:
        value = AnswerLogProbValue(force_prompt, space=own.value_space, closing="<|im_end|>" if toy else "")
    return [
        ProcessRewardCallback(
            value,
            estimator=own.estimator,
            settings=own.settings(),
            markers=line_starts if toy else EPISODE_MARKERS,
            min_episode_tokens=1 if toy else 16,
        )
    ]


if __name__ == "__main__":
    main(sys.argv[1:], (ProcessArguments,), make_callbacks)
