"""Supervised fine-tuning, the baseline for RL: on human solutions (SFT-H), or on a teacher's solutions (SFT-M).

    accelerate launch examples/sft.py                          # no arguments: a tiny model reads sums that skip steps

    python examples/traces.py toy && accelerate launch examples/sft.py --completions outputs/traces.jsonl

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/sft.py \\
        --config examples/configs/sft_h_qwen2.5-0.5b.yaml      # a run of the paper; sft_m_* needs its traces first

    accelerate launch examples/sft.py --model_name_or_path MODEL --dataset_name evalplus/mbppplus      # programs

Every field of `SupervisedArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key. The loss counts only
the tokens of completions. Problems and prompts are the same as in `train_math.py`, or in `train_code.py` if the dataset
has tests, so the models of all three scripts can be compared. `toy` names the toy model and its sums, and
`--dataset_name toy_code` the toy programs.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.distributed.elastic.multiprocessing.errors import record
from train_code import TASKS, task_of
from train_math import (
    METRICS,
    MathArguments,
    check_adapter,
    check_effects,
    is_toy,
    load_problems,
    parse,
    train_and_measure,
    with_model_arguments,
)
from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from dash_trl.checks import check_model
from dash_trl.evaluation import TOY
from dash_trl.monitoring import MetricsFileCallback, TimeLimitCallback
from dash_trl.toy import toy_defaults


@dataclass
class SupervisedArguments(MathArguments):
    """The arguments of `train_math.py`, plus a file of completions."""

    completions: str | None = field(
        default=None,
        metadata={"help": "A JSONL file with `prompt` and `completion`, as traces.py writes it; replaces the dataset."},
    )


@dataclass
class SupervisedConfig(SFTConfig):
    """TRL's `SFTConfig` with `max_length=None`: TRL's default of 1,024 tokens would cut off answers."""

    max_length: int | None = field(
        default=None,
        metadata={"help": "Cut rows off after this many tokens, even within the answer. Default: no limit."},
    )


def supervised_defaults() -> dict[str, Any]:
    """Returns the default settings of the toy run, with three epochs as in the paper."""
    shared = ("use_cpu", "bf16", "gradient_checkpointing", "logging_steps", "save_strategy", "report_to")
    return {name: toy_defaults()[name] for name in shared} | {
        "output_dir": "outputs/toy_sft",
        "per_device_train_batch_size": 64,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
    }


def main(argv: list[str]) -> None:
    types = (SupervisedArguments, SupervisedConfig, ModelConfig)
    script, args, model_args = parse(argv, types, supervised_defaults())
    check_arguments(script, args, model_args)
    with_model_arguments(args, model_args)
    if not is_toy(model_args):
        check_model(model_args.model_name_or_path, args)
    name = script.dataset_name or (TOY if is_toy(model_args) else None)
    with args.main_process_first(local=False, desc="the dataset, and the toy model's warm-up"):
        task = task_of(replace(script, dataset_name=name))
        if is_toy(model_args):
            model_args.model_name_or_path = task.toy_model(progress=args.should_save)
        completions = script.completions and Dataset.from_json(script.completions)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=args.model_init_kwargs["revision"],
        trust_remote_code=args.trust_remote_code,
    )
    train_dataset, eval_dataset = completions, None
    if completions is None:
        train_dataset, eval_dataset = load_problems(task, args, tokenizer, completion=True)
    check_completions(train_dataset, tokenizer, args)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset.select_columns(["prompt", "completion"]),
        eval_dataset=eval_dataset and eval_dataset.select_columns(["prompt", "completion"]),
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit), MetricsFileCallback(Path(args.output_dir, METRICS))],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    train_and_measure(trainer, tokenizer, task, task.toy_defaults()["max_completion_length"], measured=name in TASKS)


def check_arguments(script: SupervisedArguments, args: SupervisedConfig, model_args: ModelConfig) -> None:
    """Raises a `ValueError` if an argument would have no effect."""
    check_adapter(model_args)
    if script.completions is None:
        check_effects(replace(script, dataset_name=TOY) if script.dataset_name in TASKS else script, args, model_args)


def check_completions(rows: Dataset, tokenizer: Any, args: SupervisedConfig) -> None:
    """Raises a `ValueError` if the chat template does not end messages with EOS: the model would not learn to stop.

    Only the first row is checked.
    """
    row = rows[0]
    if args.chat_template_path is not None or isinstance(row["prompt"], str):
        return
    text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    behind = text.rpartition(row["completion"][-1]["content"].strip())[2]
    end = args.eos_token or tokenizer.eos_token
    if end not in behind:
        raise ValueError(
            f"The chat template ends a message with {behind!r}, without the end of sequence {end!r}: the trained model "
            f"would not know where to stop. Add --eos_token with the token in this text that ends a message."
        )


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # if there are several processes, the launcher shows the first error
