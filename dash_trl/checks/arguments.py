"""`DASHTrainer`'s arguments: each check raises a `ValueError` with value, reason, remedy, before it costs time."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from inspect import isfunction, ismethod
from typing import Any

from transformers import ProcessorMixin
from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from dash_trl.callbacks import ROLLOUT_EVENTS, DASHCallback, misspelt
from dash_trl.checks.models import check_model
from dash_trl.checks.prompts import check_batch, check_conversations, check_dataset
from dash_trl.config import DASHConfig
from dash_trl.rewards import scores_alone
from dash_trl.tools import ProcessTool
from dash_trl.update import OFF_POLICY_LOSSES

logger = logging.getLogger(__name__)


def check_arguments(
    model: Any, args: Any, train_dataset: Any, eval_dataset: Any, processing_class: Any, others: Mapping[str, Any]
) -> None:
    """Everything that can be known from `DASHTrainer`'s arguments before a weight is loaded."""
    if not isinstance(args, DASHConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, which lacks DASH's options. Pass a dash_trl.DASHConfig: it takes all "
            "fields of trl.GRPOConfig."
        )
    own_rollouts, environments = others.get("rollout_func") is not None, others.get("environment_factory") is not None
    if own_rollouts and (others.get("tools") or environments):
        name = "tools" if others.get("tools") else "environment_factory"
        raise ValueError(
            f"{name} and rollout_func are both set, but a rollout_func makes whole completions, tool calls included. "
            "Leave one of the two out."
        )
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, a multimodal processor, but DASHTrainer trains "
            "text models only: images cannot be re-packed. Pass a tokenizer, or use trl.GRPOTrainer."
        )
    check_callbacks(others.get("callbacks") or ())
    check_vllm(args)
    if args.loss_type in OFF_POLICY_LOSSES and not (args.use_vllm or own_rollouts or args.async_level):
        raise ValueError(
            f"loss_type={args.loss_type!r} compares the policy with the sampler, and transformers' generate reports no "
            "log-probs. Sample with vLLM (vllm_server_urls, or use_vllm=True), or with a rollout_func that returns "
            "'logprobs'; or use one of TRL's losses."
        )
    for dataset, name in ((train_dataset, "train_dataset"), (eval_dataset, "eval_dataset")):
        check_dataset(dataset, name, own_rollouts, environments=environments)
        if others.get("tools") or environments:
            check_conversations(dataset, name)
    check_tools(others.get("tools") or ())
    check_batch(train_dataset, args)
    check_correction(args)
    check_model(model, args, others.get("peft_config"))


def check_vllm(args: Any) -> None:
    """Refuse vLLM within the trainer's process where it cannot run."""
    if not args.use_vllm or args.vllm_mode != "colocate":
        return
    instead = "leave use_vllm out, so that transformers samples, or start servers and name them with vllm_server_urls"
    if args.device.type == "cpu":
        raise ValueError(
            "use_vllm=True with vllm_mode='colocate' runs vLLM in the trainer's process, which needs a GPU, but this "
            f"run is on the CPU: {instead} (docs/vllm.md)."
        )
    if find_spec("vllm") is None:
        raise ValueError(
            f'use_vllm=True, but vLLM is not installed: pip install "dash_trl[vllm]" (in a checkout -e ".[vllm]"), or '
            f"{instead}."
        )


def check_tools(tools: Sequence[Any]) -> None:
    """Refuse tools of which the policy cannot be told, or that it cannot tell apart."""
    for tool in tools:
        try:
            if not (isfunction(tool) or ismethod(tool) or isinstance(tool, ProcessTool)):
                raise TypeError("it is neither a function nor a method")
            get_json_schema(tool)
        except (ValueError, TypeError, TypeHintParsingException, DocstringParsingException) as error:
            raise ValueError(
                f"{tool!r:.100} is no tool, of which the policy is told: {error}. Pass a function with type hints and "
                "a docstring that describes it and, under Args:, its arguments; or one around another object."
            ) from error
    names = [tool.__name__ for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"Several tools have the names {sorted(twice)}, and a call could mean any of them: rename some."
        )


