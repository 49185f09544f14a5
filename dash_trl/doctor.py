"""`dash_trl doctor` shows versions, GPUs, vLLM and the sandbox of this machine, and which parts of dash_trl work on it.

`dash_trl doctor MODEL` also shows how the passes of a model would run. The command imports the trainer and starts the
sandbox. It reads a model's config but no weights, and starts no server. The exit status is 1 if training does not work.

`dash_trl doctor MODEL --update` makes one optimizer step with TRL's trainer and one with dash_trl's, on this machine's
GPU or CPU, and compares their gradients, seconds, memory and waits. It takes TRL's options of a model (`--use_peft`,
`--dtype bfloat16`, …). The exit status is 1 if the gradients differ more than rounding explains.
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


def update(name: str, given: argparse.Namespace, options: Sequence[str]) -> str:
    from transformers import HfArgumentParser
    from trl import ModelConfig

    import dash_trl.trainer
    from dash_trl.comparison import Scripted, compare_update

    (model,) = HfArgumentParser(ModelConfig).parse_args_into_dataclasses(["--model_name_or_path", name, *options])
    script = Scripted(
        constant=1 / 4, rows=given.rows, longest=given.completion_tokens, prompt_tokens=given.prompt_tokens
    )
    return compare_update(model, script, dash_trl.trainer.DASHTrainer)


PARTS = {"training": training, "GPUs": gpus, "programs in a sandbox (CodeReward)": sandbox}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dash_trl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a hub name, a directory, or 'toy'")
    parser.add_argument("--update", action="store_true", help="compare an optimizer step with TRL's")
    parser.add_argument("--rows", type=int, default=32, help="rows of the step, in groups of 8")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion_tokens", type=int, default=512, help="limit of a completion's tokens")
    given, options = parser.parse_known_args(argv)
    model = given.model
    if model == "toy":
        from dash_trl.toy import toy_model

        model = toy_model()
    if not given.update and options or given.update and model is None:
        parser.error(f"--update needs a MODEL, and only then there are more options: {options}")
    print(
        f"dash_trl {installed('dash_trl')}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} CPU cores\nThe pages that messages name: {files('docs')}\n"
    )
    works = True
    tested = bounds()
    parts = PARTS | ({f"passes of {model}": partial(passes, model)} if model else {})
    if given.update:
        parts[f"an update of {model}"] = partial(update, model, given, options)
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
            works &= what != "training" and not what.startswith("an update")
    for name, use in PACKAGES.items():
        found = installed(name)
        asked = tested.get(name)
        other = f" (tested: {asked})" if found and asked and not asked.contains(found, prereleases=True) else ""
        print(f"  {found or '–':10} {name}{other}{use and f', for {use}'}")
    return int(not works)
