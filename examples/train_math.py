"""Train a model on mathematics problems with DASH.

    accelerate launch examples/train_math.py                   # no arguments: a tiny model learns arithmetic, offline

    accelerate launch --config_file accelerate_configs/ddp.yaml examples/train_math.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \
        --use_vllm --vllm_mode colocate --output_dir outputs/gsm8k

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/train_math.py \
        --config examples/configs/dash_qwen2.5-0.5b.yaml       # a run of the paper

    accelerate launch examples/train_math.py --model_name_or_path MODEL --dataset_name own.jsonl --eval_strategy steps \
        --dataset_train_split 'train[100:]' --dataset_test_split 'train[:100]'        # a file is the one split train

Every field of `MathArguments`, `DASHConfig` (hence of TRL's `GRPOConfig`) and TRL's `ModelConfig` is a flag and a YAML
key; a flag wins over the file. The dataset is a hub name or a local path: GSM8K, MATH, or `prompt`/`answer` columns.
Without a model and a dataset the embedded model learns arithmetic; a flag that would have no effect is refused.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer, MathAccuracyReward, load_math_dataset
from dash_trl.checks import check_model
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model
from dash_trl.evaluation import accuracy
from dash_trl.monitoring import MetricsFileCallback, RewardProgressCallback, TimeLimitCallback, plot_run
from dash_trl.rewards import DEFAULT_NAME, load_reward


@dataclass
class MathArguments(ScriptArguments):
    """TRL's dataset arguments, the prompt, a reward of one's own, and how long to train."""

    prompt_template: str | None = field(
        default=None,
        metadata={"help": "A name in dash_trl.data.PROMPT_TEMPLATES, or a text with {problem}. Default: 'boxed'."},
    )
    reward_path: str | None = field(
        default=None, metadata={"help": "A Python file with a reward function, in place of the accuracy of the answer."}
    )
    reward_name: str = field(
        default=DEFAULT_NAME, metadata={"help": "What it is called there: a function, a class, or a RewardAgent."}
    )
    time_limit: float | None = field(
        default=None,
        metadata={"help": "Stop after so many seconds of training, those before a resumed checkpoint included."},
    )


class Mathematics:
    """What is trained on. Another script may have another task (`train_code.py`), with what is other than here."""

    Arguments = MathArguments  # of the task; each field is a flag

    def __init__(self, script: MathArguments):
        self.script = script
        self.own_reward = None if script.reward_path is None else load_reward(script.reward_path, script.reward_name)

    @staticmethod
    def embedded_defaults() -> dict[str, Any]:
        """Settings of the run without a model and a dataset."""
        return embedded_defaults()

    def embedded_model(self, progress: bool) -> str:
        """The directory of a small model that was warmed up for the embedded problems."""
        return embedded_model(progress=progress)

    def embedded_problems(self, split: str, seed: int = 0, completion: bool = False) -> Any:
        return arithmetic_dataset(split, seed=seed, completion=completion)

    load_dataset = staticmethod(load_math_dataset)

    def load(self, split: str, chat: bool, completion: bool = False) -> Any:
        return self.load_dataset(
            self.script.dataset_name,
            config=self.script.dataset_config,
            split=split,
            prompt_template=self.script.prompt_template,
            chat=chat,
            completion=completion,
        )

    def reward(self) -> Any:
        return self.own_reward or (arithmetic_reward if self.script.dataset_name is None else MathAccuracyReward())

    def is_right(self, completions: list[Any], **columns: Any) -> Sequence[float | None]:
        """By which the embedded model is measured, on problems that it was not trained on."""
        return arithmetic_reward(completions, **columns)


def main(
    argv: list[str], own_arguments: tuple[Any, ...] = (), make_callbacks: Any = None, make_task: Any = Mathematics
) -> None:
    """Train; another script may add dataclasses of flags, and callbacks made of them (`train_math_process.py`)."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    types = (make_task.Arguments, DASHConfig, ModelConfig, *own_arguments)
    script, args, model_args, *own = parse(argv, types, make_task.embedded_defaults())
    check_effects(script, args, model_args)
    task = make_task(script)
    timer = TimeLimitCallback(script.time_limit)
    if model_args.model_name_or_path is None:
        with args.main_process_first(local=False, desc="warm-up of the embedded model"):
            model_args.model_name_or_path = task.embedded_model(progress=args.should_save)
    with_model_arguments(args, model_args)
    check_model(model_args.model_name_or_path, args)  # before the tokenizer, whose own error says less
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=args.model_init_kwargs["revision"],
        trust_remote_code=args.trust_remote_code,
        padding_side="left",
    )
    train_dataset, eval_dataset = load_problems(task, args, tokenizer)

    metrics = Path(args.output_dir) / "metrics.jsonl"
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=task.reward(),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[timer, MetricsFileCallback(metrics), *(make_callbacks(script, *own) if make_callbacks else ())],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback)

    train_and_measure(trainer, tokenizer, task, args.max_completion_length)
    if args.should_save:
        print(f"metrics: {metrics}\nmodel:   {args.output_dir}")
        try:
            print(f"plot:    {plot_run(metrics, metrics.with_name('run.png'), title=Path(args.output_dir).name)}")
        except ValueError as error:  # a run that ended before its first log
            print(f"plot:    none. {error}")
    trainer.accelerator.end_training()  # ends the process group: without it gloo may abort at exit


