"""Train a model on mathematics problems with DASH.

    accelerate launch examples/train_math.py                   # no arguments: a tiny model learns arithmetic, offline

    accelerate launch --config_file accelerate_configs/ddp.yaml examples/train_math.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \
        --use_vllm --vllm_mode colocate --output_dir outputs/gsm8k

    accelerate launch --config_file accelerate_configs/zero3_offload.yaml examples/train_math.py \
        --config examples/configs/dash_qwen2.5-0.5b.yaml       # a run of the paper

Every field of `MathArguments`, `DASHConfig` (hence of TRL's `GRPOConfig`) and TRL's `ModelConfig` is a flag and a YAML
key; a flag wins over the file. The dataset is a hub name or a local path: GSM8K, MATH, or `prompt`/`answer` columns.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer, MathAccuracyReward, load_math_dataset
from dash_trl.callbacks import MetricsFileCallback, RewardProgressCallback
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model
from dash_trl.evaluation import accuracy
from dash_trl.visualization import plot_run


@dataclass
class MathArguments(ScriptArguments):
    """TRL's dataset arguments, and the prompt."""

    prompt_template: str | None = field(
        default=None,
        metadata={"help": "A name in dash_trl.data.PROMPT_TEMPLATES, or a text with {problem}. Default: 'boxed'."},
    )


def main(argv: list[str], own_arguments: tuple[Any, ...] = (), make_callbacks: Any = None) -> None:
    """Train; another script may add dataclasses of flags, and callbacks made of them (`train_math_process.py`)."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    parser = TrlParser((MathArguments, DASHConfig, ModelConfig, *own_arguments))
    embedded = not names_a_model(argv)
    # Every step on the bar, in the metrics file and in the plot; TRL's default is every tenth.
    parser.set_defaults_with_config(**({"logging_steps": 1} | (embedded_defaults() if embedded else {})))
    script, args, model_args, *own = parser.parse_args_and_config(argv)

    if embedded:
        with args.main_process_first(local=False, desc="warm-up of the embedded model"):
            model_args.model_name_or_path = embedded_model(progress=args.should_save)
    elif script.dataset_name is None:
        raise ValueError(
            f"model_name_or_path={model_args.model_name_or_path!r} is given, but no dataset. Add --dataset_name, a hub "
            "name such as openai/gsm8k (with --dataset_config main) or a local path; without both, the embedded "
            "model learns arithmetic."
        )
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, padding_side="left"
    )
    train_dataset, eval_dataset, reward = load_task(script, args, tokenizer)

    metrics = Path(args.output_dir) / "metrics.jsonl"
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=with_model_arguments(args, model_args),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[MetricsFileCallback(metrics), *(make_callbacks(script, *own) if make_callbacks else ())],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgressCallback)

    measured = script.dataset_name is None and args.should_save and not sharded(trainer)
    before = measure(trainer, tokenizer) if measured else {}
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = measure(trainer, tokenizer) if measured else {}
    trainer.save_model(args.output_dir)
    if args.should_save:
        for name, value in before.items():
            print(f"{name} accuracy on 256 held-out problems: {value:.3f} before, {after[name]:.3f} after")
        print(f"metrics: {metrics}\nmodel:   {args.output_dir}")
        try:
            print(f"plot:    {plot_run(metrics, metrics.with_name('run.png'), title=Path(args.output_dir).name)}")
        except ValueError as error:  # a run that ended before its first log
            print(f"plot:    none. {error}")
    trainer.accelerator.end_training()  # ends the process group: without it gloo may abort at exit


def names_a_model(argv: list[str]) -> bool:
    """Whether the flags or the YAML file choose a model; if not, the embedded one's settings become the defaults."""
    if any(argument.split("=")[0] == "--model_name_or_path" for argument in argv):
        return True
    files = [value for flag, value in zip(argv, argv[1:], strict=False) if flag == "--config"]
    return any("model_name_or_path" in (yaml.safe_load(Path(file).read_text()) or {}) for file in files)


def load_task(script: MathArguments, args: DASHConfig, tokenizer: Any) -> tuple[Any, Any, Any]:
    """(training problems, evaluation problems or None, reward function)."""
    if script.dataset_name is None:
        evaluation = arithmetic_dataset("test") if args.eval_strategy != "no" else None
        return arithmetic_dataset("train", seed=args.seed), evaluation, arithmetic_reward

    def load(split: str) -> Any:
        return load_math_dataset(
            script.dataset_name,
            config=script.dataset_config,
            split=split,
            prompt_template=script.prompt_template,
            chat=tokenizer.chat_template is not None,
        )

    with args.main_process_first(local=False, desc="loading the dataset"):
        evaluation = load(script.dataset_test_split) if args.eval_strategy != "no" else None
        return load(script.dataset_train_split), evaluation, MathAccuracyReward()


def with_model_arguments(args: DASHConfig, model_args: ModelConfig) -> DASHConfig:
    """TRL's `ModelConfig` as the keyword arguments with which the trainer loads the model."""
    kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = {**kwargs, **(args.model_init_kwargs or {})}
    return args


def sharded(trainer: DASHTrainer) -> bool:
    """Under ZeRO-3 and FSDP one process alone has no whole model to sample from."""
    return trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and trainer.accelerator.num_processes > 1)


def measure(trainer: DASHTrainer, tokenizer: Any) -> dict[str, float]:
    """Accuracy on the held-out problems: two samples each at temperature 1, and the greedy answer."""
    model: AutoModelForCausalLM = trainer.accelerator.unwrap_model(trainer.model)
    length = trainer.args.max_completion_length
    return {
        name: accuracy(
            model,
            tokenizer,
            arithmetic_dataset("test"),
            arithmetic_reward,
            num_samples=samples,
            temperature=temperature,
            max_new_tokens=length,
        )
        for name, samples, temperature in (("sampled", 2, 1.0), ("greedy", 1, 0.0))
    }


if __name__ == "__main__":
    main(sys.argv[1:])
