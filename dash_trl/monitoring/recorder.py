"""`Recorder`: what is logged of training, written where TRL's `log` reads it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# The phases of a step, in the order in which they happen.
PHASES = ("generate", "reward", "logprobs", "train")
WAITING = ("wait_for_rollouts", "wait_for_weights")  # for servers, which are within "generate"
ROUNDS = ("dynamic_sampling",)  # of a window after its first, which are within "generate" and "reward"
# Where the update does not wait for all of them; the second, for the slowest rank, is within the first.
WAITING_FOR_REWARDS = ("wait_for_rewards", "wait_for_ranks")


class Recorder:
    """Figures and seconds of training.

    Args:
        metrics: TRL's: name → values since the last log, which logs their mean.
        device: that computes. A GPU's work goes on behind the calls, so that it marks the ends of a phase itself, and
            is waited for only where the seconds are logged.
        logged: whether the optimizer step that ends will be logged.
        servers: sample, so that the trainer may wait for them. rewards: come while it trains.
        rounds: a window may take several.
    """

    def __init__(
        self,
        metrics: dict[str, list[float]],
        device: torch.device,
        logged: Callable[[], bool],
        *,
        servers: bool = False,
        rewards: bool = False,
        rounds: bool = False,
    ):
        self.metrics = metrics
        self._phases = PHASES + (ROUNDS if rounds else ()) + (WAITING if servers else ())
        self._phases += WAITING_FOR_REWARDS if rewards else ()
        self._on_gpu = device.type == "cuda"
        self._logged = logged
        self._spans: list[tuple[str, Any, Any]] = []  # (phase, its beginning, its end) since the last log
        self._steps = 0  # since the last log

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
        started = self._mark()
        yield
        if counts:
            self._spans.append((phase, started, self._mark()))

    def timed_each(self, phase: str, values: Iterator[Any]) -> Iterator[Any]:
        """The values; the seconds until each comes count as those of a phase."""
        while True:
            with self.timed(phase):
                value = next(values, None)
            if value is None:
                return
            yield value

    def end_step(self) -> None:
        """An optimizer step is over: its seconds are logged; a GPU's with the next step that will be, per step."""
        self._steps += 1
        if self._on_gpu and not self._logged():
            return
        seconds = dict.fromkeys(self._phases, 0.0)
        for phase, started, ended in self._spans:
            seconds[phase] += self._between(started, ended)
        self.log({f"time/{phase}": value / self._steps for phase, value in seconds.items()})
        self._spans, self._steps = [], 0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, started: Any, ended: Any) -> float:
        if not self._on_gpu:
            return ended - started
        ended.synchronize()
        return started.elapsed_time(ended) / 1000
