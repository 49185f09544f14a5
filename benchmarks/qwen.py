"""One optimizer step of a real shape, Qwen2.5-0.5B with random weights: TRL's GRPOTrainer against DASHTrainer.

    python benchmarks/qwen.py --json qwen.json                # on a CPU: 8 rows of ≤ 256 tokens, float32; ~12 minutes
    python benchmarks/qwen.py --shares 0.75 --steps 1         # a part of it

On a GPU: the paper's batch (256 rows of ≤ 2,048 tokens, two to a pass), bfloat16 with FlashAttention where it is
installed, and beside both trainers `loop`: the same update written as tightly as one can (rows with signal only, sorted
by length, packed by hand, log-probs in chunks, no metrics), which bounds what a trainer can reach.

Completions and rewards are scripted, so that no step samples: hidden size 896, 24 layers, 14 heads, 2 of keys and
values, vocabulary 151,936. Each trainer is a process of its own. `trl_s`, `dash_s`: the medians of its counted steps;
`trl_gb`, `dash_gb`: memory at its highest during these beyond the weights (resident on a CPU, allocated on a GPU).
`rel_param_diff`: the largest difference of a parameter after one step of SGD without clipping, relative to the largest
update, on a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("CI", "1")  # no telemetry in a timed run

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.embedded import arithmetic_tokenizer

ON_GPU = torch.cuda.is_available()
ROWS, GROUP, ROWS_PER_PASS, LONGEST, MEAN = (256, 4, 2, 2048, 500) if ON_GPU else (8, 2, 2, 256, 120)
SHARES = (0.0, 0.75)  # of groups without signal
GIGABYTE = 1e9


def save_model(directory: Path) -> str:
    tokenizer = arithmetic_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(  # Qwen/Qwen2.5-0.5B
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


class Workload:
    """The same completions and rewards for whoever asks: a function of the step and the row."""

    __name__ = "scripted"

    def __init__(self, share: float):
        self.constant_groups = round(share * ROWS / GROUP)
        self.step = 0

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        generator = random.Random(self.step)
        self.step += 1
        lengths = [min(max(round(generator.lognormvariate(0, 0.8) * MEAN), 8), LONGEST) for _ in prompts]
        completions = [[generator.randrange(10, 150_000) for _ in range(length)] for length in lengths]
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    def rewards(self, rows: int) -> list[float]:
        return [0.0 if row // GROUP < self.constant_groups else float(row % GROUP < GROUP // 2) for row in range(rows)]

    def __call__(self, prompts: list[str], **kwargs: Any) -> list[float]:
        return self.rewards(len(prompts))


class Memory:
    """The most that a span of the program takes beyond what it began with, in gigabytes."""

    def __enter__(self) -> Memory:
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted anew
            self.before = self._resident("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        most = torch.cuda.max_memory_allocated() if ON_GPU else self._resident("VmHWM")
        self.taken = (most - self.before) / GIGABYTE

    def _resident(self, name: str) -> int:
        (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name)]
        return int(line.split()[1]) * 1024


def settings(directory: str, steps: int) -> dict[str, Any]:
    return dict(
        output_dir=directory,
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=ROWS // ROWS_PER_PASS,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=steps,
        beta=0.0,
        loss_type="dr_grpo",
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=not ON_GPU,
        bf16=ON_GPU,
        gradient_checkpointing=ON_GPU,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


PROMPTS = [f"Compute {i:03d} + {i * 7 % 100:02d}:" for i in range(256)]


def by_trainer(kind: str, path: str, share: float, steps: int) -> dict[str, Any]:
    """Seconds of each step but the first, memory, and the parameters after the first."""
    workload, memory, seconds = Workload(share), Memory(), []
    first: dict[str, Tensor] = {}

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                memory.__enter__()
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if ON_GPU:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)
            if not first:
                first.update({name: value.detach().float().cpu().clone() for name, value in model.named_parameters()})

    with tempfile.TemporaryDirectory() as directory:
        attention = "flash_attention_2" if ON_GPU and is_flash_attn_2_available() else "sdpa"
        trainer = {"trl": GRPOTrainer, "dash": DASHTrainer}[kind](
            model=AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype="auto"),
            reward_funcs=workload,
            args={"trl": GRPOConfig, "dash": DASHConfig}[kind](**settings(directory, 1 + steps)),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=AutoTokenizer.from_pretrained(path),
            rollout_func=workload.rollouts,
            callbacks=[Clock()],
        )
        trainer.train()
    memory.__exit__()
    return {"seconds": seconds[1:], "gigabytes": memory.taken, "parameters": first}


def by_hand(path: str, share: float, steps: int) -> dict[str, Any]:
    """`loop`: rows with signal, packed into rows of the same tokens as two padded ones take, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="flash_attention_2" if is_flash_attn_2_available() else "sdpa", dtype="auto"
    ).cuda()
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokenizer, workload = AutoTokenizer.from_pretrained(path), Workload(share)
    prompts = [prompt for prompt in PROMPTS[: ROWS // GROUP] for _ in range(GROUP)]
    seconds: list[float] = []
    memory = Memory()
    for step in range(1 + steps):
        if step == 1:
            memory.__enter__()
        drawn = workload.rollouts(prompts, argparse.Namespace(processing_class=tokenizer))
        started = time.perf_counter()
        rewards = torch.tensor(workload.rewards(ROWS)).view(-1, GROUP)
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten().tolist()
        rows = [row for row in range(ROWS) if advantages[row]]
        rows.sort(key=lambda row: len(drawn["completion_ids"][row]))
        while rows:
            bin_, tokens = [], 0
            while rows and (not bin_ or tokens + len(drawn["completion_ids"][rows[-1]]) <= ROWS_PER_PASS * LONGEST):
                bin_.append(rows.pop())
                tokens += len(drawn["completion_ids"][bin_[-1]])
            ids: list[int] = []
            positions: list[int] = []
            weights: list[float] = []
            for row in bin_:
                prompt, completion = drawn["prompt_ids"][row], drawn["completion_ids"][row]
                ids += prompt + completion
                positions += range(len(prompt) + len(completion))
                weights += [0.0] * len(prompt) + [advantages[row] / ROWS / LONGEST] * len(completion)
            batch = torch.tensor([ids]).cuda()
            hidden = model.model(input_ids=batch, position_ids=torch.tensor([positions]).cuda(), use_cache=False)[0][0]
            weight, labels = torch.tensor(weights[1:]).cuda(), batch[0, 1:]
            loss = torch.zeros((), device="cuda")
            for begin in range(0, len(labels), 1024):
                part = slice(begin, begin + 1024)
                loss = loss + torch.utils.checkpoint.checkpoint(
                    _part_loss, model.lm_head, hidden[:-1][part], labels[part], weight[part], use_reentrant=False
                )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    memory.__exit__()
    return {"seconds": seconds[1:], "gigabytes": memory.taken, "parameters": {}}


def _part_loss(head: Any, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """−Σ advantage · π / π_old, whose value and gradient at π = π_old are those of GRPO's."""
    log_probs = -torch.nn.functional.cross_entropy(head(hidden).float(), labels, reduction="none")
    return -(weight * (log_probs - log_probs.detach()).exp()).sum()


def compare(path: str, share: float, steps: int) -> dict[str, float]:
    found: dict[str, Any] = {}
    for kind in ("trl", "dash", *(["loop"] if ON_GPU else [])):
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            arguments = ["--one", kind, "--model", path, "--shares", str(share), "--steps", str(steps)]
            command = [sys.executable, __file__, *arguments, "--json", file.name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[kind] = torch.load(file.name, weights_only=True)
    start = AutoModelForCausalLM.from_pretrained(path).state_dict()
    trl, dash = (found[kind]["parameters"] for kind in ("trl", "dash"))
    update = max((trl[name] - start[name].float()).abs().max().item() for name in trl)
    difference = max((trl[name] - dash[name]).abs().max().item() for name in trl)
    results = {f"{kind}_s": statistics.median(one["seconds"]) for kind, one in found.items()}
    results |= {f"{kind}_gb": one["gigabytes"] for kind, one in found.items()}
    return {**results, "ratio": results["trl_s"] / results["dash_s"], "rel_param_diff": difference / update}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of groups without signal")
    parser.add_argument("--steps", type=int, default=3, help="counted, after one that is not")
    parser.add_argument("--one", choices=["trl", "dash", "loop"], help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if arguments.one:
        (share,) = arguments.shares
        if arguments.one == "loop":
            found = by_hand(arguments.model, share, arguments.steps)
        else:
            found = by_trainer(arguments.one, arguments.model, share, arguments.steps)
        torch.save(found, arguments.json)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        path = save_model(Path(temporary))
        for share in arguments.shares:
            results[f"{share:g}"] = found = compare(path, share, arguments.steps)
            print(f"constant groups {share:g}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
