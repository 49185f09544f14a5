"""The task and the model of the default run: a tiny language model learns to add and subtract without slips.

The run needs no data, network or GPU.
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.toy.problems import arithmetic_dataset, arithmetic_reward
    from dash_trl.toy.tokenizer import arithmetic_tokenizer
    from dash_trl.toy.warm_up import Lessons, WarmUp, cached_model, toy_defaults, toy_model

__getattr__, __dir__, __all__ = lazy(__name__)
