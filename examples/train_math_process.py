"""Train with process rewards: every episode of a completion gets credit for its progress.

    accelerate launch examples/train_math_process.py           # no arguments: the toy model, offline

    accelerate launch examples/train_math_process.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --process_weight 0.5

This is `train_math.py` with a `ProcessRewardCallback`; it has the same flags and YAML keys, and those of
`ProcessArguments`.
"""

import sys
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record
from train_math import MathArguments, load_problems, load_tokenizer, train
from trl import ModelConfig, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.process_rewards import (
    EPISODE_MARKERS,
    AnswerLogProbValue,
    CreditSettings,
    ProcessRewardCallback,
    line_starts,
)
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_defaults, toy_model


@dataclass
class ProcessArguments:
    """Flags of the value V(prefix), and of the credit that is computed from it."""

    estimator: str = field(default="grpo_process", metadata={"help": "See docs/concepts/credit.md."})
    process_weight: float = field(default=1.0, metadata={"help": "Weight of the process part of the advantage."})
    skip_silent: bool = field(
        default=True,
        metadata={"help": "No process rewards for groups whose outcome advantages are all 0, so V alone never trains."},
    )
    value_space: str = field(
        default="log", metadata={"choices": ["log", "probability"], "help": "Unit of V of the known answer."}
    )
    force_prompt: str | None = field(default=None, metadata={"help": "Text that asks for the known answer now."})


def main(argv: list[str]) -> None:
    types = (MathArguments, DASHConfig, ModelConfig, ProcessArguments)
    script, args, model_args, process = parse(argv, types, toy_defaults())
    check_effects(script, args, model_args)
    tokenizer = load_tokenizer(args, model_args, toy_model)
    train_dataset, eval_dataset = load_problems(script, args, tokenizer, arithmetic_dataset)
    toy = script.is_toy  # a toy solution has one step per line, and its answer follows "The answer is "
    value = AnswerLogProbValue(
        process.force_prompt or ("The answer is " if toy else None),
        space=process.value_space,
        closing="<|im_end|>" if toy else "",
    )
    credit = ProcessRewardCallback(
        value,
        estimator=process.estimator,
        settings=CreditSettings(process_weight=process.process_weight),
        markers=line_starts if toy else EPISODE_MARKERS,
        skip_silent=process.skip_silent,
    )
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=script.reward(by_row=args.reward_pipeline or args.async_level > 0),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit), credit],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    train(trainer, partial(toy_accuracies, trainer, arithmetic_dataset("test"), arithmetic_reward) if toy else dict)


if __name__ == "__main__":
    record(main)(sys.argv[1:])
