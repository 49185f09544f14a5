"""Train a model that calls a tool: a calculator.

    accelerate launch examples/train_tools.py                  # no arguments: a tiny model learns it, offline
    accelerate launch examples/train_tools.py --noise          # the control: a tool that answers with random numbers

    accelerate launch examples/train_tools.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name openai/gsm8k --dataset_config main --max_completion_length 1024

This is `train_math.py` with `tools=[calculator]`; it has the same flags and YAML keys, and those of `ToolArguments`.
The toy model knows how to call the calculator, but often guesses the answer or calls it with a wrong number. The
numbers are too large for it to add. A model of your own needs a chat template that supports tools.

In 40 steps, the sampled accuracy rises from 0.28–0.30 to 0.91–0.93 (--seed 0, 1, 2). With --noise it stays at 0.00.
"""

import sys
from dataclasses import dataclass, field
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record
from toy_tools import calculator, calculator_dataset, calculator_model, noisy_calculator
from train_math import MathArguments, load_problems, load_tokenizer, train
from trl import ModelConfig, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.toy import arithmetic_reward, toy_defaults

TOY_DEFAULTS = {
    "output_dir": "outputs/toy_tools",
    "max_completion_length": 96,  # the tool's answers count, too
    "max_steps": 40,
    "max_tool_calling_iterations": 4,
    "per_device_eval_batch_size": 128,
    "num_generations_eval": 2,
}


@dataclass
class ToolArguments(MathArguments):
    """The arguments of `train_math.py`, plus the choice of the tool."""

    noise: bool = field(default=False, metadata={"help": "The tool answers every call with a random number."})


def main(argv: list[str]) -> None:
    script, args, model_args = parse(argv, (ToolArguments, DASHConfig, ModelConfig), toy_defaults() | TOY_DEFAULTS)
    check_effects(script, args, model_args)
    tokenizer = load_tokenizer(args, model_args, calculator_model)
    train_dataset, eval_dataset = load_problems(script, args, tokenizer, calculator_dataset)
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=script.reward(),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[TimeLimitCallback(script.time_limit)],
        tools=[noisy_calculator() if script.noise else calculator],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    on_toy = partial(toy_accuracies, trainer, calculator_dataset("test"), arithmetic_reward)
    train(trainer, on_toy if script.is_toy else dict)


if __name__ == "__main__":
    record(main)(sys.argv[1:])
