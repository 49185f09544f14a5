"""The default run without data, network or GPU: a tiny language model that adds and subtracts, and slips.

    problem 7+5-3 ──► the model writes   7+5=12        ──► reward 1 if the last "The answer is N" is right
                                         12-3=9
                                         The answer is 9

A supervised warm-up (under a minute on two cores, cached on disk) teaches the model to work step by step, from traces
in which a step is wrong now and then. So it knows the sums (greedy accuracy near 1) but has learned the habit of
slipping, too (sampled accuracy near 0.4), and reinforcement learning has something to remove within a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

MODEL_NAME = "arithmetic"  # begins the names of cached models
FORMAT_VERSION = 3  # of the cached model: raise it when code below changes what a warm-up produces

# ------------------------------------------------------------------------------------------------------- the problems

OPERANDS = (3, 4, 5)  # numbers in a chain: two to four sums
LARGEST_OPERAND = 9
LARGEST_TOTAL = 20  # of any step; some 300 different sums, few enough to learn in half a minute
TEST_SHARE = 8  # one problem in 8 is a test problem, by the hash of its text
LARGEST_DATASET = 20_000  # distinct problems; there are some 5,000 of three numbers in the training split
TEST_PROBLEMS, TRAIN_PROBLEMS = 256, 4096

_ANSWER = re.compile(r"The answer is (-?\d+(?:\.\d+)?)")


def _split_of(problem: str) -> str:
    """The split that a problem belongs to for good: stable over processes, machines and seeds."""
    return "test" if hashlib.sha256(problem.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def _problems(split: str, generator: random.Random, operands: Sequence[int] = OPERANDS) -> Iterator[str]:
    """Endless chains like `7+5-3+8` of this split; every running total lies in 0…LARGEST_TOTAL."""
    while True:
        total = generator.randint(1, LARGEST_OPERAND)
        problem = str(total)
        for _ in range(generator.choice(operands) - 1):
            operand = generator.randint(1, LARGEST_OPERAND)
            signs = [sign for sign in (1, -1) if 0 <= total + sign * operand <= LARGEST_TOTAL]
            sign = generator.choice(signs)
            total += sign * operand
            problem += f"{'+' if sign > 0 else '-'}{operand}"
        if _split_of(problem) == split:
            yield problem


def _answer(problem: str) -> int:
    return sum(int(number) for number in re.findall(r"[+-]?\d+", problem))


def arithmetic_dataset(
    split: str = "train", size: int | None = None, seed: int = 0, *, operands: Sequence[int] = OPERANDS
) -> Dataset:
    """Distinct arithmetic problems with the columns `prompt` (one user message) and `answer` (a string).

    Args:
        split: "train" or "test". A problem's text decides its split, so the two are disjoint for all seeds.
        size: number of problems; by default 4,096 for training and 256 for the test.
        seed: another seed draws other problems of the same split.
        operands: how many numbers a problem may have.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} does not exist. Use 'train' or 'test'.")
    size = size if size is not None else (TEST_PROBLEMS if split == "test" else TRAIN_PROBLEMS)
    if not 1 <= size <= LARGEST_DATASET:
        raise ValueError(
            f"size={size} is not in 1…{LARGEST_DATASET}: the problems are distinct and there are not endlessly many. "
            "Use fewer and train for several epochs."
        )
    chosen: dict[str, None] = {}  # a set that keeps its order
    for problem in _problems(split, random.Random(f"{split}{seed}"), operands):
        chosen[problem] = None
        if len(chosen) == size:
            break
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": problem}] for problem in chosen],
            "answer": [str(_answer(problem)) for problem in chosen],
        }
    )


def arithmetic_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the completion's last "The answer is N" is the answer, else 0.0. No answer is a wrong answer."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = _ANSWER.findall(text)
        rewards.append(float(bool(found) and found[-1] == gold))
    return rewards


# ------------------------------------------------------------------------------------------------------ the tokenizer

END_OF_TURN, PADDING, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"

