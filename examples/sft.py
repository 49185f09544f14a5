"""Supervised fine-tuning, the baseline for RL: on human solutions (SFT-H), or on a teacher's solutions (SFT-M).

    accelerate launch examples/sft.py                          # no arguments: a tiny model reads sums that skip steps

    python examples/traces.py toy && accelerate launch examples/sft.py --completions outputs/traces.jsonl

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/sft.py \\
        --config examples/configs/sft_h_qwen2.5-0.5b.yaml      # a run of the paper; sft_m_* needs its traces first

    accelerate launch examples/sft.py --model_name_or_path MODEL --dataset_name evalplus/mbppplus      # programs

Every field of `SupervisedArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key. The loss is only on
the completions. Problems and prompts are those of `train_math.py` or, if there are tests, of `train_code.py`, so that
all their models can be compared. `toy` names the toy model and its sums, `--dataset_name toy_code` the toy programs.
"""

import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.distributed.elastic.multiprocessing.errors import record
from train_code import TASKS, task_of
from train_math import (
    MathArguments,
    check_effects,
    is_toy,
    load_problems,
    parse,
    train_and_measure,
    with_model_arguments,
)
from transformers import AutoTokenizer, ProgressCallback
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from dash_trl.checks import check_model
from dash_trl.evaluation import TOY
from dash_trl.monitoring import MetricsFileCallback, RewardProgressCallback
from dash_trl.toy import toy_defaults


@dataclass
class SupervisedArguments(MathArguments):
    """The dataset and the prompt as of `train_math.py`; what to learn."""

    completions: str | None = field(
        default=None,
        metadata={"help": "A file of `prompt` and `completion` rows, as traces.py writes it, in place of a dataset."},
    )


@dataclass
class SupervisedConfig(SFTConfig):
    """TRL's, without the `max_length` of 1,024 that would cut off answers."""

    max_length: int | None = field(
        default=None, metadata={"help": "Cut longer rows off, and their answers with them. Default: none is."}
    )


def supervised_defaults() -> dict[str, Any]:
    """Settings of the run without a model and a dataset: the paper's three epochs."""
    shared = ("use_cpu", "bf16", "gradient_checkpointing", "logging_steps", "save_strategy", "report_to")
    return {name: toy_defaults()[name] for name in shared} | {
        "output_dir": "outputs/toy_sft",
        "per_device_train_batch_size": 64,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
    }


def main(argv: list[str]) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
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
        completions = None if script.completions is None else Dataset.from_json(script.completions)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=args.model_init_kwargs["revision"],
        trust_remote_code=args.trust_remote_code,
    )
    if completions is None:
        train_dataset, eval_dataset = load_problems(task, args, tokenizer, completion=True)
    else:
        train_dataset, eval_dataset = completions, None
    check_completions(train_dataset, tokenizer, args)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset.select_columns(["prompt", "completion"]),
        eval_dataset=eval_dataset and eval_dataset.select_columns(["prompt", "completion"]),
        processing_class=tokenizer,
        callbacks=[MetricsFileCallback(metrics := Path(args.output_dir) / "metrics.jsonl")],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback)
    train_and_measure(trainer, tokenizer, task, task.toy_defaults()["max_completion_length"], measured=name in TASKS)
    if args.should_save:
        print(f"metrics: {metrics}\nmodel:   {args.output_dir}")
    trainer.accelerator.end_training()


def check_arguments(script: SupervisedArguments, args: SupervisedConfig, model_args: ModelConfig) -> None:
    """Refuse what would be ignored."""
    toy = script.dataset_name in TASKS
    if script.completions is None:
        check_effects(replace(script, dataset_name=TOY) if toy else script, args, model_args)
    elif script.dataset_name is not None and not toy:  # a toy one says on what the model is measured
        raise ValueError(
            f"dataset_name={script.dataset_name!r} has no effect with completions={script.completions!r}: give one of "
            "the two."
        )


def check_completions(rows: Dataset, tokenizer: Any, args: SupervisedConfig) -> None:
    """Refuse a chat template by which the model would never learn to end."""
    row = rows[0]
    if args.chat_template_path is not None or isinstance(row["prompt"], str):
        return
    text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    behind = text.rpartition(row["completion"][-1]["content"].strip())[2]
    end = args.eos_token or tokenizer.eos_token
    if end not in behind:
        raise ValueError(
            f"The chat template ends a message with {behind!r}, without the end of sequence {end!r}: the trained model "
            f"would not know where to stop. Add --eos_token with the token of these that ends a message."
        )


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # where several processes are launched, the launcher ends with the error of the first
