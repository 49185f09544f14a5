"""Builds the `Conversations` of a run from the tools and environments that TRL has set up.

Like `seams.py`, this module reads internals of TRL.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from trl import GRPOTrainer

from dash_trl.checks import check_prompt_ids, context_of, plain_prompt
from dash_trl.seams import decoded, tool_suffix
from dash_trl.tools import (
    NO_PROMPT,
    Conversations,
    EnvironmentReward,
    Environments,
    Tool,
    ToolCalls,
    TurnRules,
    owns_reward,
)


def new_conversations(trainer: GRPOTrainer) -> Conversations | None:
    """Build the `Conversations`; `None` if there are no tools and no environments.

    The instances of environments that TRL has already created are used first.
    """
    if not trainer.tools and trainer.environment_factories is None:
        return None
    tokenizer = deepcopy(trainer._tokenizer)  # for other threads
    context = context_of(trainer.model.config)

    def tokenize(prompt: object, tools: Sequence[Tool]) -> list[int]:
        ids = tokenizer.apply_chat_template(
            plain_prompt(prompt, "A row"),
            tools=list(tools) or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
        check_prompt_ids([ids], tokenizer, trainer.eos_token_ids, rules().context)
        return ids

    def parse(ids: list[int], prefix: list[int], tools: Sequence[Tool]) -> dict[str, Any]:
        ((message,),) = decoded(tokenizer, [NO_PROMPT], [prefix], [ids], tools=tools)
        return message

    def rules() -> TurnRules:
        of_sampler = math.inf
        if trainer.use_vllm:
            sampler = trainer.vllm_generation
            servers = trainer.vllm_mode == "server"
            of_sampler = sampler.context if servers else sampler.llm.llm_engine.model_config.max_model_len
        return TurnRules(
            most_tokens=trainer.max_completion_length,
            context=min(context or math.inf, of_sampler),
            most_rounds=trainer.max_tool_calling_iterations if trainer.tools else 0,
            parse=parse,
            encode=lambda messages: tool_suffix(trainer, tokenizer, plain_prompt(messages, "A tool")),
        )

    calls = ToolCalls(trainer.args.tool_timeout)
    environments = Environments({}, {}, {})
    if trainer.environment_factories is not None:
        environments = Environments(trainer.environment_factories, trainer._env_tools, trainer._environment_pool)
    end_id = trainer._tokenizer.eos_token_id
    use = partial(setattr, trainer, "environments")  # TRL passes them to reward functions
    conversations = Conversations(rules, calls, trainer._standalone_tools, environments, tokenize, end_id, use)
    kinds = dict.fromkeys(type(pool[0]) for pool in environments.pool.values())
    own = [kind for kind in kinds if owns_reward(kind)]
    first = len(trainer.reward_funcs) - len(own)  # TRL has appended the environments' rewards
    trainer.reward_funcs[first:] = [EnvironmentReward(kind, conversations) for kind in own]
    return conversations
