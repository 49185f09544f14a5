"""What the training scripts in examples/ share: flags, their checks, and the accuracy on toy problems."""

import logging
import warnings
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import fields
from inspect import get_annotations
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

from dash_trl.checkpoints import checkpoint_to_resume
from dash_trl.evaluation import TOY, TOY_LENGTH, Task, evaluate

# The fields of TRL and Transformers that --help shows; --help_all shows all.
HELP = (
    "model_name_or_path",
    "attn_implementation",
    "use_peft",
    "lora_r",
    "output_dir",
    "resume_from_checkpoint",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "num_iterations",
    "learning_rate",
    "max_steps",
    "seed",
    "num_train_epochs",
    "use_vllm",
    "vllm_mode",
    "use_cpu",
    "bf16",
    "gradient_checkpointing",
    "report_to",
    "logging_steps",
    "log_completions",
    "eval_strategy",
    "save_strategy",
    "save_steps",
)
# Flags of `Task` that toy problems do not have.
OF_PROBLEMS = (
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "prompt_template",
    "plain_prompts",
    "problem_column",
    "answer_column",
)


def parse(argv: Sequence[str], types: Sequence[type], toy_defaults: dict[str, Any]) -> tuple:
    """Parse the command line and the YAML file of --config, and let dash_trl's messages be printed.

    The fields of `types` are the flags: a `Task`, the trainer's settings, TRL's `ModelConfig`, any others. Return an
    instance of each.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of Transformers and TRL, to each other
    parser = TrlParser(types, epilog="--help_all shows all flags: those of TRL and Transformers, too.")
    parser.add_argument("--help_all", action="help", help="Show all flags and exit.")
    if "--help_all" not in argv:
        ours = [
            kind for one in types for kind in one.__mro__ if not kind.__module__.startswith(("trl.", "transformers."))
        ]
        shown = {"help", "help_all", *HELP}.union(*map(get_annotations, ours))
        for action in parser._actions:
            action.help = action.help if action.dest in shown else SUPPRESS
    model, _ = TrlParser(ModelConfig, add_help=False).parse_args_and_config(argv, return_remaining_strings=True)
    # Log every step, for the progress bar, the metrics file and the plot; by default TRL logs every tenth step.
    parser.set_defaults_with_config(
        **{"logging_steps": 1} | (toy_defaults if model.model_name_or_path in (None, TOY) else {})
    )
    try:
        script, args, *others = parser.parse_args_and_config(argv)
    except ValueError as error:  # also of TRL and Transformers, about a flag
        raise ValueError(str(error)) from None
    args.resume_from_checkpoint = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir)
    return script, args, *others


def check_effects(script: Task, args: GRPOConfig, model_args: ModelConfig) -> None:
    """Raise a `ValueError` if only one of model and dataset is given, or if an option would have no effect."""
    model = model_args.model_name_or_path
    dataset = script.dataset_name
    if (model is None) != (dataset is None) and TOY not in (model, dataset):
        raise ValueError(
            f"model_name_or_path={model!r} with dataset_name={dataset!r}: give both, each a hub name such as "
            "Qwen/Qwen2.5-0.5B-Instruct and openai/gsm8k (with --dataset_config main), or a local path; without both, "
            f"the toy model learns arithmetic, and {TOY!r} names it and its problems."
        )
    given = {
        one.name for part in (script, model_args) for one in fields(part) if getattr(part, one.name) != one.default
    }
    unused = {
        "--model_name_or_path and --dataset_name, since the toy problems have no such options": (
            given & {*OF_PROBLEMS} if script.is_toy else ()
        ),
        "--use_peft, and all weights would be trained": (
            () if model_args.use_peft else [one for one in given if one.startswith(("lora_", "use_rslora", "use_dora"))]
        ),
        "--eval_strategy steps (or epoch), since nothing is evaluated": (
            () if args.do_eval or args.eval_on_start else given & {"dataset_test_split"}
        ),
    }
    for missing, names in unused.items():
        if names:
            raise ValueError(f"{sorted(names)} have no effect without {missing}. Add what is missing, or remove them.")


def toy_accuracies(trainer: GRPOTrainer, problems: Dataset, reward: Any) -> dict[str, float]:
    """Return the accuracy on held-out toy problems, of two samples each at temperature 1 and of the greedy answer.

    With tools, the trainer evaluates on all processes, without the greedy answer. Otherwise, one process measures
    alone, or none if it may lack parts of the model.
    """
    if getattr(trainer, "tools", None):
        return {"sampled": trainer.evaluate(problems)["eval_reward"]}
    if (
        not trainer.args.should_save
        or trainer.is_fsdp_enabled
        or (trainer.is_deepspeed_enabled and trainer.accelerator.num_processes > 1)
    ):
        return {}
    return {
        name: evaluate(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer._tokenizer,
            problems,
            reward,
            num_samples=samples,
            temperature=temperature,
            max_completion_length=getattr(trainer.args, "max_completion_length", TOY_LENGTH),
        )["accuracy"]
        for name, samples, temperature in (("sampled", 2, 1.0), ("greedy", 1, 0.0))
    }