# Options of transformers' `generate` that leave the distribution as it is.
HARMLESS = ("cache_implementation", "cache_config", "use_cache", "disable_compile", "compile_config")
# Options of sampling that change it, and the values with which they do not; temperature is known.
UNTRUNCATED = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}


def check_async(args: DASHConfig, own_rollouts: bool, rewards_come_later: bool) -> None:
    """Refuse to sample ahead where nothing could work meanwhile, or nobody knows how.

    Args:
        rewards_come_later: all of them, from functions that a runner runs beside the trainer.
    """
    if args.async_level == 0:
        return
    servers = args.use_vllm and args.vllm_mode == "server"
    if not servers and not own_rollouts and (args.async_level > 1 or not rewards_come_later):
        raise ValueError(
            f"async_level={args.async_level} lets servers sample while the trainer trains, but sampling shares the "
            "trainer's device here. Name servers (vllm_server_urls; `python -m dash_trl.serve MODEL` starts some), or "
            "leave async_level at 0. Without servers, async_level=1 samples while rewards are awaited, where all of "
            "them come from functions of one completion: reward(completion, answer, ...), see dash_trl.RewardRunner."
        )
    if own_rollouts:
        raise ValueError(
            f"async_level={args.async_level} with a rollout_func, which gets the trainer in its hands: what it calls "
            "there may need all ranks, so that it cannot run beside training. Leave async_level at 0, or sample from "
            "servers with tools or an environment_factory in place of rollout_func."
        )
    truncated = {name: value for name, none in UNTRUNCATED.items() if (value := getattr(args, name)) not in none}
    truncated |= {name: value for name, value in (args.generation_kwargs or {}).items() if name not in HARMLESS}
    if truncated and not args.use_vllm:
        raise ValueError(
            f"async_level={args.async_level} with {truncated}: transformers' generate then samples from another "
            "distribution than the model's and does not report its log-probs, which the correction for older weights "
            "needs. Leave these options out, or sample with vLLM."
        )
    mode, correction = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_correction
    if args.loss_type not in OFF_POLICY_LOSSES and (mode == "sequence_mask" or not correction):
        logger.warning(
            f"async_level={args.async_level} trains on rollouts of older weights. With "
            f"vllm_importance_sampling_correction={correction} and vllm_importance_sampling_mode={mode!r} they are "
            "taken for those of the current weights (correction=False), or most long sequences are left out "
            "(mode='sequence_mask', TRL's default; off_policy/clipped_share tells). Use loss_type='aipo', or "
            "'decoupled_ppo' (docs/async.md)."
        )


def check_correction(args: DASHConfig) -> None:
    """Warn if TRL's correction would weigh whole sequences by how another distribution than the policy's sampled."""
    if args.loss_type == "aipo" and args.use_vllm and args.vllm_importance_sampling_correction:
        logger.warning(
            "vllm_importance_sampling_correction=True is TRL's default and is off here: loss_type='aipo' weighs "
            "tokens by their ratio to the sampler itself. Set it to False, and this is not said."
        )
    options = {**{name: getattr(args, name) for name in UNTRUNCATED}, **(args.generation_kwargs or {})}
    truncated = {name: options[name] for name, none in UNTRUNCATED.items() if options[name] not in none}
    mode = args.vllm_importance_sampling_mode
    corrected = args.vllm_importance_sampling_correction and args.loss_type not in OFF_POLICY_LOSSES
    if truncated and args.use_vllm and corrected and mode.startswith("sequence"):
        logger.warning(
            f"{truncated} with vllm_importance_sampling_mode={mode!r}: vLLM's log-probs are those of the distribution "
            "that these options leave, the policy's those of its whole one, and the correction multiplies the loss of "
            "a sequence by the ratio of the two for all of its tokens: 0.98 for each is 0.00004 for 500. Leave these "
            "options out, or use vllm_importance_sampling_mode='token_truncate' or loss_type='aipo' (docs/async.md)."
        )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse a callback (an instance or a class) with rollout events that is no `DASHCallback`: it gets none."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for name in () if issubclass(kind, DASHCallback) else dir(kind):
            if event := misspelt(name, ROLLOUT_EVENTS):
                raise ValueError(
                    f"{kind.__name__}.{name} would never be called: {event} is sent to DASHCallbacks only. Derive "
                    f"{kind.__name__} from dash_trl.DASHCallback instead of {kind.__mro__[1].__name__}."
                )


