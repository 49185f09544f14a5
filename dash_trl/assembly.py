"""Builds the objects of a run from a `DASHTrainer` and its settings::

    Sampler ─┐
    Rewards ─┼──► Collector ──► MicroSteps ──► the trainer's training_step
    LogProbs ┘

The objects never get the trainer. The functions of this module read its settings, and pass values and functions on.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from accelerate.utils import DynamoBackend, is_peft_model
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from dash_trl.callbacks import SampledGroup
from dash_trl.checkpoints import Checkpoints
from dash_trl.checks import check_prompt, check_prompt_lengths
from dash_trl.collect import (
    ByFunction,
    Collector,
    DynamicSampling,
    InProcess,
    OnServers,
    Prompts,
    Rewards,
    Rounds,
    RowSettings,
    Sampler,
    TurnsInProcess,
    TurnsOnServers,
    WindowLog,
    decoded,
)
from dash_trl.log_probs import LogProbRules, LogProbs
from dash_trl.micro_steps import MicroBatches, MicroSteps
from dash_trl.monitoring import Recorder
from dash_trl.rollout import (
    EpochOrder,
    GenerationWindow,
    PromptQueue,
    PromptReader,
    RunAhead,
    Shapes,
    open_epoch,
)
from dash_trl.seams import shuffled, sync_weights, tool_suffix, weights_of
from dash_trl.tools import (
    NO_PROMPT,
    Conversations,
    EnvironmentReward,
    Environments,
    ToolCalls,
    TurnRules,
    owns_reward,
)
from dash_trl.update import ModelPasses, Schedule, has_dropout, trl_settings

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- questions about the settings


def on_servers(trainer: Any) -> bool:
    """Whether vLLM servers sample."""
    return trainer.use_vllm and trainer.vllm_mode == "server" and trainer.rollout_func is None


def one_ahead(trainer: Any) -> bool:
    """Whether this process samples the next window while it waits for rewards (`async_level=1` without servers)."""
    return trainer.args.async_level > 0 and not on_servers(trainer) and trainer.rollout_func is None


def looks_ahead(trainer: Any) -> bool:
    """Whether the sampler can sample a window before training needs it."""
    return on_servers(trainer) or one_ahead(trainer)


def knows_log_probs(trainer: Any) -> bool:
    """Whether rows may have the sampler's log-probs."""
    return trainer.use_vllm or trainer.rollout_func is not None or one_ahead(trainer)


def loss_settings(trainer: Any, *, training: bool) -> dict[str, Any]:
    """Return the settings that replace attributes of the trainer while TRL computes the loss; see `trl_settings`.

    TRL corrects for the difference between sampler and policy only with `use_vllm=True`. In training, `use_vllm` is
    therefore set to True in two more cases: with `loss_type="decoupled_ppo"`, and if this process samples the next
    window while it waits for rewards. In an evaluation, our losses have no correction, because
    the policy itself samples.

    Args:
        trainer: a `DASHTrainer`.
        training: False in an evaluation.
    """
    args = trainer.args
    settings = trl_settings(args.loss_type, delta=args.aipo_delta)
    if settings and not training:
        settings["vllm_importance_sampling_correction"] = False
    corrected = training and (args.loss_type == "decoupled_ppo" or one_ahead(trainer))
    return settings | ({"use_vllm": True} if corrected else {})


def is_repeatable(trainer: Any) -> bool:
    """Whether training passes are repeatable; see `LogProbRules.repeatable`. The check visits every module."""
    args = trainer.args
    return args.num_iterations == 1 and args.neftune_noise_alpha is None and not has_dropout(trainer.model)


def log_prob_rules(trainer: Any) -> LogProbRules:
    """Return the `LogProbRules`: which log-probs the loss needs with the trainer's settings."""
    args, settings = trainer.args, loss_settings(trainer, training=True)
    corrects = settings.get("use_vllm", trainer.use_vllm) and settings.get(
        "vllm_importance_sampling_correction", trainer.vllm_importance_sampling_correction
    )
    correction = {
        "mode": settings.get("vllm_importance_sampling_mode", trainer.vllm_importance_sampling_mode),
        "clip_min": trainer.vllm_importance_sampling_clip_min,
        "clip_max": trainer.vllm_importance_sampling_clip_max,
    }
    return LogProbRules(
        outlives_its_weights=args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0,
        reference=trainer.beta != 0.0,
        sampler_is_old=args.loss_type == "aipo",
        correction=correction if corrects else None,
        repeatable=partial(is_repeatable, trainer),
    )


# ---------------------------------------------------------------------- from prompts to a window


