"""`dash_trl doctor` shows versions, GPUs, vLLM and the sandbox of this machine, and which parts of dash_trl work on it.

`dash_trl doctor MODEL` also shows how the passes of a model would run. The command imports the trainer and starts the
sandbox. It reads a model's config but no weights, and starts no server. The exit status is 1 if training does not work.
"""

import argparse
import os
import platform
from collections.abc import Sequence
from functools import partial

from dash_trl.command import files
from dash_trl.versions import bounds, installed

# A package → what it is for; "" = training.
PACKAGES = {
    **dict.fromkeys(("torch", "trl", "transformers", "accelerate", "datasets", "math-verify"), ""),
    "deepspeed": "ZeRO",
    "peft": "LoRA",
    "torchvision": "multimodal models",
    "ray": 'RewardRunner(backend="ray")',
    "trackio": 'report_to="trackio"',
    "vllm": "vLLM servers, --use_vllm",
}


def training() -> str:
    """Import the trainer, because versions alone do not show every conflict between packages."""
    import dash_trl.trainer  # noqa: F401

    return "DASHTrainer can be imported"


def gpus() -> str:
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if not names:
        raise ValueError(f"torch sees none; this build is for {torch.version.cuda or torch.version.hip or 'CPUs'}")
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return ", ".join(names) + ("" if native else ", not in bf16, so passes compute in float32: --fp16 true is faster")


def sandbox() -> str:
    from dash_trl.sandbox import Sandbox

    return f"confined by {Sandbox().kind}"


def passes(name: str) -> str:
    """Return how the passes of a model run, as far as its config tells. A test before training decides."""
    import torch
    from transformers import AutoConfig

    from dash_trl.multimodal import auto_class
    from dash_trl.update import packing_obstacle

    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    obstacle = packing_obstacle(model)
    how = "without padding, and a shared prompt once" if obstacle is None else f"padded, because {obstacle}"
    return f"{type(model).__name__}, {model.num_parameters() / 1e9:.2f} B parameters, trained on text, {how}"


PARTS = {"training": training, "GPUs": gpus, "programs in a sandbox (CodeReward)": sandbox}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dash_trl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a hub name, a directory, or 'toy'")
    model = parser.parse_args(argv).model
    if model == "toy":
        from dash_trl.toy import toy_model

        model = toy_model()
    print(
        f"dash_trl {installed('dash_trl')}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} CPU cores\nThe pages that messages name: {files('docs')}\n"
    )
    works = True
    tested = bounds()
    parts = PARTS | ({f"passes of {model}": partial(passes, model)} if model else {})
    for what, examine in parts.items():
        try:
            print(f"  yes  {what}: {examine()}")
        except Exception as error:  # a broken installation may raise anything
            cause: BaseException = error
            while cause.__cause__ is not None:  # transformers says only what it could not import
                cause = cause.__cause__
            remedy = (
                ": torchvision does not fit torch. Install both by one command" if "torchvision" in str(cause) else ""
            )
            print(f"  no   {what}: {type(cause).__name__}: {cause}{remedy}")
            works &= what != "training"
    for name, use in PACKAGES.items():
        found = installed(name)
        asked = tested.get(name)
        other = f" (tested: {asked})" if found and asked and not asked.contains(found, prereleases=True) else ""
        print(f"  {found or '–':10} {name}{other}{use and f', for {use}'}")
    return int(not works)
