"""Train a model on programming problems, with unit tests in a sandbox as the reward.

    accelerate launch examples/train_code.py                   # no arguments: a tiny model writes one-line functions

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 examples/train_code.py \\
        --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset_name google-research-datasets/mbpp \\
        --use_vllm --vllm_mode colocate --output_dir outputs/mbpp

This is `train_math.py` with other toy problems; it has the same flags and YAML keys. The dataset is a hub name or a
local path, with the columns of MBPP, or with `prompt` and `tests` (docs/howto/code-rewards.md).
"""

import sys
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record
from toy_programs import program_dataset, program_model
from train_math import MathArguments, load_problems, load_tokenizer, train
from trl import ModelConfig, get_peft_config, get_quantization_config

from dash_trl import CodeReward, DASHConfig, DASHTrainer
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.toy import toy_defaults

TOY_DEFAULTS = {"output_dir": "outputs/toy_code", "max_completion_length": 24, "max_steps": 40}


def main(argv: list[str]) -> None:
    script, args, model_args = parse(argv, (MathArguments, DASHConfig, ModelConfig), toy_defaults() | TOY_DEFAULTS)
    check_effects(script, args, model_args)
    tokenizer = load_tokenizer(args, model_args, program_model)
    train_dataset, eval_dataset = load_problems(script, args, tokenizer, program_dataset)
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=script.reward(CodeReward()),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit)],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    train(trainer, partial(toy_accuracies, trainer, program_dataset("test"), CodeReward()) if script.is_toy else dict)


if __name__ == "__main__":
    record(main)(sys.argv[1:])
