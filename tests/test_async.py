"""Asynchronous rollouts on fake servers that write the version of their weights into their tokens.

So dates are compared with tokens, not with what the trainer believes. `test_vllm.py` has the real servers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.rollout.ahead import StaleRollouts
from dash_trl.sampling.pool import PoolError
from dash_trl.sampling.weights.snapshot import Snapshot
from tests.fake_server import Fake
from tests.tiny import run

FIRST = 10  # the token of version 0
SECONDS = 60.0  # that something is waited for which has to happen


class Dated(Fake):
    """Every completion is two tokens: the version when its request came, and when it was answered.

    Attributes:
        arrived: the prompts of requests, in order. hold: requests are not answered while it is cleared.
    """

    def __init__(self, **options: Any):
        self.arrived: list[tuple[int, ...]] = []
        self.version = 0
        self.changed = threading.Condition()
        self.hold = threading.Event()
        self.hold.set()
        super().__init__(**options)

    def next_fault(self, first: int) -> None:
        return None

    def answer(self, send: Any, request: dict[str, Any], fault: str | None) -> None:
        came = self.version
        if "prompt_logprobs" not in request and request["max_tokens"] > 1:  # else a trial or a score
            with self.changed:
                self.arrived.append(tuple(request["prompt"]))
                self.changed.notify_all()
            self.hold.wait(SECONDS)
        ids = [FIRST + came, FIRST + self.version][: request["max_tokens"]]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        choices = [{**choice, "index": i} for i in range(request["n"])]
        send(200, __import__("json").dumps({"choices": choices}).encode())

    def wait_for(self, requests: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.arrived) >= requests, SECONDS), self.arrived


class DatedWeights:
    """In place of files: tells the servers the version. `steps`: version → optimizer steps, as the test saw them."""

    dtype = torch.float32

    def __init__(self, trainer: Any, fakes: list[Dated]):
        self.trainer, self.fakes = trainer, {fake.url: fake for fake in fakes}
        self.steps: dict[int, int] = {}

    def send(self, parameters: Any, version: int, on_each: Any) -> tuple[Snapshot, dict[str, None]]:
        self.steps[version] = self.trainer.state.global_step
        snapshot = Snapshot(version, f"run-{version}", 0, "nowhere")

        async def load(server: Any) -> None:
            await server.load_weights("nowhere", snapshot.tag)
            self.fakes[server.url].version = version

        return snapshot, dict.fromkeys(on_each(load))

    async def refit(self, server: Any, snapshot: Snapshot) -> int:
        self.fakes[server.url].version = snapshot.version
        return snapshot.version


class Watch(DASHCallback):
    """What each window was sampled by, and what the servers had been asked when a step ended."""

    def __init__(self) -> None:
        self.windows: list[SimpleNamespace] = []
        self.trained: list[tuple[int, int]] = []  # (optimizer steps before, window)
        self.wait: Any = lambda window: None

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        tokens = rollouts.completion_ids[:, :2] - FIRST
        self.windows.append(
            SimpleNamespace(
                step=state.global_step,
                tokens=tokens,
                believed=rollouts.policy_version,
                prompts=[row["prompt"] for row in rollouts.examples],
            )
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.trained.append((state.global_step - 1, len(self.windows) - 1))
        self.wait(len(self.windows) - 1)


def asynchronous(tiny_model: str, output: Any, fakes: list[Dated], level: int, **settings: Any) -> tuple[Any, Any, Any]:
    """A run; returns the trainer, what the watch saw, and version → optimizer steps."""
    watch = settings.pop("watch", None) or Watch()
    weights: list[DatedWeights] = []
    prepare_more = settings.pop("prepare", lambda trainer: None)

    def prepare(trainer: Any) -> None:
        pool = trainer.vllm_generation
        weights.append(DatedWeights(trainer, fakes))
        pool._weights, pool._proven = weights[0], True
        prepare_more(trainer)

    trainer = run(
        DASHTrainer,
        tiny_model,
        output,
        vllm_server_urls=[fake.url for fake in fakes],
        async_level=level,
        callbacks=[watch],
        prepare=prepare,
        vllm_importance_sampling_correction=False,
        **settings,
    )
    return trainer, watch, weights[0].steps


@pytest.fixture
def fakes():
    made: list[Dated] = []

    def make(**options: Any) -> Dated:
        made.append(Dated(**options))
        return made[-1]

    yield make
    for fake in made:
        fake.hold.set()
        fake.stop()


# (settings, optimizer steps at which the windows begin)
SEMANTICS = {
    "a window per step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 4}, [0, 1, 2, 3, 4, 5]),
    "two steps per window": ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, [0, 2, 4, 6, 8, 10]),
    "two windows per step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [0, 0, 1, 1, 2, 2]),
    "three iterations": (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 3},
        [0, 3, 6, 9, 12, 15],
    ),
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", SEMANTICS)
def test_window_n_is_sampled_by_the_weights_with_which_window_n_minus_k_began(name, level, tiny_model, tmp_path, fakes):
    """Servers that answer at once; a step ends when the requests that may be under way have come."""
    settings, begins = SEMANTICS[name]
    fake, watch = fakes(), Watch()
    groups = settings["steps_per_generation"]  # of 4 rows
    last = len(begins) - 1
    watch.wait = lambda window: fake.wait_for(groups * (min(window + level, last) + 1))
    steps = begins[-1] + max(1, begins[-1] - begins[-2])
    _, watch, versions = asynchronous(tiny_model, tmp_path, [fake], level, max_steps=steps, watch=watch, **settings)
    assert [window.step for window in watch.windows] == begins
    for n, window in enumerate(watch.windows):
        sampled = torch.tensor([[versions[version] for version in row] for row in window.tokens.tolist()])
        assert (sampled == begins[max(0, n - level)]).all()
        assert (window.believed == sampled).all()
    assert len(fake.arrived) == groups * len(begins)  # nothing beyond the run's end
    behind = max(before - begins[max(0, window - level)] for before, window in watch.trained)
    per_window = begins[-1] - begins[-3]  # two windows' optimizer steps
    assert behind == (level + 1) * per_window // 2 - 1 if name in ("two steps per window", "three iterations") else True
