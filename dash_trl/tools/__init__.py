"""Tools and environments. With them, a row has several turns: the policy calls tools and reads their answers."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.tools.calls import ProcessTool

if TYPE_CHECKING:  # imported by other folders of the package, not public
    from dash_trl.tools.calls import ToolCalls
    from dash_trl.tools.conversations import Conversation, Conversations, EnvironmentReward
    from dash_trl.tools.environments import NO_PROMPT, Environments, owns_reward
    from dash_trl.tools.turns import TurnRules, Turns

__getattr__, __dir__, __all__ = lazy(__name__)
