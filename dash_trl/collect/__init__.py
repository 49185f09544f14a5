"""Collects the rows of a window: samples completions, gets rewards, computes advantages, filters rows."""

from dash_trl.collect.collector import Collector
from dash_trl.collect.dynamic_sampling import DynamicSampling
from dash_trl.collect.log import length_figures, reward_figures
from dash_trl.collect.samplers import new_sampler
from dash_trl.collect.scoring import Rewards
from dash_trl.collect.turns import Rounds
