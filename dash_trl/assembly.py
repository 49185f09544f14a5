"""Builds the objects of a run that do not get the trainer as their `Host`, or that there are several kinds of."""

from collections.abc import Iterator, Sequence, Sized
from copy import deepcopy
from typing import Any

from accelerate.utils import DynamoBackend, is_peft_model

from dash_trl.checks import check_prompt_lengths, plain_prompt
from dash_trl.collect import (
    ByFunction,
    DynamicSampling,
    InProcess,
    OnServers,
    Rounds,
    Sampler,
    TurnsInProcess,
    TurnsOnServers,
    decoded,
)
from dash_trl.host import looks_ahead, on_servers
from dash_trl.log_probs import LogProbs
from dash_trl.monitoring import Recorder
from dash_trl.rewards import EarlyRewards
from dash_trl.rollout import PromptQueue, PromptReader, open_epoch
from dash_trl.seams import Logs, tool_suffix
from dash_trl.tools import (
    NO_PROMPT,
    Conversations,
    EnvironmentReward,
    Environments,
    ToolCalls,
    TurnRules,
    owns_reward,
)
from dash_trl.update import ModelPasses

# ---------------------------------------------------------------------- from prompts to a window


def new_reader(trainer: Any, dynamic: DynamicSampling | None) -> PromptReader | PromptQueue:
    """Build the `PromptReader` of the run; with dynamic sampling, build a `PromptQueue` instead."""
    args = trainer.args
    window_batches = args.steps_per_generation * args.num_iterations

    def opened(epoch: int, skipped: int = 0) -> Iterator[list[dict[str, Any]]]:
        return open_epoch(trainer.callback_handler.train_dataloader, epoch, skipped)

    if dynamic is None:
        return PromptReader(
            args.async_level,
            window_batches=window_batches,
            step_batches=args.gradient_accumulation_steps,
            sized=isinstance(trainer.train_dataset, Sized),
            open_epoch=opened,
        )
    return PromptQueue(
        num_generations=trainer.num_generations,
        prompts=prompts_of_rank(args),
        window_batches=window_batches,
        accumulation=args.gradient_accumulation_steps,
        ahead=args.async_level if looks_ahead(trainer) else 0,
        first=dynamic.first,
        open_epoch=lambda epoch, batches: opened(epoch, batches * window_batches),
    )


def prompts_of_rank(args: Any) -> int:
    """Return the number of prompts that a rank has in a generation batch."""
    return args.per_device_train_batch_size * args.steps_per_generation // args.num_generations


def new_sampler(trainer: Any, early: EarlyRewards, log_probs: LogProbs) -> Sampler:
    """Build the `Sampler`, which turns prompts into completions: by `rollout_func`, on vLLM servers or in this process.

    Args:
        trainer: a `DASHTrainer`.
        early: the rewards that may begin while rows are sampled.
        log_probs: computes log-probs of completions.
    """
    conversations = trainer._conversations

    if trainer.rollout_func is not None:
        return ByFunction(trainer, early)
    if on_servers(trainer):
        if conversations is not None:
            return TurnsOnServers(trainer, early, trainer.vllm_generation, conversations)
        watched = any(callback.watches_groups for callback in trainer._dash_callbacks())
        return OnServers(trainer, early, trainer.vllm_generation, trainer.group_sampled if watched else None)
    if conversations is not None:
        return TurnsInProcess(trainer, early, log_probs, conversations)
    return InProcess(trainer, early, log_probs)


def new_dynamic_sampling(trainer: Any) -> DynamicSampling | None:
    """Build the `DynamicSampling`; `None` without `queues_prompts`."""
    args = trainer.args
    if not args.queues_prompts:
        return None
    return DynamicSampling(
        prompts_of_rank(args),
        trainer.ranks.count,
        most=args.max_num_gen_batches,
        ahead=args.async_level > 0 and looks_ahead(trainer),
    )


