"""Measures the gain if rows of several turns proceed independently, with long-tailed tool times and a real vLLM server.

    python benchmarks/tool_overlap.py --json tool_overlap.json          # ~6 minutes on 2 cores

A window has 8 groups of 8 rows. A row has 1 to 5 turns, 3 on average. The length of a turn is lognormal in tokens.
Every turn except the last ends with a tool call. A tool sleeps for a lognormal time. The median of this time is given
relative to the time that the server takes for a median turn while all rows run. Lengths and times are drawn for each
row and turn. They are the same for the two ways of sampling, which alternate:

    by row       `TurnsOnServers`: each row asks the server again as soon as its own tool has answered
    rounds       `Rounds`: all rows that wait sample together, then their tools run concurrently

The toy model writes the tokens. Its random text costs as much as a real turn: it is parsed (then the planned call
replaces it), and the tool's answer is rendered with the chat template of Qwen2.5. The server runs on one core, and
everything else on another. Nothing is trained. The figures are medians over windows:

- `by_row`, `rounds`: seconds of sampling a window.
- `bound`: simulated seconds for the same rows by row, if only tools and the server's decoding steps take time. A
  decoding step takes as long as measured on this server for the number of running responses. Requests, prefills and the
  chat template take no time.
- `rounds_bound`: the same for rounds.
- `gain`: `rounds` / `by_row`.
- `of_bound`: `bound` / `by_row`.
"""

import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import harness
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template

from dash_trl.assembly import new_sampler
from dash_trl.collect import Prompts, Rounds, Sampler, TurnsInProcess, decoded
from dash_trl.tools import Conversation, Conversations, Turns
from dash_trl.toy import arithmetic_dataset, toy_model

GROUPS, GROUP = 8, 8
TURNS = (1, 5)  # least and largest number of turns of a row
MEDIAN, SPREAD, LONGEST = 30, 0.6, 120  # tokens of a turn: exp(N(ln MEDIAN, SPREAD)), at most LONGEST
TOOL_SPREAD, LONGEST_TOOL = 1.0, 10.0  # the same for a tool's time; the longest time is in medians
TOOLS = (0.1, 1.0, 2.0)  # median times of a tool, relative to the time of a median turn
WINDOWS = 6  # number of counted windows of each way and setting; one more window precedes them
RUNNING = (1, 2, 4, 8, 16, 32, 64)  # numbers of running responses for which decoding steps are measured
SHORT, LONG, REPEATS = 20, 120, 5  # tokens of two responses; a step is the difference of their times per token

Plan = list[tuple[int, float]]  # tokens of each turn of a row, and the seconds of the tool after it


def plans(window: int, tool_median: float) -> list[Plan]:
    """Draws the plans of all rows of a window."""

    def lognormal(median: float, spread: float, longest: float) -> float:
        return min(median * math.exp(draw.gauss(0.0, spread)), longest)

    rows = []
    for row in range(GROUPS * GROUP):
        draw = random.Random(f"{window} {row}")
        turns = [
            (max(2, round(lognormal(MEDIAN, SPREAD, LONGEST))), tool_median * lognormal(1.0, TOOL_SPREAD, LONGEST_TOOL))
            for _ in range(draw.randint(*TURNS))
        ]
        rows.append(turns)
    return rows


# ------------------------------------------------------------------------------------------------ both ways


def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: for so long.
    """
    time.sleep(seconds)
    return "42"


class Context(list):
    """Token ids that the next turn continues. `room`: tokens that the turn will have."""

    room: int


class Planned(Turns):
    """Turns of the planned lengths, with a call of `wait` after each turn but the last."""

    plan: Plan

    @property
    def room(self) -> int:
        return self.plan[self.rounds][0]

    @property
    def context(self) -> list[int]:
        context = Context(super().context)
        context.room = self.room
        return context

    def sampled(self, ids: list[int], log_probs: list[float | None] | None) -> list[Mapping[str, Any]]:
        super().sampled(ids, log_probs)
        if self.rounds == len(self.plan) - 1:
            return []
        arguments = {"seconds": self.plan[self.rounds][1]}
        return [{"type": "function", "function": {"name": wait.__name__, "arguments": arguments}}]


class PlannedRows(Conversations):
    """Conversations with `Planned` turns. A row's plan is in its example."""

    async def begin(self, row: Conversation, prompt_ids: list[int] | None = None) -> bool:
        goes_on = await super().begin(row, prompt_ids)
        assert row.turns is not None
        row.turns.__class__, row.turns.plan = Planned, row.example["plan"]
        return goes_on


def samplers(trainer: Any) -> dict[str, Sampler]:
    """Returns the trainer's own sampler, and one that samples in rounds on the same server."""

    def generate(contexts: list[Context], first: bool) -> tuple[list[list[int]], list[list[float]]]:
        if not contexts:
            return [], []
        servers, room = trainer.vllm_generation, [one.room for one in contexts]
        _, ids, log_probs, _ = servers.generate(contexts, None, GROUP if first else 1, max_tokens=room)
        return ids, [[value for (value,) in row] for row in log_probs]

    trainer._conversations.__class__ = PlannedRows
    rewards = SimpleNamespace(
        early=SimpleNamespace(wanted=True, take=lambda *_: None)
    )  # as in a run, the sampler passes on sampled rows
    in_rounds = TurnsInProcess(
        Rounds(trainer.ranks, trainer._conversations, generate),
        trainer._conversations,
        lambda instances: None,
        knows_log_probs=True,
        generate=None,
        decode=partial(decoded, trainer._tokenizer),
        versions=lambda rows: torch.zeros(rows, 2, dtype=torch.long),
        on_rows=rewards.early.take,
        timed=trainer.recorder.timed,
    )
    return {"by_row": new_sampler(trainer, rewards, None), "rounds": in_rounds}


