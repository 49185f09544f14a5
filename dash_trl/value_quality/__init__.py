"""Is V(prefix) worth anything? Value estimators against how often a model's own prefixes end well.

    problems ──► responses ──► boundaries ──► K completions of each, rewarded ──► truth ──────┐
                     └──► log-probs, entropies ──► estimators, fitted to other problems ──► V ┴──► figures, plot

The command is `python -m dash_trl.value_quality` (docs/process_rewards.md).
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.value_quality.candidates import Candidate, Position, Stage, with_log_probs
    from dash_trl.value_quality.figures import COLUMNS, figures_of, table
    from dash_trl.value_quality.results import Results, measure
    from dash_trl.value_quality.study import Plan, Study, choose, collect

__getattr__, __dir__, __all__ = lazy(__name__)
