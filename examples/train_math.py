"""Train a model on mathematics problems with DASH.

    accelerate launch examples/train_math.py                   # no arguments: a tiny model learns arithmetic, offline

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 examples/train_math.py \\
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \\
        --use_vllm --vllm_mode colocate --output_dir outputs/gsm8k

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/train_math.py \\
        --config examples/configs/dash_qwen2.5-0.5b.yaml       # a run of the paper

    # A single file has only the split "train"; both parts are taken from it.
    accelerate launch examples/train_math.py --model_name_or_path MODEL --dataset_name own.jsonl \\
        --eval_strategy steps --eval_steps 50 \\
        --dataset_train_split 'train[100:]' --dataset_test_split 'train[:100]'

Every field of `MathArguments`, `DASHConfig` (which includes TRL's `GRPOConfig`) and TRL's `ModelConfig` is a flag and a
YAML key; flags override the file. The dataset is a hub name or a local path. It has the columns of GSM8K or MATH, the
columns `prompt` and `answer`, or the columns that --problem_column and --answer_column name. Without a model and a
dataset, the toy model learns arithmetic; `toy` names that model, or its problems. A flag that would have no effect
raises an error.
"""

import logging
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from dash_trl import CodeReward, DASHConfig, DASHTrainer, MathAccuracyReward, RewardRunner
from dash_trl.checkpoints import checkpoint_to_resume
from dash_trl.checks import check_model
from dash_trl.evaluation import TOY, Task, evaluate
from dash_trl.monitoring import MetricsFileCallback, RewardProgressCallback, TimeLimitCallback, plot_run
from dash_trl.rewards import load_reward
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_defaults, toy_model

# The fields of TRL and Transformers that --help shows; --help_all shows all.
HELP = (
    *("model_name_or_path", "attn_implementation", "use_peft", "lora_r", "output_dir", "resume_from_checkpoint"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations"),
    *("max_completion_length", "temperature", "beta", "num_iterations", "learning_rate", "max_steps", "seed"),
    *("num_train_epochs", "use_vllm", "vllm_mode", "use_cpu", "bf16", "gradient_checkpointing", "report_to"),
    *("logging_steps", "log_completions", "eval_strategy", "save_strategy", "save_steps"),
)
METRICS = "metrics.jsonl"  # the file in the output directory that gets every log
PATIENCE = 120.0  # timeout of a code reward in seconds; before that, the sandbox ends a program after one minute


@dataclass
class MathArguments(Task):
    """Arguments of the script: the dataset, the prompt, your own reward function, and a time limit."""

    dataset_train_split: str = field(
        default="train", metadata={"help": "Training split, or a part of it: 'train[:100]'."}
    )
    time_limit: float | None = field(
        default=None,
        metadata={"help": "Stop after this many seconds of training, including those before a resumed checkpoint."},
    )

    @property
    def is_toy(self) -> bool:
        return self.dataset_name in (None, TOY)


class Mathematics:
    """The task: toy model, problems, reward and tools. Other scripts override parts, such as the toy problems."""

    Arguments = MathArguments  # each field is a flag
    toy_reward: Any = staticmethod(arithmetic_reward)

    def __init__(self, script: MathArguments):
        self.script = script

    @staticmethod
    def toy_defaults() -> dict[str, Any]:
        """Returns the default settings of the toy run."""
        return toy_defaults()

    def toy_model(self, progress: bool) -> str:
        """Returns the directory of a small model that was warmed up for the toy problems."""
        return toy_model(progress=progress)

    def toy_problems(self, split: str, seed: int = 0, completion: bool = False) -> Any:
        return arithmetic_dataset(split, seed=seed, completion=completion)

    def reward(self) -> Any:
        if self.script.reward_path is not None:
            return load_reward(self.script.reward_path, self.script.reward_name)
        if self.script.is_toy:
            reward = self.toy_reward
        else:
            reward = CodeReward() if self.script.has_tests else MathAccuracyReward()
        return RewardRunner(reward, timeout=PATIENCE) if isinstance(reward, CodeReward) else reward

    def tools(self) -> list[Callable[..., Any]]:
        """Returns the tools that the model may call; `train_tools.py` overrides this method."""
        return []


def main(
    argv: list[str], own_arguments: tuple[Any, ...] = (), make_callbacks: Any = None, make_task: Any = Mathematics
) -> None:
    """Trains a model. Other scripts call this function with their own flags, callbacks or task.

    Args:
        argv: arguments of the command line.
        own_arguments: dataclasses of additional flags, see `train_math_process.py`.
        make_callbacks: takes the script's arguments and an instance of each of `own_arguments`; returns callbacks.
        make_task: `Mathematics` or a subclass.
    """
    types = (make_task.Arguments, DASHConfig, ModelConfig, *own_arguments)
    script, args, model_args, *own = parse(argv, types, make_task.toy_defaults())
    check_effects(script, args, model_args)
    task = make_task(script)
    if is_toy(model_args):
        with args.main_process_first(local=False, desc="warm-up of the toy model"):
            model_args.model_name_or_path = task.toy_model(progress=args.should_save)
    with_model_arguments(args, model_args)
    check_model(model_args.model_name_or_path, args)  # before the tokenizer, whose error message would be less clear
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=args.model_init_kwargs["revision"],
        trust_remote_code=args.trust_remote_code,
        padding_side="left",
    )
    train_dataset, eval_dataset = load_problems(task, args, tokenizer)

    metrics = Path(args.output_dir, METRICS)
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=task.reward(),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[
            *(TimeLimitCallback(script.time_limit), MetricsFileCallback(metrics)),
            *(make_callbacks(script, *own) if make_callbacks else ()),
        ],
        tools=task.tools(),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    train_and_measure(trainer, tokenizer, task, args.max_completion_length, measured=script.is_toy)
    if args.should_save and any("reward" in log for log in trainer.state.log_history):
        print(f"plot:    {plot_run(metrics, metrics.with_name('run.png'), title=metrics.parent.name)}")


