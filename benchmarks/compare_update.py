"""Compares an optimizer step of your model by TRL's GRPOTrainer with one by DASHTrainer, on your GPU or CPU.

    python benchmarks/compare_update.py MODEL --use_peft --dtype bfloat16       # with TRL's options of a model

Completions and rewards are scripted. The trainers get the same weights, rows and rewards, so their gradients are equal
up to rounding. A third step, TRL's in float32, tells how much rounding changes. The script prints the seconds of a
step, the peak memory and the waits of the CPU on a GPU, and the largest difference of a gradient, relative to the
largest gradient. The exit status is 1 if the gradients differ more than rounding explains.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import harness
import torch
from transformers import HfArgumentParser
from trl import GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config

from dash_trl import DASHTrainer
from dash_trl.config import computes_bf16
from dash_trl.multimodal import without_towers
from dash_trl.toy import toy_model

EXACT = 1e-5  # the largest difference in float32 (docs/concepts/exact.md)
MARGIN = 2.0  # in other dtypes: the largest difference, relative to the error that TRL's own gradients have


@dataclass
class Step:
    gradients: dict[str, torch.Tensor]
    costs: str
    figures: dict[str, float]


def make_step(kind: type[GRPOTrainer], model: ModelConfig, script: harness.Scripted, *, bf16: bool) -> Step:
    """Makes three equal optimizer steps of a trainer class, with random weights of the adapter."""
    adapter = get_peft_config(model)
    if adapter is not None:
        revision = {"revision": model.model_revision}
        # For TRL, too: the same weights are drawn.
        adapter = without_towers(adapter, model.model_name_or_path, revision)
        adapter.init_lora_weights = False  # with B = 0, A would have no gradient
        adapter.lora_dropout = 0.0  # every pass would draw other zeros
    gc.collect()  # the trainer before this one would take memory
    torch.manual_seed(0)
    clock = harness.Clock(profiled=1 if harness.ON_GPU else None)
    settings = {
        "max_steps": 3,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "bf16": bf16,
        "model_init_kwargs": {
            "revision": model.model_revision,
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
            "quantization_config": get_quantization_config(model),
        },
    }
    others = {"processing_class": None, "peft_config": adapter, "callbacks": [clock]}
    trainer = harness.scripted_trainer(kind, model.model_name_or_path, script, settings, **others)
    if harness.ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    costs = f"{clock.seconds[-1]:.2f} s"
    if harness.ON_GPU:
        costs += f", {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, {clock.waits} waits for the GPU"
    return Step(clock.gradients, costs, trainer.state.log_history[1])


def compare(model: ModelConfig, script: harness.Scripted, trainer: type[GRPOTrainer]) -> str:
    """Compares one optimizer step of TRL's trainer and of `trainer`, a `DASHTrainer` class; returns a report.

    Raises:
        ValueError: with the report, if the gradients differ more than rounding explains.
    """
    if script.rows < script.group or script.rows % script.group:
        raise ValueError(f"--rows {script.rows} is not a multiple of {script.group}, the rows of a group.")
    bf16 = computes_bf16()
    exact = make_step(GRPOTrainer, replace(model, dtype="float32"), script, bf16=False)
    theirs = make_step(GRPOTrainer, model, script, bf16=bf16)
    ours = make_step(trainer, model, script, bf16=bf16)
    found = harness.difference(theirs.gradients, ours.gradients)
    bound = max(EXACT, MARGIN * harness.difference(exact.gradients, theirs.gradients))
    packed = "without padding" if ours.figures["packing/padding_free"] else "padded"
    shared = ours.figures["packing/shared_tokens"]
    report = (
        f"TRL: {theirs.costs}\ndash_trl: {ours.costs}, {packed}; shared prompts left out {shared:.0%} of the "
        f"tokens\nthe gradients differ by {found:.2g} (bound {bound:.2g})"
    )
    if not found <= bound:
        raise ValueError(f"the update is not TRL's. {report}")
    return report


def main(argv: Sequence[str] | None = None, trainer: type[GRPOTrainer] = DASHTrainer) -> str:
    parser = HfArgumentParser(ModelConfig, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a hub name, a directory, or 'toy'")
    parser.add_argument("--rows", type=int, default=32, help="rows of the step, in groups of 8")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion_tokens", type=int, default=512, help="limit of a completion's tokens")
    model, given = parser.parse_args_into_dataclasses(argv)
    model.model_name_or_path = toy_model() if given.model == "toy" else given.model
    script = harness.Scripted(
        constant=1 / 4, rows=given.rows, longest=given.completion_tokens, prompt_tokens=given.prompt_tokens
    )
    return compare(model, script, trainer)


if __name__ == "__main__":
    try:
        print(main())
    except (OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
