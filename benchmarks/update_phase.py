"""The update phase of TRL's GRPOTrainer and of DASHTrainer on the same completions and rewards.

    python benchmarks/update_phase.py --json update_phase.json            # ~10 minutes on one core

Rollouts are scripted (`rollout_func`), so that only scoring, packing, passes and the optimizer are timed. Each share of
constant groups and each beta gets three counted steps of each trainer, in turn, after one that is not counted. `limit`
is the ratio of tokens: those that TRL processes, padding included, to the real ones of the survivors. Attention costs
more than linearly in the padded length, so the limit can be exceeded. `rel_param_diff` is the largest parameter
difference after one step of SGD (learning rate 1, no clipping), relative to the largest update.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.embedded import arithmetic_tokenizer

ROWS, GROUP, ROWS_PER_DEVICE, MICRO_STEPS = 64, 4, 4, 16
SHARES, BETAS = (0.0, 0.5, 0.75), (0.0, 0.04)
COUNTED_STEPS = 3
LONGEST = 512


def save_model(directory: Path) -> str:
    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        # transformers' 0.02 gives updates of 6e-3: one unit in the last place of a norm weight (1.0) is 1e-5 of that.
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


class Workload:
    """The same completions and rewards for whoever asks: a function of the step and the row."""

    __name__ = "scripted"

    def __init__(self, constant_share: float):
        self.constant_groups = round(constant_share * ROWS / GROUP)
        self.step = 0

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        generator = random.Random(self.step)
        self.step += 1
        lengths = [min(max(round(generator.lognormvariate(4.787, 0.8)), 8), LONGEST) for _ in prompts]  # e^4.787 = 120
        self.lengths = lengths
        self.prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[generator.randrange(10, 280) for _ in range(length)] for length in lengths]
        return {"prompt_ids": self.prompt_ids, "completion_ids": completions, "logprobs": None}

    def __call__(self, prompts: list[str], **kwargs: Any) -> list[float]:
        return [
            1.0 if row // GROUP < self.constant_groups else float(row % GROUP < 1 + (row // GROUP) % (GROUP - 1))
            for row in range(len(prompts))
        ]

    def token_limit(self) -> float:
        """Padded tokens that TRL processes / real tokens of the survivors, in the last step."""
        prompts = [len(ids) for ids in self.prompt_ids]
        padded = ROWS * (max(prompts) + max(self.lengths))
        return padded / sum(
            prompt + length
            for row, (prompt, length) in enumerate(zip(prompts, self.lengths, strict=True))
            if row // GROUP >= self.constant_groups
        )


class Stepper:
    """A trainer whose optimizer steps are run, and timed, one at a time."""

    def __init__(self, trainer_class: Any, model: str, directory: Path, share: float, beta: float, steps: int):
        self.workload = Workload(share)
        config = DASHConfig if trainer_class is DASHTrainer else GRPOConfig
        self.trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=self.workload,
            args=config(
                output_dir=str(directory),
                per_device_train_batch_size=ROWS_PER_DEVICE,
                gradient_accumulation_steps=MICRO_STEPS,
                num_generations=GROUP,
                max_completion_length=LONGEST,
                max_steps=steps,
                beta=beta,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"Compute {i:03d} + {i * 7 % 100:02d}:" for i in range(256)]}),
            processing_class=AutoTokenizer.from_pretrained(model),
            rollout_func=self.workload.rollouts,
        )


def timed_steps(
    trainer_class: Any, model: str, directory: Path, share: float, beta: float
) -> tuple[list[float], float, dict]:
    """(seconds of each counted step, token limit, parameters after the first step)."""
    from transformers import TrainerCallback

    stepper = Stepper(trainer_class, model, directory, share, beta, steps=1 + COUNTED_STEPS)
    seconds, first, limits = [], {}, []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            seconds.append(time.perf_counter() - self.started)
            limits.append(stepper.workload.token_limit())
            if not first:
                first.update({name: value.detach().clone() for name, value in model.named_parameters()})

    stepper.trainer.add_callback(Clock())
    stepper.trainer.train()
    return seconds[1:], statistics.median(limits[1:]), first


def compare(model: str, directory: Path, share: float, beta: float) -> dict[str, float]:
    start = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    trl, limit, trl_first = timed_steps(GRPOTrainer, model, directory, share, beta)
    dash, _, dash_first = timed_steps(DASHTrainer, model, directory, share, beta)
    update = max((trl_first[name] - start[name]).abs().max().item() for name in start)
    difference = max((trl_first[name] - dash_first[name]).abs().max().item() for name in start)
    trl_s, dash_s = statistics.median(trl), statistics.median(dash)
    return {
        "trl_s": trl_s,
        "dash_s": dash_s,
        "ratio": trl_s / dash_s,
        "limit": limit,
        "rel_param_diff": difference / update,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="the first one is written as `share`")
    parser.add_argument("--betas", type=float, nargs="+", default=list(BETAS))
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = save_model(Path(temporary) / "model")
        print(
            f"{'threads':>7} {'beta':>5} {'constant':>8} {'TRL s':>7} {'DASH s':>7} {'ratio':>6} {'limit':>6} rel. diff"
        )
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for beta in arguments.betas:
                key = "share" if beta == 0 else "beta"
                table = results if threads == arguments.threads[0] else results.setdefault(f"threads_{threads}", {})
                for share in SHARES:
                    row = compare(model, Path(temporary) / "out", share, beta)
                    table.setdefault(key, {})[f"{share:g}"] = row
                    print(
                        f"{threads:7d} {beta:5.2f} {share:8.2f} {row['trl_s']:7.2f} {row['dash_s']:7.2f} "
                        f"{row['ratio']:6.1f} {row['limit']:6.1f} {row['rel_param_diff']:.1e}",
                        flush=True,
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
