"""Reward functions, the runner that calls them in parallel, and the handling of failed rewards."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.rewards.answers import final_text, last_boxed, last_hashes
    from dash_trl.rewards.code import CodeReward
    from dash_trl.rewards.forms import load_reward
    from dash_trl.rewards.judge import JudgeError, JudgeReward
    from dash_trl.rewards.math import MathAccuracyReward, completion_text
    from dash_trl.rewards.runner import RewardRunner

if TYPE_CHECKING:  # imported by other folders of the package, not public
    from dash_trl.rewards.answers import ANSWER_BEGINS, plain_answer
    from dash_trl.rewards.failures import (
        FailureWatch,
        distinct,
        failure_of,
        raise_reward_error,
        unscored,
        watch,
    )
    from dash_trl.rewards.forms import DEFAULT_NAME, ROW, Score, form_of, read_score
    from dash_trl.rewards.runner import RewardTeam, is_reward_model, unpack
    from dash_trl.rewards.runner_reward import RunnerReward

__getattr__, __dir__, __all__ = lazy(__name__)
