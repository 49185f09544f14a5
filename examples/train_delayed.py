"""Train with rewards that take 1 to 40 s: the experiment of the asynchronous reward agent, on GSM8K.

    accelerate launch examples/train_delayed.py --delay_scale 0.01       # the toy model, 10 to 400 ms, offline

    accelerate launch --num_processes 8 examples/train_delayed.py --model_name_or_path Qwen/Qwen2.5-3B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --use_vllm --vllm_mode colocate \\
        --max_completion_length 1024 --reward_pipeline --async_level 1 --loss_type decoupled_ppo

The baseline has neither --reward_pipeline nor --async_level. This is `train_math.py` with a delayed reward; it has the
same flags and YAML keys, and --delay_scale.
"""

import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from train_math import MathArguments, Mathematics, main

from dash_trl import MathAccuracyReward, RewardRunner

SHORTEST, LONGEST = 1.0, 40.0  # seconds


@dataclass
class DelayedArguments(MathArguments):
    """The arguments of `train_math.py`, plus the scale of the delays."""

    delay_scale: float = field(default=1.0, metadata={"help": "Each reward takes 1 to 40 s times this."})


class Delayed(Mathematics):
    """The task of `train_math.py`, with a reward that takes a random time."""

    Arguments = DelayedArguments

    def __init__(self, script: DelayedArguments):
        if script.reward_path is not None:
            raise ValueError(f"reward_path={script.reward_path!r} has no effect here: remove it.")
        super().__init__(script)

    def reward(self) -> RewardRunner:
        scale, times, right = self.script.delay_scale, random.Random(), MathAccuracyReward()

        def delayed(completion: Any, answer: str) -> float:
            time.sleep(scale * times.uniform(SHORTEST, LONGEST))
            return right(completions=[completion], answer=[answer])[0]

        # All rewards of a window wait at once, as for a service.
        return RewardRunner(delayed, timeout=60 + scale * LONGEST, max_concurrency=4096)


if __name__ == "__main__":
    main(sys.argv[1:], make_task=Delayed)
