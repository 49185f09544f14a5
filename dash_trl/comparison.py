"""Compares one optimizer step of TRL's `GRPOTrainer` and of `DASHTrainer` on scripted completions and rewards.

`dash_trl doctor MODEL --update` uses it. The trainers get the same weights, rows and rewards, so their gradients are
equal up to rounding. A third step, TRL's in float32, tells how much rounding changes.
"""

import gc
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

from dash_trl.config import DASHConfig, computes_bf16
from dash_trl.multimodal import without_towers

GROUP = 8
EXACT = 1e-5  # the largest difference in float32 (docs/concepts/exact.md)
MARGIN = 2.0  # in other dtypes: the largest difference, relative to the error that TRL's own gradients have
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


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
    group: int = GROUP
    longest: int
    prompt_tokens: int
    __name__ = "scripted"

    def rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, object]:
        draw = random.Random(trainer.state.global_step)
        drawn = [round(draw.lognormvariate(0, 0.8) * self.longest / 4) for _ in prompts]
        self.lengths: list[int] = [min(max(length, 8), self.longest) for length in drawn]
        return {
            "prompt_ids": [_ids(random.Random(prompt), self.prompt_tokens) for prompt in prompts],
            "completion_ids": [_ids(draw, length) for length in self.lengths],
            "logprobs": None,
        }

    def __call__(self, prompts: list[str], **kwargs: object) -> list[float]:
        constant = round(self.constant * self.rows / self.group)
        groups = [divmod(row, self.group) for row in range(len(prompts))]
        return [1.0 if group < constant else float(row < 1 + group % (self.group - 1)) for group, row in groups]


def _ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(100, 256) for _ in range(length)]  # those before are special tokens of some models


def begin_counting() -> profile:
    """Begin to count what a GPU is asked to do; `counted` ends it."""
    on_gpu = torch.cuda.is_available()
    counting = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    counting.start()
    return counting


def counted(counting: Any) -> tuple[int, int]:
    """Return the number of kernels that were launched, and how often the CPU waited for the GPU."""
    counting.stop()
    # Not `key_averages`, which takes longer than what it counts.
    names = Counter(event.name() for event in counting.profiler.kineto_results.events())
    launches = sum(count for name, count in names.items() if "LaunchKernel" in name)
    return launches, sum(names[name] for name in WAITS)


class Step(TrainerCallback):
    """The gradients (float32, on the CPU) and waits of a run's first step; the log and other costs of its last step."""

    seconds: float
    costs: str
    figures: dict[str, float]
    gradients: dict[str, Tensor]

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            self.counting = begin_counting()
        self.seconds = -time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == 0:
            _, self.waits = counted(self.counting)
            grads = {name: one.grad for name, one in model.named_parameters()}
            self.gradients = {name: one.float().cpu() for name, one in grads.items() if one is not None}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter()


def make_step(kind: type[GRPOTrainer], model: ModelConfig, script: Scripted, *, bf16: bool) -> Step:
    """Make two equal optimizer steps of a trainer class, with learning rate 0 and random weights of the adapter."""
    adapter = get_peft_config(model)
    if adapter is not None:
        adapter = without_towers(adapter, model.model_name_or_path, {})  # for TRL, too: the same weights are drawn
        adapter.init_lora_weights = False  # with B = 0, A would have no gradient
        adapter.lora_dropout = 0.0  # every pass would draw other zeros
    on_gpu = torch.cuda.is_available()
    gc.collect()  # the trainer before this one would take memory
    torch.manual_seed(0)
    step = Step()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig if kind is GRPOTrainer else DASHConfig
        args = config(
            folder,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=script.rows // GROUP,
            num_generations=GROUP,
            max_completion_length=script.longest,
            max_steps=2,
            learning_rate=0.0,
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=bf16,
            model_init_kwargs={"dtype": model.dtype, "attn_implementation": model.attn_implementation},
        )
        trainer = kind(
            model=model.model_name_or_path,
            reward_funcs=script,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(map(str, range(script.rows)))}),
            peft_config=adapter,
            rollout_func=script.rollouts,
            callbacks=[step],
        )
        trainer.remove_callback(PrinterCallback)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    step.costs = f"{step.seconds:.2f} s"
    if on_gpu:
        step.costs += f", {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, {step.waits} waits for the GPU"
    step.figures = trainer.state.log_history[1]
    return step


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of a gradient, relative to the largest gradient of `one`. A missing one is 0."""
    largest = max(gradient.abs().max().item() for gradient in one.values())
    return max((gradient - other.get(name, 0)).abs().max().item() for name, gradient in one.items()) / largest


def compare_update(model: ModelConfig, script: Scripted, trainer: type[GRPOTrainer]) -> str:
    """Compare one optimizer step of TRL's trainer and of `trainer`, a `DASHTrainer` class, and return a report.

    Raises:
        ValueError: with the report, if the gradients differ more than rounding explains.
    """
    bf16 = computes_bf16()
    exact = make_step(GRPOTrainer, replace(model, dtype="float32"), script, bf16=False)
    theirs = make_step(GRPOTrainer, model, script, bf16=bf16)
    ours = make_step(trainer, model, script, bf16=bf16)
    found = difference(theirs.gradients, ours.gradients)
    bound = max(EXACT, MARGIN * difference(exact.gradients, theirs.gradients))
    packed = "without padding" if ours.figures["packing/padding_free"] else "padded"
    shared = ours.figures["packing/shared_tokens"]
    report = (
        f"TRL: {theirs.costs}\n       dash_trl: {ours.costs}, {packed}; shared prompts left out {shared:.0%} of the "
        f"tokens\n       the gradients differ by {found:.2g} (bound {bound:.2g})"
    )
    if not found <= bound:
        raise ValueError(f"the update is not TRL's. {report}")
    return report
