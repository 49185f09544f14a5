"""Shared code of the benchmarks: command line, trainers, clocks, and a server beside the trainer.

Import this module before transformers, since it sets environment variables that transformers reads on import.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks run without an installation
os.environ.update(
    {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",  # no warning that a rollout_func is experimental
        "CI": "1",  # no telemetry in a timed run
        "RAY_USAGE_STATS_ENABLED": "0",
        **os.environ,  # variables of the user have precedence
    }
)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from dash_trl import DASHConfig, DASHTrainer  # noqa: E402
from dash_trl.serve import vllm_servers  # noqa: E402
from dash_trl.toy import (  # noqa: E402
    arithmetic_dataset,
    arithmetic_reward,
    arithmetic_tokenizer,
    toy_defaults,
    toy_model,
)

OUTPUT = tempfile.TemporaryDirectory()  # contains the output directories of all trainers
ON_GPU = torch.cuda.is_available()
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Settings of a run whose gradients can be compared with those of another trainer: no clipping.
COMPARABLE = {
    "use_cpu": not ON_GPU,
    "optim": "sgd",
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
}


# ------------------------------------------------------------------------------------------------ the command line


def run(main: Callable[..., Any], description: str | None, **options: dict[str, Any]) -> None:
    """Runs a benchmark: parses the command line, calls `main` with the options, and writes its figures to `--json`.

    Args:
        main: function of the benchmark; returns the figures.
        description: text of --help.
        options: the arguments of `add_argument`, by name of the option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    arguments = vars(parser.parse_args())
    file = arguments.pop("json")
    figures = main(**arguments)
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def say(name: str, figures: Mapping[str, Any]) -> None:
    """Prints a line and flushes it: a name, and those figures that are numbers or texts."""
    cells = [f"{key} {value}" for key, value in figures.items() if isinstance(value, int | str)]
    cells += [f"{key} {value:.3g}" for key, value in figures.items() if isinstance(value, float)]
    print(f"{name:36} " + "  ".join(cells), flush=True)


# ------------------------------------------------------------------------------------------------ figures


def medians(of: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {name: statistics.median(values) for name, values in of.items()}


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return (result of the function, its seconds)."""
    started = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - started


class Clock(TrainerCallback):
    """Callback that records the seconds and the end of each optimizer step, and the gradients of the first step.

    Args:
        compares: False = do not record gradients.
        profiled: the step whose kernel launches and waits for the GPU are counted, as `launches` and `waits`. Its
            seconds are not recorded.
    """

    def __init__(self, compares: bool = True, profiled: int | None = None) -> None:
        self.compares = compares
        self.profiled = profiled
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.profiled:
            self.counting = profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU])
            self.counting.start()
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.compares and state.global_step == 0:
            grads = {name: one.grad for name, one in model.named_parameters()}
            self.gradients = {name: one.float().cpu() for name, one in grads.items() if one is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step - 1 == self.profiled:
            self.counting.stop()
            # Not `key_averages`, which takes longer than what it counts.
            events = Counter(event.name() for event in self.counting.profiler.kineto_results.events())
            self.launches = sum(count for name, count in events.items() if "LaunchKernel" in name)
            self.waits = sum(events[name] for name in WAITS)
            return
        if ON_GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.seconds.append(self.ends[-1] - self.started)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a gradient, relative to the largest gradient of `one`. A missing one is 0."""
    zero = torch.zeros(1)
    pairs = [(one.get(name, zero), other.get(name, zero)) for name in {**one, **other}]
    largest = torch.stack([first.abs().max() for first, _ in pairs]).max()  # NaN, if any is
    return (torch.stack([(first - second).abs().max() for first, second in pairs]).max() / largest).item()


def against_trl(clocks: Mapping[str, Clock], *, skipped: int = 1) -> dict[str, float]:
    """Compares the steps of TRL and DASH.

    Args:
        clocks: clocks of the trainers "trl" and "dash".
        skipped: number of first steps that are not counted.
    Returns:
        Median seconds of a step, their ratio, and, if the clocks have gradients, `rel_grad_diff`: the largest
        difference of a gradient of the first step, relative to the largest gradient.
    """
    seconds = medians({f"{kind}_s": clock.seconds[skipped:] for kind, clock in clocks.items()})
    found = {**seconds, "ratio": seconds["trl_s"] / seconds["dash_s"]}
    if clocks["trl"].gradients:
        found["rel_grad_diff"] = difference(clocks["trl"].gradients, clocks["dash"].gradients)
    return found


# ------------------------------------------------------------------------------------------------ trainers


@dataclass(kw_only=True)
class Scripted:
    """Rollouts and rewards without sampling. They depend only on step and row, so all trainers get the same.

    Attributes:
        constant: share of groups without signal.
        rows: number of rows of an optimizer step, in groups of `group`.
        longest: limit of the lengths of completions, which are lognormal with a fourth of it as median.
        prompt_tokens: number of random tokens of a prompt.
    """

    constant: float
    rows: int
    group: int = 8
    longest: int
    prompt_tokens: int
    __name__ = "scripted"

    def lengths(self, draw: random.Random) -> list[int]:
        """Return the lengths of the completions of a step; `draw` has the seed of the step."""
        drawn = [round(draw.lognormvariate(0, 0.8) * self.longest / 4) for _ in range(self.rows)]
        return [min(max(length, 8), self.longest) for length in drawn]

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        draw = random.Random(trainer.state.global_step)
        return {
            "prompt_ids": [random_ids(random.Random(prompt), self.prompt_tokens) for prompt in prompts],
            "completion_ids": [random_ids(draw, length) for length in self.lengths(draw)],
            "logprobs": None,
        }

    def __call__(self, prompts: list[str], **columns: Any) -> list[float]:
        constant = round(self.constant * self.rows / self.group)
        groups = [divmod(row, self.group) for row in range(len(prompts))]
        return [1.0 if group < constant else float(row < 1 + group % (self.group - 1)) for group, row in groups]


def random_ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(100, 256) for _ in range(length)]  # those before are special tokens of some models


