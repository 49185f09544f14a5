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

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from toy_judge import JUDGE_NAME, ToyJudge
from train_math import MathArguments, Mathematics, main

from dash_trl.rewards import JudgeReward, RewardRunner

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


class Judged(Mathematics):
    """The task of `train_math.py`, with a judge as the reward."""

    Arguments = JudgeArguments

    def __init__(self, script: JudgeArguments):
        if script.reward_path is not None:
            raise ValueError(f"reward_path={script.reward_path!r} has no effect here, where a judge scores: remove it.")
        super().__init__(script)
        if script.judge_model is None:
            self.judge = self._toy_judge()
        else:
            template = script.judge_template or WITH_ANSWER
            self.judge = JudgeReward(script.judge_model, base_url=script.judge_url, template=template)

    def _toy_judge(self) -> JudgeReward:
        for name in ("judge_url", "judge_template"):
            if (value := getattr(self.script, name)) is not None:
                raise ValueError(f"{name}={value!r} has no effect without --judge_model: add it, or remove {name}.")
        if not self.script.is_toy:
            raise ValueError(
                f"dataset_name={self.script.dataset_name!r} is given, but no judge. Add --judge_model, and --judge_url "
                "where it is not OpenAI's; without a model and a dataset, a rule takes the judge's place."
            )
        known = [ToyJudge().url if PartialState().is_main_process else None]
        (url,) = broadcast_object_list(known)  # all ranks share one server
        return JudgeReward(JUDGE_NAME, base_url=url)

    def reward(self) -> RewardRunner:
        return RewardRunner(self.judge)


if __name__ == "__main__":
    main(sys.argv[1:], make_task=Judged)
