"""Measures how well a value of prefixes predicts, for a model, how often completions of the prefix succeed.

    python examples/value_quality toy                                   # the tiny model of `make demo`, offline

    python examples/value_quality Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --use_vllm --fit_rollouts 128 512 2048

The command samples responses, cuts them at episode boundaries, and completes every prefix K times. The mean reward of
the K completions is the *truth*, to which V(prefix) is compared. Before sampling, the command prints the cost. It
writes OUTPUT_DIR/value_quality.json and .png, and all samples. To continue an interrupted command, run it again. If you
run it with other values, it uses the existing samples again. For more see docs/howto/value-quality.md.

    problems ──► responses ──► boundaries ──► K completions of each, rewarded ──► truth ──────┐
                     └──► log-probs, entropies ──► estimators, fitted to other problems ──► V ┴──► figures, plot
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dash_trl.evaluation import Checkpoint, Draw, TaskArguments, check_shapes, command_parser, model_of, prompt_ids
from dash_trl.process_rewards import EPISODE_MARKERS, AnswerLogProbValue, OutcomeValue, Segmenter, line_starts
from examples.value_quality.candidates import Candidate, measure, of_file, saved
from examples.value_quality.figures import plot, table
from examples.value_quality.study import ANSWER, FIT_SAMPLES, Plan, check_files, choose, collect, logger

VALUES = ("answer", "outcome")
LINES = "lines"
# The models of `dash_trl.toy` write one step per line, and these texts before and after the answer.
TOY_ANSWER = ("The answer is ", "<|im_end|>")


@dataclass
class ValueQualityArguments(TaskArguments):
    """Arguments of the command: what is sampled, how it is cut, and which values are measured."""

    dataset_train_split: str | None = field(
        default=None,
        metadata={"help": "The split for fitting values. Default: other problems of the test split."},
    )
    num_problems: int = field(default=64, metadata={"help": "Number of measured problems, drawn by the seed."})
    num_samples: int = field(default=4, metadata={"help": "Number of responses of each problem."})
    num_rollouts: int = field(default=32, metadata={"help": "K, the number of completions of every prefix."})
    fit_rollouts: list[int] = field(
        default_factory=lambda: [512],
        metadata={"help": f"Numbers of rollouts to fit values to; {FIT_SAMPLES} of each of some other problems."},
    )
    value: list[str] | None = field(
        default=None,
        metadata={
            "choices": list(VALUES),
            "help": "answer (AnswerLogProbValue), outcome (OutcomeValue). Default: both, or what the data allows.",
        },
    )
    force_prompt: list[str] | None = field(
        default=None, metadata={"help": "Force prompts; each gives an answer value. Default: AnswerLogProbValue's."}
    )
    checkpoint: str | None = field(
        default=None, metadata={"help": "A checkpoint whose OutcomeValue is also measured, as training has fitted it."}
    )
    value_path: str | None = field(
        default=None,
        metadata={"help": "A Python file with your own estimators. One with `learn` is fitted like outcome."},
    )
    value_name: list[str] | None = field(
        default=None, metadata={"help": "Names in the file of --value_path: functions, objects or classes."}
    )
    markers: list[str] | None = field(
        default=None, metadata={"help": f"Texts that begin an episode, or {LINES!r}. Default: EPISODE_MARKERS."}
    )
    max_episode_tokens: int = field(default=256, metadata={"help": "See Segmenter."})
    min_episode_tokens: int | None = field(default=None, metadata={"help": "See Segmenter. Default: 16, or 1 for toy."})
    output_dir: str = field(default="outputs/value_quality", metadata={"help": "Where samples and results go."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for count in (self.num_samples, self.num_rollouts):
            Draw(count, self.temperature, 1, self.seed)
        if (self.value_path is None) != (self.value_name is None):
            raise ValueError(
                f"--value_path {self.value_path} with --value_name {self.value_name}: estimators of your own take "
                "both, a Python file and their names in it."
            )

    def segmentation(self, toy: bool) -> dict[str, Any]:
        """Returns the settings of `Segmenter`, as JSON.

        Args:
            toy: the model is the toy model.
        """
        return {
            "markers": self.markers or ([LINES] if toy else list(EPISODE_MARKERS)),
            "max_episode_tokens": self.max_episode_tokens,
            "min_episode_tokens": self.min_episode_tokens or (1 if toy else 16),
        }

    def candidates(self, columns: Sequence[str], toy: bool) -> list[Candidate]:
        """Returns the value estimators that these arguments name.

        Args:
            columns: the columns of the problems.
            toy: the model is the toy model.
        Raises:
            ValueError: if an estimator does not exist, or needs answers that the dataset does not have.
        """
        names = self.value or [name for name in VALUES if name != "answer" or ANSWER in columns or self.force_prompt]
        entropies = self.backend == "transformers"  # as in training: vLLM reports log-probs only
        sizes = sorted(set(self.fit_rollouts))
        found = []
        if "answer" in names:
            prompt, closing = TOY_ANSWER if toy else (None, "")
            for text in self.force_prompt or [prompt]:
                value = AnswerLogProbValue(text, closing=closing)
                found.append(Candidate("answer" if text is None else f"answer, {text + value.closing!r}", value))
        if "outcome" in names:
            found.append(Candidate("outcome", OutcomeValue(num_windows=1), sizes, entropies))
        if self.checkpoint is not None:
            found.append(saved(self.checkpoint))
        for name, value in of_file(self.value_path, self.value_name or ()) if self.value_path else ():
            found.append(Candidate(name, value, sizes if hasattr(value, "learn") else (), entropies))
        for one in found:
            if getattr(one.value, "needs_answers", True) and ANSWER not in columns:
                raise ValueError(
                    f"{one.name} needs a problem's answer, but the columns are {list(columns)}: leave it out (--value "
                    "outcome). If your own value needs no answers, give it an attribute, needs_answers = False."
                )
        return found


def main(argv: Sequence[str]) -> None:
    parser = command_parser(ValueQualityArguments, "", __doc__)
    parser.prog = "python examples/value_quality"
    parser.add_argument("model", metavar="MODEL", help="a directory (of a LoRA adapter, too), a hub name, or 'toy'")
    arguments, rest = parser.parse_args_into_dataclasses(argv)
    value_quality(rest.model, arguments)


def value_quality(model: str, arguments: ValueQualityArguments) -> None:
    """Measures values; prints, writes and plots the figures.

    Model, problems, reward function, estimators and files are checked before any weight is loaded.

    Args:
        model: a directory, a hub name, or "toy".
        arguments: of the command.
    Raises:
        ValueError: if one of these does not exist or cannot be used.
    """
    task = arguments.task([model])
    folder = Path(arguments.output_dir)
    with task.reward() as reward:
        checkpoint = Checkpoint(model_of(model))
        tokenizer = checkpoint.tokenizer
        chat = tokenizer.chat_template is not None
        problems = task.problems(chat)
        reward.check_columns(problems.column_names)
        others = None
        if arguments.dataset_train_split is not None:
            others = replace(task, dataset_test_split=arguments.dataset_train_split).problems(chat)
            reward.check_columns(others.column_names)
        candidates = arguments.candidates(problems.column_names, task.is_toy)
        segmentation = arguments.segmentation(task.is_toy)
        markers = line_starts if segmentation["markers"] == [LINES] else segmentation["markers"]
        segmenter = Segmenter(tokenizer, **{**segmentation, "markers": markers})
        plan = Plan(
            num_problems=arguments.num_problems,
            num_samples=arguments.num_samples,
            num_rollouts=arguments.num_rollouts,
            fit_rollouts=tuple(sorted({size for one in candidates for size in one.sizes})),
            temperature=arguments.temperature,
            max_completion_length=arguments.length(task),
            shortest=segmentation["min_episode_tokens"],
            seed=arguments.seed,
        )
        measured, to_fit = choose(_unseen(problems, candidates, tokenizer, arguments), others, plan)
        if arguments.vllm_server_urls:
            check_shapes([checkpoint], arguments.vllm_server_urls)
        settings = {
            "model": os.path.normpath(model),
            "weights": checkpoint.fingerprint,
            **arguments.settings(task),
            "segmentation": segmentation,
        }
        check_files(measured, to_fit, plan, folder, settings)
        logger.info(plan.cost())
        with arguments.open_sampler(checkpoint, folder) as sampler:
            study = collect(sampler, reward, measured, to_fit, plan, segmenter, folder, settings)
            weights = getattr(sampler, "model", None)
    found = measure(candidates, study, plan, weights or checkpoint.load_here(), tokenizer)
    figures, picture = folder / "value_quality.json", folder / "value_quality.png"
    figures.write_text(json.dumps({**found, "settings": {**settings, **vars(plan)}}, indent=2) + "\n")
    plot(found, picture, title=Path(model).name)
    print(f"\n{table(found)}\n\nfigures: {figures}\nplot:    {picture}")


def _unseen(
    problems: Any, candidates: Sequence[Candidate], tokenizer: Any, arguments: ValueQualityArguments
) -> list[Any]:
    """Returns the problems from which no checkpoint's value has learned, since it would predict the others too well."""
    values = [one.value for one in candidates if isinstance(one.value, OutcomeValue) and not one.sizes]
    rows, template = list(problems), arguments.chat_template_kwargs
    left = [
        row
        for row in rows
        if not any(value.learned_from(prompt_ids(row["prompt"], tokenizer, template)) for value in values)
    ]
    if len(left) < len(rows):
        logger.info(f"{len(rows) - len(left)} problems are left out: the checkpoint's value has learned from them.")
    return left
