"""Train with a judge: a language model behind an OpenAI-compatible server scores every completion.

    pip install "dash_trl[judge]"                              # the client of openai; in a checkout: -e ".[judge]"
    accelerate launch examples/train_judge.py                  # no arguments: the toy model and a rule, offline

    accelerate launch examples/train_judge.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --judge_model gpt-4.1-mini        # the key: OPENAI_API_KEY

    accelerate launch examples/train_judge.py … --judge_model Qwen/Qwen3-8B --judge_url http://127.0.0.1:8000/v1 \\
        --judge_template $'Task:\\n{prompt}\\n\\nAnswer:\\n{completion}'                       # without the gold answer

This is `train_math.py` with a `JudgeReward`; it has the same flags and YAML keys, and those of `JudgeArguments`. If
neither a judge nor a model nor a dataset is given, a rule on this machine replaces the judge and is called in the same
way.
"""

import sys
from dataclasses import dataclass, field
from functools import partial

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed.elastic.multiprocessing.errors import record
from toy_judge import JUDGE_NAME, ToyJudge
from train_math import MathArguments, load_problems, load_tokenizer, train
from trl import ModelConfig, get_peft_config, get_quantization_config

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.rewards import JudgeReward, RewardRunner
from dash_trl.script import check_effects, parse, toy_accuracies
from dash_trl.toy import arithmetic_dataset, arithmetic_reward, toy_defaults, toy_model

WITH_ANSWER = "Task:\n{prompt}\n\nReference answer: {answer}\n\nAnswer:\n{completion}"


@dataclass
class JudgeArguments(MathArguments):
    """The arguments of `train_math.py`, plus the judge."""

    judge_model: str | None = field(default=None, metadata={"help": "Name of the judge on its server."})
    judge_url: str | None = field(
        default=None, metadata={"help": "URL of its server, with /v1. Default: OPENAI_BASE_URL, else OpenAI's."}
    )
    judge_template: str | None = field(
        default=None,
        metadata={"help": "Template of the message to it, with {completion}, {prompt}, {answer}. Default: with all."},
    )


def main(argv: list[str]) -> None:
    script, args, model_args = parse(argv, (JudgeArguments, DASHConfig, ModelConfig), toy_defaults())
    check_effects(script, args, model_args)
    judge = judge_of(script)
    tokenizer = load_tokenizer(args, model_args, toy_model)
    train_dataset, eval_dataset = load_problems(script, args, tokenizer, arithmetic_dataset)
    trainer = DASHTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=RewardRunner(judge),
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


def judge_of(script: JudgeArguments) -> JudgeReward:
    """Return the judge that the flags name; without any, a rule on this machine."""
    name = script.judge_model
    url = script.judge_url
    template = script.judge_template
    by_rule = script.is_toy and (name, url, template) == (None, None, None)
    if script.reward_path is not None or not (by_rule or name):
        raise ValueError(
            f"judge_model={name!r}, judge_url={url!r}, judge_template={template!r}, reward_path="
            f"{script.reward_path!r}, dataset_name={script.dataset_name!r}: a judge scores here. Name it with "
            "--judge_model, and --judge_url where it is not OpenAI's, and remove --reward_path. Without all of "
            "these, a rule takes the judge's place."
        )
    if by_rule:
        known = [ToyJudge().url if PartialState().is_main_process else None]
        name = JUDGE_NAME
        (url,) = broadcast_object_list(known)  # all ranks share one server
    return JudgeReward(name, base_url=url, template=template or WITH_ANSWER)


if __name__ == "__main__":
    record(main)(sys.argv[1:])
