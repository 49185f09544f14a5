"""Checks `DASHTrainer`'s arguments, most of them before weights are loaded."""

import logging
from collections.abc import Iterable, Mapping
from inspect import unwrap
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from trl import GRPOTrainer

from dash_trl.callbacks import ROLLOUT_EVENTS, DASHCallback, misspelt
from dash_trl.checks.models import check_model
from dash_trl.checks.prompts import check_batch, check_dataset
from dash_trl.config import DASHConfig
from dash_trl.rewards import RunnerReward, form_of, is_reward_model
from dash_trl.seams import generate_options
from dash_trl.update import OFF_POLICY_LOSSES

logger = logging.getLogger(__name__)


def check_arguments(
    model: PreTrainedModel | str,
    rewards: Any,
    args: object,
    train_dataset: object,
    eval_dataset: object,
    others: Mapping[str, Any],
) -> None:
    """Raise a `ValueError` if an argument of `DASHTrainer` cannot be used, or if two arguments exclude each other.

    `rewards` are unpacked; `others` are the arguments without a parameter here, such as `tools` and `peft_config`.
    """
    if not isinstance(args, DASHConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, which lacks DASH's options. Pass a dash_trl.DASHConfig: it has all "
            "fields of trl.GRPOConfig."
        )
    own_rollouts = others.get("rollout_func") is not None
    environments = others.get("environment_factory") is not None
    tools = environments or bool(others.get("tools"))
    if own_rollouts and tools:
        raise ValueError(
            f"rollout_func is set, and so is tools={others.get('tools')} or environment_factory. But a rollout_func "
            "makes whole completions, including tool calls. Leave one of the two out."
        )
    check_callbacks(others.get("callbacks") or ())
    if args.use_vllm and args.vllm_mode == "colocate" and args.device.type == "cpu":
        raise ValueError(
            "use_vllm=True with vllm_mode='colocate' runs vLLM in the trainer's process, which needs a GPU, but this "
            "run is on the CPU: leave use_vllm out, so that transformers samples, or start servers and name them with "
            "vllm_server_urls (docs/howto/vllm.md)."
        )
    if args.loss_type in OFF_POLICY_LOSSES and not (args.use_vllm or own_rollouts or args.async_level):
        raise ValueError(
            f"loss_type={args.loss_type!r} compares the policy with the sampler, but transformers' generate reports no "
            "log-probs. Sample with vLLM (vllm_server_urls, or use_vllm=True), or with a rollout_func that returns "
            "'logprobs'; or use one of TRL's losses."
        )
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if isinstance(eval_dataset, Mapping):
        datasets |= {f"eval_dataset[{split!r}]": part for split, part in eval_dataset.items()}
    for name, dataset in datasets.items():
        check_dataset(dataset, name, own_rollouts, environments=environments, conversations=tools)
    check_batch(train_dataset, args)
    check_sampling(args)
    check_model(model, args, others.get("peft_config"))
    check_rewards(rewards, args, datasets, own_rollouts)


# Sampling option → the values with which it leaves the distribution of completions unchanged. The temperature is not
# listed, because log-probs are computed at the same temperature.
UNTRUNCATED = {"top_p": (1.0,), "top_k": (0, -1, None), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}

# Sampling options of the requests that vLLM's servers take (`/v1/completions`, vLLM 0.31), except for those that change
# the prompt (`truncate_prompt_tokens`): the loss has the whole prompt. Colocated vLLM takes no others.
VLLM_OPTIONS = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "ec_transfer_params",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "logit_bias",
    "max_tokens",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_detection",
    "repetition_penalty",
    "response_format",
    "seed",
    "session_id",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
    "vllm_xargs",
    "watermarking",
)


