"""The paper's methods on a pretrained model: short problems of GSM8K, and the seconds of an optimizer step.

    python benchmarks/pretrained.py --dataset openai/gsm8k --config main      # writes the problems to outputs/short
    python benchmarks/pretrained.py --samples outputs/eval/MODEL.jsonl        # and those that a model can learn from
    dash_trl serve MODEL --max-model-len 256                                  # in another terminal
    python benchmarks/pretrained.py --model MODEL --json pretrained.json      # 20 minutes on 2 cores

The problems are those of at most 200 characters whose solution has at most 2 calculations. Their human solutions are
the calculations alone, one per line. Files: train.jsonl and test.jsonl, with the columns prompt, completion and answer.
From the samples that `dash_trl eval` wrote, mixed.jsonl gets the problems with right and wrong answers; training uses
this file.

With `reward_pipeline`, groups are trained on while others are sampled; its `sampling_s` is only what the trainer waits
before the first group. The methods take their optimizer steps in turn, each in a process of its own, so that other work
on the machine slows all alike. A step has 8 problems with 8 completions of at most 32 tokens, in 8 micro-steps. All
sample from the one vLLM server, TRL's GRPOTrainer too. The figures are medians over the steps after the first.

    python benchmarks/pretrained.py --model MODEL --methods "GRPO, samples per step (TRL)" --steps 39 --save outputs

trains with TRL alone.
"""

import json
import multiprocessing
import random
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer

from dash_trl import DASHTrainer, MathAccuracyReward, load_math_dataset
from dash_trl.sampling import install

SYSTEM = "Write only the calculations."
LONGEST = 200
CALCULATIONS = 2
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO, samples per micro-step": (GRPOTrainer, {"steps_per_generation": 1}),
    "GRPO, samples per step (TRL)": (GRPOTrainer, {}),
    "DASH without the filter": (DASHTrainer, {"gradient_filter_threshold": None}),
    "DASH": (DASHTrainer, {}),
    "DASH, reward_pipeline": (DASHTrainer, {"reward_pipeline": True}),
    "DASH, dynamic sampling": (DASHTrainer, {"max_num_gen_batches": 3}),
}


def short_problems(dataset: str, config: str | None, split: str) -> Dataset:
    """Return the short problems of a split in a random order that is always the same."""
    found = []
    for row in load_dataset(dataset, config, split=split):
        solution, _, gold = row["answer"].replace(",", "").rpartition("#### ")
        marks = re.findall(r"<<([^<>]*)>>", solution)
        if len(row["question"]) <= LONGEST and 0 < len(marks) <= CALCULATIONS and marks[-1].endswith(f"={gold}"):
            said = {"system": SYSTEM, "user": row["question"], "assistant": "\n".join(marks)}
            *prompt, completion = [{"role": role, "content": text} for role, text in said.items()]
            found.append({"prompt": prompt, "completion": [completion], "answer": gold})
    random.Random(0).shuffle(found)
    return Dataset.from_list(found)


