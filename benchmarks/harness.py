"""Shared code of the benchmarks: command line, trainers, clocks, memory, and a server beside the trainer.

Import this module before transformers, since it sets environment variables that transformers reads on import.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks run without an installation
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
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
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from dash_trl import DASHConfig, DASHTrainer  # noqa: E402
from dash_trl.comparison import Scripted  # noqa: E402
from dash_trl.serve import vllm_servers  # noqa: E402
from dash_trl.toy import (  # noqa: E402
    arithmetic_dataset,
    arithmetic_reward,
    arithmetic_tokenizer,
    toy_defaults,
    toy_model,
)

OUTPUT = tempfile.TemporaryDirectory()  # contains the output directories of all trainers
COLUMNS = {"prompt": [f"Compute {i:03d} + {i * 7 % 100:02d}:" for i in range(256)], "answer": [*range(256)]}


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
    """Callback that records the seconds and the end of each optimizer step, and the parameters after the first step.

    Args:
        parameters: False = do not record parameters.
    """

    def __init__(self, parameters: bool = True) -> None:
        self.parameters = parameters
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.first: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.seconds.append(self.ends[-1] - self.started)
        if self.parameters and state.global_step == 1:
            self.first = {name: one.detach().float().cpu().numpy().copy() for name, one in model.named_parameters()}


def against_trl(clocks: Mapping[str, Clock], start: Mapping[str, Any] | None, *, skipped: int = 1) -> dict[str, float]:
    """Compares the steps of TRL and DASH.

    Args:
        clocks: clocks of the trainers "trl" and "dash".
        start: the parameters before the first step. `None`: parameters are not compared.
        skipped: number of first steps that are not counted.
    Returns:
        Median seconds of a step, their ratio, and `rel_param_diff`: the largest difference of a parameter after the
        first step, relative to the largest update.
    """
    trl = clocks["trl"]
    dash = clocks["dash"]
    seconds = medians({f"{kind}_s": clock.seconds[skipped:] for kind, clock in clocks.items()})
    found = {**seconds, "ratio": seconds["trl_s"] / seconds["dash_s"]}
    if start is not None:
        update = max(abs(value - start[name].float().numpy()).max() for name, value in trl.first.items())
        difference = max(abs(value - dash.first[name]).max() for name, value in trl.first.items())
        found["rel_param_diff"] = float(difference / update)
    return found


def begin_peak(on_gpu: bool = False) -> int:
    """Resets `peak`; returns the bytes that this process has allocated now."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return peak(on_gpu)


def peak(on_gpu: bool = False) -> int:
    """Return the peak memory of this process in bytes, on the CPU or the GPU, since the last `begin_peak`."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


# ------------------------------------------------------------------------------------------------ trainers


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

    The optimizer is SGD with learning rate 1 and without clipping, so that updates of trainers can be compared.
    """
    settings = {
        "num_generations": workload.group,
        "max_completion_length": workload.longest,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        **settings,
    }
    others |= {"train_dataset": Dataset.from_dict(COLUMNS), "processing_class": arithmetic_tokenizer()}
    return new_trainer(kind, settings, model=model, reward_funcs=workload, rollout_func=workload.rollouts, **others)


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