def parse(argv: Sequence[str], types: Sequence[Any], without_model: dict[str, Any]) -> tuple[Any, ...]:
    """One instance of each dataclass. Without a model, other settings are the defaults."""
    # TRL knows `--config FILE` only: it would take the next flag for the file, and does not see `--config=FILE`.
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config", action="append", nargs="?", const="")
    named, flags = config.parse_known_args(argv)
    if len(named.config or ()) > 1:
        raise ValueError(f"--config is given more than once: {named.config}. Put the settings into one file.")
    file = named.config[0] if named.config else None
    settings = {} if file is None else read_settings(file, {one.name for kind in types for one in fields(kind)})

    parser = TrlParser(types)
    given, _ = parser.parse_known_args(flags)  # by argparse, which takes --model-name-or-path and abbreviations, too
    embedded = given.model_name_or_path is None and settings.get("model_name_or_path") is None
    # Every step on the bar, in the metrics file and in the plot; TRL's default is every tenth.
    parser.set_defaults_with_config(**({"logging_steps": 1} | (without_model if embedded else {})))
    return parser.parse_args_and_config(flags if file is None else ["--config", file, *flags])


def read_settings(file: str, options: set[str]) -> dict[str, Any]:
    """The YAML file of `--config`; raises a `ValueError` for what is none, and for a key that is no option."""
    if not file:
        raise ValueError("--config names no file. Write --config FILE, e.g. one of examples/configs/.")
    try:
        settings = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"--config {file} cannot be read ({error.strerror}): correct the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--config {file} is no mapping. Write one `option: value` per line, as in examples/configs/.")
    for key in settings.keys() - options - {"env"}:  # env: environment variables, TRL's
        close = difflib.get_close_matches(str(key), options, 1)
        raise ValueError(
            f"--config {file} has the key {key!r}, which is no option. "
            + (f"Did you mean {close[0]!r}?" if close else "Remove it; --help lists all options.")
        )
    return settings


# Of TRL's script arguments, those that nothing here reads.
WITHOUT_EFFECT = {
    "dataset_streaming": "all problems are read, and checked, before training",
    "ignore_bias_buffers": "TRL's GRPO does not know it either",
}