class Turns(harness.Clock):
    """Clock of the steps of one method, which wait for those of the other methods."""

    def __init__(self, own: Any, following: Any) -> None:
        super().__init__(compares=False)
        self.own = own
        self.following = following
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.own.acquire()
        self.rows.append({"sampling_s": 0.0, "rewards_s": 0.0})
        super().on_step_begin(*args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.rows[-1] |= {"update_s": self.seconds[-1] - sum(self.rows[-1].values()), "step_s": self.seconds[-1]}
        self.following.release()


def train(name: str, folder: str, model: str, url: str, steps: int, save: Path | None, clock: Turns) -> list[Any]:
    """Trains by one method, in a process of its own; returns the figures of its steps."""
    kind, own = METHODS[name]

    class Timed(kind):
        if kind is GRPOTrainer:  # DASH logs its own times

            def _generate_single_turn(self, *args: Any) -> Any:
                return spent("sampling_s", super()._generate_single_turn, *args)

            def _calculate_rewards(self, *args: Any) -> Any:
                return spent("rewards_s", super()._calculate_rewards, *args)

    def spent(part: str, work: Any, *arguments: Any) -> Any:
        result, seconds = harness.timed(work, *arguments)
        clock.rows[-1][part] += seconds
        return result

    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "max_completion_length": 32,
        "max_steps": 1 + steps,
        "seed": 0,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "vllm_importance_sampling_correction": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        **own,
    }
    servers = {"vllm_server_urls": [url], "vllm_request_timeout": 600, "vllm_weight_dir": None, "vllm_mode": "server"}
    trainer = harness.new_trainer(
        Timed,
        settings if kind is GRPOTrainer else settings | servers,
        model=model,
        reward_funcs=MathAccuracyReward().math_accuracy if "reward_pipeline" in own else MathAccuracyReward(),
        train_dataset=load_math_dataset(f"{folder}/mixed.jsonl"),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    if kind is GRPOTrainer:  # its own client of a server needs CUDA
        vars(trainer.args).update(servers)
        trainer._last_loaded_step = -1
        trainer.recorder = SimpleNamespace(timed=lambda *_, **__: nullcontext())
        install(trainer)
    trainer.train()
    if save:
        trainer.save_model(str(save / name))
    rows = [*zip(clock.rows, trainer.state.log_history, strict=False)]  # a last log follows those of the steps
    for row, log in rows:
        for part, phase in (("sampling_s", "time/generate"), ("rewards_s", "time/reward")):
            row[part] += log.get(phase, 0.0)
            row["update_s"] -= log.get(phase, 0.0)
    return [row | {"signal": 1 - log["frac_reward_zero_std"], "reward": log["reward"]} for row, log in rows]


def main(
    dataset: str | None, config: str, samples: Path | None, folder: str, model: str | None, url: str, **others: Any
) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test") if dataset else ():
        short_problems(str(dataset), config or None, split).to_json(f"{folder}/{split}.jsonl")
    if samples:
        found = map(json.loads, samples.read_text().splitlines()[1:])
        mixed = [row for row in found if len({one["reward"] for one in row["samples"]}) > 1]
        Dataset.from_list(mixed).select_columns(["prompt", "answer"]).to_json(f"{folder}/mixed.jsonl")
    return times(folder, model, url, **others) if model else {}


def times(folder: str, model: str, url: str, steps: int, methods: list[str], save: Path | None) -> dict[str, Any]:
    """Lets the methods train in turn; prints the medians of their figures, and returns the figures of all steps."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(len(methods), spawn) as pool:
        turns = [manager.Semaphore(number == 0) for number in range(len(methods))]
        clocks = map(Turns, turns, [*turns[1:], turns[0]])
        given = (folder, model, url, steps, save)
        found = {pool.submit(train, name, *given, clock): name for name, clock in zip(methods, clocks, strict=True)}
        try:
            rows = {found[one]: one.result() for one in as_completed(found)}
        finally:  # the others would wait for a method that failed, and the reward's processes keep them from ending
            for worker in multiprocessing.active_children():
                worker.kill()
    for name in methods:
        harness.say(name, harness.medians({part: [row[part] for row in rows[name][1:]] for part in rows[name][0]}))
    return rows


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        dataset={"help": "GSM8K: openai/gsm8k, or a folder with train.jsonl and test.jsonl"},
        samples={"type": Path, "help": "samples of dash_trl eval: keep the problems with right and wrong answers"},
        config={"default": "", "help": "configuration of the dataset on the hub, such as main"},
        folder={"default": "outputs/short", "help": "the folder of the problems"},
        model={"help": "time the steps of this model"},
        url={"default": "http://127.0.0.1:8000", "help": "the vLLM server"},
        methods={"nargs": "+", "choices": METHODS, "default": [*METHODS], "help": "the methods that are timed"},
        save={"type": Path, "help": "save the trained models in this folder"},
        steps={"type": int, "default": 5, "help": "number of counted steps; one more step precedes them"},
    )
