"""Checks that the model exists, is a causal language model, and can be trained."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate.utils import is_peft_model
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import unwrap_peft_model
from trl import GRPOTrainer

from dash_trl.config import DASHConfig
from dash_trl.multimodal import class_of
from dash_trl.sampling import changes_base

logger = logging.getLogger(__name__)


def check_model(model: PreTrainedModel | str, args: DASHConfig, peft_config: object = None) -> None:
    """Check, before any weight is loaded, that a model, given as an object, name or directory, can be trained.

    Raises:
        ValueError: if the model does not exist, is compiled, is not a causal language model, or has virtual tokens, or
            if its reference or the best model would be another.
    """
    given = getattr(model, "active_peft_config", None)
    default = getattr(model, "peft_config", {}).get("default")
    others = given is not None and model.active_adapters != ["default"]  # type: ignore[union-attr, comparison-overlap]
    adapter = peft_config or given
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"peft_config={type(adapter).__name__}: virtual tokens cannot be trained here. Padding lies between them "
            "and the prompt, so the width of a pass would change its result. Use another adapter, such as LoraConfig."
        )
    option = changes_base(adapter)
    bias = getattr(adapter, "bias", "none")
    beta = getattr(args, "beta", 0)
    best = args.load_best_model_at_end
    if beta and (option or bias != "none" or given is not default) or others and (beta or best):
        raise ValueError(
            f"A beta above 0 needs a reference (beta={beta}): the base model or a copy of the model's own adapter "
            f"'default'; load_best_model_at_end={best} loads no other adapter. This adapter has another name, or "
            f"changes the base model ({option or 'not by an option'}, bias={bias!r}). Leave the option out, or use a "
            "LoraConfig without these two and a PeftModel without adapter_name."
        )
    if isinstance(model, str):
        settings = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        try:
            config = AutoConfig.from_pretrained(model, **settings)
        except OSError as error:
            raise ValueError(
                f"model={model!r} cannot be loaded: neither a directory with a config.json nor a model on the Hugging "
                f"Face Hub was found ({str(error).splitlines()[0]}). Check the spelling and, for a hub model, the "
                "network and your access."
            ) from error
        kind = class_of(config)  # a model of remote code is loaded as a causal LM
    else:
        if hasattr(model, "_orig_mod"):
            raise ValueError(
                f"The model is compiled: a {type(model).__name__}. Its weights have other names, so it could not be "
                "saved and loaded. Pass the model itself, and set torch_compile=True."
            )
        config = model.config
        kind = type(unwrap_peft_model(model))
    if config.is_encoder_decoder or hasattr(kind, "can_generate") and not kind.can_generate():
        raise ValueError(
            f"The model is a {getattr(kind, '__name__', config.architectures)}, but DASHTrainer trains decoders of "
            "text with a language modeling head. Use a causal language model (transformers.AutoModelForCausalLM), or a "
            "multimodal model with one."
        )


def check_trainable(model: PreTrainedModel) -> None:
    """Raise a `ValueError` if nothing of the model or its adapter would be trained, or some in each backward pass.

    Warn if SDPA leaves out a part of the model (Gemma 2 with transformers before 5.23).
    """
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) and text._attn_implementation == "sdpa":
        logger.warning(
            f"attn_implementation='sdpa' leaves out attn_logit_softcapping={text.attn_logit_softcapping}, so log-probs "
            "are not those of the model, nor of vLLM. Use 'flash_attention_2', or 'eager', whose passes are padded."
        )
    prefix = model.prefix if is_peft_model(model) else ""  # with bias="all", a frozen adapter has trained biases
    if not any(one.requires_grad for name, one in model.named_parameters() if prefix in name):
        raise ValueError(
            f"No parameter of the {type(model).__name__} (or of its adapter) requires a gradient: nothing is trained. "
            "Set inference_mode=False in a peft_config that was read from a saved adapter, load an adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True), or call model.requires_grad_()."
        )
    if any(one._post_accumulate_grad_hooks for one in model.parameters()):
        raise ValueError(
            "A parameter of the model has a hook of register_post_accumulate_grad_hook, as optimizers have that make a "
            "step in each backward pass. But an optimizer step has any number of passes. Remove the hook."
        )


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens of a model's context; None if unknown.

    Qwen's model cards extend the context with `rope_parameters` (YaRN) and leave `max_position_embeddings` as it is.
    """
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if length is None or rope.get("rope_type") != "yarn":
        return length
    return max(length, int(rope["factor"] * rope.get("original_max_position_embeddings", length)))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` if the tokenizer has no end token: no completion could end, and no batch be padded."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The {type(tokenizer).__name__} has no eos_token, so no completion could end. Set one that the model "
            "writes, e.g. tokenizer.eos_token = '<|im_end|>', and pass the tokenizer as processing_class."
        )


def check_saving(trainer: GRPOTrainer) -> None:
    """Save everything of a checkpoint but the weights, and raise a `ValueError` if something cannot be saved."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    args = trainer.args
    savers = {
        "model.config": model.config.save_pretrained,
        "model.generation_config": model.generation_config.save_pretrained,
        "processing_class": trainer.processing_class.save_pretrained,
        "args": lambda folder: torch.save(args, Path(folder, TRAINING_ARGS_NAME)),
    }
    for name, save in savers.items() if args.should_save else ():
        try:
            with TemporaryDirectory(dir=args.output_dir) as folder:
                save(folder)
        except Exception as error:
            raise ValueError(
                f"{name} cannot be saved in output_dir={args.output_dir!r}, so checkpoints and the model could not be "
                f"either: {error} Change it before training."
            ) from error


def check_served_adapter(model: PreTrainedModel) -> None:
    """Raise a `ValueError` if vLLM cannot get an adapter's weights, because it has no such weight, or one for two.

    If embeddings and LM head are tied, vLLM has one weight for both. The adapter unties them if it trains only one of
    them, or a weight for each.
    """
    if not is_peft_model(model):
        return
    if rows := getattr(model.active_peft_config, "trainable_token_indices", None):
        raise ValueError(
            f"trainable_token_indices={rows}: PEFT cannot merge these rows of the embeddings into a weight that vLLM "
            "has. Sample without vLLM, or train other modules."
        )
    if not model.config.get_text_config().tie_word_embeddings:
        return
    base = model.get_base_model()
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    weights = {id(getattr(end, "weight", None)) for end in ends}
    if len(weights) > 1 or any(hasattr(end, "get_base_layer") for end in ends):
        raise ValueError(
            f"The adapter trains the embeddings or the LM head of a {type(base).__name__}, where both are one weight "
            "(tie_word_embeddings=True). vLLM keeps one weight for both, so it would sample from another policy. Leave "
            "both out of target_modules and modules_to_save, or set modules_to_save=['embed_tokens'] and "
            "ensure_weight_tying=True, which trains one weight for both."
        )
