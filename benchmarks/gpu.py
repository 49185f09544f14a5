"""Measures one optimizer step of TRL and of DASH on a GPU, in at most eight minutes.

    python benchmarks/gpu.py --json gpu.json      # needs neither vLLM nor the hub
    python benchmarks/gpu.py --larger             # Qwen2.5-1.5B's shape instead of 0.5B's
    python benchmarks/gpu.py --use_kernels        # both trainers with fused layers, which come from the hub
    python benchmarks/gpu.py --small              # the same code with a tiny model, in a minute, also on a CPU

Each figure is printed, and written to the file, as soon as it is known:

1. `tests`: the exit status of tests of attention, losses and updates with their trainers on the GPU.
2. A step for Qwen2.5-0.5B's shape with random weights, float32 under bf16: 256 rows in groups of 8, prompts of 512
   tokens, completions of up to 1,024 with lognormal lengths. 0, 50 or 75 % of the groups have no signal. TRL runs 8
   rows per pass; `dash` has its default, `dash_23k` has `max_tokens_per_microbatch=23_000`.
3. The step of DASH with 0 % constant groups once more, with process rewards: V(prefix) after at most 64 tokens of each
   completion, by the log-prob of an answer.
4. A step of the toy model, sampled by transformers.

Completions and rewards of 2 and 3 are scripted, so only V(prefix) and the update are timed.

- `seconds`: median of two steps; a step before them is not counted.
- `launches`, `waits`: kernels that one more step starts, and how often the host waits in it for the GPU.
- `gb`: peak memory of these steps beyond the memory before them.
- `padding_free`: False = passes were padded. For DASH, a warning on the terminal says why.
- `ratio`: the seconds of TRL by those of DASH. `rel_param_diff`: the largest difference of a parameter after the first
  step (SGD), relative to the largest update.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import torch
from torch.profiler import ProfilerActivity, profile
from trl import GRPOTrainer

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.comparison import Scripted
from dash_trl.process_rewards import AnswerLogProbValue

ON_GPU = torch.cuda.is_available()
TESTS = ("test_equivalence.py", "test_padding_free.py", "test_shared_prompts.py", "test_losses.py")
STEPS = 2  # that are counted
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trl": (GRPOTrainer, {}),
    "dash": (DASHTrainer, {}),
    "dash_23k": (DASHTrainer, {"max_tokens_per_microbatch": 23_000}),
}
SHAPE = {  # Qwen/Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
LARGER = {**SHAPE, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
SMALL = {**SHAPE, "vocab_size": 512, "hidden_size": 56, "intermediate_size": 128, "num_hidden_layers": 2}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Clock(harness.Clock):
    """Clock that also records the peak memory after the first step, and what the profiler counts in the last step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.before = harness.begin_peak(ON_GPU)
        if state.global_step == 1 + STEPS:
            self.gb = (harness.peak(ON_GPU) - self.before) / 1e9
            self.profile = profile(activities=[ProfilerActivity.CUDA] if ON_GPU else [ProfilerActivity.CPU])
            self.profile.start()
        super().on_step_begin(args, state, control)

    def figures(self) -> dict[str, float]:
        self.profile.stop()
        counts = {event.key: event.count for event in self.profile.key_averages()}
        return {
            **harness.medians({"seconds": self.seconds[1 : 1 + STEPS]}),
            "launches": sum(count for name, count in counts.items() if "LaunchKernel" in name),
            "waits": sum(counts.get(name, 0) for name in WAITS),
            "gb": self.gb,
            "padding_free": self.padding_free,
        }


def update(kind: str, share: float, given: argparse.Namespace, *callbacks: Any) -> Clock:
    trainer, own = KINDS[kind]
    rows, prompt, longest = (32, 16, 32) if given.small else (256, 512, 1024)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = harness.qwen2(attn_implementation="sdpa", **(SMALL if given.small else (SHAPE, LARGER)[given.larger]))
    model.use_kernels = given.use_kernels
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": rows // 8, "max_steps": 2 + STEPS}
    settings |= {"beta": 0.0, "loss_type": "dr_grpo", "bf16": ON_GPU, "use_cpu": not ON_GPU, **own}
    workload = Scripted(constant=share, rows=rows, longest=longest, prompt_tokens=prompt)
    clock = Clock()
    clock.start = {name: one.detach().cpu() for name, one in model.named_parameters()}
    gc.collect()  # the trainer before this one would count as memory
    return trained(harness.scripted_trainer(trainer, model, workload, settings, callbacks=[clock, *callbacks]), clock)


def trained(trainer: Any, clock: Clock) -> Clock:
    trainer.train()
    clock.padding_free = isinstance(trainer, DASHTrainer) and trainer._passes.padding_free
    return clock


def toy(kind: str, small: bool) -> Clock:
    clock = Clock()
    settings = {"max_steps": 2 + STEPS, "gradient_accumulation_steps": 2 if small else 32, "logging_strategy": "no"}
    return trained(harness.toy_trainer(settings, kind=KINDS[kind][0], callbacks=[clock]), clock)


def main(given: argparse.Namespace) -> None:
    found: dict[str, dict[str, float]] = {}

    def note(name: str, figures: dict[str, float]) -> None:
        found[name] = figures
        harness.say(name, figures)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=2) + "\n")

    if ON_GPU:
        command = [sys.executable, "-m", "pytest", "-q", "-x", *(str(harness.ROOT / "tests" / one) for one in TESTS)]
        ended = subprocess.run(["timeout", "60", *command], env={**os.environ, "TEST_ON_GPU": "1"}, cwd=harness.ROOT)
        note("tests", {"status": ended.returncode})  # 124: they were not done in a minute
    for share in (0.0, 0.5, 0.75):
        clocks: dict[str, Clock] = {}
        for kind in KINDS:
            clocks[kind] = update(kind, share, given)
            note(f"{share:.0%} constant, {kind}", clocks[kind].figures())
        note(f"{share:.0%} constant", harness.against_trl(clocks, clocks["trl"].start))
    process = ProcessRewardCallback(AnswerLogProbValue(), max_episode_tokens=8 if given.small else 64)
    note("0% constant, dash, V(prefix)", update("dash", 0.0, given, process).figures())
    for kind in ("trl", "dash"):
        note(f"toy, {kind}", toy(kind, given.small).figures())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--larger", action="store_true", help="Qwen2.5-1.5B's shape")
    parser.add_argument("--use_kernels", action="store_true", help="fused layers of the hub")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    main(parser.parse_args())
