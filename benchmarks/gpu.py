"""Measures one optimizer step of TRL and of DASH on a GPU, in at most eight minutes.

    python benchmarks/gpu.py --json gpu.json      # needs neither vLLM nor the hub
    python benchmarks/gpu.py --use_kernels        # both trainers with fused layers, which come from the hub
    python benchmarks/gpu.py --torch_compile      # both trainers with torch.compile
    python benchmarks/gpu.py --small              # the same code with tiny models, in a minute, also on a CPU

Each figure is printed, and written to the file, as soon as it is known. An error is noted in place of its figure. After
`LIMIT` seconds, the program ends.

1. `machine`: the versions, the GPU, and why PyTorch's varlen kernel cannot be used, if so.
2. `attention`: the largest differences of this kernel in bf16 from float64, relative to the largest value: of the
   output and of the gradients, for heads of 64 and of 128 numbers.
3. `packed`: a step of a tiny model. If its passes are padded, the program ends.
4. A step for Qwen2.5-0.5B's shape with random weights, float32 under bf16: 256 rows in groups of 8, prompts of 512
   tokens, completions of up to 1,024 with lognormal lengths. 0, 50 or 75 % of the groups have no signal. TRL runs 8
   rows per pass; `dash` has its default, `dash_23k` has `max_tokens_per_microbatch=23_000`, for which a device that
   computes nothing predicts 5.1 GB (`pytest tests/test_fake_cuda.py`).
5. LoRA: the same rows, Qwen2.5-1.5B's shape in bf16, with the adapter and the token budget of docs/howto/lora.md.
6. V(prefix): the step of DASH with 0 % constant groups once more, with process rewards: V(prefix) after at most 64
   tokens of each completion, by the log-prob of an answer.
7. Qwen3.5: the same rows, about Qwen3.5-0.8B's shape. `fla`: whether its kernels are installed.

Completions and rewards are scripted, so only V(prefix) and the update are timed.

- `seconds`: median of two steps; a step before them is not counted.
- `launches`, `waits`: kernels that one more step starts, and how often the host waits in it for the GPU.
- `gb`: peak memory of these steps beyond the memory before them; on a CPU, 0.
- `ratio`: the seconds of TRL by those of DASH. `rel_grad_diff`: the largest difference of a gradient of the first step,
  relative to the largest gradient.
"""

import argparse
import gc
import json
import signal
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import torch
import transformers
from peft import LoraConfig
from trl import GRPOTrainer

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import AnswerLogProbValue
from dash_trl.update import TreeShape, tree_attention, varlen_arguments, varlen_flaw