def parse(argv: Sequence[str], types: Sequence[Any], without_model: dict[str, Any]) -> tuple[Any, ...]:
    """Parses the command line, and lets dash_trl's messages be printed. The toy model has its own defaults.

    Args:
        argv: arguments of the command line.
        types: the dataclasses whose fields are flags.
        without_model: defaults for the toy model.
    Returns:
        One instance of each dataclass.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    model_args, _ = TrlParser(ModelConfig, add_help=False).parse_args_and_config(argv, return_remaining_strings=True)
    parser = TrlParser(types, epilog="--help_all shows all flags: those of TRL and Transformers, too.")
    parser.add_argument("--help_all", action="help", help="Show all flags and exit.")
    if "--help_all" not in argv:
        shorten_help(parser, types)
    # Log every step, for the progress bar, the metrics file and the plot; by default TRL logs every tenth step.
    defaults = {"logging_steps": 1} | (without_model if is_toy(model_args) else {})
    parser.set_defaults_with_config(**defaults)
    script, args, *others = parser.parse_args_and_config(argv)
    args.resume_from_checkpoint = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir)
    return script, args, *others


def shorten_help(parser: TrlParser, types: Sequence[Any]) -> None:
    """Hides the flags of TRL and Transformers in --help, except those in `HELP`."""
    ours = [kind for one in types for kind in one.__mro__ if not kind.__module__.startswith(("trl.", "transformers."))]
    shown = {"help", "help_all", *HELP}.union(*map(get_annotations, ours))
    for action in parser._actions:
        if action.dest not in shown:
            action.help = SUPPRESS


def is_toy(model_args: ModelConfig) -> bool:
    return model_args.model_name_or_path in (None, TOY)


def check_effects(script: MathArguments, args: Any, model_args: ModelConfig) -> None:
    """Raises a `ValueError` if only one of model and dataset is given, or if an option would have no effect."""
    model, dataset = model_args.model_name_or_path, script.dataset_name
    if (model is None) != (dataset is None) and TOY not in (model, dataset):
        raise ValueError(
            f"model_name_or_path={model!r} with dataset_name={dataset!r}: give both, each a hub name such as "
            "Qwen/Qwen2.5-0.5B-Instruct and openai/gsm8k (with --dataset_config main), or a local path; without both, "
            f"the toy model learns arithmetic, and {TOY!r} names it and its problems."
        )
    own = {one.name for one in fields(MathArguments)} - {"dataset_name", "reward_path", "reward_name", "time_limit"}
    changed = [one.name for one in fields(script) if one.name in own and getattr(script, one.name) != one.default]
    if script.is_toy and changed:
        raise ValueError(
            f"{changed} have no effect without --model_name_or_path and --dataset_name: the toy problems have no such "
            "options. Add these two, or remove them."
        )
    check_adapter(model_args)
    if (args.do_eval or "dataset_test_split" in changed) and not evaluates(args):
        raise ValueError(
            "do_eval and dataset_test_split have no effect, since nothing is evaluated: add --eval_strategy "
            "steps (or epoch), or remove them."
        )


def check_adapter(model_args: ModelConfig) -> None:
    """Raises a `ValueError` if an option of an adapter is given, but no adapter."""
    adapter = [
        one.name
        for one in fields(model_args)
        if one.name.startswith(("lora_", "use_rslora", "use_dora")) and getattr(model_args, one.name) != one.default
    ]
    if adapter and not model_args.use_peft:
        raise ValueError(
            f"{adapter} have no effect without --use_peft, and all weights would be trained: add --use_peft, or remove "
            "them."
        )


def evaluates(args: Any) -> bool:
    return args.eval_strategy != "no" or args.eval_on_start


def load_problems(task: Mathematics, args: Any, tokenizer: Any, completion: bool = False) -> tuple[Any, Any]:
    """Returns the problems for training, and those for the evaluation (None = no evaluation).

    Args:
        task: the task.
        args: training arguments.
        tokenizer: if it has a chat template, prompts are messages, unless `plain_prompts` is True.
        completion: True = add a column `completion` with human solutions.
    """
    script = task.script
    if script.is_toy:
        evaluation = task.toy_problems("test", completion=completion) if evaluates(args) else None
        return task.toy_problems("train", seed=args.seed, completion=completion), evaluation
    chat = tokenizer.chat_template is not None
    with args.main_process_first(local=False, desc="loading the dataset"):
        train = script.problems(chat, script.dataset_train_split, completion)
        evaluation = script.problems(chat, script.dataset_test_split, completion) if evaluates(args) else None
    return train, evaluation


def with_model_arguments(args: Any, model_args: ModelConfig) -> None:
    """Copies TRL's `ModelConfig` to `args.model_init_kwargs`, with which the trainer loads the model."""
    kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = {**kwargs, **(args.model_init_kwargs or {})}


