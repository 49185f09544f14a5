"""Process rewards: computes one advantage per token from the values V(prefix) at episode boundaries."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.process_rewards.callback import ProcessRewardCallback
    from dash_trl.process_rewards.credit import ESTIMATORS, CreditSettings
    from dash_trl.process_rewards.episodes import EPISODE_MARKERS, FINAL_ANSWER, Episodes, Segmenter, line_starts
    from dash_trl.process_rewards.monte_carlo import MonteCarloValue
    from dash_trl.process_rewards.outcome import OutcomeValue
    from dash_trl.process_rewards.picture import credit_html
    from dash_trl.process_rewards.steps import ProcessRewardModel, ScoreSteps, StepValue
    from dash_trl.process_rewards.values import AnswerLogProbValue, ServerValue, ValueEstimator, ValueRequest

if TYPE_CHECKING:  # imported by other folders of the package and by tests, not public
    from dash_trl.process_rewards.callback import accepted_answers
    from dash_trl.process_rewards.credit import Rewards, anchor, place_rewards
    from dash_trl.process_rewards.diagnostics import batch_figures
    from dash_trl.process_rewards.features import FEATURES
    from dash_trl.process_rewards.tree import Branch, Tree, loop_log_probs, tree_log_probs
    from dash_trl.process_rewards.values import checked_values
    from dash_trl.process_rewards.worth import evidence_of

__getattr__, __dir__, __all__ = lazy(__name__)