def check_async(args: DASHConfig, own_rollouts: bool, rewards_come_later: bool) -> None:
    """Check that `async_level` fits the other arguments, and warn if the loss does not fit older rollouts.

    `rewards_come_later` means that a `RewardRunner` computes all rewards, so that sampling can go on meanwhile.

    Raises:
        ValueError: if `async_level` is above 0 and a `rollout_func` samples, which needs the trainer; or if the
            trainer's process samples, but `async_level` is above 1 or `rewards_come_later` is False.
    """
    if args.async_level == 0:
        return
    if own_rollouts:
        raise ValueError(
            f"async_level={args.async_level} does not work with a rollout_func: the function gets the trainer, and may "
            "call methods that need all ranks, so it cannot run while the trainer trains. Leave async_level at 0, or "
            "replace rollout_func by tools or an environment_factory and sample from servers."
        )
    if not args.names_servers and (args.async_level > 1 or not rewards_come_later):
        raise ValueError(
            f"async_level={args.async_level} lets servers sample while the trainer trains, but sampling shares the "
            "trainer's device here. Name servers (vllm_server_urls; `dash_trl serve MODEL` starts some), or "
            "leave async_level at 0. Without servers, async_level=1 samples while rewards are awaited. For this, all "
            "reward functions must score one completion: reward(completion, answer, ...), see dash_trl.RewardRunner."
        )
    mode = args.vllm_importance_sampling_mode
    correction = args.vllm_importance_sampling_correction
    if args.loss_type not in OFF_POLICY_LOSSES and (mode == "sequence_mask" or not correction):
        logger.warning(
            f"async_level={args.async_level} trains on rollouts of older weights. With "
            f"vllm_importance_sampling_correction={correction} and vllm_importance_sampling_mode={mode!r}, they are "
            "treated as rollouts of the current weights (correction=False), or most long sequences are left out "
            "(mode='sequence_mask', TRL's default; see off_policy/clipped_share). Use loss_type='aipo' or "
            "'decoupled_ppo' (docs/concepts/staleness.md)."
        )


def check_rewards(
    rewards: list[Any] | None, args: DASHConfig, datasets: Mapping[str, object], own_rollouts: bool
) -> None:
    """Check that the unpacked reward functions fit the datasets and the configuration.

    Raises:
        ValueError: if a needed column does not exist; or if a function scores a whole batch, but `reward_pipeline` or
            `async_level` needs functions that score one completion.
    """
    check_async(args, own_rollouts, all(isinstance(one, RunnerReward) for one in rewards or [None]))
    known = [getattr(dataset, "column_names", None) for dataset in datasets.values()]
    for one in rewards or ():
        if args.reward_pipeline and not isinstance(one, RunnerReward):
            raise ValueError(
                f"reward_pipeline=True, but {getattr(one, '__name__', one)!r:.100} scores a whole batch at once. Use "
                "functions that score one completion: reward(completion, answer, ...)."
            )
        if is_reward_model(one):
            continue
        form = one.form if isinstance(one, RunnerReward) else form_of(one)
        for columns in known:
            if isinstance(columns, list) and not own_rollouts:  # a rollout_func may add columns
                form.check_columns(columns)


# Option of transformers' generate → the value with which it samples one completion for each row, and the remedy.
GENERATE = {
    "stop_strings": (None, "It needs a tokenizer, which TRL does not pass. Use eos_token_id, or vLLM's option stop"),
    "num_return_sequences": (1, "A row has one completion. Use num_generations"),
    "num_beams": (1, "A beam search does not sample from the policy. Use temperature and top_p"),
    "do_sample": (True, "Greedy completions of a prompt are equal, so they carry no signal. Use a low temperature"),
    "return_dict_in_generate": (False, "TRL reads token ids only. Use log_completions to see completions"),
}


def check_generate(model: PreTrainedModel, generation_config: GenerationConfig, *, exact: bool) -> None:
    """Raise a `ValueError` if a sampling option of transformers' `generate` has no use in training.

    `exact` is True if older weights sample. Then options such as `top_p`, which change the model's distribution, raise
    an error, too. Otherwise they only give a warning.
    """
    options, changes = generate_options(model, generation_config)
    for name, (usable, remedy) in GENERATE.items():
        if (value := getattr(options, name)) != usable:
            raise ValueError(
                f"{name}={value!r} cannot be used in training. {remedy}, and take {name} out of generation_kwargs, or "
                "of the model's generation config."
            )
    if changes:
        said = (
            f"transformers' generate would sample from another distribution than the model's: {changes}. A correction "
            "needs the log-probs of that distribution, but generate does not report them. Leave the options out that "
            "cause this. If they come from the model's generation config, change that (for example "
            "model.generation_config.min_p = None). Or sample with vLLM."
        )
        if exact:
            raise ValueError(f"async_level=1 corrects for older weights, but {said}")
        logger.warning(f"The update takes completions for samples of the model, but {said}")