def check_effects(script: MathArguments, args: Any, model_args: ModelConfig) -> None:
    """Refuse what would be ignored: half a task, and options of what is not used."""
    values = [(one.name, getattr(script, one.name), one.default) for one in fields(script)]
    changed = {name: value for name, value, default in values if value != default}
    for name, reason in WITHOUT_EFFECT.items():
        if name in changed:
            raise ValueError(f"{name}={changed[name]} has no effect: {reason}. Remove it.")
    if script.reward_path is None and "reward_name" in changed:
        raise ValueError(f"reward_name={script.reward_name!r} has no effect without --reward_path, its file.")
    changed = {name: value for name, value in changed.items() if not name.startswith(("reward_", "judge_", "time_"))}
    model, dataset = model_args.model_name_or_path, script.dataset_name
    if model is not None and dataset is None:
        raise ValueError(
            f"model_name_or_path={model!r} is given, but no dataset. Add --dataset_name, a hub name such as "
            "openai/gsm8k (with --dataset_config main) or a local path; without both, the embedded model learns "
            "arithmetic."
        )
    if model is None and dataset is not None:
        raise ValueError(
            f"dataset_name={dataset!r} is given, but no model. Add --model_name_or_path, a hub name such as "
            "Qwen/Qwen2.5-0.5B-Instruct or a local path; without both, the embedded model learns arithmetic."
        )
    if model is None and model_args.model_revision != ModelConfig.model_revision:
        changed["model_revision"] = model_args.model_revision
    if model is None and changed:
        name, value = next(iter(changed.items()))
        raise ValueError(
            f"{name}={value!r} has no effect without --model_name_or_path and --dataset_name: the embedded model "
            "learns arithmetic of its own. Add these two, or remove it."
        )
    wanted = {"do_eval": args.do_eval, "dataset_test_split": changed.get("dataset_test_split")}
    for name, value in wanted.items():
        if value and not evaluates(args):
            raise ValueError(
                f"{name}={value!r} has no effect, since nothing is evaluated: add --eval_strategy steps (or epoch), or "
                "remove it."
            )


def evaluates(args: Any) -> bool:
    return args.eval_strategy != "no" or args.eval_on_start


def load_problems(task: Mathematics, args: Any, tokenizer: Any, completion: bool = False) -> tuple[Any, Any]:
    """For training; for the evaluation, or None. With solutions by humans, if asked for."""
    script = task.script
    if script.dataset_name is None:
        evaluation = task.embedded_problems("test", completion=completion) if evaluates(args) else None
        return task.embedded_problems("train", seed=args.seed, completion=completion), evaluation
    chat = tokenizer.chat_template is not None
    with args.main_process_first(local=False, desc="loading the dataset"):
        train = task.load(script.dataset_train_split, chat, completion)
        try:
            evaluation = task.load(script.dataset_test_split, chat, completion) if evaluates(args) else None
        except ValueError as error:
            raise ValueError(f"--dataset_test_split, for the evaluation: {error}") from error
    return train, evaluation


def with_model_arguments(args: Any, model_args: ModelConfig) -> None:
    """Notes TRL's `ModelConfig` in `args`, as the keyword arguments with which the trainer loads the model."""
    kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = {**kwargs, **(args.model_init_kwargs or {})}


def train_and_measure(trainer: Any, tokenizer: Any, task: Mathematics, max_new_tokens: int) -> None:
    """Trains and saves; of an embedded run, the accuracy before and after."""
    args = trainer.args
    measured = task.script.dataset_name is None and args.should_save and not sharded(trainer)
    before = measure(trainer, tokenizer, task, max_new_tokens) if measured else {}
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = measure(trainer, tokenizer, task, max_new_tokens) if measured else {}
    trainer.save_model(args.output_dir)
    for name, value in before.items():
        print(f"{name} accuracy on 256 held-out problems: {value:.3f} before, {after[name]:.3f} after")


def sharded(trainer: Any) -> bool:
    """Under ZeRO-3 and FSDP one process alone has no whole model to sample from."""
    return trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and trainer.accelerator.num_processes > 1)


def measure(trainer: Any, tokenizer: Any, task: Mathematics, max_new_tokens: int) -> dict[str, float]:
    """Accuracy on the held-out problems: two samples each at temperature 1, and the greedy answer."""
    model: AutoModelForCausalLM = trainer.accelerator.unwrap_model(trainer.model)
    return {
        name: accuracy(
            model,
            tokenizer,
            task.embedded_problems("test"),
            task.is_right,
            num_samples=samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )
        for name, samples, temperature in (("sampled", 2, 1.0), ("greedy", 1, 0.0))
    }


if __name__ == "__main__":
    main(sys.argv[1:])
