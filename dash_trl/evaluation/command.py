"""Measure models: accuracy and pass@k on math or programming problems, with 95 % intervals over the problems.

    dash_trl eval toy                                      # the tiny model of `make demo`, offline

    dash_trl eval Qwen/Qwen2.5-0.5B-Instruct outputs/gsm8k \\
        --dataset_name openai/gsm8k --dataset_config main --num_samples 16 --k 1 8 16 --temperature 0.6 --use_vllm

    dash_trl serve Qwen/Qwen2.5-0.5B-Instruct --servers 2   # or use servers: all models must have one shape
    dash_trl eval … --vllm_server_urls http://127.0.0.1:8000 http://127.0.0.1:8001

Writes OUTPUT_DIR/<model>.jsonl (all samples), <model>.json (the figures) and pass_at_k.png, and replaces earlier files
of these names. For more see docs/howto/evaluate.md.
"""

import argparse
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg, HfArgumentParser
from trl import maybe_apply_chat_template

from dash_trl.data import has_tests, load_code_dataset, load_math_dataset, load_rows, select_split
from dash_trl.evaluation.figures import Rows, comparison, differences, figures_of, table
from dash_trl.evaluation.reward import PATIENCE, Reward, scored_samples
from dash_trl.evaluation.samplers import (
    BATCH_SIZE,
    MAX_COMPLETION_LENGTH,
    TOY,
    Checkpoint,
    LocalSampler,
    open_sampler,
)
from dash_trl.monitoring import plot_pass_at_k
from dash_trl.rewards import DEFAULT_NAME, CodeReward, MathAccuracyReward, RewardRunner, load_reward
from dash_trl.sampling import WEIGHT_DIR
from dash_trl.toy import arithmetic_dataset, arithmetic_reward

TOY_LENGTH = 64  # in tokens