# Qwen2.5's ChatML without its system prompt, which would double the length of these prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def arithmetic_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE with the few merges of this task: each word and each digit is one token.

    It has to be Qwen2's in everything but the merges: `AutoTokenizer` (and so vLLM) loads the tokenizer of any model of
    type qwen2 as a `Qwen2Tokenizer`, whatever pre-tokenizer was saved with it.
    """
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # a ceiling: the few words below need fewer
        special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["The answer is", "Wait", "user", "assistant"], trainer)
    learned = json.loads(backend.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        extra_special_tokens=[START_OF_TURN],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# -------------------------------------------------------------------------------------------------------- the warm-up


@dataclass(frozen=True)
class WarmUp:
    """How the embedded model is made. Every field is part of the name under which the model is cached.

    Args:
        steps, batch_size, learning_rate: AdamW with a short linear warm-up and a linear decay.
        clean_share: of the steps, the first ones, are without slips and corrections: the sums are learned before the
            habit, which halves the time.
        slip_rate: probability that a step of a trace is wrong and stays so. Sets the sampled accuracy.
        wait_rate: probability that a step is wrong, noticed ("Wait, ...") and done again.
        hidden_size, num_layers, num_heads: of the Qwen2 model. vLLM's attention kernels take heads of 32, 64, 96, …
        operands: how many numbers a problem may have.
        seed: of the weights and the traces.
    """

    steps: int = 400
    batch_size: int = 48
    learning_rate: float = 3e-3
    clean_share: float = 0.7
    slip_rate: float = 0.1
    wait_rate: float = 0.05
    hidden_size: int = 96
    num_layers: int = 4
    num_heads: int = 3
    operands: tuple[int, ...] = OPERANDS
    seed: int = 0


CONTEXT = 2048  # room for the problems of other datasets, which this tokenizer writes byte by byte
INITIALIZER_RANGE = 0.08  # with the usual 0.02 a model this narrow takes twice the steps to learn the sums
ROPE_THETA = 100.0  # for texts of some 50 tokens; the usual 10,000 leaves most frequencies idle, and took twice as long


def _trace(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    """A solution in the model's language, with slips and corrections at the given rates per step.

    A slip is any other number with equal probability: a floor of noise under every sum, which reinforcement learning
    can lower as a whole. Slips to the neighbours (±1, ±2) would have to be unlearned sum by sum.
    """
    first, *operations = re.findall(r"[+-]?\d+", problem)
    total, lines = int(first), []
    for operation in operations:
        left, right = f"{total}{operation}=", total + int(operation)
        wrong = generator.choice([number for number in range(LARGEST_TOTAL + 1) if number != right])
        fate = generator.random()
        if fate < slip_rate:
            lines.append(f"{left}{wrong}")
            total = wrong
        elif fate < slip_rate + wait_rate:
            lines += [f"{left}{wrong}", f"Wait, {left}{right}"]
            total = right
        else:
            lines.append(f"{left}{right}")
            total = right
    return "\n".join([*lines, f"The answer is {total}"])


def _batch(
    tokenizer: Qwen2Tokenizer,
    problems: Iterator[str],
    generator: random.Random,
    settings: WarmUp,
    *,
    clean: bool,
) -> dict[str, torch.Tensor]:
    """`batch_size` prompts with their traces, padded on the right; the loss is on the trace and its end."""
    rows, labels = [], []
    for _ in range(settings.batch_size):
        problem = next(problems)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True, tokenize=False
        )
        slip_rate, wait_rate = (0.0, 0.0) if clean else (settings.slip_rate, settings.wait_rate)
        trace = _trace(problem, generator, slip_rate, wait_rate) + END_OF_TURN
        prompt_ids, trace_ids = tokenizer([prompt, trace], add_special_tokens=False)["input_ids"]
        rows.append(prompt_ids + trace_ids)
        labels.append([-100] * len(prompt_ids) + trace_ids)
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    }


def _model(tokenizer: Qwen2Tokenizer, settings: WarmUp) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=3 * settings.hidden_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            num_key_value_heads=settings.num_heads,
            max_position_embeddings=CONTEXT,
            initializer_range=INITIALIZER_RANGE,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def _warm_up(tokenizer: Qwen2Tokenizer, settings: WarmUp, progress: bool) -> Qwen2ForCausalLM:
    """Trains a model on slipping traces of training problems, in an RNG state of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = random.Random(settings.seed)
    problems = _problems("train", generator, settings.operands)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(settings.seed)
        model = _model(tokenizer, settings).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
        ramp = max(1, settings.steps // 10)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / ramp, (settings.steps - step) / settings.steps)
        )
        bar = tqdm(range(settings.steps), desc="Warming up the embedded model (once)", disable=not progress)
        for step in bar:
            batch = _batch(tokenizer, problems, generator, settings, clean=step < settings.clean_share * settings.steps)
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.cpu()


