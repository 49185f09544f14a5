"""dash_trl: extends TRL's `GRPOTrainer`, and skips the model passes of completions that would not change the weights.

A name is imported when it is first used, so `import dash_trl` is quick and needs neither torch nor trl.
"""

import os
from typing import TYPE_CHECKING, Any

from dash_trl._lazy import lazy
from dash_trl.versions import installed, refuse_other_trl

if TYPE_CHECKING:  # the names below, for type checkers
    from dash_trl.callbacks import DASHCallback
    from dash_trl.config import DASHConfig
    from dash_trl.data import load_code_dataset, load_math_dataset
    from dash_trl.process_rewards import ProcessRewardCallback
    from dash_trl.rewards import CodeReward, MathAccuracyReward, RewardRunner
    from dash_trl.rollout import RolloutBatch
    from dash_trl.tools import ProcessTool
    from dash_trl.trainer import DASHTrainer

# PyTorch reads this when it is loaded. Otherwise, beside other work, its threads spin for long to wait for each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
__version__ = installed("dash_trl") or "0.0.0"  # a source tree that is not installed

_get, __dir__ = lazy(
    __name__,
    callbacks=["DASHCallback"],
    config=["DASHConfig"],
    data=["load_code_dataset", "load_math_dataset"],
    process_rewards=["ProcessRewardCallback"],
    rewards=["CodeReward", "MathAccuracyReward", "RewardRunner"],
    rollout=["RolloutBatch"],
    tools=["ProcessTool"],
    trainer=["DASHTrainer"],
)
__all__ = [*__dir__(), "__version__"]


def __getattr__(name: str) -> Any:
    refuse_other_trl()  # before any import from TRL: a newer TRL may lack a private name that this package imports
    return _get(name)