@dataclass
class Task:
    """The problems, and the reward function that decides which completions are correct.

    Raises:
        ValueError: from its methods, if a dataset, split or reward function does not exist or does not fit.
    """

    dataset_name: str | None = HfArg(
        default=None,
        help="A hub name or a local path: GSM8K, MATH-500, AIME, MBPP+, or what has "
        f"their columns; or {TOY}, the default of the toy model.",
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of the dataset on the hub, such as 'main'.")
    dataset_test_split: str = HfArg(default="test", help="Test split of the dataset, or a part of it: 'test[:100]'.")
    prompt_template: str | None = HfArg(
        default=None,
        help="A name in dash_trl.data.PROMPT_TEMPLATES (default: 'boxed' or 'code'), or text with {problem}.",
    )
    plain_prompts: bool = HfArg(
        default=False, help="Prompts are texts also if the tokenizer has a chat template: for base models."
    )
    problem_column: str | None = HfArg(
        default=None, help="The column with the problems, if it has another name than in those datasets."
    )
    answer_column: str | None = HfArg(
        default=None, help="The column with the gold answers, if it has another name than in those datasets."
    )
    reward_path: str | None = HfArg(
        default=None, help="A Python file with the reward function; `dash_trl eval` counts scores above 0.5 as correct."
    )
    reward_name: str = HfArg(
        default=DEFAULT_NAME, help="Name in the file of --reward_path: a function, a class, or a RewardRunner."
    )

    @property
    def is_toy(self) -> bool:
        return self.dataset_name in (None, TOY)

    @cached_property
    def has_tests(self) -> bool:
        if self.is_toy or self.answer_column is not None:
            return False
        return has_tests(str(self.dataset_name), config=self.dataset_config)

    def problems(self, chat: bool, split: str | None = None, solution: bool = False) -> Dataset:
        """Load the problems: rows with a `prompt` and the columns that the reward function reads.

        Args:
            chat: True = make each prompt a conversation, unless `plain_prompts` is True. Toy prompts always are.
            split: a split, or a part of it, such as "train[:100]". None: `dataset_test_split`.
            solution: True = keep the column with solutions.
        """
        split = split or self.dataset_test_split
        if self.is_toy:
            return select_split({name: arithmetic_dataset(name) for name in ("train", "test")}, split, TOY)
        load: Callable[..., Dataset] = partial(load_math_dataset, answer_column=self.answer_column)
        if self.has_tests:
            load = load_code_dataset
        problems = load(
            str(self.dataset_name),
            config=self.dataset_config,
            split=split,
            prompt_template=self.prompt_template,
            chat=chat and not self.plain_prompts,
            solution=solution,
            problem_column=self.problem_column,
        )
        if self.reward_path is None:
            return problems
        rows = load_rows(str(self.dataset_name), self.dataset_config, split)  # your reward may read any column
        return problems.from_dict(rows.to_dict() | problems.to_dict())

    def reward(self, toy: Any = arithmetic_reward, *, by_row: bool = False) -> Any:
        """Return the reward function: your own, or the one that fits the problems (`toy` for toy problems).

        Args:
            by_row: True = one that ships scores one completion, as `reward_pipeline` needs.
        """
        if self.reward_path is not None:
            reward = load_reward(self.reward_path, self.reward_name)
        elif self.reward_name != DEFAULT_NAME:
            raise ValueError(f"reward_name={self.reward_name!r} names a function in a file: add --reward_path FILE.")
        else:
            reward = toy if self.is_toy else CodeReward() if self.has_tests else MathAccuracyReward()
        if by_row and isinstance(reward, MathAccuracyReward):
            return reward.math_accuracy
        return RewardRunner(reward, timeout=PATIENCE) if isinstance(reward, CodeReward) else reward


@dataclass
class EvaluationArguments(Task):
    """Flags of the command."""

    num_samples: int = HfArg(default=16, help="Number of completions of each problem.")
    k: list[int] | None = HfArg(
        default=None, help="Values of k for pass@k; at most num_samples. Default: 1, 2, 4, … up to num_samples."
    )
    temperature: float = HfArg(default=1.0, help="Sampling temperature. 0 decodes greedily, with one sample.")
    max_completion_length: int | None = HfArg(
        default=None, help="Limit of a completion in tokens. Default: 2048; for toy problems 64."
    )
    chat_template_kwargs: dict[str, Any] | str | None = HfArg(
        default=None, help="Arguments of the chat template, as in training: '{\"enable_thinking\": false}'."
    )
    seed: int = HfArg(default=0, help="Seed of the samples.")
    use_vllm: bool = HfArg(default=False, help="Start vLLM servers and sample from them; else sample by transformers.")
    vllm_server_urls: list[str] | None = HfArg(
        default=None, help="Sample from these servers (dash_trl serve); they get the weights."
    )
    per_device_eval_batch_size: int = HfArg(
        default=BATCH_SIZE, help="Rows that transformers samples side by side. The samples depend on it."
    )
    output_dir: str = HfArg(default="outputs/evaluation", help="Folder of the results.")

    def __post_init__(self) -> None:
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = dict(json.loads(self.chat_template_kwargs))
        is_greedy = (self.temperature, self.num_samples) == (0, 1)
        length = self.max_completion_length
        sizes = self.num_samples, self.per_device_eval_batch_size, MAX_COMPLETION_LENGTH if length is None else length
        if min(sizes) < 1 or not (is_greedy or 0 < self.temperature < math.inf):
            raise ValueError(
                f"temperature={self.temperature} with {sizes} as num_samples, per_device_eval_batch_size and "
                "max_completion_length: take numbers of 1 or more, and a temperature above 0, or temperature 0 with "
                "--num_samples 1 (greedy decoding)."
            )
        self.k = sorted(set(self.k or (2**i for i in range(self.num_samples.bit_length()))))
        if not 1 <= self.k[0] <= self.k[-1] <= self.num_samples:
            raise ValueError(
                f"k={self.k} with num_samples={self.num_samples}: pass@k takes 1 <= k <= num_samples samples of each "
                f"problem. Add --num_samples {self.k[-1]}, or ask for other k."
            )

    def task(self, models: Sequence[str]) -> Self:
        """Return these arguments with a dataset (by default, the toy problems for the toy model) and a length.

        Raises:
            ValueError: if no dataset is given and the toy model is not among the models.
        """
        name = self.dataset_name or (TOY if TOY in models else None)
        if name is None:
            raise ValueError(
                f"There is no dataset for {models[0]!r}: add --dataset_name, a hub name such as openai/gsm8k (with "
                f"--dataset_config main), a local path, or {TOY}."
            )
        length = self.max_completion_length or (TOY_LENGTH if name == TOY else MAX_COMPLETION_LENGTH)
        folder = os.path.abspath(self.output_dir)  # a reward function may change the current folder
        return replace(self, dataset_name=name, max_completion_length=length, output_dir=folder)


def command_parser(arguments: type, command: str, description: str | None) -> HfArgumentParser:
    """Return the parser of a command's dataclass of flags, and set up logging so that messages are printed."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dash_trl").setLevel(logging.INFO)
    return HfArgumentParser(
        arguments,
        prog=command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def main(argv: Sequence[str]) -> None:
    parser = command_parser(EvaluationArguments, "dash_trl eval", __doc__)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a directory (of a LoRA adapter, too), a hub name, or 'toy'"
    )
    arguments, rest = parser.parse_args_into_dataclasses(argv)
    evaluate_models(rest.models, arguments)


def evaluate_models(models: Sequence[str], arguments: EvaluationArguments) -> dict[str, dict[str, Any]]:
    """Measure models; print, write and plot their figures. Everything is checked before any weight is loaded.

    Args:
        models: directories, hub names, or "toy".
        arguments: the arguments of the command.
    Returns:
        Label of a model → its figures; see `figures_of`.
    Raises:
        ValueError: if a model, dataset, reward function or server cannot be used.
    """
    arguments = arguments.task(models)
    ks = arguments.k or []
    folder = Path(arguments.output_dir)
    results: dict[str, dict[str, Any]] = {}
    with Reward(arguments.reward()) as reward:
        names = labels(models)
        found = [Checkpoint(model) for model in models]
        problems = [arguments.problems(chat=one.tokenizer.chat_template is not None) for one in found]
        reward.check_columns(problems[0].column_names)
        # The user sees a wrong template here. In the figures it only looks like a weak model.
        options: Any = arguments.chat_template_kwargs or {}
        shown = maybe_apply_chat_template({"prompt": problems[0][0]["prompt"]}, found[0].tokenizer, **options)
        print(f"first prompt:\n{shown['prompt'][:500]}\n")
        folder.mkdir(parents=True, exist_ok=True)
        for label, checkpoint, rows in zip(names, found, problems, strict=True):
            samples = _sample(label, checkpoint, rows, reward, arguments)
            figures = {"model": checkpoint.name, **figures_of(samples, ks)}
            if not results:
                first = samples
            else:
                figures["difference"] = {"from": names[0], **differences(samples, first, ks)}
            results[label] = figures
            settings = json.dumps({**figures, "settings": asdict(arguments)}, indent=2)
            (folder / f"{label}.json").write_text(f"{settings}\n")
    print(f"\n{table(results)}")
    for label in list(results)[1:]:
        print(comparison(label, results[label]["difference"]))
    print(f"\nsamples: {', '.join(str(folder / f'{label}.jsonl') for label in results)}")
    print(f"plot:    {plot_pass_at_k(results, folder / 'pass_at_k.png', title=Path(str(arguments.dataset_name)).name)}")
    return results


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    reward_func: Any,
    *,
    k: Sequence[int] = (1,),
    batch_size: int = BATCH_SIZE,
    **sampling: Any,
) -> dict[str, Any]:
    """Sample every prompt of a dataset, score the samples, and return their figures (see `figures_of`).

    A reward failed if it is None, NaN or infinite, or if the function raised an exception. It never counts as 0.

    Args:
        model: see `LocalSampler`.
        tokenizer: the tokenizer of the model.
        dataset: rows with a `prompt`; the other columns go to the reward function, as in TRL.
        reward_func: see `Reward`.
        k: values of k for pass@k; at most `num_samples`.
        batch_size: see `LocalSampler`.
        sampling: arguments of `Sampler.sample`, such as `num_samples` and `temperature`.
    Raises:
        ValueError: if there are several reward functions, a column is missing, or a number is wrong.
    """
    EvaluationArguments(k=[*k], per_device_eval_batch_size=batch_size, **{"num_samples": 1, **sampling})
    with Reward(reward_func) as reward:
        reward.check_columns([*dataset[0]])
        scored = scored_samples(LocalSampler(model, tokenizer, batch_size), dataset, reward, **sampling)
        samples = [row["samples"] for _, row in scored]
    return figures_of(samples, k)


def labels(models: Sequence[str]) -> list[str]:
    """Return names of models for files and plots: the last part of each path or, if two are equal, whole paths.

    Raises:
        ValueError: if a model is named twice.
    """
    for names in (
        [os.path.basename(os.path.abspath(model)) for model in models],
        [os.path.normpath(model).replace(os.sep, "-").strip("-.~") for model in models],
    ):
        if len({*names}) == len(names):
            return names
    raise ValueError(f"A model is named twice in {list(models)}: name each once.")


def _sample(
    label: str, checkpoint: Checkpoint, problems: Dataset, reward: Reward, arguments: EvaluationArguments
) -> Rows:
    """Sample and score problems, write each to the file as soon as it is done, and return the samples of each."""
    folder = Path(arguments.output_dir)
    samples: dict[int, list[dict[str, Any]]] = {}
    with (
        open_sampler(
            checkpoint,
            use_vllm=arguments.use_vllm,
            server_urls=arguments.vllm_server_urls or (),
            batch_size=arguments.per_device_eval_batch_size,
            weight_dir=folder / WEIGHT_DIR,
        ) as sampler,
        (folder / f"{label}.jsonl").open("w", encoding="utf-8") as file,
    ):
        file.write(json.dumps({"settings": {"model": checkpoint.name, **asdict(arguments)}}) + "\n")
        done = scored_samples(
            sampler,
            problems,
            reward,
            num_samples=arguments.num_samples,
            temperature=arguments.temperature,
            max_completion_length=arguments.max_completion_length,
            seed=arguments.seed,
            chat_template_kwargs=arguments.chat_template_kwargs,
        )
        for index, row in tqdm(done, total=len(problems), desc=label, unit="problem"):
            file.write(json.dumps({"index": index, **row}, ensure_ascii=False) + "\n")
            samples[index] = row["samples"]
    return [samples[index] for index in range(len(problems))]
