"""The task and the model of the default run: a tiny language model learns to add and subtract without slips.

It needs no data, network or GPU.
"""

from dash_trl.toy.problems import arithmetic_dataset, arithmetic_reward
from dash_trl.toy.tokenizer import arithmetic_tokenizer
from dash_trl.toy.warm_up import Lessons, WarmUp, cached_model, toy_defaults, toy_model