def new_reader(trainer: Any) -> PromptReader | PromptQueue:
    """Build the `PromptReader` of the run; with `queues_prompts`, build a `PromptQueue` instead."""
    args = trainer.args
    window_batches = args.steps_per_generation * args.num_iterations

    def opened(epoch: int, skipped: int = 0) -> Iterator[list[dict[str, Any]]]:
        return open_epoch(trainer.callback_handler.train_dataloader, epoch, skipped)

    if not args.queues_prompts:
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
        first=lambda: trainer._collector.first_prompts(prompts_of_rank(args)),
        open_epoch=lambda epoch, batches: opened(epoch, batches * window_batches),
    )


def prompts_of_rank(args: Any) -> int:
    """Return the number of prompts that a rank has in a generation batch."""
    return args.per_device_train_batch_size * args.steps_per_generation // args.num_generations


def new_order(trainer: Any, sampler: Any) -> EpochOrder:
    """Build the `EpochOrder`: the prompts of each epoch in TRL's order.

    Args:
        trainer: a `DASHTrainer`.
        sampler: TRL's `RepeatSampler`, which orders the prompts.
    """
    return EpochOrder(sampler, lambda: int(trainer.state.epoch or 0))


def new_sampler(trainer: Any, rewards: Rewards, log_probs: LogProbs) -> Sampler:
    """Build the `Sampler`, which turns prompts into completions: by `rollout_func`, on vLLM servers or in this process.

    Args:
        trainer: a `DASHTrainer`.
        rewards: the rewards of the run, which may begin while rows are sampled.
        log_probs: computes log-probs of completions, if this process samples the next window while it waits for
            rewards, and the sampler does not report log-probs.
    """
    decode, timed = partial(decoded, trainer._tokenizer), trainer.recorder.timed
    on_rows = rewards.early.take if rewards.early.wanted else None

    def generate(tokenized: tuple[Any, ...]) -> tuple[list[list[int]], Any]:
        return trainer._generate_single_turn(*tokenized, trainer.num_generations)

    def call_function(prompts: list[Any]) -> dict[str, Any]:
        sync_weights(trainer)
        return trainer.rollout_func(prompts, trainer)

    def versions(rows: int) -> Tensor:
        return torch.full((rows, 2), weights_of(trainer))

    def versions_of_turns(rows: int) -> Tensor:
        # If every row failed before its first turn, nothing has sent vLLM the current weights. Then `versions` would
        # return the version of older weights.
        sync_weights(trainer)
        return versions(rows)

    def use_environments(instances: list[Any]) -> None:
        if trainer.environment_factories is not None:
            trainer.environments = instances  # TRL passes them to reward functions

    if trainer.rollout_func is not None:
        return ByFunction(call_function, decode=decode, versions=versions, timed=timed)
    common = {"generate": generate, "decode": decode, "on_rows": on_rows, "timed": timed}
    if on_servers(trainer):
        common |= {"pool": trainer.vllm_generation, "add": trainer.ranks.sum}
        common |= {"figures": trainer.recorder.log, "total": trainer.recorder.total}
        if trainer._conversations is None:
            return OnServers(**common, on_group=group_watch(trainer))
        return TurnsOnServers(trainer._conversations, use_environments, **common)
    own_log_probs = partial(log_probs.of_tokens, pad_token_id=trainer._tokenizer.pad_token_id)
    common |= {"versions": versions, "log_probs": own_log_probs if one_ahead(trainer) else None}
    if trainer._conversations is None:
        return InProcess(**common)
    return TurnsInProcess(
        new_rounds(trainer),
        trainer._conversations,
        use_environments,
        knows_log_probs=trainer.use_vllm,
        **common | {"versions": versions_of_turns},
    )


def group_watch(trainer: Any) -> Callable[[Prompts, int, list[list[int]]], None] | None:
    """Return a function that calls `on_group_sampled` for a group; `None` if no callback has `watches_groups`."""
    watching = [callback for callback in trainer._dash_callbacks() if callback.watches_groups]

    def sampled(prompts: Prompts, first: int, completion_ids: list[list[int]]) -> None:
        own = slice(first, first + len(completion_ids))
        group = SampledGroup(prompts.number, prompts.examples[own], prompts.ids[own], completion_ids)
        for callback in watching:
            callback.on_group_sampled(trainer.args, trainer.state, trainer.control, group, trainer=trainer)

    return sampled if watching else None


