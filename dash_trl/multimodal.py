"""Multimodal models that are trained on text: modules that texts do not pass through stay as they are."""

import re
from copy import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)


def is_multimodal(config: PreTrainedConfig) -> bool:
    return config.get_text_config() is not config


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class that loads a model whole."""
    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def class_of(config: PreTrainedConfig) -> Any:
    """Return the class of a checkpoint's model; `None` if transformers does not have it (remote code)."""
    return getattr(transformers, (config.architectures or [""])[0], None)


def of_texts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that texts pass through: the language model and its LM head."""
    return [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]


def freeze_towers(model: PreTrainedModel) -> None:
    """Let no optimizer get the weights of a vision tower or of another part that texts do not pass through.

    Such weights have no gradient. DDP would wait for one, and weight decay under ZeRO would change them.
    """
    trained = {parameter for part in of_texts(model) for parameter in part.parameters()}
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


def without_towers(peft_config: Any, model: PreTrainedModel | str, settings: dict[str, Any]) -> Any:
    """Return an adapter's configuration that leaves out the towers of a multimodal model, whatever its targets are.

    If the model has no towers or the configuration excludes modules already, the result is `peft_config` itself.
    """
    if getattr(peft_config, "exclude_modules", "") is not None:
        return peft_config
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, **settings)
        kind = class_of(config)
        if kind is None or not is_multimodal(config):
            return peft_config
        with torch.device("meta"):
            model = kind(config)
    used = {module for part in of_texts(model) for module in part.modules()}
    names = [name for name, module in model.named_modules() if not used.intersection(module.modules())]
    tops = [re.escape(name) for name in names if name.rpartition(".")[0] not in names]
    if tops:
        peft_config = copy(peft_config)
        peft_config.exclude_modules = rf"({'|'.join(tops)})(\..*)?"
    return peft_config
