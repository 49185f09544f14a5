"""`Checkpoint`: finds and loads a model by its name. A LoRA adapter is merged into the model's weights."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ADAPTER = "adapter_config.json"  # peft's file in the directory of an adapter
WEIGHT_FILES = (".safetensors", ".bin", ".pt")
TOY = "toy"  # the name of the tiny model of `dash_trl.toy`


@dataclass(frozen=True)
class Checkpoint:
    """A model that is named by its directory or hub name, or a LoRA adapter that is named by its directory.

    The constructor reads the config, but no weights.

    Args:
        name: the directory or the hub name.
    Raises:
        ValueError: if the config of the model cannot be read, for example because no model has this name.
    """

    name: str

    def __post_init__(self) -> None:
        self.config  # noqa: B018 (read now, so that a missing model is an error now)

    @property
    def is_adapter(self) -> bool:
        return (Path(self.name).expanduser() / ADAPTER).is_file()

    @cached_property
    def base(self) -> str:
        """Name or directory of the config and the full weights: `name` itself, or, for an adapter, its base model."""
        if not self.is_adapter:
            return str(Path(self.name).expanduser()) if Path(self.name).expanduser().is_dir() else self.name
        return str(json.loads((Path(self.name).expanduser() / ADAPTER).read_text()).get("base_model_name_or_path"))

    @cached_property
    def config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(self.base)
        except (OSError, ValueError) as error:
            of = f"the base model {self.base!r} of the adapter {self.name!r}" if self.is_adapter else f"{self.name!r}"
            raise ValueError(
                f"The model {of} cannot be read: no directory or hub name with a config.json was found "
                f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the spelling and, for a hub model, the "
                "network and your access."
            ) from error

    @cached_property
    def tokenizer(self) -> Any:
        own = (Path(self.name).expanduser() / "tokenizer_config.json").is_file()
        return AutoTokenizer.from_pretrained(self.name if own else self.base, padding_side="left")

    @property
    def generation_config(self) -> Any:
        try:
            return GenerationConfig.from_pretrained(self.base)
        except OSError:  # the model has no generation_config.json
            return GenerationConfig.from_model_config(self.config)

    def load(self, dtype: Any, device: str = "cpu") -> Any:
        """Loads the model for inference. An adapter is merged into the weights.

        Args:
            dtype: dtype of the weights.
            device: the device of the model.
        """
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)
        if self.is_adapter:
            from peft import PeftModel  # imported here, since most runs have no adapter

            model = PeftModel.from_pretrained(model, str(Path(self.name).expanduser())).merge_and_unload()
        return model.to(device).eval()

    def load_here(self) -> Any:
        """Loads the model on a GPU in its own dtype, on a CPU in float32 (there, half precision is slow or missing)."""
        on_gpu = torch.cuda.is_available()
        return self.load("auto" if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")

    @cached_property
    def fingerprint(self) -> str:
        """A text that changes when the weights change: a hash of the commit on the hub, or of the weight files.

        The evaluation command writes it into the settings of each file of samples, and `Records` refuses a file with
        other settings. So if the model in a directory is trained further, its new samples never get into the old file.
        """
        digest = hashlib.sha256()
        for source in dict.fromkeys([self.name, self.base]):
            folder = Path(source).expanduser()
            if not folder.is_dir():
                digest.update(str(getattr(self.config, "_commit_hash", None)).encode())
                continue
            for file in sorted(folder.iterdir()):
                if file.suffix in WEIGHT_FILES and file.is_file():
                    with file.open("rb") as content:
                        digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()[:16]
