"""Models that are not there, or cannot be trained as text generators."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from dash_trl.config import DASHConfig

# Of `model_init_kwargs`, those that say where a config is; the others are for the weights.
WHERE = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def check_model(model: Any, args: DASHConfig, peft_config: Any = None) -> None:
    """Refuse a model that is not there, or cannot be trained as a text generator, before any weight is loaded."""
    if isinstance(model, str):
        config = _load_config(model, args)
        name = (config.architectures or [None])[0]
        if name is None:
            raise ValueError(
                f"The config.json of model={model!r} names no architecture, so TRL cannot tell its class. Add e.g. "
                '"architectures": ["Qwen2ForCausalLM"], or pass a model loaded with AutoModelForCausalLM.'
            )
        kind = getattr(transformers, name, None)  # None: it comes with code of its own, and loads as a causal LM
    else:
        config = getattr(model, "config", None)
        if config is None:
            raise ValueError(
                f"model is a {type(model).__name__}, which has no config. Pass the path or hub name of a causal "
                "language model as a str, or one loaded with transformers.AutoModelForCausalLM."
            )
        text_model = model.get_base_model() if hasattr(model, "get_base_model") else model  # without peft's wrapper
        kind, name = type(text_model), type(text_model).__name__
    if isinstance(config, PretrainedConfig) and hasattr(config, "vision_config"):
        raise ValueError(
            f"model={getattr(config, 'name_or_path', '') or model!r} is a vision-language model "
            f"({config.model_type}), but DASHTrainer trains text models only: images cannot be re-packed. Use a text "
            "model, or trl.GRPOTrainer."
        )
    generates = getattr(kind, "can_generate", None)
    if getattr(config, "is_encoder_decoder", False) or generates is not None and not generates():
        raise ValueError(
            f"The model is a {name}, which is no decoder with a language modeling head, so that it cannot sample "
            "completions of a prompt. Use a causal language model (transformers.AutoModelForCausalLM)."
        )
    if not isinstance(model, str) and peft_config is None and not any(one.requires_grad for one in model.parameters()):
        raise ValueError(
            f"No parameter of the {type(model).__name__} requires a gradient, so there is nothing to train. Load an "
            "adapter with PeftModel.from_pretrained(..., is_trainable=True), pass a peft_config, or call "
            "model.requires_grad_()."
        )


def _load_config(model: str, args: DASHConfig) -> PretrainedConfig:
    """The config that the weights will be loaded with."""
    settings = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    code = {"trust_remote_code": settings["trust_remote_code"]}
    where = {name: settings[name] for name in WHERE if name in settings}
    try:
        config = AutoConfig.from_pretrained(model, **code, **where)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model={model!r} comes with code of its own, which is run only if you ask for it. Read it, and set "
                "trust_remote_code=True in the DASHConfig, or use a model that transformers has the code of."
            ) from error
        looks_local = os.path.isdir(model) or model.startswith((".", "/", "~")) or model.count("/") > 1
        place = "that directory" if looks_local else "a directory or a model on the Hugging Face Hub"
        raise ValueError(
            f"model={model!r} cannot be loaded: {place} with a config.json was not found or could not be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the spelling and, for a hub model, the "
            "network and your access."
        ) from error
    if where:
        try:
            AutoConfig.from_pretrained(model, **code)
        except (OSError, ValueError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in where.items() if name != "token")
            raise ValueError(
                f"model={model!r} is found with model_init_kwargs ({given or 'token'}), but TRL looks up its "
                f"architecture without them, and fails ({type(error).__name__}: {str(error).splitlines()[0]}). Load it "
                "yourself, and pass the model: AutoModelForCausalLM.from_pretrained(...)."
            ) from error
    return config