def check_rounding(model: PreTrainedModel, args: DASHConfig, *, has_copies: bool) -> None:
    """Warn if the trained weights have 16 bits, and the optimizer has no copies of them in float32.

    Since Transformers 5, `from_pretrained` keeps the dtype of the checkpoint, mostly bf16. DeepSpeed and FSDP keep
    copies (`has_copies`).
    """
    if not has_copies and any(one.requires_grad and one.dtype.itemsize == 2 for one in model.parameters()):
        logger.warning(
            f"The weights that are trained have 16 bits, so updates below about 1/500 of a weight are lost: with "
            f"learning_rate={args.learning_rate}, AdamW may change few weights. Load the model with dtype float32 "
            "(from_pretrained(..., dtype=torch.float32), or leave dtype out of model_init_kwargs); with bf16=True, "
            "passes compute in bf16 all the same."
        )


def check_sampling(args: DASHConfig) -> None:
    """Check the sampling options, and warn if some change vLLM's distribution while the loss has a ratio to it.

    The temperature must be that of the loss. vLLM's `stop` would end completions that then count as truncated. vLLM
    would ignore some options, or cut prompts.

    Raises:
        ValueError: if the correction has one ratio per sequence, but `loss_type="vespo"` needs one per token; or if an
            option in `generation_kwargs` cannot be used.
    """
    mode = args.vllm_importance_sampling_mode
    corrects = args.vllm_importance_sampling_correction
    # TRL checks this only if vLLM samples in the trainer's process.
    if corrects and mode.startswith("sequence") and args.loss_type == "vespo" and (args.use_vllm or args.async_level):
        raise ValueError(
            f"loss_type='vespo' with vllm_importance_sampling_mode={mode!r}: VESPO needs a ratio for each "
            "token, and this mode gives one for each sequence. Use 'token_truncate' or 'token_mask'."
        )
    options = args.generation_kwargs or {}
    used = {name: options.get(name, getattr(args, name)) for name in UNTRUNCATED}
    truncated = {name: value for name, value in used.items() if value not in UNTRUNCATED[name]}
    if truncated and args.use_vllm and (corrects or args.loss_type in OFF_POLICY_LOSSES):
        logger.warning(
            f"{truncated}: these options change vLLM's distribution and its log-probs, but not the policy's. So the "
            "ratio of the two multiplies the loss of each token by the probability that the options keep (0.98 on "
            "average with top_p=0.9 and the toy model), and in the modes of sequences by the product over the row: "
            "0.98 per token gives 0.00004 for 500 tokens. Leave these options out, or set "
            "vllm_importance_sampling_correction=False with a loss of TRL (docs/concepts/staleness.md)."
        )
    if options.get("temperature", args.temperature) != args.temperature:
        raise ValueError(
            f"generation_kwargs has temperature={options['temperature']}, but the loss uses temperature="
            f"{args.temperature}, so its log-probs would not be those of the sampler. Set temperature in the config."
        )
    sampler, known = ("vLLM", VLLM_OPTIONS) if args.use_vllm else ("transformers' generate", vars(GenerationConfig()))
    if unknown := sorted(options.keys() - {*known}):
        raise ValueError(
            f"generation_kwargs has {unknown}, which {sampler} does not use, so completions would be sampled without "
            "them (or, with truncate_prompt_tokens, from another prompt than the loss has; rewards never see special "
            f"tokens). Leave them out, or use other options: {', '.join(known)}."
        )
    if options.get("stop") and args.mask_truncated_completions:
        raise ValueError(
            f"generation_kwargs has stop={options['stop']}, but mask_truncated_completions=True masks completions that "
            "end without an end token, also those that vLLM ends at such a string. Use stop_token_ids, which count as "
            "end tokens, or leave one of the two out."
        )


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise a `ValueError` if a callback has a rollout event, such as `on_rewards`, but is not a `DASHCallback`.

    The trainer would never call this event. A method whose name closely resembles that of an event counts, too.
    """
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for name in () if issubclass(kind, DASHCallback) else dir(kind):
            if event := misspelt(name, ROLLOUT_EVENTS):
                raise ValueError(
                    f"{kind.__name__}.{name} would never be called: only DASHCallbacks receive {event}. Derive "
                    f"{kind.__name__} from dash_trl.DASHCallback instead of {kind.__mro__[1].__name__}."
                )


def check_groups_apart(trainer: GRPOTrainer, base: type[GRPOTrainer]) -> None:
    """Check that nothing in a run with `reward_pipeline` or `max_num_gen_batches` needs all groups of a window.

    With these options, callbacks and `compute_advantages` get some groups of a window at a time. Methods count only if
    a subclass of `base`, which is `DASHTrainer`, overrides them.

    Raises:
        ValueError: if a reward or a loss needs the whole window; or if an overridden `compute_advantages`, or a
            callback with such an event, lacks the attribute `per_group = True`.
    """
    args = trainer.args
    if args.reward_pipeline:
        if not all(isinstance(one, RunnerReward) for one in trainer.reward_funcs):
            raise ValueError(
                "reward_pipeline=True with an environment that has get_reward: TRL calls get_reward for a whole batch "
                "at once. Use a reward function that scores one completion instead, or leave reward_pipeline out."
            )
        if trainer.aux_loss_enabled or adds_term(type(trainer), base, "_compute_loss"):
            raise ValueError(
                "reward_pipeline=True with a router loss or a term of your own (regularizer_scale), which is averaged "
                "over all rows that the filter keeps, but the pipeline trains on groups before the rewards of other "
                "groups are known. Leave one of the two out."
            )
        if type(trainer)._calculate_rewards is not base._calculate_rewards:
            raise ValueError(
                "reward_pipeline=True trains on groups as their rewards come, but "
                f"{type(trainer).__name__}._calculate_rewards would be called after that. Change rewards in a "
                "DASHCallback (on_rewards, with per_group = True), or leave reward_pipeline out."
            )
    elif not args.samples_dynamically:
        return
    option = "reward_pipeline=True" if args.reward_pipeline else f"max_num_gen_batches={args.max_num_gen_batches}"
    judged: list[Any] = [(type(trainer), base, ["compute_advantages"], type(trainer).compute_advantages)]
    events = ROLLOUT_EVENTS if args.reward_pipeline else ROLLOUT_EVENTS[1:]
    judged += [(type(one), DASHCallback, events, one) for one in trainer.callback_handler.callbacks]
    for kind, plain, names, marked in judged:
        own = issubclass(kind, plain) and any(getattr(kind, name) is not getattr(plain, name) for name in names)
        if own and not getattr(marked, "per_group", False):
            raise ValueError(
                f"{option} passes on some groups of a window at a time, but {kind.__name__} does not say that its "
                f"{', '.join(names)} treat each group by itself. If they do, give it an attribute per_group = True "
                f"(for compute_advantages, on the function), or leave {option.partition('=')[0]} out."
            )


# TRL samples with these methods. In training, `dash_trl.collect` samples instead, so an override would have no effect
# there.
NOT_CALLED = ("_generate", "_generate_and_score_completions", "_tool_call_loop")


def check_called(kind: type, base: type, names: Iterable[str] = NOT_CALLED) -> None:
    """Raise a `ValueError` if a subclass overrides a method of TRL that is not called in training."""
    for name in names:
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(
                f"{kind.__name__}.{name} would not be called during training: DASHTrainer samples in its own way. "
                "Sample in a rollout_func, change rollouts in a DASHCallback (on_rollouts_sampled), or override "
                "compute_advantages."
            )


def adds_term(kind: type, base: type, name: str) -> bool | None:
    """Return whether a subclass's method for the loss has `regularizer_scale`, the weight of a term that it may add.

    `None`: the subclass does not override the method.
    """
    own = unwrap(getattr(kind, name))
    return None if own is unwrap(getattr(base, name)) else "regularizer_scale" in own.__code__.co_consts


def check_subclass(kind: type, base: type) -> None:
    """Call `check_called`, and warn if a subclass computes the loss without `regularizer_scale`."""
    check_called(kind, base)
    for name in ("compute_loss", "_compute_loss"):
        if adds_term(kind, base, name) is False:
            logger.warning(
                f"The weight of a term that {kind.__name__}.{name} may add to the loss depends on the number of "
                "survivors. Add such a term in _compute_loss, and multiply it by inputs['regularizer_scale']. For "
                "a loss of your own, override per_token_loss (docs/howto/extend.md)."
            )


def check_losses(trainer: GRPOTrainer, run: int, weighed: int) -> None:
    """Raise a `ValueError` if the `run` passes of a micro-step have not called `_compute_loss` once each.

    `weighed` is the number of these calls. A loss would lack the weight of its pass in the optimizer step.
    """
    if run != weighed:
        raise ValueError(
            f"{type(trainer).__name__} computes the loss without super()._compute_loss, so the loss lacks the weight "
            "of its pass in the optimizer step. Call it, and add your term times inputs['regularizer_scale']; or, for"
            " a loss of your own, override per_token_loss (docs/howto/extend.md)."
        )
