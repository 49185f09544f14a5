"""Seconds of phases: per optimizer step, whatever lies between two logs, and without waiting for a GPU in between."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from dash_trl import DASHConfig
from dash_trl.monitoring import Recorder


class Clock:
    """A clock that advances only by `pass_`; replaces `time.perf_counter` and a GPU's events."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.waited = 0
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def synchronize(self):
                clock.waited += 1

            def elapsed_time(self, end):
                return 1000 * (end.at - self.at)

        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("torch.cuda.Event", Event)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_window_for_two_steps_and_a_log_every_four(device, monkeypatch):
    clock = Clock(monkeypatch)
    metrics = defaultdict(list)
    args = DASHConfig("unused", use_cpu=True)
    state = TrainerState(logging_steps=4)
    monkeypatch.setattr(DASHConfig, "device", torch.device(device))
    recorder = Recorder(args, state, SimpleNamespace(figures=metrics))
    for step in range(1, 9):
        state.global_step = step - 1
        if step % 2:
            with recorder.timed("generate"):
                clock.now += 6.0
        with recorder.timed("train"):
            clock.now += 1.0
        with recorder.timed("generate", counts=False):  # an evaluation
            clock.now += 50.0
        recorder.end_step()
        assert clock.waited == (6 * (step // 4) if device == "cuda" else 0)  # for the spans of a log only
        if step % 4 == 0:  # TRL logs the mean of the values since the last log
            logged = {name: sum(values) / len(values) for name, values in metrics.items()}
            assert logged == {"time/generate": 3.0, "time/reward": 0.0, "time/logprobs": 0.0, "time/train": 1.0}
            metrics.clear()
