"""Reward functions, the runner that calls them in parallel, and the handling of failed rewards."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:  # the names below, for type checkers
    from dash_trl.rewards.answers import ANSWER_BEGINS, final_text, last_boxed, last_hashes, plain_answer
    from dash_trl.rewards.code import CodeReward
    from dash_trl.rewards.failures import (
        BROKEN_AFTER,
        FailureWatch,
        distinct,
        failure_of,
        raise_reward_error,
        unscored,
        watch,
    )
    from dash_trl.rewards.forms import BATCH, DEFAULT_NAME, ROW, Score, form_of, load_reward, read_score
    from dash_trl.rewards.math import MathAccuracyReward, completion_text
    from dash_trl.rewards.runner import RewardRunner, is_reward_model, unpack
    from dash_trl.rewards.runner_reward import Request, RunnerReward

__getattr__, __dir__ = lazy(
    __name__,
    answers=["ANSWER_BEGINS", "final_text", "last_boxed", "last_hashes", "plain_answer"],
    code=["CodeReward"],
    failures=["BROKEN_AFTER", "FailureWatch", "distinct", "failure_of", "raise_reward_error", "unscored", "watch"],
    forms=["BATCH", "DEFAULT_NAME", "ROW", "Score", "form_of", "load_reward", "read_score"],
    math=["MathAccuracyReward", "completion_text"],
    runner=["RewardRunner", "is_reward_model", "unpack"],
    runner_reward=["Request", "RunnerReward"],
)
