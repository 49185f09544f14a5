"""Supervised fine-tuning, the baseline of RL: on solutions by humans (SFT-H), or on a teacher's traces (SFT-M).

    accelerate launch examples/sft.py                          # no arguments: a tiny model reads sums that skip steps

    python examples/traces.py embedded && accelerate launch examples/sft.py --completions outputs/traces.jsonl

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/sft.py \\
        --config examples/configs/sft_h_qwen2.5-0.5b.yaml      # a run of the paper; sft_m_… after its traces

    accelerate launch examples/sft.py --model_name_or_path MODEL --dataset_name evalplus/mbppplus      # programs

Every field of `SupervisedArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key. The loss is on the
completions alone. The problems and prompts are those of `train_math.py` and, where there are tests, `train_code.py`, so
that all their models are measured alike. `--dataset_name embedded_code` are the programs of this package.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from train_code import EMBEDDED, task_of
from train_math import (
    MathArguments,
    Mathematics,
    check_effects,
    evaluates,
    load_problems,
    parse,
    train_and_measure,
    with_model_arguments,
)
from transformers import AutoTokenizer, ProgressCallback
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from dash_trl.checks import check_model
from dash_trl.embedded import embedded_defaults
from dash_trl.monitoring import MetricsFileCallback, RewardProgressCallback

logger = logging.getLogger("dash_trl.sft")


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


READ = {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "prompt_template"}
READ |= {"completions"}


def supervised_defaults() -> dict[str, Any]:
    """Settings of the run without a model and a dataset: the paper's three epochs."""
    shared = ("use_cpu", "bf16", "gradient_checkpointing", "logging_steps", "save_strategy", "report_to")
    return {name: embedded_defaults()[name] for name in shared} | {
        "output_dir": "outputs/embedded_sft",
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
    if model_args.model_name_or_path is not None:
        check_model(model_args.model_name_or_path, args)
    completions = None if script.completions is None else read_completions(script.completions)
    name = script.dataset_name or ("embedded" if model_args.model_name_or_path is None else None)
    with args.main_process_first(local=False, desc="the dataset, and the embedded model's warm-up"):
        if name is None:
            task = Mathematics(replace(script, dataset_name=script.completions))  # nothing is measured
        else:
            task = task_of(replace(script, dataset_name=name))
        if model_args.model_name_or_path is None:
            model_args.model_name_or_path = task.embedded_model(progress=args.should_save)
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
    train_and_measure(trainer, tokenizer, task, task.embedded_defaults()["max_completion_length"])
    if args.should_save:
        print(f"metrics: {metrics}\nmodel:   {args.output_dir}")
    trainer.accelerator.end_training()


def check_arguments(script: SupervisedArguments, args: SupervisedConfig, model_args: ModelConfig) -> None:
    """Refuse what would be ignored."""
    given = {one.name: getattr(script, one.name) for one in fields(script) if getattr(script, one.name) != one.default}
    model, file, name = model_args.model_name_or_path, script.completions, script.dataset_name
    for other in given.keys() - READ - {"dataset_streaming", "ignore_bias_buffers"}:
        raise ValueError(f"{other}={given[other]!r} has no effect on supervised fine-tuning: remove it.")
    if file is not None:
        for other in sorted(given.keys() & READ - {"completions"}):
            if name not in EMBEDDED:  # which says on what the model is measured
                raise ValueError(
                    f"{other}={given[other]!r} has no effect with completions={file!r}: give one of the two."
                )
        if evaluates(args):
            raise ValueError(
                f"completions={file!r} are trained on, and there are no others to evaluate: leave --eval_strategy out, "
                "and measure the model by python -m dash_trl.evaluation."
            )
    as_dataset = None if model is None and name in EMBEDDED else name or (model and file)
    check_effects(replace(script, completions=None, dataset_name=as_dataset), args, model_args)


def read_completions(file: str) -> Dataset:
    """The columns `prompt` and `completion` of a JSONL file, both texts or both conversations."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"completions={file!r} cannot be read ({error}): correct the path.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found = list(row)
            row = {name: row[name] for name in ("prompt", "completion")}
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Line {number} of {file} is no JSON ({error}): give a file that traces.py wrote."
            ) from error
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {file} lacks a `prompt` or a `completion`; it has {found}. Give the file that "
                "traces.py wrote (not its *.samples.jsonl), or a dataset with solutions by --dataset_name."
            ) from error
        if not row["completion"] or isinstance(row["prompt"], str) != isinstance(row["completion"], str):
            raise ValueError(
                f"Line {number} of {file} has an empty completion, or one of another form than its prompt (a text, or "
                f"a list of messages): {str(row)[:200]}. Correct or remove it."
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"completions={file!r} has no rows: there is nothing to train on.")
    return Dataset.from_list(rows)


def check_completions(rows: Dataset, tokenizer: Any, args: SupervisedConfig) -> None:
    """Refuse a chat template by which the model would never learn to end; count the rows that `max_length` cuts."""
    if args.chat_template_path is not None:
        return
    chat = not isinstance(rows[0]["prompt"], str)
    if chat and tokenizer.chat_template is None:
        raise ValueError(
            "The prompts are conversations, but the model's tokenizer has no chat template: add --chat_template_path, "
            "or sample the traces from a teacher without one."
        )
    end = args.eos_token or tokenizer.eos_token

    def text(row: dict[str, Any]) -> str:
        if chat:
            return tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        return row["prompt"] + row["completion"] + end

    behind = text(rows[0]).rpartition(rows[0]["completion"][-1]["content"].strip())[2] if chat else end
    if end not in behind:
        raise ValueError(
            f"The chat template ends a message with {behind!r}, without the end of sequence {end!r}: the trained model "
            f"would not know where to stop. Add --eos_token with the token of these that ends a message."
        )
    if args.max_length is not None:
        lengths = [len(tokenizer(text(row), add_special_tokens=not chat)["input_ids"]) for row in rows]
        if cut := sum(length > args.max_length for length in lengths):
            logger.warning(
                "max_length=%d cuts the ends, and so the answers, off %d of %d rows; the longest has %d tokens.",
                *(args.max_length, cut, len(lengths), max(lengths)),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
