"""Process rewards: one advantage per token, from the values V(prefix) at episode boundaries."""

from dash_trl.process_rewards.callback import ProcessRewardCallback, accepted_answers
from dash_trl.process_rewards.credit import ESTIMATORS, CreditSettings, Estimator, Rewards, place_rewards
from dash_trl.process_rewards.diagnostics import batch_figures
from dash_trl.process_rewards.episodes import EPISODE_MARKERS, FINAL_ANSWER, Episodes, Segmenter, line_starts
from dash_trl.process_rewards.monte_carlo import MonteCarloValue
from dash_trl.process_rewards.values import AnswerLogProbValue, ValueEstimator, ValueRequest, checked_values
