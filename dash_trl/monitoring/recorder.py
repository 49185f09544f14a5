"""`Recorder` adds figures and the seconds of each training phase to TRL's metrics."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# The phases of a step, in the order in which they happen.
PHASES = ("generate", "reward", "logprobs", "train")


class Recorder:
    """Records figures and the seconds of each training phase in TRL's metrics.

    Attributes:
        logs: what TRL's `log` reads; see `seams.Logs`. `figures`: name → values since the last log.
    """

    def __init__(self, args: Any, state: Any, logs: Any):
        self.logs = logs
        self._args = args
        self._state = state
        # The trainer waits for servers. These seconds are also counted in "generate".
        self._phases = PHASES + (("wait_for_rollouts", "wait_for_weights") if args.names_servers else ())
        # The time in which the trainer has no scored group to train on, or waits for slower ranks; on servers, groups
        # may still be sampled.
        self._phases += ("wait_for_rewards",) if args.reward_pipeline else ()
        # A GPU works asynchronously, so the beginning and the end of a phase are recorded as events on the GPU. The
        # recorder waits for the GPU only in steps that TRL logs.
        self._on_gpu = args.device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []  # since the last log: (phase, its beginning, its end)
        self._steps = 0  # number of optimizer steps since the last log

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add one value to each figure (name → value). TRL logs the mean of the values since the last log."""
        for name, value in metrics.items():
            self.logs.figures[name].append(value)

    def total(self, name: str, value: float) -> None:
        """Set a running total. TRL logs the last total instead of a mean."""
        self.logs.figures[name] = [value]

    @contextmanager
    def timed(self, phase: str, *, counts: bool = True) -> Iterator[None]:
        """Add the seconds within the `with` block to a phase, which is logged per optimizer step as `time/<phase>`.

        They are not added with `counts=False`, as in an evaluation, or if the run does not log the phase.
        """
        started = self._mark()
        yield
        if counts and phase in self._phases:
            self._spans.append((phase, started, self._mark()))

    def end_step(self) -> None:
        """End an optimizer step and log the seconds of its phases.

        On a GPU, TRL's next log has them as the mean of the steps since the last log.
        """
        self._steps += 1
        step = self._state.global_step + 1
        if self._on_gpu and not (  # TRL will not log this step, as far as is known now
            self._args.logging_strategy != "steps"
            or step % self._state.logging_steps == 0
            or (step == 1 and self._args.logging_first_step)
        ):
            return
        seconds = dict.fromkeys(self._phases, 0.0)
        for phase, started, ended in self._spans:
            seconds[phase] += self._between(started, ended)
        self.log({f"time/{phase}": value / self._steps for phase, value in seconds.items()})
        self._spans = []
        self._steps = 0

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
