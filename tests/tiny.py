"""A tiny model, scripted rollouts, and runs of TRL and DASH on the same rollouts."""

import atexit
import functools
import gc
import json
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dash_trl.update import VARLEN_DTYPES

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
warnings.filterwarnings("ignore", category=FutureWarning)

VOCABULARY = 300
EOS = 1  # <|im_end|>
ON_GPU = bool(os.environ.get("TEST_ON_GPU"))  # True = trainers train on the GPU, so that the package is tested on it
if ON_GPU:
    VARLEN_DTYPES.pop("cuda")  # so that models in float32 are packed on a GPU, too
UNKNOWN = (math.nan, -9999.0, -math.inf)  # in place of a log-prob


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["the answer is 12 + 34 = 46\n"] * 4, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>", "<|im_end|>"]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )


def save_tiny_model(directory: Path, model_class=None, config=None, **settings) -> str:
    """A randomly initialised model and a byte-level BPE tokenizer, as a directory to load from."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = config or AutoConfig.for_model(
        settings.pop("model_type", "qwen2"),
        vocab_size=settings.pop("vocab_size", VOCABULARY),
        hidden_size=settings.pop("hidden_size", 32),
        intermediate_size=64,
        num_hidden_layers=settings.pop("num_hidden_layers", 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=settings.pop("max_position_embeddings", 512),
        initializer_range=0.2,  # far from uniform, so that gradients are not tiny
        **settings,
    )
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    (model_class or kind.from_config)(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def load(folder: str, **settings):
    """The model in a folder, whole if it is multimodal."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    return kind.from_pretrained(folder, **settings)


def without_compiled_ops() -> None:
    """DeepSpeed runs on PyTorch alone.

    For CPUs it compiles collectives first, which takes minutes beside other work, and PyTorch waits without an end for
    the lock of a compilation whose process was killed.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}


def fsdp_on_cpu() -> None:
    """accelerate takes FSDP for GPUs alone, though PyTorch's runs on gloo, too."""
    from accelerate import state

    made = state.AcceleratorState.__init__

    def with_fsdp(self, *arguments, fsdp_plugin=None, **settings) -> None:
        made(self, *arguments, fsdp_plugin=fsdp_plugin, **settings)  # each time it sets the type that it found anew
        self.fsdp_plugin = fsdp_plugin or self.fsdp_plugin
        self.distributed_type = state.DistributedType.FSDP

    state.AcceleratorState.__init__ = with_fsdp


def place(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return two [tokens] tensors: the sample of each token, and how many tokens of this sample are left."""
    place = torch.arange(tokens, device=ends.device)
    sample = torch.bucketize(place, ends[1:], right=True)
    return sample, ends[1:][sample] - place


def packed_by_mask(
    module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings
) -> tuple[Tensor, None]:
    """Attention that takes the arguments of FlashAttention's varlen kernels (causal from the lower right)."""
    if "cu_seq_lens_q" in settings:
        assert mask is None and "position_ids" not in settings  # Transformers would read them in each layer
        sample, left = place(settings["cu_seq_lens_q"].long(), query.shape[2])
        of_key, key_left = place(settings["cu_seq_lens_k"].long(), key.shape[2])
        before = key_left - left[:, None]
        mask = ((sample[:, None] == of_key) & (before >= 0) & (before < (settings.get("sliding_window") or 512)))[
            None, None
        ]
    return sdpa_attention_forward(module, query, key, value, mask, **settings)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[Tensor],
    longest: Sequence[int],
    scale: float,
    window: int,
    fault: str,
) -> Tensor:
    """Attention with the arguments of `varlen_attn`; `window`: keys before a query; `fault` as in `on_varlen`."""
    (sequence, left), (of_key, key_left) = (place(one.long(), int(one[-1])) for one in ends)
    lengths, key_lengths = (one.diff() for one in ends)
    assert [lengths.max(), key_lengths.max()] == longest and {one.dtype for one in ends} == {torch.int32}
    if fault == "upper-left":
        left = left - lengths[sequence]
        key_left = key_left - key_lengths[of_key]
    before = key_left - left[:, None]
    seen = (sequence[:, None] == of_key) & (before >= 0) & (before <= window)
    if fault == "leak":
        seen |= (sequence[:, None] == of_key + 1) & (key_left == 1)
    if fault == "alone":
        seen &= key_left <= lengths[of_key]
    if fault == "no gradient":
        key = key.detach()
    states = (one.transpose(0, 1) for one in (query, key, value))
    output = scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=True)
    return output.transpose(0, 1).contiguous()


