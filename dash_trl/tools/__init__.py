"""Tools and environments. With them, a row has several turns: the policy calls tools and reads their answers."""

from dash_trl.tools.calls import ProcessTool, ToolCalls
from dash_trl.tools.conversations import Conversation, Conversations, EnvironmentReward
from dash_trl.tools.environments import NO_PROMPT, Environments, owns_reward
from dash_trl.tools.turns import Tool, TurnRules
