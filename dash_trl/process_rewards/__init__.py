"""Process rewards: V(prefix) at episode boundaries → marginal utilities → an advantage per token."""

from dash_trl.process_rewards.callback import ProcessRewardCallback
from dash_trl.process_rewards.credit import ESTIMATORS, CreditSettings
from dash_trl.process_rewards.episodes import EPISODE_MARKERS, Episodes, Segmenter, line_starts
from dash_trl.process_rewards.monte_carlo import MonteCarloValue
from dash_trl.process_rewards.values import AnswerLogProbValue, ServerValue, ValueEstimator, ValueRequest

__all__ = [
    "EPISODE_MARKERS",
    "ESTIMATORS",
    "AnswerLogProbValue",
    "CreditSettings",
    "Episodes",
    "MonteCarloValue",
    "ProcessRewardCallback",
    "Segmenter",
    "ServerValue",
    "ValueEstimator",
    "ValueRequest",
    "line_starts",
]