def _cache_path(settings: WarmUp, cache_dir: str | Path | None = None) -> Path:
    """Where the model of these settings is, or will be."""
    if cache_dir is None:
        configured = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path there is invalid and to be ignored.
        cache_dir = (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "dash_trl"
    key = json.dumps({"format": FORMAT_VERSION, **asdict(settings)}, sort_keys=True)
    return Path(cache_dir) / f"{MODEL_NAME}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def embedded_model(cache_dir: str | Path | None = None, *, settings: WarmUp = WarmUp(), progress: bool = True) -> str:
    """The directory of the warmed-up model and its tokenizer, made on the first call and cached for the next ones.

    The model is written beside its final place and moved there in one step, so that an interrupted warm-up leaves no
    half cache and of several concurrent ones the first to finish wins. What a killed one left is removed by the next.
    In a distributed launch let the main process call it first; the others would do the same work again.

    Args:
        cache_dir: by default `$XDG_CACHE_HOME/dash_trl` or `~/.cache/dash_trl`.
        settings: another warm-up is cached under another name.
        progress: show a progress bar.
    """
    final = _cache_path(settings, cache_dir)
    folder = final.parent
    if final.is_dir():
        return str(final)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = stack.enter_context(_unfinished(folder, final.name))
        except OSError as error:
            raise ValueError(
                f"The embedded model cannot be cached in {folder} ({error}). Pass a writable cache_dir, or set "
                "XDG_CACHE_HOME to one."
            ) from error
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        # `accelerate launch` leaves a process one thread; a second one takes a third of the time off.
        torch.set_num_threads(max(threads, min(2, os.cpu_count() or 1)))
        tokenizer = arithmetic_tokenizer()
        _warm_up(tokenizer, settings, progress).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            os.replace(unfinished, final)
        except OSError:
            if not final.is_dir():  # else a concurrent call was first, and its model is as good
                raise
    return str(final)


@contextmanager
def _unfinished(folder: Path, name: str) -> Iterator[Path]:
    """A new directory for a warm-up, removed at the end, if it is still there. First removes those of dead processes.

    A warm-up holds a lock on its directory, which the kernel takes away with the process, whatever ended it. The folder
    is locked meanwhile, so that nobody sees a directory between its making and its locking. Where there are no locks,
    nothing of others is removed.
    """
    with ExitStack() as stack:
        with _locked(folder, fcntl.LOCK_EX) as alone:
            for left in folder.glob(f"{MODEL_NAME}-*.*") if alone else ():
                with _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB) as dead:
                    if dead:
                        shutil.rmtree(left, ignore_errors=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))
            stack.callback(shutil.rmtree, unfinished, ignore_errors=True)
            stack.enter_context(_locked(unfinished, fcntl.LOCK_EX))
        yield unfinished


@contextmanager
def _locked(directory: Path, operation: int) -> Iterator[bool]:
    """Whether the lock on the directory could be had; free again at the end."""
    with ExitStack() as stack:
        held = False
        with suppress(OSError):  # somebody else's, or a file system without locks
            lock = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, operation)
            held = True
        yield held


# --------------------------------------------------------------------------------------------- reinforcement learning


def embedded_defaults() -> dict[str, Any]:
    """`DASHConfig` fields of the default run: 80 optimizer steps of 128 rows, 16 problems with 8 completions each.

    In float32, on the GPU if there is one. The learning rate decays, since near the end a constant one unlearns a sum
    as often as it learns another; much more of it (3e-4) makes the model forget.
    """
    return {
        "output_dir": "outputs/embedded",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "num_generations": 8,
        "max_completion_length": 64,
        "max_steps": 80,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "linear",
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
