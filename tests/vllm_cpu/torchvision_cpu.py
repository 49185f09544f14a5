"""Declares torchvision's operators when torchvision is imported: its own library does not load without CUDA.

transformers' processors and vLLM import torchvision for multimodal models. Transforms of images work, `nms` does not.
`torchvision_cpu.pth` imports this module when Python starts.
"""

import importlib.abc
import re
import sys
from pathlib import Path


class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            text = Path(__file__).with_name("torchvision").joinpath("_meta_registrations.py").read_text()
            for one in {*re.findall(r'register_meta\("(\w+)"\)', text), *re.findall(r"torchvision::(\w+)", text)}:
                torch.library.define(f"torchvision::{one}", "(Tensor x) -> Tensor")


sys.meta_path.insert(0, Declare())
