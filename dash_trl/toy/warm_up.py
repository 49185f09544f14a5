"""Trains the toy model by a supervised warm-up, caches it on disk, and defines the settings of the default run.

The model learns step-by-step solutions with some wrong lines (slips): it knows the sums (greedy accuracy near 1), but
slips (sampled accuracy near 0.4), which reinforcement learning can cure within a minute.
"""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from dash_trl._cache import cache_folder
from dash_trl.toy.problems import LARGEST_TOTAL, problems_of
from dash_trl.toy.tokenizer import END_OF_TURN, arithmetic_tokenizer

FORMAT_VERSION = 3  # part of the cached model's name: increase it when a change of the code changes the model


@dataclass(frozen=True)
class WarmUp:
    """Settings of the warm-up of the toy model. Their hash is part of the cached model's name.

    Args:
        steps: number of AdamW steps. The learning rate has a short linear warm-up and a linear decay.
        batch_size: number of solutions per step.
        learning_rate: the peak learning rate.
        clean_share: share of the steps, at the beginning, without slips; learning the sums first halves the time.
        slip_rate: probability that an operation has a wrong result.
        wait_rate: probability of a wrong result that the next line ("Wait, ...") corrects.
        hidden_size, num_layers, num_heads: shape of the Qwen2 model. vLLM's attention kernels need
            `hidden_size / num_heads` = 32, 64, 96, …
        seed: seed of the weights and the solutions.
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
    seed: int = 0


CONTEXT = 2048  # tokens; enough for problems of other datasets, which this tokenizer encodes byte by byte
INITIALIZER_RANGE = 0.08  # with the usual 0.02, a model this narrow needs twice the steps to learn the sums
# Fits texts of about 50 tokens. With the usual 10,000, most frequencies are unused, and learning took twice as long.
ROPE_THETA = 100.0


def _trace(problem: str, generator: random.Random, slip_rate: float, wait_rate: float) -> str:
    """Return a solution with one operation per line. The rates are those of `WarmUp`.

    A slip is any wrong number: uniform noise on every sum, which reinforcement learning can reduce for all at once.
    """
    first, *operations = re.findall(r"[+-]?\d+", problem)
    total = int(first)
    lines = []
    for operation in operations:
        left = f"{total}{operation}="
        right = total + int(operation)
        wrong = generator.choice([number for number in range(LARGEST_TOTAL + 1) if number != right])
        fate = generator.random()
        total = wrong if fate < slip_rate else right
        if slip_rate <= fate < slip_rate + wait_rate:
            lines += [f"{left}{wrong}", f"Wait, {left}{right}"]
        else:
            lines.append(f"{left}{total}")
    return "\n".join([*lines, f"The answer is {total}"])


Solution = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Lessons:
    """The task that the model learns in the warm-up.

    Args:
        name: the beginning of the cached model's name.
        tokenizer: makes the model's tokenizer.
        problems: yields problems of the training split without end.
        solution: takes a problem, a random generator, and `slip_rate` and `wait_rate` of `WarmUp`; returns a text, or
            messages of the assistant and of tools.
        tools: their JSON schemas.
    """

    name: str
    tokenizer: Callable[[], Qwen2Tokenizer]
    problems: Callable[[random.Random], Iterator[str]]
    solution: Callable[[str, random.Random, float, float], Solution]
    tools: Sequence[dict[str, Any]] = ()


ARITHMETIC = Lessons("arithmetic", arithmetic_tokenizer, partial(problems_of, "train"), _trace)


def _row(
    tokenizer: Qwen2Tokenizer, problem: str, solution: Solution, tools: Sequence[dict[str, Any]]
) -> dict[str, list[int]]:
    """Return token ids of a prompt with its solution, and labels: -100 for tokens that the model does not write."""
    prompt = [{"role": "user", "content": problem}]
    if not isinstance(solution, str):
        rendered = tokenizer.apply_chat_template(
            prompt + solution, tools=list(tools), return_dict=True, return_assistant_tokens_mask=True
        )
        ids = rendered["input_ids"]
        written = rendered["assistant_masks"]
        return {
            "input_ids": ids,
            "labels": [token if own else -100 for token, own in zip(ids, written, strict=True)],
        }
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    prompt_ids, trace_ids = tokenizer([text, solution + END_OF_TURN], add_special_tokens=False)["input_ids"]
    return {"input_ids": prompt_ids + trace_ids, "labels": [-100] * len(prompt_ids) + trace_ids}


def _warm_up(tokenizer: Qwen2Tokenizer, settings: WarmUp, progress: bool, lessons: Lessons) -> Qwen2ForCausalLM:
    """Train a model on solutions with slips; torch's global random state stays unchanged."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # here, because importing it takes seconds

    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = random.Random(settings.seed)
    problems = lessons.problems(generator)
    config = Qwen2Config(
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
    )
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(settings.seed)
        model = Qwen2ForCausalLM(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        ramp = max(1, settings.steps // 10)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / ramp, (settings.steps - step) / settings.steps)
        )
        bar = tqdm(range(settings.steps), desc="Warming up the toy model (once)", disable=not progress)
        for step in bar:
            clean = step < settings.clean_share * settings.steps
            rates = (0.0, 0.0) if clean else (settings.slip_rate, settings.wait_rate)
            rows = [
                _row(tokenizer, problem, lessons.solution(problem, generator, *rates), lessons.tools)
                for problem in islice(problems, settings.batch_size)
            ]
            loss = model(**{name: tensor.to(device) for name, tensor in collate(rows).items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.cpu()


def toy_model(
    *,
    settings: WarmUp = WarmUp(),
    progress: bool = True,
    lessons: Lessons = ARITHMETIC,
) -> str:
    """Return the directory of the toy model and its tokenizer. The first call trains the model and caches it.

    The cache is `$XDG_CACHE_HOME/dash_trl` or `~/.cache/dash_trl`.

    Args:
        settings: settings of the warm-up; each has its own model in the cache.
        progress: whether to show a progress bar.
        lessons: the task that the model learns.
    """

    def make(folder: Path) -> None:
        tokenizer = lessons.tokenizer()
        _warm_up(tokenizer, settings, progress, lessons).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached_model(lessons.name, asdict(settings), make)


def cached_model(name: str, settings: Mapping[str, object], make: Callable[[Path], None]) -> str:
    """Return the directory of a model that is made once and then cached.

    An interrupted call leaves no incomplete model. Of several processes, one makes the model and the others wait.

    Args:
        name: the beginning of the directory's name.
        settings: values of JSON, whose hash ends the directory's name.
        make: writes the model into a given directory.
    """
    folder = cache_folder()
    key = json.dumps({"format": FORMAT_VERSION, **settings}, sort_keys=True)
    final = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if final.is_dir():  # the cache may be read-only
        return str(final)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(final.with_suffix(".lock")):
        if not final.is_dir():
            unfinished = final.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(final)
    return str(final)


def toy_defaults() -> dict[str, Any]:
    """Return the `DASHConfig` fields of the default run: 80 optimizer steps of 16 problems with 8 rows each.

    With a constant learning rate, or one of 3e-4, the model would forget one sum while it learns another.
    """
    return {
        "output_dir": "outputs/toy",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "num_generations": 8,
        "max_completion_length": 64,
        "max_steps": 80,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "linear",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
