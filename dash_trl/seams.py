"""Functions that use internals of TRL, Transformers and accelerate, such as TRL's loss settings or TRL's step counter.

All such uses belong here, except overridden methods and attributes that are only read. Contract tests on a plain
`GRPOTrainer` (`tests/test_seams.py`) fail if a new TRL changes the internals that they check.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DynamoBackend, is_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.integrations import TrackioCallback, hub_kernels
from transformers.trainer_utils import unwrap_peft_model
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.extras.profiling import profiling_context
from trl.trainer import GRPOTrainer, grpo_trainer
from trl.trainer.utils import shuffle_sequence_dict, use_adapter

from dash_trl.update import ModelPasses

logger = logging.getLogger(__name__)
# No subclass and no argument reaches these globals of modules, so they are replaced within a `with` block:
# - `grpo_trainer.nanmin` and `nanmax`, in `unread_figures`, until TRL's do not wait for the GPU (1.16: they do).
# - `grpo_trainer.create_model_from_path`, in `reference_of`, until TRL takes a reference model (1.16: it does not).
# - `transformers.trainer.rotate_checkpoints`, in `DASHTrainer._save_checkpoint`, until Transformers calls it in a
#   method of its own (5.17: in `_save_checkpoint`, before our list of the checkpoint's files is written).
# An evaluation's `_calculate_rewards` is wrapped on the instance, because a user's subclass may override the method.
_told = set[str]()  # special tokens that `_tell_what_vanishes` has warned of


@contextmanager
def with_settings(trainer: object, settings: Mapping[str, object]) -> Iterator[None]:
    """Set attributes (name → value) of a trainer, its arguments or a module within the `with` block.

    They must not be properties, nor come from `__getattr__` as a `PeftModel`'s do.
    """
    attributes = vars(trainer)
    before = {name: attributes[name] for name in settings if name in attributes}  # without methods of the class
    attributes.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del attributes[name]
        attributes.update(before)


def regularizer(trainer: GRPOTrainer, mask: Tensor, entropies: Tensor, aux_loss: Tensor | None) -> Tensor | float:
    """Return what TRL's loss of a pass will contain besides policy and KL: minus the entropy bonus, plus router loss.

    Call it before the loss, which may adapt the entropy's coefficient. `mask` (1 = counts) and `entropies` are [S, T].
    """
    value = trainer.router_aux_loss_coef * aux_loss if trainer.aux_loss_enabled else 0.0
    gated = trainer.use_adaptive_entropy and not trainer._last_world_entropy <= trainer.args.entropy_target
    if trainer._entropy_bonus_enabled and not gated:
        if trainer.top_entropy_quantile < 1.0:
            mask = mask * trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
        value -= trainer.entropy_coef * (entropies * mask).sum() / mask.sum().clamp(min=1)
    return value / trainer.current_gradient_accumulation_steps


class Unread(TorchFunctionMode):
    """Mode in which `Tensor.item()` returns the tensor, and `torch.tensor` of a number fills a tensor on the GPU.

    Otherwise the CPU would wait for the GPU to read or to copy the number.
    """

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tensor and isinstance(args[0], float):
            return torch.full((), *args, **kwargs)
        return args[0] if function is Tensor.item else function(*args, **(kwargs or {}))


@contextmanager
def unread_figures(trainer: GRPOTrainer) -> Iterator[dict[str, list[Tensor | float]]]:
    """Within the `with` block, TRL's loss logs its figures into the yielded dict, as tensors.

    With the adaptive entropy bonus, which needs one of the figures at once, the figures are numbers.
    """
    figures: dict[str, list[Tensor | float]] = defaultdict(list)
    extremes = {"nanmin": lambda one: one.nanquantile(0.0), "nanmax": lambda one: one.nanquantile(1.0)}
    with (
        with_settings(trainer, {"_metrics": {"train": figures}}),
        with_settings(grpo_trainer, extremes),
        nullcontext() if trainer.use_adaptive_entropy else Unread(),
    ):
        yield figures


def new_passes(trainer: GRPOTrainer) -> ModelPasses:
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    models = [unwrap_peft_model(trainer.accelerator.unwrap_model(model)) for model in models]
    for model in models:
        if model.use_kernels:  # all but RoPE, because the hub's kernel for it has no backward pass
            mapping = hub_kernels.get_kernel_mapping_transformers()
            mapping.pop("rotary_pos_emb", None)
            hub_kernels.register_kernel_mapping(mapping, inherit_mapping=False)
            model.set_use_kernels(True)
    adapter = getattr(trainer.model, "active_peft_config", None)
    passes = ModelPasses(
        models,
        invoked_adapter=bool(getattr(adapter, "alora_invocation_tokens", None)),
        continuous_batching=trainer.args.use_transformers_continuous_batching,
        noisy_embeddings=trainer.args.neftune_noise_alpha is not None,
        # The backend is set by `torch_compile` or by accelerate's own configuration.
        compiled=trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
        share_prompts=trainer.args.share_prompts,
        router_losses=trainer.aux_loss_enabled,
    )
    if passes.full_width:  # RoPE's buffers depend on each rank's own passes, so DDP cannot broadcast them
        trainer.accelerator.ddp_handler.broadcast_buffers = False
    return passes


@contextmanager
def reference(trainer: GRPOTrainer) -> Iterator[PreTrainedModel]:
    """Yield the reference model. With PEFT, it is the policy with the adapter "ref" or, without "ref", the base model.

    The adapter "ref" is a copy of the adapter with which training began.
    """
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield trainer.model


def reference_of(model: Any) -> AbstractContextManager[None]:
    """Context manager in which TRL's reference of a given model is its copy, not the one that its config names."""
    load = grpo_trainer.create_model_from_path

    def copied(*args: Any, **kwargs: Any) -> PreTrainedModel:
        if not any(hasattr(one, "ds_tensor") for one in model.parameters()):
            return deepcopy(model).eval()
        loaded = load(*args, **kwargs)  # under ZeRO-3, each rank has its shards only
        for own, given in zip(loaded.parameters(), model.parameters(), strict=True):
            own.ds_tensor.data.copy_(given.ds_tensor.data)
        return loaded

    return with_settings(grpo_trainer, {} if isinstance(model, str) else {"create_model_from_path": copied})