def new_conversations(trainer: Any) -> Conversations | None:
    """Build the `Conversations`, which run the tools and environments of rows with several turns.

    The instances of environments that TRL has already created are used first. The result is `None` if there are no
    tools and no environments.
    """
    if not trainer.tools and trainer.environment_factories is None:
        return None
    tokenizer, context = deepcopy(trainer._tokenizer), trainer.context_length  # other threads use the copy

    def tokenize(prompt: Any, tools: Sequence[Any]) -> list[int]:
        check_prompt(prompt, "A row")
        ids = tokenizer.apply_chat_template(
            prompt,
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
            encode=partial(tool_suffix, trainer, tokenizer),
        )

    calls, environments = ToolCalls(trainer.args.tool_timeout), None
    if trainer.environment_factories is not None:
        kinds = dict.fromkeys(type(pool[0]) for pool in trainer._environment_pool.values())
        environments = Environments(trainer.environment_factories, trainer._env_tools, trainer._environment_pool)
    conversations = Conversations(
        rules, calls, trainer._standalone_tools, environments, tokenize, trainer._tokenizer.eos_token_id
    )
    if environments is not None:
        own = [kind for kind in kinds if owns_reward(kind)]
        first = len(trainer.reward_funcs) - len(own)  # TRL has appended the environments' rewards
        trainer.reward_funcs[first:] = [EnvironmentReward(kind, conversations) for kind in own]
    return conversations


def new_rounds(trainer: Any) -> Rounds:
    """Build the `Rounds`, which sample the waiting rows turn by turn in this process."""

    def generate(contexts: list[list[int]], first: bool) -> tuple[list[list[int]], Any]:
        # Sampling may be a collective, in which every rank must take part. So a rank without waiting rows samples a
        # completion of a prompt with a single token, and drops the completion. With tensor parallelism, TRL
        # finds a rank's completions by multiplying its place in its group by its own number of prompts. So all ranks
        # must pass the same number of prompts.
        rows, wanted = len(contexts), 0
        if not on_servers(trainer):
            is_split = trainer.use_vllm and trainer.args.vllm_tensor_parallel_size > 1
            wanted = -trainer.ranks.least(-rows) if is_split else 1
        contexts = [*contexts, *[[trainer._tokenizer.eos_token_id]] * (wanted - rows)]
        ids, log_probs = trainer._generate_single_turn(contexts, None, {}, trainer.num_generations if first else 1)
        return ids[:rows], log_probs if log_probs is None else log_probs[:rows]

    return Rounds(trainer.ranks, trainer._conversations, generate)


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
    new_rounds(trainer).go_on(rows, completion_ids, log_probs)
    turns = [row.turns for row in rows]
    return (
        [one.own for one in turns],
        [one.messages for one in turns],
        [one.completion_ids for one in turns],
        None if log_probs is None else [one.log_probs for one in turns],
        sum(row.calls for row in rows),
        sum(row.failed_calls for row in rows),
        [[] for _ in rows],  # images
    )


def new_rewards(trainer: Any, base: Any) -> Rewards:
    """Build the `Rewards`, which compute the rewards of a run and count failures.

    Args:
        trainer: a `DASHTrainer`.
        base: the class `DASHTrainer`, to find out whether a subclass overrides `_calculate_rewards`. Such an override
            may change rows before they are scored, so no reward begins before the override is called.
    """
    overridden = type(trainer)._calculate_rewards is not base._calculate_rewards
    if overridden and looks_ahead(trainer) and trainer.accelerator.is_main_process:
        logger.warning(
            f"{type(trainer).__name__} overrides _calculate_rewards. The override may change rows before they are "
            "scored, so rewards begin only when it is called, not while rows are sampled. If you only change rewards, "
            "use a DASHCallback (on_rewards) instead: rewards then begin early."
        )
    this = weakref.ref(trainer)  # a runner's worker may outlive the trainer and must not keep the model in memory

    def group_size() -> int:
        if (alive := this()) is None:
            return 0
        return alive.num_generations if alive.model.training else alive.num_generations_eval

    return Rewards(
        trainer.ranks,
        trainer.recorder,
        trainer.reward_funcs,
        trainer.reward_func_names,
        num_generations=trainer.num_generations,
        group_size=group_size,
        early=looks_ahead(trainer) and not overridden,
        calculate=trainer._calculate_rewards,
        groups_of_step=lambda: trainer._micro_steps.groups_of_step(trainer._step),
    )


