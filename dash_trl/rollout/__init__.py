"""Data between sampling and loss: batches of rollouts, the generation window, readers of prompts, saved runs."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.rollout.batch import CreditedRollouts, RolloutBatch, ScoredRollouts, Survivors

if TYPE_CHECKING:  # imported by other folders of the package, not public
    from dash_trl.rollout.ahead import RunAhead, StaleRollouts
    from dash_trl.rollout.batch import LOG_PROB_FIELDS, joined, widened
    from dash_trl.rollout.prompts import EpochOrder, new_queue, open_epoch
    from dash_trl.rollout.queue import PromptQueue
    from dash_trl.rollout.resume import SavedRun, Shapes, loading, one_run, why_a_new_window
    from dash_trl.rollout.window import Part, Window

__getattr__, __dir__, __all__ = lazy(__name__)
