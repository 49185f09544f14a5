"""Measures how much time of V(prefix) is hidden if it is computed while a real vLLM server samples.

    python benchmarks/value_overlap.py --json value_overlap.json          # ~6 minutes on 2 cores

Values are computed either early, as each group arrives, or after all groups have arrived. The two ways alternate, with
the same lengths. A window has 16 groups of 4 completions with lognormal lengths and an episode every 16 tokens; the toy
model ignores its end token. Either the trainer's model (`AnswerLogProbValue`) or the server (`ServerValue`) computes
the log-prob of the answer at each boundary. Nothing is learned (learning rate 0). The server runs on one core, the
trainer on another. The figures are medians over windows:

    sample   `time/generate` in seconds
    values   `time/values` in seconds, for which the trainer waits
    hidden   the decrease of sample + values if values begin early, as a share of the values' seconds afterwards
"""

import math
import random
import statistics
from typing import Any

import harness
from transformers import TrainerCallback

from dash_trl.process_rewards import AnswerLogProbValue, ProcessRewardCallback, ServerValue
from dash_trl.sampling import VLLMPool
from dash_trl.toy import toy_model

GROUPS, GROUP = 16, 4
MEDIAN, SPREAD, LONGEST = 60, 0.8, 400  # tokens of a completion: exp(N(ln MEDIAN, SPREAD)), at most LONGEST
EPISODE = 16  # tokens
WINDOWS = 12  # number of counted windows of each way; one more window precedes them


class InTurn(TrainerCallback):
    """Callback that lets values begin early in every second window, and records the seconds of each window."""

    def __init__(self, process: ProcessRewardCallback):
        self.process, self.early = process, process.on_group_sampled
        self.seconds: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.process.on_group_sampled = self.early if state.global_step % 2 else lambda *_, **__: None  # type: ignore[method-assign]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "time/generate" in logs:
            self.seconds.append({"sample": logs["time/generate"], "values": logs["time/values"]})


def lengths(window: int) -> list[int]:
    """Returns the length of each group's completions; both windows of a pair have the same lengths."""
    draw = random.Random(window // 2)
    return [min(max(round(draw.lognormvariate(math.log(MEDIAN), SPREAD)), 8), LONGEST) for _ in range(GROUPS)]


class WithLengths(VLLMPool):
    """Server pool that samples completions of `lengths`."""

    def _jobs(self, window: int, prompts: list[list[int]], num_generations: int, max_tokens: Any = None) -> list[Any]:
        longest = [length for length in lengths(window) for _ in range(GROUP)]
        return super()._jobs(window, prompts, num_generations, longest)


def found(value: Any, url: str) -> dict[str, Any]:
    """Runs the windows with one value estimator; returns its figures."""
    process = ProcessRewardCallback(value, max_episode_tokens=EPISODE, min_episode_tokens=1, skip_solved=False)
    clock = InTurn(process)
    settings = {
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "max_steps": 2 * (WINDOWS + 1),
        "learning_rate": 0.0,
        "logging_steps": 1,
        "vllm_server_urls": [url],
        "generation_kwargs": {"ignore_eos": True},
    }
    trainer = harness.toy_trainer(settings, callbacks=[process, clock])
    trainer.vllm_generation.__class__ = WithLengths
    trainer.train()
    after, early = clock.seconds[2::2], clock.seconds[3::2]
    results: dict[str, Any] = {}
    for name, seconds in (("after", after), ("early", early)):
        results[name] = {key: statistics.median(one[key] for one in seconds) for key in ("sample", "values")}
        harness.say(f"{type(value).__name__}, {name}: seconds", results[name])
    pairs = zip(after, early, strict=True)
    hidden = [(sum(one.values()) - sum(other.values())) / one["values"] for one, other in pairs]
    results["hidden"] = {"median": statistics.median(hidden), "lowest": min(hidden), "highest": max(hidden)}
    harness.say(f"{type(value).__name__}: hidden", results["hidden"])
    return results


def main() -> dict[str, Any]:
    with harness.server_beside(toy_model()) as url:
        return {type(value).__name__: found(value, url) for value in (AnswerLogProbValue(), ServerValue())}


if __name__ == "__main__":
    harness.run(main, __doc__)