def without_casts(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Context manager in which a plain LoRA adapter gets its inputs as they are. Autocast casts them, to the same bits.

    PEFT would cast them to the dtype of the adapter first, which costs a kernel and memory in each layer. Other
    adapters and LoRA's variants, such as DoRA, compute with the inputs before autocast casts them.
    """
    if not (trainer.accelerator.native_amp and is_peft_model(trainer.model)):
        return nullcontext()
    are_lora = all(one.peft_type == "LORA" for one in trainer.model.peft_config.values())
    if not are_lora or any(getattr(one, "lora_variant", None) for one in trainer.model.modules()):
        return nullcontext()
    from peft.helpers import disable_input_dtype_casting

    return disable_input_dtype_casting(trainer.model)


def use_own_generator(dataloader: DataLoader, seed: int) -> None:
    """Let a dataloader draw the seeds of its workers from a generator of its own.

    It draws at times that depend on how far prompts are read ahead, but a resumed run repeats the common generator's
    numbers.
    """
    getattr(dataloader, "base_dataloader", dataloader).generator = torch.Generator().manual_seed(seed)


def begin_accelerate(args: TrainingArguments) -> None:
    """Let accelerate forget other trainers, and let a run on CPUs train on the device "cpu".

    Several processes would train on "cpu:0", which `torch.load` of an optimizer does not know. No memory is
    pinned.
    """
    AcceleratorState._reset_state()
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False
        args.distributed_state.device = vars(args)["_setup_devices"] = torch.device("cpu")


def tool_suffix(trainer: GRPOTrainer, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    """Tokenize tool messages as TRL does, with a tokenizer that only this thread uses; return token ids."""
    this = copy(trainer)  # other threads use the tokenizer of `trainer`
    this.processing_class = this._tokenizer = tokenizer
    return this._get_tool_suffix_ids(messages)


def decoded(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    *,
    tools: Sequence[Any] = (),
) -> list[Any]:
    """Decode B completions, each by itself, into what reward functions get: texts or, for conversations, a message.

    If the tokenizer has a `response_template` or `response_schema`, TRL parses more fields, such as the reasoning.
    """
    are_messages = is_conversational({"prompt": prompts[0]})
    if are_messages and any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        return [[_parsed(tokenizer, *row, tools)] for row in zip(completion_ids, prompt_ids, strict=True)]
    _tell_what_vanishes(tokenizer, {*chain.from_iterable(completion_ids)})
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts] if are_messages else texts


def _tell_what_vanishes(tokenizer: PreTrainedTokenizerBase, ids: set[int]) -> None:
    """Warn, once, of special tokens that the user has added, because texts for rewards lack them."""
    named = f"{tokenizer.bos_token}{tokenizer.eos_token}{tokenizer.pad_token}{tokenizer.unk_token}"
    usual = f"{named}{tokenizer.chat_template}"
    added = tokenizer.added_tokens_decoder.items()
    lost = {one.content for number, one in added if number in ids and one.special and one.content not in usual}
    if (lost := lost - _told) and PartialState().is_main_process:
        _told.update(lost)
        logger.warning(
            f"Completions have the special tokens {sorted(lost)}, which rewards do not see, because texts are decoded "
            "without special tokens. If they are a part of answers, add them with tokenizer.add_tokens(...), which "
            "makes ordinary tokens; or read completion_ids in the reward function."
        )


def _parsed(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prompt: list[int], tools: Sequence[Any]
) -> dict[str, Any]:
    """Parse a response into a message, as TRL does; but JSON nested too deeply is a text, as other malformed output."""
    try:
        return parse_response(tokenizer, ids, prefix=prompt, tools=list(tools))
    except RecursionError:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def add_end_tokens(trainer: GRPOTrainer, ids: Iterable[int]) -> None:
    """Let more token ids end a completion, so that TRL, too, does not count a row that ends with one as truncated."""
    trainer.eos_token_ids = [*dict.fromkeys([*trainer.eos_token_ids, *ids])]  # a new list: the model may own the old


def generate_options(model: PreTrainedModel, config: GenerationConfig) -> tuple[GenerationConfig, list[str]]:
    """Return the options with which `generate` runs, and the processors by which it samples from another distribution.

    Where `config` leaves options out, they are the model's own. Processors are named by their classes.
    """
    config = model._prepare_generation_config(config)[0]
    model._prepare_special_tokens(config)
    # Log-probs are computed at the same temperature. min_p=0 changes nothing, nor do the processors of the other two.
    config.temperature = None
    config.min_p = config.min_p or None
    config.renormalize_logits = config.remove_invalid_values = None
    if config.suppress_tokens == [getattr(model.config, "image_token_id", None)]:
        config.suppress_tokens = None  # TRL's, for a multimodal model, which hardly ever writes it
    ids = torch.zeros(1, 1, dtype=torch.long)
    processors = model._get_logits_processor(config, input_ids_seq_length=1, encoder_input_ids=ids)
    return config, [type(one).__name__ for one in processors]


def sync_weights(trainer: GRPOTrainer) -> None:
    """Send vLLM the current weights if it has others, as TRL does before it calls a `rollout_func`."""
    if trainer.use_vllm and trainer.state.global_step != trainer._last_loaded_step:
        with profiling_context(trainer, "sync_weights"), trainer.recorder.timed("wait_for_weights"):
            trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


@dataclass(frozen=True)
class Logs:
    """The fields of a `GRPOTrainer` that TRL's `log` reads.

    Attributes:
        tables: the columns of the table of completions.
        extra: the columns of `log_extra`, which reward functions call.
        metrics: the values of `log_metric`, which reward functions call.
        figures: name → values since the last log; TRL logs their mean.
    """

    tables: dict[str, Any]
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]
    figures: dict[str, list[float]]


def begin_anew(trainer: GRPOTrainer) -> None:
    """Reset the trainer's counters, pending figures, table of completions, entropy controller and vLLM's version.

    Reset the loss scaler, too: after an interrupted step, it would treat the next gradients as unscaled already.
    """
    if (scaler := trainer.accelerator.scaler) is not None:
        scaler._per_optimizer_states.clear()
    trainer._step = 0
    trainer._current_train_step_time = 0.0
    trainer._last_loaded_step = -1
    trainer._entropy_window_stats = None
    trainer._last_world_entropy = float("inf")
    trainer.entropy_coef = trainer.args.entropy_coef
    for pending in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        pending.clear()
    logs = trainer._logs
    for column in (logs["prompt"], logs["completion"], logs["advantages"], logs["extra"], *logs["rewards"].values()):
        column.clear()


def begin_trackio(trainer: GRPOTrainer) -> None:
    """Begin the run of Trackio, to which TRL's profiler logs. Transformers begins it only with training."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackioCallback):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def end_micro_step(trainer: GRPOTrainer, seconds: float, *, ends_step: bool) -> None:
    """Count a micro-step, which need not have exactly one pass, as TRL's training step does."""
    trainer._step += 1
    trainer._current_train_step_time += seconds
    if ends_step:
        trainer._metrics["train"]["step_time"].append(trainer._current_train_step_time)
        trainer._current_train_step_time = 0.0


def to_training_mode(trainer: GRPOTrainer) -> None:
    """Put model and optimizer into training mode before a window is sampled: some optimizers then swap the weights."""
    trainer.model_wrapped.train()
    trainer.optimizer.train()  # of accelerate's wrapper: nothing if the optimizer has no mode


def nothing_pending() -> dict[str, Any]:
    """Return settings of a trainer that keep training's pending logs apart."""
    return {name: defaultdict(list) for name in ("_pending_extra_logs", "_pending_metrics")}


@contextmanager
def evaluated_rewards(trainer: GRPOTrainer) -> Iterator[list[Tensor]]:
    """Within the `with` block, collect the rewards of an evaluation: a list that gets [N, F] for each batch."""
    batches: list[Tensor] = []
    calculate = trainer._calculate_rewards
    columns = trainer._logs["extra"]
    trained = dict(columns)
    columns.clear()

    def calculated(*rows: object) -> Tensor:
        batches.append(calculate(*rows))
        return batches[-1]

    with with_settings(trainer, {"_calculate_rewards": calculated, **nothing_pending()}):
        yield batches
    rows = len(trainer._logs["prompt"])  # a column that the evaluation does not log has fewer, and is left out
    for name, values in columns.items():
        columns[name] = deque([*trained.get(name, [None] * rows), *values][-rows:])


def evaluated_figures(trainer: GRPOTrainer) -> dict[str, float | None]:
    """Return TRL's figures of an evaluation, averaged as in TRL's `log`, and take them from the trainer."""
    figures = trainer._metrics["eval"]
    valid = {name: [one for one in values if not math.isnan(one)] for name, values in figures.items()}
    figures.clear()
    return {name: sum(values) / len(values) if values else None for name, values in valid.items()}


def restore_accelerate(trainer: GRPOTrainer) -> None:
    """Restore what accelerate knew when the trainer was made, which another trainer replaces for all."""
    vars(trainer.accelerator.state).update(trainer._accelerate_state)


def leave_out_step(accelerator: Accelerator) -> None:
    """Make accelerate skip the next optimizer step, by clearing its flag for synchronised gradients."""
    accelerator.gradient_state._set_sync_gradients(False)


def begin_left_out_step(accelerator: Accelerator) -> None:
    """Prepare an optimizer step that is left out: clear flags of overflows, and advance DeepSpeed's schedule."""
    for optimizer in accelerator._optimizers:
        optimizer._is_overflow = False
        if optimizer.step_was_skipped:  # still True: DeepSpeed's wrapper reads its own optimizer's flag
            optimizer.optimizer.overflow = False
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    if engine is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.step()


def shuffled(rows: int) -> Tensor:
    """Draw the random order of the rows, [rows] int64. The random state advances as with TRL's shuffle."""
    return shuffle_sequence_dict({"row": torch.arange(rows)})["row"]
