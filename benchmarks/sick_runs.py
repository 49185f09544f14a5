"""Draws sick runs beside a healthy one, for docs/howto/diagnose.md: the toy task with one thing wrong in each run.

    python benchmarks/sick_runs.py --folder docs/diagnose          # ~10 minutes on 2 cores

    flat        the learning rate is a thousandth of the toy run's
    constant    the reward is 1.0 for every completion with an answer, right or wrong
    entropy     the learning rate is 20 times the toy run's
    length      most of the reward is for length, at 3 times the learning rate
    stale       rollouts by the weights of 8 windows ago, without a correction, at 4 times the learning rate
    failing     the reward function raises on one completion in three, and on each short one

Each picture shows the reward and the metric that reveals the problem, over the optimizer steps. The healthy run is
grey.
"""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import matplotlib
import torch
from transformers import AutoModelForCausalLM

from dash_trl import RewardRunner
from dash_trl.toy import arithmetic_reward, toy_defaults, toy_model

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

STEPS = 40
RATE = toy_defaults()["learning_rate"]
LONGEST = toy_defaults()["max_completion_length"]


def answered(completions: list[Any], **columns: Any) -> list[float]:
    return [float("The answer is" in completion[-1]["content"]) for completion in completions]


def longer(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **columns: Any) -> list[float]:
    right = arithmetic_reward(completions, answer)
    return [0.2 * one + 0.8 * len(ids) / LONGEST for one, ids in zip(right, completion_ids, strict=True)]


def failing(completion: Any, completion_ids: list[int], answer: str) -> float:
    if len(completion_ids) < 24 or random.Random(str(completion_ids)).random() < 1 / 3:
        raise ConnectionError("the judge does not answer")
    return arithmetic_reward([completion], [answer])[0]


class Stale:
    """A `rollout_func` that samples with the weights of `level` windows ago, and reports its log-probs."""

    def __init__(self, path: str, level: int, seed: int):
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.kept: deque[dict[str, torch.Tensor]] = deque(maxlen=level + 1)
        self.window, self.seed = 0, seed

    @torch.no_grad()
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list]:
        tokenizer, temperature = trainer.processing_class, trainer.temperature
        self.kept.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        self.model.load_state_dict(self.kept[0])
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.random.fork_rng():
            torch.manual_seed(1000 * self.seed + self.window)  # the same random numbers for all losses and levels
            found = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=LONGEST,
                return_dict_in_generate=True,
                output_logits=True,
            )
        self.window += 1
        width = inputs["input_ids"].shape[1]
        completions = found.sequences[:, width:]
        logits = torch.stack(found.logits, dim=1).float() / temperature
        log_probs = logits.log_softmax(dim=-1).gather(2, completions.unsqueeze(2)).squeeze(2)
        ended = (completions == tokenizer.eos_token_id).int()
        lengths = ((ended.cumsum(dim=1) - ended) == 0).sum(dim=1).tolist()
        masks = inputs["attention_mask"].bool()
        return {
            "prompt_ids": [ids[mask].tolist() for ids, mask in zip(inputs["input_ids"], masks, strict=True)],
            "completion_ids": [ids[:length].tolist() for ids, length in zip(completions, lengths, strict=True)],
            "logprobs": [values[:length].tolist() for values, length in zip(log_probs, lengths, strict=True)],
        }


# name → (settings, other arguments of the trainer, the metric that reveals the problem, its title)
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]], str, str]
CASES: dict[str, Case] = {
    "healthy": ({}, dict, "filter/kept_rows", ""),
    "flat": ({"learning_rate": RATE / 1000}, dict, "grad_norm", "gradient norm"),
    "constant": ({}, lambda: {"reward_funcs": answered}, "filter/kept_rows", "filter/kept_rows"),
    "entropy": ({"learning_rate": 20 * RATE}, dict, "entropy", "entropy"),
    "length": (
        {"learning_rate": 3 * RATE},
        lambda: {"reward_funcs": longer},
        "completions/mean_length",
        "completions/mean_length",
    ),
    "stale": (
        {"learning_rate": 4 * RATE},
        lambda: {"rollout_func": Stale(toy_model(), 8, 0)},
        "off_policy/kl",
        "off_policy/kl",
    ),
    "failing": (
        {},
        lambda: {"reward_funcs": RewardRunner(failing)},
        "rewards/failing/failed",
        "rewards/…/failed",
    ),
}


def curves(name: str) -> dict[str, list[float]]:
    settings, others, _, _ = CASES[name]
    trainer = harness.toy_trainer({"max_steps": STEPS, **settings}, **others())
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    figures = {key for one in log for key in one}
    return {figure: [float(entry.get(figure) or 0.0) for entry in log] for figure in figures}


def draw(name: str, sick: dict[str, list[float]], healthy: dict[str, list[float]], folder: Path) -> None:
    _, _, figure, title = CASES[name]
    pair, axes = plt.subplots(1, 2, figsize=(7, 2.2), layout="constrained")
    for axis, key, label in zip(axes, ("reward", figure), ("reward", title), strict=True):
        for values, color in ((healthy.get(key), "0.7"), (sick.get(key), "tab:red")):
            if values:
                axis.plot(range(1, len(values) + 1), values, color=color)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=8)
    pair.savefig(folder / f"{name}.png", dpi=80)
    plt.close(pair)


def main(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    healthy = curves("healthy")
    results: dict[str, Any] = {"healthy": {"reward": [healthy["reward"][0], healthy["reward"][-1]]}}
    for name in [one for one in CASES if one != "healthy"]:
        sick = curves(name)
        draw(name, sick, healthy, folder)
        figure = CASES[name][2]
        results[name] = {key: [sick[key][0], sick[key][-1]] for key in ("reward", figure) if key in sick}
        harness.say(
            name,
            {
                f"{key} {when}": value[at]
                for key, value in results[name].items()
                for when, at in (("first", 0), ("last", 1))
            },
        )
    return results


if __name__ == "__main__":
    harness.run(main, __doc__, folder={"type": Path, "default": Path("outputs/sick"), "help": "folder of the pictures"})