def train_and_measure(trainer: Any, tokenizer: Any, task: Mathematics, length: int, *, measured: bool) -> None:
    """Trains and saves the model; if `measured`, prints its accuracy on the toy problems before and after.

    After Ctrl-C, it prints where the run stands and how to continue it, and ends the program.
    """
    args = trainer.args
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback)
    # With FSDP or DeepSpeed, one process may lack parts of the model.
    sharded = trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and trainer.accelerator.num_processes > 1)
    # With tools, the trainer evaluates, so all processes have to take part. Otherwise one process measures alone.
    measured = measured and (bool(task.tools()) or (args.should_save and not sharded))
    before = measure(trainer, tokenizer, task, length) if measured else {}
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except KeyboardInterrupt as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # a second Ctrl-C, while the first one ended the run
            raise
        if args.should_save:
            saved = get_last_checkpoint(args.output_dir)
            go_on = f"To continue, repeat the command with --resume_from_checkpoint {saved}"
            print(
                f"\nStopped after step {trainer.state.global_step} of {trainer.state.max_steps}.",
                go_on if saved else "There is no checkpoint: --save_strategy steps and --save_steps N save some.",
            )
        sys.exit(130)  # as a shell reports Ctrl-C
    after = measure(trainer, tokenizer, task, length) if measured else {}
    trainer.save_model(args.output_dir)
    for name, value in before.items() if args.should_save else ():
        print(f"{name} accuracy on 256 held-out problems: {value:.3f} before, {after[name]:.3f} after")
    if args.should_save:
        print(f"metrics: {Path(args.output_dir, METRICS)}\nmodel:   {args.output_dir}")
    trainer.accelerator.end_training()  # ends the process group: without it gloo may abort at exit


def measure(trainer: Any, tokenizer: Any, task: Mathematics, length: int) -> dict[str, float]:
    """Returns the accuracy on the held-out problems, of two samples each at temperature 1 and of the greedy answer.

    With tools, it returns only the accuracy of samples.
    """
    if task.tools():
        return {"sampled": trainer.evaluate(task.toy_problems("test"))["eval_reward"]}
    model: AutoModelForCausalLM = trainer.accelerator.unwrap_model(trainer.model)
    return {
        name: evaluate(
            model,
            tokenizer,
            task.toy_problems("test"),
            task.toy_reward,
            num_samples=samples,
            temperature=temperature,
            max_completion_length=length,
        )["accuracy"]
        for name, samples, temperature in (("sampled", 2, 1.0), ("greedy", 1, 0.0))
    }


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # if there are several processes, the launcher shows the first error
