"""Runs passes of `DASHTrainer` on a CUDA device that computes nothing, and counts what they ask of a GPU.

    python -m tests.fake_cuda GUARD FOLDER    # GUARD: guard.cpp, compiled; see tests/test_fake_cuda.py

Prints a JSON object: name of a case → what `counted` returns. A trainer collects a window on the CPU. Its first
pass then runs on the device, with models whose tensors have a shape and a dtype, but no numbers (`FakeTensorMode`).
"""

import ctypes
import json
import sys
import weakref
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

ctypes.CDLL(sys.argv[1])  # before torch is imported, which looks for devices once

import torch  # noqa: E402
from accelerate import PartialState  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Trainer  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402
from trl.kernels import chunked_logprob  # noqa: E402
from trl.trainer import utils  # noqa: E402

from dash_trl import DASHTrainer, seams  # noqa: E402
from dash_trl.process_rewards import AnswerLogProbValue, ValueRequest  # noqa: E402
from dash_trl.update import plan_share, to_device, varlen_flaw  # noqa: E402
from tests.models import FAMILIES, SIZES, fla  # noqa: E402
from tests.tiny import rows_of, run, save_tiny_model  # noqa: E402

CUDA = torch.device("cuda", 0)
FAKE = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
READS = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
NO_LAUNCH = ("empty", "lift_fresh", "_unsafe_view")
APART = ("mistral", "qwen3_5_text")  # a window, and layers with a state
QWEN = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)  # Qwen2.5-0.5B's
QWEN |= dict(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True)
MODELS = dict.fromkeys(("qwen2", "qwen3", "llama", "gemma"), {}) | {name: FAMILIES[name] for name in APART}
HEADS = SIZES | dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=16)
LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "logprobs": True},
    "beta, entropy": {"beta": 0.04, "entropy_coef": 0.1},
    "dapo": {},
}


class Device(TorchDispatchMode):
    """Counts kernels, waits of the host, calls of `varlen_attn`, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = self.peak = 0
        self.waits: list[str] = []
        self.varlen: list[list[str]] = []
        self.known: set[int] = set()  # storages

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        name = operation.name()
        if operation.is_view or name == "prim::device":
            return result
        made, used = (
            [one for one in tree_leaves(all_) if isinstance(one, Tensor)] for all_ in (result, (args, kwargs))
        )
        devices = {one.device.type for one in made + used}
        if "cuda" not in devices:
            return result
        blocks = "copy" in name and len(devices) == 2 and not (kwargs.get("non_blocking") or args[2:] == (True,))
        if blocks or "index_put" in name and any(one is not None and one.dtype == torch.bool for one in args[1]):
            self.waits.append(name)
        self.launches += not any(part in name for part in NO_LAUNCH)
        if name == "torch_attn::_varlen_attn":
            self.varlen.append([f"{one.device.type} {one.dtype} {one.dim()} {one.is_contiguous()}" for one in used])
        for one in made:
            if one.device == CUDA:
                self.keep(one.untyped_storage())
        return result

    def keep(self, storage: Any) -> None:
        """Counts the bytes of a storage until it is freed."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def first_pass(folder: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Trains on the CPU up to the first pass; returns the trainer, whose device is then the GPU, and its inputs."""
    PartialState().device = torch.device("cpu")
    settings |= {"bf16": True, "constant": 0.2, "max_tokens_per_microbatch": 200}
    with patch.object(Trainer, "training_step", autospec=True, side_effect=EOFError) as step, suppress(EOFError):
        run(DASHTrainer, str(folder), folder / "out", **settings)
    PartialState().device = CUDA
    trainer, _, inputs, _ = step.call_args.args
    return trainer, inputs


def place(trainer: Any, config: Any, *, lora: bool = False, checkpointing: bool = False) -> None:
    """Gives the trainer a model on the GPU, with float32 weights, or in bf16 with an adapter."""
    with FAKE, CUDA, patch.object(torch.nn.Module, "to", lambda module, *others, **more: module):  # all is there
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if lora else torch.float32)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if lora:
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        if checkpointing:
            model.gradient_checkpointing_enable()
    trainer.model = trainer.model_wrapped = model.train()
    trainer._passes = seams.new_passes(trainer)
    with trainer.accelerator.autocast():
        assert (why := trainer._passes.padded_because or varlen_flaw(model, CUDA)) is None, why


