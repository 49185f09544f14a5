"""Every metric that TRL logs of a step and of an evaluation, `DASHTrainer` logs with the same name and the same value.

No row is dropped, and both trainers get the same rollouts. So they differ only in how rows are sampled, carried and
packed. Metrics of the loss are means over tokens in DASH, and over micro-batches in TRL. For these metrics, the
reference is TRL's values, weighted by the tokens of the micro-batches.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from tests.tiny import EOS, conversations, prompts, run

# Of the clock
TIMES = ("runtime", "per_second", "step_time", "time/")
# Weighed by tokens; the extremes are those of a pass, and passes are others than TRL's micro-batches.
BY_TOKENS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "policy_loss")
OF_PASSES = ("clip_ratio/low_min", "clip_ratio/high_max")
TEMPLATE = "{% for one in messages %}<{{ one['role'] }}>{{ one['content'] }}{% endfor %}<assistant>"


class Rollouts:
    """Random completions, and columns of its own: `difficulty`, and `fleet`, which is one for all rows.

    Args:
        equal: all completions have one length.
        masked: with `env_mask`, and with log-probs of which some are not known.
        row: makes the rows of token ids and masks; TRL takes tensors, too.
    """

    def __init__(self, *, equal: bool, masked: bool, row=list):
        self.equal = equal
        self.masked = masked
        self.row = row
        self.calls = 0

    def __call__(self, prompts: list[Any], trainer) -> dict[str, list]:
        chance = random.Random(f"{self.calls} {trainer.accelerator.process_index}")
        self.calls += 1
        trainer.reward_weights = trainer.reward_weights * 1.1  # as a callback may change them
        lengths = [10 if self.equal else chance.randint(1, 20) for _ in prompts]
        ends = [chance.choice((EOS, 77)) for _ in prompts]
        output = {
            "prompt_ids": [self.row(encoded(trainer.processing_class, prompt)) for prompt in prompts],
            "completion_ids": [
                self.row([*(chance.randrange(4, 260) for _ in range(length - 1)), end])
                for length, end in zip(lengths, ends, strict=True)
            ],
            "logprobs": None,
            "difficulty": [chance.randint(1, 5) for _ in prompts],
            "fleet": "two servers",
        }
        if self.masked:
            output["env_mask"] = [self.row([int(place % 4 > 0) for place in range(length)]) for length in lengths]
            output["logprobs"] = [self.row(chance.choices((math.nan, -0.5), k=length)) for length in lengths]
        return output


def encoded(tokenizer, prompt) -> list[int]:
    text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, tokenize=False)
    return tokenizer(text=text)["input_ids"]


def first(completions, completion_ids, log_extra, log_metric, difficulty=None, fleet=None, **columns):
    """Random, and in the table; a metric is logged in some calls only."""
    log_extra("ends", [int(ids[-1]) == EOS for ids in completion_ids])
    if difficulty is not None:
        log_extra("difficulty", difficulty)
        log_extra("fleet", fleet)
    if len(completion_ids[0]) % 2:
        log_metric("first_length", float(len(completion_ids[0])))
    return [random.Random(str([*map(int, ids)])).random() for ids in completion_ids]


def second(completion_ids, **columns):
    """Applies to two thirds of the rows, and once to none of a batch."""
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 3 == 1) for ids in completion_ids]


class ByTokens(GRPOTrainer):
    """Weighs the figures of `BY_TOKENS` by the loss tokens of an optimizer step's micro-batches."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            tokens = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
            tokens = self.accelerator.reduce(tokens, reduction="sum").item()
            for name in filter(self._metrics["train"].get, BY_TOKENS):
                of_step = self.seen[name].setdefault(self.state.global_step, [])
                # policy_loss is a mean over micro-steps here, too
                of_step.append((self._metrics["train"][name][-1], 1 if name == "policy_loss" else tokens))
        return loss

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if self.model.training:
            for name, steps in self.seen.items():
                means = [
                    sum(value * count for value, count in step) / sum(count for _, count in step)
                    for step in steps.values()
                ]
                self.state.log_history[-1][name] = sum(means) / len(means)
            self.seen.clear()

    seen: defaultdict[str, dict[int, list[tuple[float, int]]]] = defaultdict(dict)


SCENARIOS: dict[str, dict[str, Any]] = {
    "equal lengths, clipped in the second of two steps": {"equal": True, "steps_per_generation": 4, "epsilon": 0.01},
    "env_mask, conversational": {"masked": True, "conversational": True},
    "truncated rows are masked, a log of two steps": {
        "mask_truncated_completions": True,
        "pad_to_multiple_of": 8,
        "logging_steps": 2,
    },
    "generated, conversational": {"generated": True, "conversational": True},
    "clipped, with a reference": {"num_iterations": 2, "beta": 0.04, "epsilon": 0.01, "entropy_coef": 1e-9},
}


def logged(
    kind,
    model: str,
    output: Path,
    *,
    equal: bool = False,
    masked: bool = False,
    conversational: bool = False,
    generated: bool = False,
    **settings,
):
    """The trainer after steps with evaluations between them; its tables are in `output`."""

    def prepare(trainer) -> None:
        trainer.processing_class.chat_template = TEMPLATE

    defaults = {
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "log_completions": True,
        "loss_type": "dapo",
        "reward_weights": [1.0, 0.5],
        "max_completion_length": 20,
    }
    ours = issubclass(kind, DASHTrainer)
    own = {"gradient_filter_threshold": None} if ours else {}
    row = torch.tensor if ours and masked else list
    rows = conversations if conversational else lambda dataset: dataset
    torch.manual_seed(0)
    return run(
        kind,
        model,
        output,
        reward=[first, second],
        rollouts=None if generated else Rollouts(equal=equal, masked=masked, row=row),
        in_process=generated,
        dataset=rows(prompts(12)),
        eval_dataset=rows(prompts(2)),
        prepare=prepare,
        **{**defaults, **own, **settings},
    )


def check_contract(model: str, folder: Path, settings: dict[str, Any]) -> None:
    equal = settings.get("equal", False)
    kinds = GRPOTrainer if equal else ByTokens, DASHTrainer
    check_logs([logged(kind, model, folder / kind.__name__, **settings) for kind in kinds], equal=equal)


def check_logs(trainers: Sequence[Any], *, equal: bool = False) -> None:
    """Every key and value of TRL's log on every rank, and every column of the tables.

    Args:
        trainers: TRL's and ours. equal: all completions have one length.
    """
    unequal = () if equal else OF_PASSES
    for one, other in zip(*(trainer.state.log_history for trainer in trainers), strict=True):
        for name, value in one.items():
            if not any(clock in name for clock in TIMES) and name.removeprefix("eval_") not in unequal:
                expected = value if value is None else pytest.approx(value, rel=1e-4, abs=2e-6)
                assert other[name] == expected, (name, other[name], expected)
    if trainers[0].accelerator.is_main_process and trainers[0].log_completions:
        written = [sorted(Path(trainer.args.output_dir, "completions").iterdir()) for trainer in trainers]
        assert written[0] and [file.name for file in written[0]] == [file.name for file in written[1]]
        for one, other in (map(pandas.read_parquet, files) for files in zip(*written, strict=True)):
            pandas.testing.assert_frame_equal(one, other, check_like=True, rtol=1e-4, atol=1e-6)