LIMIT = 470  # seconds
DEVICE = torch.device("cuda" if harness.ON_GPU else "cpu")
STEPS = 2  # that are counted
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trl": (GRPOTrainer, {}),
    "dash": (DASHTrainer, {}),
    "dash_23k": (DASHTrainer, {"max_tokens_per_microbatch": 23_000}),
    "dash_8k": (DASHTrainer, {"max_tokens_per_microbatch": 8192}),
    "tiny": (DASHTrainer, {}),
}
QWEN2 = {  # Qwen/Qwen2.5-0.5B
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
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": QWEN2,
    "LoRA": {
        **QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen3.5": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
TREES = (TreeShape(200, (100, 60, 7), (200,) * 3), TreeShape(90))


class Clock(harness.Clock):
    """Clock that also records the peak memory after the first step, and profiles the last step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.before = torch.cuda.memory_allocated()
            if harness.ON_GPU:
                torch.cuda.reset_peak_memory_stats()
        if state.global_step == 1 + STEPS:
            self.gb = (torch.cuda.max_memory_allocated() - self.before) / 1e9
        super().on_step_begin(args, state, control)

    def figures(self) -> dict[str, float]:
        seconds = harness.medians({"seconds": self.seconds[1 : 1 + STEPS]})
        return {**seconds, "launches": self.launches, "waits": self.waits, "gb": self.gb}


def machine() -> dict[str, Any]:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        flaw = varlen_flaw(built("0.5B", True), DEVICE)
    versions = {one.__name__: one.__version__ for one in (torch, transformers)}
    device = torch.cuda.get_device_name() if harness.ON_GPU else "cpu"
    return {**versions, "device": device, "varlen": flaw or "usable", "fla": find_spec("fla") is not None}


def attention() -> dict[str, float]:
    found = {}
    for size, heads, of_a_key in ((64, 14, 7), (128, 12, 1)):
        torch.manual_seed(0)
        tokens = sum(map(len, TREES))
        drawn = [torch.randn(1, count, tokens, size).bfloat16() for count in (heads, *[heads // of_a_key] * 2)]
        weights = torch.randn(1, tokens, heads, size)
        module: Any = SimpleNamespace(num_key_value_groups=of_a_key, is_causal=True, training=True)
        tables = []
        for device, dtype in ((torch.device("cpu"), torch.float64), (DEVICE, torch.bfloat16)):
            states = [one.to(device, dtype).requires_grad_() for one in drawn]
            arguments = varlen_arguments(TREES, device) if device.type == "cuda" else {}
            query, key, value = states
            output, _ = tree_attention(module, query, key, value, None, TREES, scaling=size**-0.5, **arguments)
            (output * weights.to(device)).sum().backward()
            tables.append([one.double().cpu() for one in (output.detach(), *(state.grad for state in states))])
        for name, exact, own in zip(("output", "query", "key", "value"), *tables, strict=True):
            found[f"{name}_{size}"] = ((own - exact).abs().max() / exact.abs().max()).item()
    return found


def built(name: str, small: bool) -> Any:
    with DEVICE:
        model = harness.qwen2(attn_implementation="sdpa", **SHAPES[name] | (TINY if small else {}))
    return model.bfloat16() if name == "LoRA" else model


def update(name: str, kind: str, share: float, given: argparse.Namespace, *callbacks: Any) -> Clock:
    trainer_class, own = KINDS[kind]
    small = given.small or kind == "tiny"
    rows, prompt, longest = (32, 16, 32) if small else (256, 512, 1024)
    gc.collect()  # the trainer before this one would count as memory
    model = built(name, small)
    model.use_kernels = given.use_kernels
    settings = {
        "max_steps": 2 + STEPS,
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "bf16": harness.ON_GPU,
        "torch_compile": given.torch_compile,
        **own,
    }
    workload = harness.Scripted(constant=share, rows=rows, longest=longest, prompt_tokens=prompt)
    clock = Clock(compares=name == "0.5B", profiled=1 + STEPS)
    others: dict[str, Any] = {"callbacks": [clock, *callbacks]}
    if name == "LoRA":
        others["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = harness.scripted_trainer(trainer_class, model, workload, settings, **others)
    trainer.train()
    if kind != "trl" and not trainer._passes.padding_free:
        raise ValueError(f"passes are padded: {trainer._passes.padded_because}")
    return clock


def main(given: argparse.Namespace) -> None:
    found: dict[str, dict[str, Any]] = {}

    def note(name: str, work: Callable[[], dict[str, Any]]) -> bool:
        try:
            found[name] = work()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        harness.say(name, found[name])
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=2) + "\n")
        return "error" not in found[name]

    def compare(model: str, share: float, kinds: tuple[str, ...]) -> None:
        clocks: dict[str, Clock] = {}

        def measure(kind: str) -> dict[str, Any]:
            clocks[kind] = update(model, kind, share, given)
            return clocks[kind].figures()

        name = f"{model}, {share:.0%} constant"
        if all([note(f"{name}, {kind}", partial(measure, kind)) for kind in kinds]):
            clocks["dash"] = clocks[kinds[1]]
            note(name, partial(harness.against_trl, clocks))

    note("machine", machine)
    note("attention", attention)
    if not note("packed", lambda: update("0.5B", "tiny", 0.0, given).figures()):
        return
    for share in (0.0, 0.5, 0.75):
        compare("0.5B", share, ("trl", "dash", "dash_23k"))
    compare("LoRA", 0.0, ("trl", "dash_8k"))
    process = ProcessRewardCallback(AnswerLogProbValue(), max_episode_tokens=8 if given.small else 64)
    note("V(prefix)", lambda: update("0.5B", "dash", 0.0, given, process).figures())
    compare("Qwen3.5", 0.0, ("trl", "dash"))


def stop(*_: Any) -> None:
    raise SystemExit(f"The program ends after {LIMIT} s; see `LIMIT`.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--use_kernels", action="store_true", help="fused layers of the hub")
    parser.add_argument("--torch_compile", action="store_true", help="torch.compile")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    main(parser.parse_args())