def new_trainer(kind: Any, settings: dict[str, Any], **others: Any) -> Any:
    """Return a trainer without a progress bar, whose output directory is removed at the end."""
    config = DASHConfig if issubclass(kind, DASHTrainer) else GRPOConfig
    settings |= {"output_dir": tempfile.mkdtemp(dir=OUTPUT.name), "disable_tqdm": True}
    trainer = kind(args=config(**settings), **others)
    trainer.remove_callback(PrinterCallback)
    return trainer


def toy_trainer(
    settings: dict[str, Any], *, kind: Any = DASHTrainer, path: str | None = None, train: Any = None, **others: Any
) -> Any:
    """Return a trainer of the toy task.

    Args:
        settings: settings that replace those of `toy_defaults`.
        kind: class of the trainer: TRL's GRPOTrainer, or DASHTrainer.
        path: directory of the model; None = the toy model.
        train: problems to train on; None = those of the seed in `settings`.
        others: more arguments of the trainer, such as `callbacks`, `rollout_func` or `reward_funcs`.
    """
    others = {
        "model": path or toy_model(progress=False),
        "train_dataset": train or arithmetic_dataset("train", seed=settings.get("seed", 0)),
        "reward_funcs": arithmetic_reward,
        **others,
    }
    return new_trainer(kind, {**toy_defaults(), **settings}, **others)


def scripted_trainer(kind: Any, model: Any, workload: Scripted, settings: dict[str, Any], **others: Any) -> Any:
    """Return a trainer that gets its rollouts from `workload`, so that its steps consist of the update alone.

    A micro-batch is a group. The learning rate is 0, so all steps are of the same weights.
    """
    settings = {
        "per_device_train_batch_size": workload.group,
        "gradient_accumulation_steps": workload.rows // workload.group,
        "num_generations": workload.group,
        "max_completion_length": workload.longest,
        **COMPARABLE,
        **settings,
    }
    numbers = [str(number) for number in range(workload.rows)]
    others = {
        "reward_funcs": workload,
        "rollout_func": workload.rollouts,
        "train_dataset": Dataset.from_dict({"prompt": numbers, "answer": numbers}),
        "processing_class": arithmetic_tokenizer(),
        **others,
    }
    return new_trainer(kind, settings, model=model, **others)


def qwen2(**shape: Any) -> Any:
    """Return a model (Qwen2 if `shape` has no `model_type`) with random weights, which are always the same.

    It has the special tokens of the toy task.
    """
    torch.manual_seed(0)
    tokenizer = arithmetic_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "qwen2", **ids, **shape}))


# ------------------------------------------------------------------------------------------------ servers


@contextmanager
def server_beside(path: str, port: int = 8800, options: Sequence[str] = ()) -> Iterator[str]:
    """Starts a vLLM server on the last core and yields its URL; this process then uses one thread on the first core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"This needs 2 cores, one for the server and one for the trainer; there are {len(cores)}.")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[-1:])  # the server inherits this affinity
    with vllm_servers(path, port=port, options=[*options]) as (url,):
        os.sched_setaffinity(0, cores[:1])
        yield url
    os.sched_setaffinity(0, cores)
