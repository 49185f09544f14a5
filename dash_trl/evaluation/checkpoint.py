"""`Checkpoint`: finds and loads a model by its name. A LoRA adapter is merged into the model's weights."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TOY = "toy"  # the name of the tiny model of `dash_trl.toy`


class Checkpoint:
    """A model that is named by its directory or hub name, or a LoRA adapter that is named by its directory.

    The constructor reads the config and the tokenizer, but no weights.

    Args:
        name: the directory or the hub name.
    Attributes:
        base: name or directory of the config and the full weights: `name` itself, or, for an adapter, its base model.
        is_adapter: whether the model is an adapter.
        config: the config of the base model.
        tokenizer: the tokenizer.
    Raises:
        ValueError: if the config of the model cannot be read, for example because no model has this name.
    """

    def __init__(self, name: str):
        self.name = name
        folder = Path(name).expanduser()
        self._folder = str(folder) if folder.is_dir() else name
        self.is_adapter = (folder / "adapter_config.json").is_file()  # peft's file
        self.base = self._folder
        if self.is_adapter:
            self.base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        try:
            self.config = AutoConfig.from_pretrained(self.base)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The model {name!r}, with its config in {self.base!r}, cannot be read: no directory or hub name with "
                f"a config.json was found ({type(error).__name__}: {str(error).splitlines()[0]}). Check the spelling "
                "and, for a hub model, the network and your access."
            ) from error
        own = (folder / "tokenizer_config.json").is_file()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self._folder if own else self.base, padding_side="left")

    @property
    def generation_config(self) -> Any:
        try:
            return GenerationConfig.from_pretrained(self.base)
        except OSError:  # the model has no generation_config.json
            return GenerationConfig.from_model_config(self.config)

    def load(self, dtype: Any = None, device: str = "cpu") -> Any:
        """Loads the model for inference. An adapter is merged into the weights.

        Args:
            dtype: dtype of the weights.
            device: the device of the model.
        """
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)
        if self.is_adapter:
            from peft import PeftModel  # imported here, since most runs have no adapter

            model = PeftModel.from_pretrained(model, self._folder).merge_and_unload()
        return model.to(device).eval()

    def load_here(self) -> Any:
        """Loads the model on a GPU in its own dtype, on a CPU in float32 (there, half precision is slow or missing)."""
        on_gpu = torch.cuda.is_available()
        return self.load("auto" if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")
