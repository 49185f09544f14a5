"""`Recorder`: what is logged of training, written where TRL's `log` reads it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

PHASES = ("generate", "reward", "logprobs", "train")


class Recorder:
    """Figures and seconds of training.

    Args:
        metrics: TRL's: name → values since the last log, which logs their mean.
        device: that computes. A GPU is waited for at the ends of a phase, since its work goes on behind the calls.
        logged: whether the optimizer step that is running will be logged: on a GPU only its seconds are recorded, so
            that the other steps wait for nothing.
    """

    def __init__(self, metrics: dict[str, list[float]], device: torch.device, logged: Callable[[], bool]):
        self.metrics = metrics
        self._gpu = device if device.type == "cuda" else None
        self._logged = logged
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def log(self, metrics: Mapping[str, float]) -> None:
        """One more value of each; the log has the mean of those since the last one."""
        for name, value in metrics.items():
            self.metrics[name].append(value)

    def total(self, name: str, value: float) -> None:
        """A running total, which is logged as it is."""
        self.metrics[name] = [value]

    @contextmanager
    def timed(self, phase: str, *, counts: bool = True) -> Iterator[None]:
        """The seconds within it count as those of a phase; logged per optimizer step as `time/<phase>`.

        Args:
            counts: `False`: they do not, as in an evaluation.
        """
        counts = counts and (self._gpu is None or self._logged())
        started = self._now() if counts else 0.0
        yield
        if counts:
            self._seconds[phase] += self._now() - started

    def end_step(self) -> None:
        """An optimizer step is over: its seconds are logged."""
        if self._gpu is None or self._logged():
            self.log({f"time/{phase}": self._seconds.pop(phase, 0.0) for phase in PHASES})
        self._seconds.clear()

    def _now(self) -> float:
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return time.perf_counter()
