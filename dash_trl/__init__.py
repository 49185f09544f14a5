"""dash_trl: extends TRL's `GRPOTrainer`, and skips the model passes of completions that would not change the weights.

A name is imported when it is first used, so `import dash_trl` is quick and needs neither torch nor trl.
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy
from dash_trl.versions import installed, warn_of_trl

if TYPE_CHECKING:
    from dash_trl.callbacks import DASHCallback
    from dash_trl.config import DASHConfig
    from dash_trl.data import load_code_dataset, load_math_dataset
    from dash_trl.process_rewards import ProcessRewardCallback
    from dash_trl.rewards import CodeReward, MathAccuracyReward, RewardRunner
    from dash_trl.rollout import RolloutBatch
    from dash_trl.tools import ProcessTool
    from dash_trl.trainer import DASHTrainer

__version__ = installed("dash_trl") or "0.0.0"  # a source tree that is not installed

warn_of_trl()  # before any import from TRL, because a newer TRL may lack a private name that this package imports

__getattr__, __dir__, _names = lazy(__name__)
__all__ = [*_names, "__version__"]
