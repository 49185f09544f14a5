"""Process rewards: one advantage per token, from the values V(prefix) at episode boundaries."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.process_rewards.callback import ProcessRewardCallback
    from dash_trl.process_rewards.credit import ESTIMATORS, CreditSettings, Estimator, Rewards, place_rewards
    from dash_trl.process_rewards.episodes import EPISODE_MARKERS, FINAL_ANSWER, Episodes, Segmenter, line_starts
    from dash_trl.process_rewards.monte_carlo import MonteCarloValue
    from dash_trl.process_rewards.values import AnswerLogProbValue, ValueEstimator, ValueRequest

if TYPE_CHECKING:  # imported by other folders of the package and by tests, not public
    from dash_trl.process_rewards.callback import accepted_answers
    from dash_trl.process_rewards.diagnostics import batch_figures
    from dash_trl.process_rewards.tree import Branch, Tree, loop_log_probs, tree_log_probs
    from dash_trl.process_rewards.values import checked_values

__getattr__, __dir__, __all__ = lazy(__name__)