def counted(trainer: Any, work: Any, *arguments: Any) -> dict[str, Any]:
    """Counts what some work asks of the GPU. It ends at an operation whose result the host would have to read."""
    device = Device()
    trainer.model.zero_grad()
    kernels = dict.fromkeys(
        ("_forward_tile", "_backward_tile"), lambda *args, **kwargs: None
    )  # Triton's write in place
    kernels["_use_triton"] = lambda device: False
    try:
        with patch.multiple(chunked_logprob, **kernels), FAKE, torch.autograd.set_multithreading_enabled(False), device:
            work(trainer, *arguments)
    except READS as error:
        device.waits.append(str(error))
    torch.clear_autocast_cache()
    figures = {name: getattr(device, name) for name in ("launches", "waits", "varlen", "peak")}
    trained = [one for one in trainer.model.parameters() if one.requires_grad]
    return figures | {"gradients": sum(one.grad is not None for one in trained) / len(trained)}


def step(trainer: Any, inputs: dict[str, Any]) -> None:
    with seams.without_casts(trainer):
        Trainer.training_step(trainer, trainer.model, inputs, None)


def log_probs(trainer: Any, inputs: dict[str, Any], backward: bool = True, casts: bool = False) -> None:
    with nullcontext() if casts else seams.without_casts(trainer), torch.set_grad_enabled(backward):
        found, *_ = trainer.run_pass({name: to_device(value, CUDA) for name, value in inputs.items()})
    torch.clear_autocast_cache()
    if backward:
        found.sum().backward()


def values(trainer: Any, prompt: int, completion: int) -> None:
    """V(prefix) in a pass over a tree."""
    request = ValueRequest((5,) * prompt, (6,) * completion, (0, completion // 2, completion), ("1", "2"))
    with patch("dash_trl.process_rewards.values.tree_flaw", lambda *args: None), trainer.accelerator.autocast():
        AnswerLogProbValue(" = ").score([request], trainer.model, trainer._tokenizer)


def groups_of_8(passes: Any, groups: int, prompt: int, completion: int) -> dict[str, Any]:
    prompts = [[group] * prompt for group in range(groups) for _ in range(8)]
    survivors = rows_of(prompts, [[1] * completion] * len(prompts))
    return passes.inputs(survivors, [*range(len(prompts))], size=len(prompts), pad_token_id=0)


def main(folder: Path) -> dict[str, Any]:
    """Counts all cases."""
    models = {name: AutoConfig.for_model(name, **SIZES | own) for name, own in MODELS.items()}
    models["LoRA"] = models["qwen2"]
    cases: dict[str, Any] = {}
    for name, settings in LOSSES.items():
        trainer, inputs = first_pass(folder, **settings)
        place(trainer, models["qwen2"])
        cases[name] = counted(trainer, step, inputs)
    cases["old"] = counted(trainer, log_probs, inputs, False)
    for name, checkpointing in product(models, (False, True)):
        place(trainer, models[name], lora=name == "LoRA", checkpointing=checkpointing)
        cases[name + ", checkpointing" * checkpointing] = counted(trainer, step, inputs)
    place(trainer, models["qwen2"])
    for groups in (1, 8):
        cases[f"{groups} groups"] = counted(trainer, log_probs, groups_of_8(trainer._passes, groups, 20, 12))
    place(trainer, AutoConfig.for_model("qwen2", **QWEN), checkpointing=True)
    for groups in (4, 8):
        cases[f"0.5B, {groups} groups"] = counted(trainer, log_probs, groups_of_8(trainer._passes, groups, 512, 300))
    cases["0.5B, old"] = counted(trainer, log_probs, groups_of_8(trainer._passes, 8, 512, 300), False)
    for casts in (True, False):
        place(trainer, AutoConfig.for_model("qwen2", **QWEN), lora=True, checkpointing=True)
        batch = groups_of_8(trainer._passes, 8, 512, 300)
        cases["0.5B, LoRA, 8 groups" + ", casts" * casts] = counted(trainer, log_probs, batch, True, casts)
    cases["0.5B, V(prefix)"] = counted(trainer, values, 512, 4000)
    for prompt, completion in ((4000, 100), (4000, 1000), (512, 100)):
        rows = torch.tensor([[[prompt, completion, completion, row // 8] for row in range(64)]])
        passes = plan_share(rows, max_rows=8, width=prompt + completion, min_shared=15)
        for share, most in ((True, max(len(one.rows[0]) for one in passes)), (False, 8)):  # TRL shares no prompts
            trainer.args.share_prompts = share
            place(trainer, AutoConfig.for_model("qwen2", **HEADS))
            batch = groups_of_8(trainer._passes, most // 8, prompt, completion)
            cases[f"{prompt}, {completion}" + ", alone" * (not share)] = counted(trainer, log_probs, batch)
    return cases


if __name__ == "__main__":
    torch.cuda._lazy_init = lambda: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    Tensor.pin_memory = lambda tensor: tensor
    utils._use_triton = lambda device: device == CUDA
    modeling_qwen3_5.torch_chunk_gated_delta_rule = lambda *args, **kwargs: fla([], *args, **kwargs)
    print(json.dumps(main(Path(save_tiny_model(Path(sys.argv[2], "model"))))))
