"""Log-probs and entropies for `OutcomeValue`: seen while `generate` samples, or by a pass over the samples.

    OMP_NUM_THREADS=1 python benchmarks/witness.py --json witness.json          # ~1 minute on one core

The embedded model, 128 rows in groups of 8 per step, learning rate 0: two trainers sample the same rows, step by step.
Medians over the steps, the first of which are not counted, in CPU seconds of this process, whatever else the machine
does: of sampling, with what the witness costs; of credit, with the pass or what the witness has kept; of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from dash_trl import DASHConfig, DASHTrainer, ProcessRewardCallback
from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_defaults, embedded_model
from dash_trl.process_rewards import OutcomeValue, line_starts

STEPS, NOT_COUNTED = 12, 2


class Timed(DASHTrainer):
    """CPU seconds of sampling, of credit and of whole steps."""

    def _begin_run(self) -> None:
        super()._begin_run()
        self.seconds: dict[str, list[float]] = {"sampling": [], "credit": [], "step": []}

    def _of(self, part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.process_time()
        found = work(*arguments)
        self.seconds[part].append(time.process_time() - started)
        return found

    def _generate(self, prompts: list) -> tuple:
        return self._of("sampling", super()._generate, prompts)

    def _credit(self, rollouts: Any) -> Any:
        return self._of("credit", super()._credit, rollouts)


class ByPass(Timed):
    """Without a witness."""

    def _witnessing(self) -> Any:
        return nullcontext()


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.seconds["step"].append(time.process_time() - self.started)


def run(trainer_class: type[Timed], path: str) -> dict[str, float]:
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        config = {**embedded_defaults(), "output_dir": output, "max_steps": STEPS, "learning_rate": 0.0}
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(path),
            processing_class=AutoTokenizer.from_pretrained(path),
            reward_funcs=arithmetic_reward,
            args=DASHConfig(**config, disable_tqdm=True, logging_strategy="no"),
            train_dataset=arithmetic_dataset("train"),
            callbacks=[clock, ProcessRewardCallback(OutcomeValue(), markers=line_starts, min_episode_tokens=1)],
        )
        clock.trainer = trainer
        trainer.train()
    return {part: statistics.median(seconds[NOT_COUNTED:]) for part, seconds in trainer.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    path = embedded_model()
    found = {name: run(trainer_class, path) for name, trainer_class in (("witness", Timed), ("pass", ByPass))}
    for name, parts in found.items():
        print(f"{name:8}" + "  ".join(f"{part} {seconds:.3f} s" for part, seconds in parts.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