@contextmanager
def on_varlen(*dtypes: torch.dtype, fault: str = "") -> Iterator[None]:
    """Lets packed passes on the CPU compute attention as on a GPU.

    Args:
        dtypes: those for which there is a kernel.
        fault: what is wrong with the kernel. "upper-left": its causal mask; "leak": a sequence sees the last key of the
            sequence before; "alone": a branch does not see its trunk; "no gradient": the keys get none.
    """

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):  # as in torch 2.11
        assert window_size[1] == 0 and len({one.dtype for one in (query, key, value)}) == 1
        window = window_size[0] % 512  # -1: all
        scale = scale or query.shape[2] ** -0.5
        return attended(query, key, value, [cu_seq_q, cu_seq_k], [max_q, max_k], scale, window, fault)

    with pytest.MonkeyPatch.context() as patch:
        for device in ("cpu", "cuda"):
            patch.setitem(VARLEN_DTYPES, device, dtypes)
        patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
        yield


def with_flash_stand_in(model: str, attention=packed_by_mask):
    """Loads a model that is packed as with FlashAttention."""
    AttentionInterface.register("flash_stand_in", attention)
    AttentionMaskInterface.register("flash_stand_in", sdpa_mask)
    loaded = load(model)
    loaded.config._attn_implementation = "flash_stand_in"
    return loaded


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refusal(call, *arguments, error=ValueError, **settings) -> str:
    """What the error of a call says, which is of a class, or of one of several; "" if there is none."""
    try:
        call(*arguments, **settings)
    except error as raised:
        return str(raised)
    return ""


def refused(pattern: str, call, *arguments, **settings) -> None:
    """Asserts that a call raises an error in whose text the pattern is found; `error`: see `refusal`."""
    message = refusal(call, *arguments, **settings)
    assert re.search(pattern, message), message


def user(content) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def assistant(content) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


def prompts(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i} + {3 * i} = " for i in range(count)], "answer": list(range(count))})


def conversations(dataset: Dataset) -> Dataset:
    """Makes a conversation of each prompt."""
    return dataset.map(lambda row: {"prompt": user(row["prompt"])})


class ScriptedRollouts:
    """A `rollout_func` with random completions that depend only on seed, rank and number of the call.

    Args:
        seed: the seed.
        longest: largest number of tokens of a completion.
        noise: standard deviation of the noise on the model's log-probs, like a sampler's in lower precision; None = no
            log-probs.
        unknown: share of unknown log-probs.
        filled: True = the model's log-probs replace unknown ones.
    """

    def __init__(
        self, seed: int = 0, longest: int = 24, noise: float | None = None, unknown: float = 0.0, filled: bool = False
    ):
        self.random = random.Random(seed)
        self.longest = longest
        self.noise = noise
        self.unknown = unknown
        self.filled = filled

    def __call__(self, prompts: list[str], trainer) -> dict[str, list]:
        rank = trainer.accelerator.process_index
        generator = random.Random(self.random.randrange(2**30) + rank)
        completions = [
            [generator.randrange(4, 260) for _ in range(generator.randint(0, self.longest - 1))]
            + [EOS if generator.random() < 0.7 else 77]
            for _ in prompts
        ]
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}
        if self.noise is not None:
            values = [log_probs(trainer.model, *row) for row in zip(prompt_ids, completions, strict=True)]
            output["logprobs"] = [[self._report(value, generator) for value in row] for row in values]
        return output

    def _report(self, value: float, chance: random.Random) -> float:
        reported = value + chance.gauss(0.0, self.noise)
        stand_in = chance.choice(UNKNOWN)
        if chance.random() >= self.unknown:
            return reported
        return value if self.filled else stand_in


@torch.no_grad()
def log_probs(model, prompt: list[int], completion: list[int]) -> list[float]:
    """Return log P of each token of one completion, from the logits of a plain pass."""
    logits = model(input_ids=torch.tensor([prompt + completion], device=model.device)).logits[0].log_softmax(dim=-1)
    return [logits[len(prompt) + i - 1, token].item() for i, token in enumerate(completion)]


