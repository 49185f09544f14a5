"""Train a model on mathematics problems with DASH.

    dash_trl train            # without flags: a tiny model learns arithmetic, offline; runs this script by
                              # accelerate launch examples/train_math.py

    dash_trl train --accelerate_config ddp --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --use_vllm --vllm_mode colocate --output_dir outputs/gsm8k

    # a run of the paper
    dash_trl train --accelerate_config zero3_offload --config examples/configs/dash_qwen2.5-0.5b.yaml

Every field of `MathArguments`, `DASHConfig` (which includes TRL's `GRPOConfig`) and TRL's `ModelConfig` is a flag and a
YAML key; flags override the file. The dataset is a hub name or a local path. It has the columns of GSM8K or MATH, the
columns `prompt` and `answer`, or the columns that --problem_column and --answer_column name. Without a model and a
dataset, the toy model learns arithmetic; `toy` names that model, or its problems. A flag that would have no effect
raises an error.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoProcessor
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.checks import check_model
from dash_trl.evaluation import TOY, Task
from dash_trl.monitoring import TimeLimitCallback, monitor
from dash_trl.rewards import completion_text
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.signals import interrupts
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_defaults, toy_model

NOTHING_SAVED = "There is no checkpoint: --save_strategy steps and --save_steps N save some."


@dataclass
class MathArguments(Task):
    """Arguments of the script: the dataset, the prompt, your own reward function, and a time limit."""

    dataset_train_split: str = field(default="train", metadata={"help": "Training split, or a part: 'train[:100]'."})
    time_limit: float | None = field(
        default=None,
        metadata={"help": "Stop after this many seconds of training, including those before a resumed checkpoint."},
    )


def main(argv: list[str]) -> None:
    script, args, model_args = parse(argv, (MathArguments, DASHConfig, ModelConfig), toy_defaults())
    check_effects(script, args, model_args)
    tokenizer = load_tokenizer(args, model_args, toy_model)
    train_dataset, eval_dataset = load_problems(script, args, tokenizer, arithmetic_dataset)
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=script.reward(by_row=args.reward_pipeline or args.async_level > 0),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit)],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    on_toy = partial(toy_accuracies, trainer, arithmetic_dataset("test"), arithmetic_reward)
    train(trainer, on_toy if script.is_toy else dict)


def load_tokenizer(args: Any, model_args: ModelConfig, toy: Callable[..., str]) -> Any:
    """Return the tokenizer, or the processor of a multimodal model, and completes the settings of the model.

    The first run makes the toy model.
    """
    if model_args.model_name_or_path in (None, TOY):
        with args.main_process_first(local=False, desc="warm-up of the toy model"):
            model_args.model_name_or_path = toy(progress=args.should_save)
    settings = {name: getattr(model_args, name) for name in ("attn_implementation", "dtype")}
    args.model_init_kwargs = {"revision": model_args.model_revision, **settings, **(args.model_init_kwargs or {})}
    check_model(model_args.model_name_or_path, args)  # before the tokenizer, whose error message would be less clear
    where = {"revision": args.model_init_kwargs["revision"], "trust_remote_code": args.trust_remote_code}
    return AutoProcessor.from_pretrained(model_args.model_name_or_path, padding_side="left", **where)


def load_problems(script: MathArguments, args: Any, tokenizer: Any, toy: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the problems for training, and those for the evaluation (None = no evaluation)."""
    evaluates = args.do_eval or args.eval_on_start
    if script.is_toy:
        return toy("train", seed=args.seed), toy("test") if evaluates else None
    chat = tokenizer.chat_template is not None  # True = prompts are messages
    with args.main_process_first(local=False, desc="loading the dataset"):
        return script.problems(chat, script.dataset_train_split), script.problems(chat) if evaluates else None


def train(trainer: Any, measure: Callable[[], dict[str, float]]) -> None:
    """Trains and saves the model, and prints accuracies before and after. After Ctrl-C, it prints how to continue."""
    args = trainer.args
    folder = Path(trainer.args.output_dir)
    monitor(trainer)  # a progress bar with the reward, metrics.jsonl and run.png
    before = measure()
    with interrupts(signal.SIGINT, *(() if args.enable_jit_checkpoint else (signal.SIGTERM,))) as signals:
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            trainer.save_model()  # before it is measured, so that an interrupt does not lose it
        except BaseException:  # another rank may have ended before this one
            if not signals:
                raise
            state = trainer.state
            if is_done := 0 < state.max_steps <= state.global_step:
                trainer.save_model()
            if args.should_save:
                saved = get_last_checkpoint(folder)
                go_on = (
                    f"To continue, repeat the command with --resume_from_checkpoint {saved}" if saved else NOTHING_SAVED
                )
                print(f"\nStopped after step {state.global_step} of {state.max_steps}.", end=" ")
                print(f"The model is in {folder}" if is_done else go_on)
            sys.exit(128 + signals[0])  # as a shell reports the signal
    after = measure()
    if args.should_save:
        completions = [*getattr(trainer, "_logs", {}).get("completion", [])]  # SFT has none
        for completion in completions[:1] + completions[-1:]:
            print(f"one of the last completions: {completion_text(completion)!r:.500}")
        for name, value in before.items():
            print(f"{name} accuracy on 256 held-out problems: {value:.3f} before, {after[name]:.3f} after")
        plot = f"\nplot:    {picture}" if (picture := folder / "run.png").exists() else ""
        print(f"metrics: {folder / 'metrics.jsonl'}\nmodel:   {folder}{plot}")
    trainer.accelerator.end_training()  # ends the process group: without it gloo may abort at exit


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # if there are several processes, the launcher shows the first error