def new_conversations(trainer: Any) -> Conversations | None:
    """Build the `Conversations`, which run the tools and environments of rows with several turns.

    The instances of environments that TRL has already created are used first. The result is `None` if there are no
    tools and no environments.
    """
    if not trainer.tools and trainer.environment_factories is None:
        return None
    tokenizer, context = deepcopy(trainer._tokenizer), trainer.context_length  # other threads use the copy

    def tokenize(prompt: Any, tools: Sequence[Any]) -> list[int]:
        ids = tokenizer.apply_chat_template(
            plain_prompt(prompt, "A row"),
            tools=list(tools) or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
        check_prompt_lengths([ids], rules().context)
        return ids

    def parse(ids: list[int], prefix: list[int], tools: Sequence[Any]) -> dict[str, Any]:
        ((message,),) = decoded(tokenizer, [NO_PROMPT], [prefix], [ids], tools=tools)
        return message

    def rules() -> TurnRules:
        of_sampler = None
        if trainer.use_vllm:
            sampler = trainer.vllm_generation
            servers = trainer.vllm_mode == "server"
            of_sampler = sampler.context if servers else sampler.llm.llm_engine.model_config.max_model_len
        return TurnRules(
            most_tokens=trainer.max_completion_length,
            context=min((one for one in (context, of_sampler) if one is not None), default=None),
            most_rounds=trainer.args.max_tool_calling_iterations if trainer.tools else 0,
            parse=parse,
            encode=lambda messages: tool_suffix(trainer, tokenizer, plain_prompt(messages, "A tool")),
        )

    def use_environments(instances: list[Any]) -> None:
        trainer.environments = instances  # TRL passes them to reward functions

    calls, environments = ToolCalls(trainer.args.tool_timeout), None
    if trainer.environment_factories is not None:
        kinds = dict.fromkeys(type(pool[0]) for pool in trainer._environment_pool.values())
        environments = Environments(trainer.environment_factories, trainer._env_tools, trainer._environment_pool)
    end_id = trainer._tokenizer.eos_token_id
    conversations = Conversations(
        rules, calls, trainer._standalone_tools, environments, tokenize, end_id, use_environments
    )
    if environments is not None:
        own = [kind for kind in kinds if owns_reward(kind)]
        first = len(trainer.reward_funcs) - len(own)  # TRL has appended the environments' rewards
        trainer.reward_funcs[first:] = [EnvironmentReward(kind, conversations) for kind in own]
    return conversations


def evaluated_turns(
    trainer: Any, prompt_ids: list[list[int]], completion_ids: list[list[int]], log_probs: list[list[float]] | None
) -> tuple:
    """Sample the second and later turns of an evaluation's rows, in place of TRL's `_tool_call_loop`.

    Args:
        trainer: a `DASHTrainer` in evaluation.
        prompt_ids: token ids of each prompt.
        completion_ids: token ids of each first turn.
        log_probs: the sampler's log-probs of each first turn, or `None`.
    Returns:
        The tuple that TRL's `_tool_call_loop` returns.
    """
    rows = trainer._conversations.begun(
        prompt_ids, trainer.environments, trainer._batch_environments if trainer.environments else None
    )
    Rounds(trainer, trainer._conversations).go_on(rows, completion_ids, log_probs)
    turns = [row.turns for row in rows]
    return (
        [one.own for one in turns],
        [one.messages for one in turns],
        [one.completion_ids for one in turns],
        None if log_probs is None else [one.log_probs for one in turns],
        [row.calls for row in rows],  # TRL adds them up when they are gathered
        [row.failed_calls for row in rows],
        [[] for _ in rows],  # images
    )


# ---------------------------------------------------------------------- from a window to model passes


def new_passes(trainer: Any) -> ModelPasses:
    """Build the `ModelPasses`, which run the passes of the policy and the reference model, padding-free if possible."""
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    models = [trainer.accelerator.unwrap_model(model) for model in models]
    adapter = getattr(trainer.model, "active_peft_config", None)
    return ModelPasses(
        [model.get_base_model() if is_peft_model(model) else model for model in models],
        virtual_tokens=getattr(adapter, "is_prompt_learning", False),
        invoked_adapter=bool(getattr(adapter, "alora_invocation_tokens", None)),
        continuous_batching=trainer.args.use_transformers_continuous_batching,
        noisy_embeddings=trainer.args.neftune_noise_alpha is not None,
        # The backend is set by `torch_compile` or by accelerate's own configuration.
        compiled=trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
        share_prompts=trainer.args.share_prompts,
        router_losses=trainer.aux_loss_enabled,
    )


# ---------------------------------------------------------------------- logs and checkpoints


def new_recorder(trainer: Any) -> Recorder:
    """Build the `Recorder`, which collects the figures and seconds that TRL logs."""

    def logged() -> bool:
        """Whether the running optimizer step will be logged, as far as that is known now."""
        args, state = trainer.args, trainer.state
        step = state.global_step + 1
        at_first = step == 1 and args.logging_first_step
        return args.logging_strategy != "steps" or step % state.logging_steps == 0 or at_first

    return Recorder(
        trainer._metrics["train"],
        trainer.accelerator.device,
        logged,
        servers=trainer.use_vllm and trainer.vllm_mode == "server",
        rewards=trainer.args.reward_pipeline,
        rounds=trainer.args.max_num_gen_batches > 1,
        logs=Logs(trainer._logs, trainer._pending_extra_logs, trainer._pending_metrics),
    )
