"""Measures what staleness costs each loss, on the toy task with rollouts that are exactly k windows old; no servers.

    python benchmarks/staleness_learning.py --json staleness_learning.json          # ~16 minutes on 2 cores
    python benchmarks/staleness_learning.py --seeds 2 --levels 8 --rates 6e-4       # a quick look, 3 minutes

Before each window the policy's weights are copied. A second model samples the window with the copy of k windows ago (in
the first k windows, with the first weights) and reports its log-probs μ. A window is one optimizer step, so a rollout
is exactly k steps old. With the same seed, all losses and all k have the same problems in the same order, the same
first weights and the same random numbers for sampling. The losses (docs/concepts/staleness.md):

    dapo             TRL's default without correction: rollouts count as if the current weights had sampled them
    sequence_mask    dapo with TRL's default correction: sequences with Π π_prox/μ > 3 are left out
    ppo              dapo with μ as the old log-probs, so PPO clips the ratio to the sampler at 0.2: AReaL's "naive PPO"
    decoupled_ppo, aipo, aipo_detached

At k = 0 all losses have the gradient of dapo, so only dapo runs with k = 0. The figures are means with 95 % intervals
(Student's t over seeds):

- `accuracy`: sampled at temperature 1 after the last step, on 256 held-out problems with 4 completions each.
- `change`: accuracy minus the accuracy at k = 0 with the same seed.
- `clipped`: share of the survivors' tokens that the loss truncates or masks (`off_policy/clipped_share`; for ppo, TRL's
  clip ratio over all tokens), mean over the steps.
- `kl`: `off_policy/kl`, mean over the steps.

The learning rate decays to 0, as in the toy run. It begins at 6e-4, where staleness has an effect while k = 0 still
learns about as well as in the toy run. The largest k also runs with the learning rate of the toy run.
"""

import multiprocessing
import statistics
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import harness
import torch
from transformers import AutoModelForCausalLM

from dash_trl.toy import toy_defaults, toy_model

LEVELS, SEEDS = (1, 2, 4, 8), 3
RATES = {6e-4: LEVELS, toy_defaults()["learning_rate"]: LEVELS[-1:]}  # learning rate → levels
STEPS, PROMPTS, LONGEST, SAMPLES = 40, 8, 48, 4

# Loss → (options, settings that replace the result of `loss_settings`; None = nothing is replaced).
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "dapo": ({"loss_type": "dapo"}, None),
    "sequence_mask": ({"loss_type": "dapo"}, {"use_vllm": True}),  # TRL corrects only with use_vllm
    "ppo": ({"loss_type": "aipo"}, {"loss_type": "dapo", "vllm_importance_sampling_correction": False}),
    "decoupled_ppo": ({"loss_type": "decoupled_ppo"}, None),
    "aipo": ({"loss_type": "aipo"}, None),
    "aipo_detached": ({"loss_type": "aipo", "aipo_detached": True}, None),
}


class Stale:
    """A `rollout_func` that samples with the weights of `level` windows ago."""

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


def run(loss: str, level: int, seed: int, rate: float, steps: int) -> dict[str, Any]:
    """Trains and measures once, with one thread. Called in a process of its own."""
    torch.set_num_threads(1)
    options, loss_settings = LOSSES[loss]
    started = time.process_time()
    settings = {"seed": seed, "max_steps": steps, "learning_rate": rate, **options}
    settings |= {"gradient_accumulation_steps": PROMPTS, "max_completion_length": LONGEST}
    with ExitStack() as patches:
        for module in ("assembly", "trainer") if loss_settings is not None else ():
            patches.enter_context(patch(f"dash_trl.{module}.loss_settings", lambda *args, **kwargs: loss_settings))
        trainer = harness.toy_trainer(settings, rollout_func=Stale(toy_model(), level, seed))
        trainer.train()
    log = trainer.state.log_history
    sampling = {"num_samples": SAMPLES, "max_completion_length": LONGEST, "batch_size": 256}
    final = harness.accuracy(trainer.model, trainer.processing_class, **sampling)

    def mean(name: str) -> float:
        values = [entry[name] for entry in log if name in entry]
        return statistics.mean(values) if values else 0.0

    return {
        "loss": loss,
        "level": level,
        "seed": seed,
        "rate": rate,
        "accuracy": final,
        "clipped": mean("clip_ratio/region_mean" if loss == "ppo" else "off_policy/clipped_share"),
        "kl": mean("off_policy/kl"),
        "rewards": [entry["reward"] for entry in log if "reward" in entry],
        "cpu_seconds": time.process_time() - started,
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns and prints a row for each (learning rate, loss, level)."""
    cells: dict[tuple[float, str, int], dict[int, dict[str, Any]]] = {}
    for one in runs:
        cells.setdefault((one["rate"], one["loss"], one["level"]), {})[one["seed"]] = one
    rows = []
    for rate, loss, level in sorted(cells, key=lambda cell: (-cell[0], list(LOSSES).index(cell[1]), cell[2])):
        seeds, fresh = cells[rate, loss, level], cells.get((rate, "dapo", 0), {})
        changes = [seeds[seed]["accuracy"] - fresh[seed]["accuracy"] for seed in seeds.keys() & fresh.keys()]
        row = {
            "rate": rate,
            "loss": loss,
            "level": level,
            "accuracy": harness.interval([one["accuracy"] for one in seeds.values()]),
            "change": harness.interval(changes) if level else None,
            "clipped": statistics.mean(one["clipped"] for one in seeds.values()),
            "kl": statistics.mean(one["kl"] for one in seeds.values()),
        }
        harness.say(loss, row)
        rows.append(row)
    return rows


def main(
    seeds: int, rates: list[float], levels: list[int] | None, losses: list[str], steps: int, workers: int
) -> dict[str, Any]:
    toy_model()
    grid = [
        (loss, level, seed, rate)
        for rate in rates
        for seed in range(seeds)
        for level in (0, *(levels or RATES.get(rate, LEVELS)))
        for loss in (losses if level else ["dapo"])
    ]
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, *one, steps) for one in grid]):
            runs.append(done.result())
            harness.say(f"{len(runs)}/{len(grid)} {runs[-1]['loss']}", runs[-1])
    return {"steps": steps, "summary": summary(runs), "runs": runs}


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        seeds={"type": int, "default": SEEDS, "choices": range(2, 9), "metavar": "2-8"},
        rates={"type": float, "nargs": "+", "default": list(RATES), "help": "learning rates"},
        levels={"type": int, "nargs": "+", "help": "values of k above 0; default: see RATES"},
        losses={"nargs": "+", "choices": LOSSES, "default": list(LOSSES), "metavar": "LOSS"},
        steps={"type": int, "default": STEPS},
        workers={"type": int, "default": 2, "help": "processes of one thread each"},
    )
