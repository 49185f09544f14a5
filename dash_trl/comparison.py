"""Compares one optimizer step of TRL's `GRPOTrainer` and of `DASHTrainer` on scripted completions and rewards.

`dash_trl doctor MODEL --update` uses it. The trainers get the same weights, rows and rewards, so their gradients have
to be equal up to rounding. A third step, TRL's in float32, tells how much rounding changes.
"""

import gc
import random
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

from dash_trl.config import DASHConfig
from dash_trl.multimodal import without_towers
from dash_trl.trainer import DASHTrainer

GROUP = 8
EXACT = 1e-5  # by so much gradients in float32 may differ (docs/concepts/exact.md)
MARGIN = 2.0  # by so many errors of TRL's gradients (against float32) they may differ otherwise: both trainers round


class Scripted:
    """Rollouts and rewards without sampling. They depend only on step and row, so all trainers get the same.

    Args:
        constant: share of groups without signal.
        rows: number of rows of an optimizer step.
        group: G, rows of a group.
        median: median of the lognormal lengths of completions, in tokens.
        longest: limit of these lengths.
        vocabulary: token ids are below this number.
        prompt_tokens: number of random tokens that replace a prompt's own tokens; None = they stay.
    """

    __name__ = "scripted"

    def __init__(
        self,
        constant: float,
        rows: int,
        group: int,
        *,
        median: float,
        longest: int,
        vocabulary: int,
        prompt_tokens: int | None = None,
    ):
        self.constant_groups, self.group, self.prompt_tokens = round(constant * rows / group), group, prompt_tokens
        self.median, self.longest, self.vocabulary = median, longest, vocabulary
        self.step = 0

    def rollouts(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the fields of a `rollout_func` for N prompts."""
        generator = random.Random(self.step)
        self.step += 1
        drawn = [round(generator.lognormvariate(0, 0.8) * self.median) for _ in prompts]
        self.lengths = [min(max(length, 8), self.longest) for length in drawn]
        if self.prompt_tokens is None:
            self.prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        else:
            drawn_of = {prompt: random.Random(prompt) for prompt in prompts}
            longer = {
                prompt: [drawn.randrange(10, self.vocabulary) for _ in range(self.prompt_tokens)]
                for prompt, drawn in drawn_of.items()
            }
            self.prompt_ids = [longer[prompt] for prompt in prompts]
        completions = [[generator.randrange(10, self.vocabulary) for _ in range(length)] for length in self.lengths]
        return {"prompt_ids": self.prompt_ids, "completion_ids": completions, "logprobs": None}

    def __call__(self, prompts: list[str], **kwargs: Any) -> list[float]:
        groups = [divmod(row, self.group) for row in range(len(prompts))]
        return [
            1.0 if group < self.constant_groups else float(row < 1 + group % (self.group - 1)) for group, row in groups
        ]


@dataclass
class Step(TrainerCallback):
    """What one optimizer step gave: gradients of the first step, everything else of the second.

    Attributes:
        gradients: name of a parameter → its gradient, float32 on the CPU.
        seconds: duration.
        gigabytes: peak of allocated memory beyond the memory before the step; 0 without a GPU.
        waits: how often the host waited for the GPU.
        figures: the logged figures.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    gigabytes: float = 0.0
    waits: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.gigabytes = -torch.cuda.memory_allocated() / 1e9
        self.seconds = -time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.gradients:
            named = [(name, one.grad) for name, one in model.named_parameters()]
            self.gradients = {name: one.detach().float().cpu() for name, one in named if one is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
            self.gigabytes += torch.cuda.max_memory_allocated() / 1e9
        self.seconds += time.perf_counter()


def make_step(
    kind: Any, model: ModelConfig, *, bf16: bool, rows: int, prompt_tokens: int, completion_tokens: int
) -> Step:
    """Make two optimizer steps with learning rate 0.

    Args:
        kind: `GRPOTrainer` or `DASHTrainer`.
        model: the model, its dtype and its adapter, whose weights are random.
        bf16: whether passes compute in bf16 (`TrainingArguments.bf16`).
        rows: rows of the step, a multiple of `GROUP`.
        prompt_tokens: length of a prompt.
        completion_tokens: limit of the lengths of completions.
    """
    adapter = get_peft_config(model)
    if adapter is not None:
        adapter = without_towers(adapter, model.model_name_or_path, {})  # for TRL, too: the same weights are drawn
        adapter.init_lora_weights = False  # with B = 0, A would have no gradient
        adapter.lora_dropout = 0.0  # every pass would draw other zeros
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    step = Step()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": rows // GROUP,
        "num_generations": GROUP,
        "max_completion_length": completion_tokens,
        "max_steps": 2,
        "learning_rate": 0.0,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "use_cpu": not on_gpu,
        "bf16": bf16,
        "model_init_kwargs": {"dtype": model.dtype, "attn_implementation": model.attn_implementation},
    }
    script = Scripted(
        1 / 4,
        rows,
        GROUP,
        median=completion_tokens / 3,
        longest=completion_tokens,
        vocabulary=256,
        prompt_tokens=prompt_tokens,
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        config = DASHConfig if kind is DASHTrainer else GRPOConfig
        trainer = kind(
            model=model.model_name_or_path,
            reward_funcs=script,
            args=config(output_dir=folder, **settings),
            train_dataset=Dataset.from_dict({"prompt": [str(row) for row in range(2 * rows)]}),
            peft_config=adapter,
            rollout_func=script.rollouts,
            callbacks=[step],
        )
        trainer.remove_callback(PrinterCallback)
        if on_gpu:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        trainer.train()
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    step.waits = sum("synchroniz" in str(one.message) for one in warned) // 2
    step.figures = trainer.state.log_history[1]
    del trainer
    gc.collect()
    return step


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of a gradient, relative to the largest gradient of `one`. A missing one is 0."""
    largest = max(gradient.abs().max().item() for gradient in one.values())
    nothing = torch.zeros(())
    differences = [one.get(name, nothing) - other.get(name, nothing) for name in one.keys() | other.keys()]
    return max(by.abs().max().item() for by in differences) / largest


def compare_update(model: ModelConfig, *, rows: int, prompt_tokens: int, completion_tokens: int) -> tuple[str, bool]:
    """Compare one optimizer step of both trainers; see `make_step` for the arguments.

    Returns:
        A report for the terminal, and whether the updates are equal up to rounding.
    Raises:
        ValueError: if `rows` is not a multiple of `GROUP`.
    """
    if rows < GROUP or rows % GROUP:
        raise ValueError(f"rows={rows} are no groups of {GROUP}: pass a multiple of {GROUP}.")
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    sizes = {"rows": rows, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    exact = make_step(GRPOTrainer, replace(model, dtype="float32"), bf16=False, **sizes)
    theirs = make_step(GRPOTrainer, model, bf16=bf16, **sizes)
    ours = make_step(DASHTrainer, model, bf16=bf16, **sizes)
    found = difference(theirs.gradients, ours.gradients)
    bound = max(EXACT, MARGIN * difference(exact.gradients, theirs.gradients))
    lines = [
        f"{name}: {step.seconds:.2f} s, {step.gigabytes:.2f} GB, {step.waits} waits for the GPU"
        for name, step in (("TRL", theirs), ("dash_trl", ours))
    ]
    packed = "without padding" if ours.figures["packing/padding_free"] else "padded"
    shared = ours.figures["packing/shared_tokens"]
    lines.append(f"dash_trl ran {packed}; shared prompts left out {shared:.0%} of the tokens")
    lines.append(f"the gradients differ by {found:.2g} (bound {bound:.2g})")
    return "\n       ".join(lines), found <= bound