def new_log_probs(trainer: Any) -> LogProbs:
    """Build the `LogProbs`, which compute old log-probs, reference log-probs and importance-sampling ratios."""
    micro_batches = new_micro_batches(trainer)

    def inputs_of(window: GenerationWindow, lengths: Tensor) -> Iterator[tuple[list[int], dict[str, Any]]]:
        with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            for rows, inputs in micro_batches.without_gradient(window, lengths):
                yield rows, trainer._prepare_inputs(inputs)

    def run(model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple:
        return trainer._passes.run(trainer._get_per_token_logps_and_entropies, model, inputs, **kwargs)

    def reference(inputs: dict[str, Any]) -> tuple:
        if trainer.ref_model is not None:
            return run(trainer.ref_model, inputs)
        # With PEFT, the reference is the adapter "ref", a copy of the adapter with which training began. Without "ref",
        # the reference is the base model.
        model = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return run(trainer.model, inputs)

    return LogProbs(
        trainer.ranks,
        partial(log_prob_rules, trainer),
        inputs_of,
        policy=lambda inputs, **kwargs: run(trainer.model, inputs, **kwargs),
        reference=reference,
        log=trainer.recorder.log,
        timed=trainer.recorder.timed,
    )


def new_collector(trainer: Any, rewards: Rewards) -> Collector:
    """Build the `Collector`, which turns prompts into windows that are ready for training.

    Its `LogProbs`, `Sampler` and `WindowLog` are built here, too.
    """
    args, pad_token_id = trainer.args, trainer._tokenizer.pad_token_id
    log_probs = new_log_probs(trainer)

    def count_tokens(tokens: int) -> int:
        trainer.state.num_input_tokens_seen += tokens
        return trainer.state.num_input_tokens_seen

    def settings() -> RowSettings:
        return RowSettings(
            num_generations=trainer.num_generations,
            end_ids=frozenset([*trainer.eos_token_ids, pad_token_id]),
            mask_truncated=trainer.mask_truncated_completions,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=trainer.pad_to_multiple_of,
            threshold=args.gradient_filter_threshold,
        )

    return Collector(
        trainer.ranks,
        settings,
        new_sampler(trainer, rewards, log_probs),
        rewards,
        log_probs,
        trainer.recorder,
        WindowLog(
            trainer.ranks,
            figures=trainer.recorder.log,
            total=trainer.recorder.total,
            tables=trainer._logs,
            extra=trainer._pending_extra_logs,
            metrics=trainer._pending_metrics,
            names=trainer.reward_func_names,
            weights=lambda: trainer.reward_weights,
            count_tokens=count_tokens,
        ),
        # A `rollout_func` tokenizes prompts itself. An environment may add to its prompt when it is reset, so its
        # prompts are tokenized after the reset.
        tokenize=trainer._tokenize_prompts
        if trainer.rollout_func is None and trainer.environment_factories is None
        else None,
        upcoming=lambda: trainer._reader.upcoming(trainer._step),
        ahead=RunAhead(args.async_level if looks_ahead(trainer) else 0),
        log_staleness=looks_ahead(trainer),
        **new_dynamic_sampling(trainer),
        step=lambda: trainer.state.global_step,
        dispatch=trainer._dispatch,
        advantages=trainer._advantages,
        draw_order=shuffled,
    )


def new_dynamic_sampling(trainer: Any) -> dict[str, Any]:
    """Return the arguments of `Collector` for dynamic sampling; empty without `queues_prompts`."""
    args, ranks = trainer.args, trainer.ranks
    if not args.queues_prompts:
        return {}

    dynamic = DynamicSampling(
        prompts_of_rank(args),
        ranks.count,
        most=args.max_num_gen_batches,
        ahead=args.async_level > 0 and looks_ahead(trainer),
    )
    return {
        "dynamic": dynamic,
        "more": lambda prompts: trainer._reader.take(prompts),
        "epochs": lambda: trainer._reader.epochs,
    }


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


def new_micro_batches(trainer: Any) -> MicroBatches:
    """Build the `MicroBatches`, which make the inputs of model passes from the rows of a window."""
    args = trainer.args
    return MicroBatches(
        trainer._passes,
        trainer.ranks.rank,
        pad_token_id=trainer._tokenizer.pad_token_id,
        max_rows=args.per_device_train_batch_size,
        max_tokens=args.max_tokens_per_microbatch,
        loss_type=trainer.loss_type,
        filter_denominator=args.filter_denominator,
    )


def new_micro_steps(trainer: Any, collector: Collector) -> MicroSteps:
    """Build the `MicroSteps`, which make the inputs for each call of `training_step`."""
    args, micro_batches = trainer.args, new_micro_batches(trainer)
    return MicroSteps(
        Schedule(
            steps_per_generation=args.steps_per_generation,
            num_iterations=args.num_iterations,
            accumulation=args.gradient_accumulation_steps,
            rows_per_step=args.per_device_train_batch_size,
            pack=micro_batches.plan,
        ),
        micro_batches,
        collector.window,
        by_group=args.reward_pipeline,
        num_generations=trainer.num_generations,
        log=trainer.recorder.log,
        to_training=lambda: trainer.model.train(),
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
    )


def new_checkpoints(trainer: Any, log_probs: LogProbs) -> Checkpoints:
    """Build the `Checkpoints`, which save and restore the window in use."""

    def shapes() -> Shapes:
        dataset, rules = trainer.train_dataset, log_probs.rules
        return Shapes.of(
            trainer.args,
            processes=trainer.ranks.count,
            prompts=len(dataset) if isinstance(dataset, Sized) else None,
            corrected=rules.correction is not None,
            sampler_is_old=rules.sampler_is_old,
        )

    return Checkpoints(trainer.ranks, shapes, trainer._dash_callbacks)