def seconds_of(sampler: Sampler, window: int, rows: list[Plan], prompt_ids: list[list[int]]) -> float:
    """Samples a window and checks its turns; returns its seconds."""
    prompt = [{"role": "user", "content": ""}]
    examples = [{"prompt": prompt, "plan": plan} for plan in rows]
    prompts = Prompts(window, examples, (prompt_ids, None, {}))
    sampler.begin(window, [prompts])
    sampled, seconds = harness.timed(sampler.take, prompts)
    own = [sum(row) for row in sampled.own_tokens]
    assert own == [sum(tokens for tokens, _ in plan) for plan in rows], "a turn has another length"
    assert sampled.turns.calls[:, 0].tolist() == [len(plan) - 1 for plan in rows]
    return seconds


# ------------------------------------------------------------------------------------------------ the bound


def step_seconds(pool: Any, prompt_ids: list[int]) -> dict[int, float]:
    """Measures the seconds of a decoding step, by the number of running responses."""

    def once(running: int, tokens: int) -> float:
        jobs = pool.completions([(prompt_ids, 1)] * running, {"max_tokens": tokens, "ignore_eos": True})
        return harness.timed(pool.run, jobs)[1]

    found = {}
    for running in RUNNING:
        once(running, SHORT)
        pairs = [(once(running, SHORT), once(running, LONG)) for _ in range(REPEATS)]
        found[running] = statistics.median(long - short for short, long in pairs) / (LONG - SHORT)
    return found


def interpolated(seconds: Mapping[int, float]) -> Callable[[int], float]:
    def step(running: int) -> float:
        below = max(one for one in seconds if one <= running)
        above = min(one for one in seconds if one >= running)
        share = (running - below) / (above - below) if above > below else 0.0
        return seconds[below] + share * (seconds[above] - seconds[below])

    return step


def simulated(rows: Sequence[Plan], step: Callable[[int], float]) -> float:
    """Simulates a window by row; returns the seconds until the last row has ended.

    Args:
        rows: the plans of the rows.
        step: takes the number of running responses; returns the seconds of a decoding step.
    """
    now = 0.0
    asks = [(0.0, row, 0) for row in range(len(rows))]  # (when, row, turn), a heap
    running: dict[int, tuple[int, int]] = {}  # row → (turn, tokens left)
    while asks or running:
        if not running:
            now = max(now, asks[0][0])
        while asks and asks[0][0] <= now:
            _, row, turn = heapq.heappop(asks)
            running[row] = turn, rows[row][turn][0]
        now += step(len(running))
        running = {row: (turn, left - 1) for row, (turn, left) in running.items()}
        for row, (turn, left) in list(running.items()):
            if not left:
                del running[row]
                if turn + 1 < len(rows[row]):
                    heapq.heappush(asks, (now + rows[row][turn][1], row, turn + 1))
    return now


def simulated_rounds(rows: Sequence[Plan], step: Callable[[int], float]) -> float:
    """Simulates a window in rounds; see `simulated`."""
    seconds = 0.0
    for turn in range(max(map(len, rows))):
        seconds += simulated([row[turn : turn + 1] for row in rows if len(row) > turn], step)
        seconds += max((row[turn][1] for row in rows if len(row) > turn + 1), default=0.0)
    return seconds


# ------------------------------------------------------------------------------------------------ the runs


def main() -> dict[str, Any]:
    path = toy_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = arithmetic_dataset("train", 512)["prompt"][:]
    prompt_ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokenizer.chat_template = qwen2_5_chat_template
    results: dict[str, Any] = {}
    with harness.server_beside(path) as url:
        settings = {
            "per_device_train_batch_size": GROUP,
            "gradient_accumulation_steps": GROUPS,
            "num_generations": GROUP,
            "max_completion_length": 1536,
            "vllm_server_urls": [url],
            "generation_kwargs": {"ignore_eos": True},
            "async_level": 0,
        }
        trainer = harness.toy_trainer(settings, tools=[wait], processing_class=tokenizer)
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = 0
        steps = step_seconds(trainer.vllm_generation.pool, prompt_ids[0])
        results["step_ms"] = {running: 1000 * seconds for running, seconds in steps.items()}
        harness.say("decoding step, ms", {f"{running}:": one for running, one in results["step_ms"].items()})
        step, both = interpolated(steps), samplers(trainer)
        turn = MEDIAN * step(GROUPS * GROUP)
        number = 0
        for share in TOOLS:
            found: dict[str, list[float]] = {}
            for window in range(WINDOWS + 1):
                rows = plans(window, share * turn)
                ids = [prompt_ids[(window * GROUPS + row // GROUP) % 512] for row in range(GROUPS * GROUP)]
                row: dict[str, float] = {}
                for name, sampler in both.items():
                    row[name] = seconds_of(sampler, number, rows, ids)
                    number += 1
                row["bound"], row["rounds_bound"] = simulated(rows, step), simulated_rounds(rows, step)
                row["gain"], row["of_bound"] = row["rounds"] / row["by_row"], row["bound"] / row["by_row"]
                for name, value in row.items():
                    found.setdefault(name, []).extend([value] * (window > 0))
            results[f"tools_{share:g}"] = {"tool_s": share * turn, **harness.medians(found)}
            harness.say(f"tool / turn {share:g}: seconds", results[f"tools_{share:g}"])
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
