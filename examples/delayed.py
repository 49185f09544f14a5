"""A reward that takes 1 to 40 s: the experiment of the asynchronous reward agent, on GSM8K.

    dash_trl train --reward_path examples/delayed.py --reward_name briefly        # the toy model, 10 to 400 ms, offline

    dash_trl train --accelerate_config ddp --reward_path examples/delayed.py --reward_name delayed \\
        --model_name_or_path Qwen/Qwen2.5-3B-Instruct --dataset_name openai/gsm8k --dataset_config main \\
        --use_vllm --vllm_mode colocate --max_completion_length 1024 --reward_pipeline --async_level 1 \\
        --loss_type decoupled_ppo

The baseline has neither --reward_pipeline nor --async_level.
"""

import random
import time
from typing import Any

from dash_trl import MathAccuracyReward, RewardRunner


def after_a_while(scale: float) -> RewardRunner:
    """Returns the reward of a right answer, which takes 1 to 40 s times `scale`."""
    times = random.Random()
    right = MathAccuracyReward()

    def delayed(completion: Any, answer: str) -> float:
        time.sleep(scale * times.uniform(1, 40))
        return right.math_accuracy(completion, answer)

    # All rewards of a window wait at once, as for a service.
    return RewardRunner(delayed, timeout=60 + scale * 40, max_concurrency=4096)


delayed = after_a_while(1.0)
briefly = after_a_while(0.01)