def check_another_run(have_trained: bool, deepspeed: bool) -> None:
    """Refuse a second `train()` with DeepSpeed."""
    if have_trained and deepspeed:
        raise ValueError(
            "train() was called a second time, but DeepSpeed's engine of the first is gone, and Transformers makes no "
            "other for the same trainer. Make a new DASHTrainer; resume from a checkpoint if it should go on."
        )


def check_pipeline(trainer: Any, base: Any, callbacks: Iterable[Any]) -> None:
    """Refuse what would see a few groups of a window at a time and does not say that it may (`per_group = True`).

    Args:
        base: `DASHTrainer`, whose own methods may.
    """
    if trainer.environment_factories is not None and not all(map(scores_alone, trainer.reward_funcs)):
        raise ValueError(
            "reward_pipeline=True with an environment that has get_reward, which TRL asks for a whole batch. Give a "
            "reward function of one completion in its place, or leave the pipeline out."
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "reward_pipeline=True with a router loss, which is shared out over all rows that are kept, while the "
            "pipeline trains on groups before it knows the others' rewards. Leave one of the two out."
        )
    if type(trainer)._calculate_rewards is not base._calculate_rewards:
        raise ValueError(
            f"reward_pipeline=True trains on groups as their rewards come, and {type(trainer).__name__}."
            "_calculate_rewards would be called after that. Change rewards in a DASHCallback (on_rewards, with "
            "per_group = True), or leave the pipeline out."
        )
    check_per_group(trainer, base, callbacks)


def check_per_group(trainer: Any, base: Any, callbacks: Iterable[Any]) -> None:
    """Refuse what makes a row's advantage from some groups of a window and does not say that it may."""
    args = trainer.args
    option = "reward_pipeline=True" if args.reward_pipeline else f"max_num_gen_batches={args.max_num_gen_batches}"
    judged = [(type(trainer), base, ["compute_advantages"], type(trainer).compute_advantages)]
    judged += [(type(one), DASHCallback, ["on_rewards", "on_advantages"], one) for one in callbacks]
    for kind, plain, names, marked in judged:
        own = issubclass(kind, plain) and any(getattr(kind, name) is not getattr(plain, name) for name in names)
        if own and not getattr(marked, "per_group", False):
            raise ValueError(
                f"{option} hands over some groups of a window at a time, but {kind.__name__} does not say that its "
                f"{' and '.join(names)} treat each group by itself. Give it an attribute per_group = True if they do "
                f"(compute_advantages: the function), or leave {option.partition('=')[0]} out."
            )


# Methods of TRL's that sample in training, which `dash_trl.collect` does.
NOT_CALLED = ("_generate", "_generate_and_score_completions", "_tool_call_loop")


def check_subclass(kind: type, base: type) -> None:
    """Refuse a trainer's methods that nothing calls: what `base` does would be done in their place.

    Args:
        base: `DASHTrainer`.
    """
    for name in NOT_CALLED:
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(
                f"{kind.__name__}.{name} would not be called in training, which samples by itself. Sample in a "
                "rollout_func, change rollouts in a DASHCallback (on_rollouts_sampled), or override compute_advantages."
            )
    for name in vars(kind):
        if "compute_advantages" not in vars(kind) and misspelt(name, ["compute_advantages"]) and name[0] != "_":
            raise ValueError(
                f"{kind.__name__}.{name} would never be called. Rename it to compute_advantages, which makes the "
                "advantages; a helper needs another name."
            )
