"""What the benchmarks share: the command line, trainers, clocks, memory, a server beside the trainer, intervals.

A benchmark imports it before transformers, which reads the environment that is set here.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that they run without an installation
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",  # that a rollout_func is experimental
    "CI": "1",  # no telemetry in a timed run
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from dash_trl import DASHConfig, DASHTrainer  # noqa: E402
from dash_trl.embedded import (  # noqa: E402
    arithmetic_dataset,
    arithmetic_reward,
    arithmetic_tokenizer,
    embedded_defaults,
    embedded_model,
)
from dash_trl.serve import Servers  # noqa: E402

OUTPUT = tempfile.TemporaryDirectory()  # of all trainers
PROMPTS = [f"Compute {i:03d} + {i * 7 % 100:02d}:" for i in range(256)]
# Student's t, 97.5 %, by the number of seeds.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


# ------------------------------------------------------------------------------------------------ the command line


def parser(description: str | None) -> argparse.ArgumentParser:
    """With `--json`; `write` writes there."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, help="write the figures to this file")
    return found


def write(file: Path | None, figures: Any) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def say(name: str, figures: Mapping[str, Any]) -> None:
    """Prints a line at once: a name, and its figures that are numbers or intervals."""
    cells = [f"{key} {value:.3g}" for key, value in figures.items() if isinstance(value, int | float)]
    cells += [f"{key} {one[0]:.3f} ± {one[1]:.3f}" for key, one in figures.items() if isinstance(one, tuple)]
    print(f"{name:36} " + "  ".join(cells), flush=True)


# ------------------------------------------------------------------------------------------------ figures


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval), of a run per seed."""
    return statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


class Clock(TrainerCallback):
    """Seconds of each optimizer step, the end of each, and the parameters after the first one.

    Args:
        keep_first: whether the parameters are kept.
    """

    def __init__(self, *, keep_first: bool = False) -> None:
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.first: dict[str, torch.Tensor] = {}
        self.keep_first = keep_first

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.seconds.append(self.ends[-1] - self.started)
        if self.keep_first and state.global_step == 1:
            self.first = {name: value.detach().float().cpu().clone() for name, value in model.named_parameters()}


def relative_difference(start: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of a parameter after an update, relative to the largest update."""
    update = max((theirs[name] - start[name].float()).abs().max().item() for name in theirs)
    return max((theirs[name] - ours[name]).abs().max().item() for name in theirs) / update


class Memory:
    """`taken`: the most bytes that a span of the program takes beyond what it began with; of a GPU, if there is one."""

    def __enter__(self):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted anew
        self.before = self._most()
        return self

    def __exit__(self, *exception: object) -> None:
        self.taken = self._most() - self.before

    def _most(self) -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


# ------------------------------------------------------------------------------------------------ trainers


def embedded_trainer(
    settings: dict[str, Any], *, kind: Any = DASHTrainer, path: str | None = None, train: Any = None, **others: Any
) -> Any:
    """A trainer of the embedded task, with other settings than its defaults.

    Args:
        kind: its class, TRL's GRPOTrainer or a DASHTrainer. path: of another model.
        train: other problems than those of the run's seed.
        others: `callbacks`, `rollout_func`, `reward_funcs`.
    """
    settings = {
        **embedded_defaults(),
        "output_dir": tempfile.mkdtemp(dir=OUTPUT.name),
        "disable_tqdm": True,
        **settings,
    }
    trainer = kind(
        model=path or embedded_model(progress=False),
        args=_config(kind)(**settings),
        train_dataset=train or arithmetic_dataset("train", seed=settings.get("seed", 0)),
        **{"reward_funcs": arithmetic_reward, **others},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _config(kind: Any) -> Any:
    return DASHConfig if issubclass(kind, DASHTrainer) else GRPOConfig


class Scripted:
    """Rollouts and rewards that are the same for all trainers: a function of the step and the row, without sampling.

    Args:
        constant: share of groups without signal. group: G.
        median, longest: of the lognormal lengths of completions. vocabulary: ids below it.
    """

    __name__ = "scripted"

    def __init__(self, constant: float, rows: int, group: int, *, median: float, longest: int, vocabulary: int):
        self.constant_groups, self.group = round(constant * rows / group), group
        self.median, self.longest, self.vocabulary = median, longest, vocabulary
        self.step = 0

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        generator = random.Random(self.step)
        self.step += 1
        drawn = [round(generator.lognormvariate(0, 0.8) * self.median) for _ in prompts]
        self.lengths = [min(max(length, 8), self.longest) for length in drawn]
        self.prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [[generator.randrange(10, self.vocabulary) for _ in range(length)] for length in self.lengths]
        return {"prompt_ids": self.prompt_ids, "completion_ids": completions, "logprobs": None}

    def __call__(self, prompts: list[str], **kwargs: Any) -> list[float]:
        groups = [divmod(row, self.group) for row in range(len(prompts))]
        return [
            1.0 if group < self.constant_groups else float(row < 1 + group % (self.group - 1)) for group, row in groups
        ]


def scripted_trainer(kind: Any, model: Any, workload: Scripted, settings: dict[str, Any], **others: Any) -> Any:
    """A trainer of its class whose steps only update: SGD at rate 1 without clipping, so that updates compare."""
    common = {
        "output_dir": tempfile.mkdtemp(dir=OUTPUT.name),
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
        "disable_tqdm": True,
    }
    trainer = kind(
        model=model,
        reward_funcs=workload,
        args=_config(kind)(**common, **settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=arithmetic_tokenizer(),
        rollout_func=workload.rollouts,
        **others,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def qwen2(tokenizer: Any = None, **shape: Any) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, the same ones each time."""
    torch.manual_seed(0)
    if tokenizer is not None:
        shape |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen2ForCausalLM(Qwen2Config(**shape))


# ------------------------------------------------------------------------------------------------ servers


@contextmanager
def server_beside(path: str, port: int = 8800) -> Iterator[str]:
    """The URL of a vLLM server on the last core, while this process keeps to the first one with one thread."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"This needs 2 cores, one for the server and one for the trainer; there are {len(cores)}.")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[-1:])  # which the server inherits
    with Servers(path, 1, port=port) as servers:
        os.sched_setaffinity(0, cores[:1])
        servers.wait_until_ready()
        yield servers.urls[0]
    os.sched_setaffinity(0, cores)
