"""dash_trl: reinforcement learning of reasoning models with TRL, on the rows that carry signal.

Names are imported when they are first used, so `import dash_trl` is quick and needs neither torch nor trl.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

try:
    __version__ = version("dash_trl")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

_EXPORTS = {
    "DASHTrainer": "trainer",
    "DASHConfig": "config",
    "DASHCallback": "callbacks",
    "RolloutBatch": "rollout.batch",
    "MathAccuracyReward": "rewards.math",
    "ProcessRewardCallback": "process_rewards.callback",
    "load_math_dataset": "data",
}

__all__ = [
    "DASHCallback",
    "DASHConfig",
    "DASHTrainer",
    "MathAccuracyReward",
    "ProcessRewardCallback",
    "RolloutBatch",
    "__version__",
    "load_math_dataset",
]

if TYPE_CHECKING:
    from dash_trl.callbacks import DASHCallback
    from dash_trl.config import DASHConfig
    from dash_trl.data import load_math_dataset
    from dash_trl.process_rewards.callback import ProcessRewardCallback
    from dash_trl.rewards.math import MathAccuracyReward
    from dash_trl.rollout.batch import RolloutBatch
    from dash_trl.trainer import DASHTrainer


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dash_trl' has no attribute {name!r}")
    return getattr(import_module(f"dash_trl.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
