"""Collects the rows of a window: samples completions, gets rewards, computes advantages, filters rows."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.collect.collector import Collector
    from dash_trl.collect.decode import Prompts
    from dash_trl.collect.dynamic_sampling import DynamicSampling, rows_of_window
    from dash_trl.collect.log import length_figures, reward_figures
    from dash_trl.collect.samplers import Sampler, new_sampler
    from dash_trl.collect.scoring import Rewards
    from dash_trl.collect.turns import Rounds

__getattr__, __dir__, __all__ = lazy(__name__)
