"""Supervised fine-tuning, the baseline for RL: on human solutions (SFT-H), or on a teacher's solutions (SFT-M).

    dash_trl sft                                               # without flags: a tiny model reads sums that skip steps

    python examples/traces.py toy && dash_trl sft --completions outputs/traces.jsonl

    # a run of the paper; sft_m_* needs its traces first
    dash_trl sft --accelerate_config zero3_offload --config examples/configs/sft_h_qwen2.5-0.5b.yaml

    dash_trl sft --model_name_or_path MODEL --dataset_name evalplus/mbppplus                           # programs

Every field of `SupervisedArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key. The loss counts only
the tokens of completions. Problems and prompts are the same as in `train_math.py`, or in `train_code.py` if the dataset
has tests, so the models of all three scripts can be compared. `toy` names the toy model and its sums, and
`--dataset_name toy_code` the toy programs.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasets import Dataset
from torch.distributed.elastic.multiprocessing.errors import record
from toy_programs import program_dataset, program_model
from train_math import MathArguments, load_tokenizer, train
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from dash_trl import CodeReward
from dash_trl.config import computes_bf16
from dash_trl.evaluation import TOY
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.rewards import completion_text, last_boxed
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_defaults, toy_model


@dataclass
class SupervisedArguments(MathArguments):
    """The arguments of `train_math.py`, plus a file of completions."""

    completions: str | None = field(
        default=None,
        metadata={"help": "A JSONL file with `prompt` and `completion`, as traces.py writes it; replaces the dataset."},
    )


@dataclass
class SupervisedConfig(SFTConfig):
    """TRL's `SFTConfig`, with two other defaults: no row is cut off, and models train in float32 where bf16 is slow."""

    max_length: int | None = field(
        default=None,
        metadata={"help": "Cut rows off after this many tokens, even within the answer. Default: no limit."},
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and computes_bf16()
        super().__post_init__()


def supervised_defaults() -> dict[str, Any]:
    """Return the default settings of the toy run, with three epochs as in the paper."""
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
    name = script.dataset_name or (TOY if model_args.model_name_or_path in (None, TOY) else None)
    make_model, solved_toy, toy_reward = TOYS.get(name, TOYS[TOY])
    tokenizer = load_tokenizer(args, model_args, make_model)
    train_dataset, eval_dataset = load_solutions(script, args, tokenizer, solved_toy if name in TOYS else None)
    check_completions(train_dataset, tokenizer, args)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit)],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    train(trainer, partial(toy_accuracies, trainer, solved_toy("test"), toy_reward) if name in TOYS else dict)


def check_arguments(script: SupervisedArguments, args: SupervisedConfig, model_args: ModelConfig) -> None:
    """Raises a `ValueError` if an argument would have no effect."""
    needs_none = script.completions is not None or script.dataset_name in TOYS
    check_effects(replace(script, dataset_name=TOY) if needs_none else script, args, model_args)


def load_solutions(
    script: SupervisedArguments, args: SupervisedConfig, tokenizer: Any, solved_toy: Callable[..., Dataset] | None
) -> tuple[Dataset, Dataset | None]:
    """Return prompts with completions for training, and those for the evaluation (None = no evaluation)."""
    splits = [script.dataset_train_split, *([script.dataset_test_split] if args.do_eval or args.eval_on_start else [])]
    with args.main_process_first(local=False, desc="the dataset"):
        if script.completions is not None:
            found = [Dataset.from_json(script.completions)]
        elif solved_toy is not None:
            found = [solved_toy(split, seed=args.seed if split == "train" else 0) for split in splits]
        else:
            chat = tokenizer.chat_template is not None
            found = [with_completions(script.problems(chat, split, solution=True)) for split in splits]
    train_dataset, *others = (one.select_columns(["prompt", "completion"]) for one in found)
    return train_dataset, next(iter(others), None)


# ----------------------------------------------------------------------------------------- from a solution to a text


def with_completions(problems: Dataset) -> Dataset:
    """Adds a column `completion`: the solutions in the form of the prompts, texts or messages of the assistant.

    Args:
        problems: as `load_math_dataset` or `load_code_dataset` returns them with `solution=True`. The texts of a column
            `completion` stay unchanged.
    Raises:
        ValueError: if a row has no solution.
    """
    rows = problems.to_list()
    for number, row in enumerate(rows):
        solution = row.get("completion", row.get("solution"))
        if completion_text(solution).strip() in ("", row.get("answer")):
            raise ValueError(
                f"Row {number} lacks a solution (an answer alone is none, without #### before it): {str(row):.200}. "
                "Remove such rows and load the copy that save_to_disk writes."
            )
        prompt = row["prompt"]
        text = solution
        if "completion" not in row:
            text = (math_solution if "answer" in row else code_solution)(solution, prompt, row.get("answer"))
        row["completion"] = (
            text
            if isinstance(prompt, str) or isinstance(text, list)
            else [{"role": "assistant", "content": text.strip()}]
        )
    return Dataset.from_list(rows)


def math_solution(solution: str, prompt: str | list[dict[str, str]], answer: str) -> str:
    r"""Makes a completion from the solution of a math problem: without calculator marks, with the answer at its end.

    Args:
        solution: the solution. If it has a ``\boxed{}``, no answer is added at its end.
        prompt: the prompt. The added answer is in a box if the prompt asks for a box.
        answer: the gold answer.
    """
    text = re.sub(r"<<[^<>]*>>", "", solution).strip()
    if last_boxed(text) is None:
        final = rf"\boxed{{{answer}}}" if r"\boxed" in str(prompt) else answer
        text = f"{text.partition('####')[0].rstrip()}\nThe answer is {final}.".lstrip()
    # Tokens often begin with a space. A newline would form one token with the punctuation mark at the prompt's end.
    return text if str(prompt)[-1:].isspace() else f" {text}"


def code_solution(solution: str, prompt: str | list[dict[str, str]], answer: None = None) -> str:
    """Makes a completion from a program, in a fence if the prompt asks for one."""
    text = "\n".join(solution.splitlines()).strip("\n")  # lines in MBPP end in \r\n
    if "```" in str(prompt):
        text = f"```python\n{text}\n```"
    return text if str(prompt)[-1:].isspace() else f"\n{text}"


def human_dataset(split: str, seed: int = 0) -> Dataset:
    """Return the toy problems with solutions like those of a human: right, with two operations per line."""
    rows = arithmetic_dataset(split, seed=seed)
    return rows.map(lambda row: {"completion": [{"role": "assistant", "content": human_solution(row["prompt"])}]})


def human_solution(prompt: list[dict[str, str]]) -> str:
    """Return a solution with two operations per line, unlike those of the toy model's warm-up, which have one."""
    total, *operations = re.findall(r"[+-]?\d+", prompt[0]["content"])
    lines = []
    for start in range(0, len(operations), 2):
        step = operations[start : start + 2]
        left = total + "".join(step)
        total = str(sum(map(int, [total, *step])))
        lines.append(f"{left}={total}")
    return "\n".join([*lines, f"The answer is {total}"])


# Name of toy problems → the model, the problems with solutions, and the reward function that measures the model.
TOYS: dict[str | None, tuple[Any, Any, Any]] = {
    TOY: (toy_model, human_dataset, arithmetic_reward),
    "toy_code": (program_model, partial(program_dataset, completion=True), CodeReward),
}


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