class ScriptedReward:
    """A reward function: 0 or 1 at random. With probability `constant`, all completions of a prompt get the same.

    In the calls (generation windows) whose numbers are in `silent`, all rewards are 1.
    """

    __name__ = "scripted"

    def __init__(self, seed: int = 0, constant: float = 0.5, silent: Sequence[int] = ()):
        self.seed = seed
        self.constant = constant
        self.silent = silent
        self.calls = 0

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **kwargs) -> list[float]:
        self.calls += 1
        if self.calls - 1 in self.silent:
            return [1.0] * len(prompts)
        rewards = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            group = random.Random(f"{self.seed}{prompt}")
            row = random.Random(f"{self.seed}{prompt}{ids}")
            rewards.append(float(group.random() < 0.5) if group.random() < self.constant else float(row.random() < 0.5))
        return rewards


def parameters(of) -> dict[str, torch.Tensor]:
    """Return copies of the parameters of a trainer's model, of a model, or of the model in a folder; a dict stays."""
    if isinstance(of, dict):
        return of
    model = load(of) if isinstance(of, str) else of.model if isinstance(of, Trainer) else of
    found = {name: value.detach() for name, value in model.named_parameters()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
    return {name: value.clone().float().cpu() for name, value in whole.items()}


class Snapshots(TrainerCallback):
    """Callback that records the parameters at the start of a run, and after each step."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.start = parameters(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(parameters(model))


def noting(event: str, value: Callable[[Any], Any] = lambda rollouts: rollouts):
    """A callback whose `noted` has a value of the rollouts of each event with this name."""
    from dash_trl import DASHCallback

    noted = []
    note = {event: lambda self, args, state, control, rollouts, **kwargs: noted.append(value(rollouts))}
    return type("Noting", (DASHCallback,), {**note, "noted": noted})()


def relative_difference(start: dict, one: dict, other: dict) -> tuple[float, float]:
    """Return (largest difference of two updates relative to the largest update, largest update)."""
    update = torch.stack([(one[name] - start[name]).abs().max() for name in start]).max().item()  # NaN if one is
    difference = torch.stack([(one[name] - other[name]).abs().max() for name in start]).max().item()
    return difference / max(update, 1e-30), update


def assert_same_update(start, one, other, *, tolerance: float = 1e-5, least: float = 1e-3) -> None:
    """Asserts that both updates from `start` are equal within `tolerance`, and larger than `least`.

    Args: start, one, other: what `parameters` takes.
    """
    difference, update = relative_difference(*map(parameters, (start, one, other)))
    assert update > least and difference <= tolerance, (update, difference)


def compare(train: Callable[..., Any], **settings) -> tuple[list[tuple[float, float]], Any, Any]:
    """Trains TRL's and our trainer.

    Args:
        train: the fixture. settings: of both; those that TRL does not know are of ours.
    Returns:
        The difference and the update of each step, as in `relative_difference`, and both trainers.
    """
    from trl import GRPOConfig, GRPOTrainer

    from dash_trl import DASHConfig

    own = {field.name for field in fields(DASHConfig)} - {field.name for field in fields(GRPOConfig)}
    trls = {name: value for name, value in settings.items() if name not in own}
    one = Snapshots()
    other = Snapshots()
    trainers = train(GRPOTrainer, callbacks=[one], **trls), train(callbacks=[other], **settings)
    steps = zip(one.steps, other.steps, strict=True)
    return [relative_difference(one.start, *ends) for ends in steps], *trainers


def pad(trainer) -> None:
    """A `prepare` that gives the policy eager attention, which cannot keep packed rows apart: its passes are padded."""
    trainer.model.set_attn_implementation("eager")


def corrects(trainer) -> None:
    """A `prepare` that turns TRL's correction on: scripted rollouts and their log-probs are those of a vLLM in here."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, llm=SimpleNamespace(llm_engine=config))
    trainer._last_loaded_step = -1


@functools.cache
def leave_modules_to_themselves() -> None:
    """Excludes loaded modules from garbage collection, where `train()` would spend most of its time."""
    gc.freeze()


FIGURES = Path(__file__).parents[1] / "docs" / "reference" / "figures.md"
OWN_FIGURES = {"step", "measured", "shortest", "first_length", "calls"}  # the log's step; by log_metric in tests


@functools.cache
def figure_names() -> frozenset[str]:
    """Return the names of figures in the documentation's tables; `<name>` and `<note>` stand for any name."""
    return frozenset(re.findall(r"(?:^\| |, )`([^`]+)`(?=[^|]*\|[^|]*\|[^|]*\|$)", FIGURES.read_text(), re.MULTILINE))


@functools.cache
def is_documented(name: str) -> bool:
    patterns = [re.sub(r"<\w+>", "[^/]+", re.escape(one)) for one in figure_names() | OWN_FIGURES]
    # The names of several evaluation sets stand between the prefix and the figure.
    return any(re.fullmatch(f"(eval_(\\w+_)?)?{pattern.removeprefix('eval_')}", name) for pattern in patterns)


def check_documented(log_history: Sequence[Mapping[str, Any]]) -> None:
    missing = {name for logs in log_history for name in logs if not is_documented(name)}
    assert not missing, f"docs/reference/figures.md says nothing about {sorted(missing)}"


def run(
    trainer_class,
    model: str,
    output: Path,
    *,
    optimizer: str = "sgd",
    constant: float = 0.5,
    reward=None,
    logprobs: bool = False,
    rollouts=None,
    prepare=None,
    resume: Path | str | bool | None = None,
    peft_config=None,
    callbacks=None,
    dataset=None,
    eval_dataset=None,
    in_process: bool = False,
    loaded=None,
    more: Mapping[str, Any] | None = None,
    **settings,
):
    """Train `trainer_class` on scripted rollouts, or on those of servers; the trainer afterwards.

    `loaded` takes the place of the model in the directory `model`, which then gives the tokenizer only. `more` are
    further arguments of the trainer, and others than these here.
    """
    from trl import GRPOConfig

    from dash_trl import DASHConfig, DASHTrainer

    leave_modules_to_themselves()
    config = DASHConfig if issubclass(trainer_class, DASHTrainer) else GRPOConfig
    defaults = dict(
        output_dir=str(output),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=24,
        max_steps=1,
        learning_rate=1.0 if optimizer == "sgd" else 1e-3,
        lr_scheduler_type="constant",
        optim=optimizer,
        max_grad_norm=0.0,
        use_cpu=not ON_GPU,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    if ON_GPU:
        defaults["tf32"] = False  # otherwise, transformers turns it on with torch.compile, for all later runs, too
    if config is DASHConfig:
        defaults["share_prompts"] = True  # the prompts here are short
    args = config(**{**defaults, **settings})
    if rollouts is None and "vllm_server_urls" not in settings and not in_process:  # by transformers' generate
        rollouts = ScriptedRollouts(noise=0.1 if logprobs else None)
    arguments = dict(
        model=load(model) if loaded is None else loaded,
        reward_funcs=ScriptedReward(constant=constant) if reward is None else reward,
        args=args,
        train_dataset=prompts(64) if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        rollout_func=rollouts,
        peft_config=peft_config,
        callbacks=callbacks,
    )
    trainer = trainer_class(**{**arguments, **(more or {})})
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    if config is DASHConfig:
        check_documented(trainer.state.log_history)
    return trainer


def rows_of(prompt_ids: list[list[int]], completion_ids: list[list[int]]):
    """Rows for passes, padded with 0."""
    from dash_trl import RolloutBatch

    none = torch.zeros(len(prompt_ids), dtype=torch.long)
    fields = {"group": none, "policy_version": none}
    for name, rows, side in (("prompt_", prompt_ids, "left"), ("completion_", completion_ids, "right")):
        tokens = [torch.tensor(row).long() for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_side=side, padding_value=-1)
        fields |= {name + "ids": ids.clamp(min=0), name + "mask": (ids >= 0).long()}
    return RolloutBatch(**fields)


def said(caplog) -> str:
    """What the package warned of: of a connection that another test has left, asyncio complains at any time."""
    return "\n".join(
        one.getMessage()
        for one in caplog.records
        if one.name.startswith("dash_trl") and one.levelname == "WARNING"  # no notes of progress
    )


def leave(code: int = 0) -> NoReturn:
    """The end of a rank's process; with a failure it does not wait for the others.

    DDP keeps its process group alive when that is destroyed, and gloo's threads in it now and then abort a process that
    exits ("terminate called without an active exception"): so, without the end of the interpreter.
    """
    if code == 0 and torch.distributed.is_initialized():
        torch.distributed.barrier()  # the first rank keeps the store that the others read
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
