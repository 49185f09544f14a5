"""How good is a model? Sampled or greedy accuracy and pass@k, measured with a reward function.

    prompts ──► sample_completions ──► reward function ──► Evaluation: accuracy, pass@k, failed rewards

Letters: P prompts, S samples of each. Samples come from the model's own distribution at the given temperature: top-k,
top-p and repetition penalties that a model's `generation_config` may ask for are switched off, as in TRL.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

CORRECT_ABOVE = 0.5  # a completion with a greater reward is correct: the middle of a 0/1 reward


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is correct.

        pass@k = 1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, arXiv 2107.03374, equation 1)

    Args:
        n: samples drawn. c: correct ones among them. k: 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}) is undefined: it needs 0 <= c <= n and 1 <= k <= n samples.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Evaluation:
    """The samples of one evaluation.

    Args:
        completions: P lists of S texts.
        rewards: P lists of S rewards; `None` where the reward failed (was None, NaN or infinite).
    """

    completions: list[list[str]]
    rewards: list[list[float | None]]

    @property
    def scored(self) -> list[float]:
        return [reward for row in self.rewards for reward in row if reward is not None]

    @property
    def failed(self) -> int:
        """Samples without a usable reward. They count neither as right nor as wrong."""
        return sum(len(row) for row in self.rewards) - len(self.scored)

    @property
    def accuracy(self) -> float:
        """Share of correct completions among the scored ones; NaN if none is."""
        scored = self.scored
        return sum(reward > CORRECT_ABOVE for reward in scored) / len(scored) if scored else math.nan

    def pass_at(self, k: int) -> float:
        """Mean pass@k over the prompts with at least k scored samples; NaN if there is none."""
        estimates = []
        for row in self.rewards:
            scored = [reward for reward in row if reward is not None]
            if len(scored) >= k:
                estimates.append(pass_at_k(len(scored), sum(reward > CORRECT_ABOVE for reward in scored), k))
        return sum(estimates) / len(estimates) if estimates else math.nan


@contextmanager
def _inference(model: Any, seed: int) -> Iterator[None]:
    """Evaluation mode, no gradients and a seeded RNG inside; all of it as before outside."""
    training = {module: module.training for module in model.modules()}
    try:
        # All devices, since manual_seed reaches all of them.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
            torch.manual_seed(seed)
            model.eval()
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokenizer's end of sequence and those that the model declares, as TRL takes them."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return list(dict.fromkeys([*declared, tokenizer.eos_token_id]))


def _prompt_ids(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _sample_ids(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
) -> list[list[int]]:
    """P·S completions, the samples of a prompt adjacent, each up to and including its first end token."""
    if temperature < 0 or num_samples < 1 or (temperature == 0 and num_samples > 1):
        raise ValueError(
            f"temperature={temperature} with num_samples={num_samples}: greedy decoding (temperature 0) gives one "
            "sample per prompt. Use num_samples=1, or a temperature above 0."
        )
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    # Neutral values, not absent ones: generate() fills absent ones from the model's generation_config.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": None}
    if temperature == 0:
        sampling = {"do_sample": False}
    rows = [ids for prompt in prompts for ids in [_prompt_ids(tokenizer, prompt)] * num_samples]
    completions = []
    with _inference(model, seed):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            width = max(map(len, batch))
            generated = model.generate(
                input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in batch], device=model.device),
                attention_mask=torch.tensor(
                    [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=model.device
                ),
                max_new_tokens=max_new_tokens,
                repetition_penalty=1.0,
                pad_token_id=pad,
                eos_token_id=ends,
                **sampling,
            )
            for ids in generated[:, width:].tolist():
                length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
                completions.append(ids[:length])
    return completions


def sample_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[str]]:
    """`num_samples` completions of each prompt: P lists of S texts, without special tokens.

    The model's mode and the global RNG state are afterwards what they were before. The samples depend on `seed` and on
    `batch_size`.

    Args:
        model: a causal language model on any device; unwrapped (`trainer.accelerator.unwrap_model`).
        tokenizer: with a chat template if the prompts are conversational.
        prompts: texts or lists of messages.
        temperature: 0 decodes greedily.
    """
    ids = _sample_ids(model, tokenizer, prompts, num_samples, temperature, max_new_tokens, seed, batch_size)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]


def evaluate(
    model: Any,
    tokenizer: Any,
    dataset: Any,
    reward_func: Callable[..., Sequence[float | None]],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = 64,
) -> Evaluation:
    """Samples every prompt of a data set and scores the samples with a TRL-style reward function.

    A reward that is None, NaN or infinite has failed: it is left out and counted in `Evaluation.failed`, never taken
    for 0. An exception of the reward function is not caught.

    Args:
        dataset: rows with a `prompt`; its other columns go to the reward function, as in TRL.
        reward_func: called once, with `prompts`, `completions`, `completion_ids` and the columns.
    """
    rows: list[Mapping[str, Any]] = list(dataset)
    prompts = [row["prompt"] for row in rows]
    ids = _sample_ids(model, tokenizer, prompts, num_samples, temperature, max_new_tokens, seed, batch_size)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    repeated = [row for row in rows for _ in range(num_samples)]
    rewards = reward_func(
        prompts=[row["prompt"] for row in repeated],
        completions=[
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(repeated, texts, strict=True)
        ],
        completion_ids=ids,
        **{name: [row[name] for row in repeated] for name in (rows[0] if rows else {}) if name != "prompt"},
    )
    usable = [None if reward is None or not math.isfinite(reward) else float(reward) for reward in rewards]
    if len(usable) != len(texts):
        raise ValueError(f"The reward function returned {len(usable)} rewards for {len(texts)} completions.")
    starts = range(0, len(texts), num_samples)
    return Evaluation(
        completions=[texts[start : start + num_samples] for start in starts],
        rewards=[usable[start : start + num_samples] for start in starts],
    )


def accuracy(
    model: Any, tokenizer: Any, dataset: Any, reward_func: Callable[..., Sequence[float | None]], **sampling: Any
) -> float:
    """`evaluate(...).accuracy`, with a warning that counts the failed rewards, if any."""
    result = evaluate(model, tokenizer, dataset, reward_func, **sampling)
    if result.failed:
        logger.warning(
            "%d of %d rewards failed and are left out of the accuracy.",
            result.failed,
            result.failed + len(result.scored),
        )
    return result.accuracy
