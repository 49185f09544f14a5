"""What a run shows and keeps of its metrics: the bar, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerState

from dash_trl.monitoring.recorder import PHASES

BALANCED = 0.05  # of a step's seconds: a trainer that waits for less keeps the servers waiting


class RewardProgressCallback(ProgressCallback):
    """The progress bar with reward and kept share beside it, or else the loss, instead of a printed dict per log.

    With `async_level` > 0 it says which side waits for the other: "trainer 30%" of its time, or "servers".
    """

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if (
            state.is_world_process_zero
            and self.training_bar is not None
            and logs
            and ("reward" in logs or "loss" in logs)
        ):
            figures = {"reward": logs.get("reward"), "kept": logs.get("filter/kept_rows")}
            figures = figures if "reward" in logs else {"loss": logs["loss"]}
            shown = {key: f"{value:.2f}" for key, value in figures.items() if value is not None}
            if getattr(args, "async_level", 0):
                shown["waits"] = who_waits(logs)
            self.training_bar.set_postfix(shown)


def who_waits(logs: dict[str, Any]) -> str:
    """Which side of an asynchronous run waits for the other, by the seconds of a log."""
    waits = logs.get("time/wait_for_rollouts", 0.0)
    spent = sum(logs.get(f"time/{phase}", 0.0) for phase in PHASES)
    share = waits / spent if spent else 0.0
    return f"trainer {share:.0%}" if share >= BALANCED else "servers"


class MetricsFileCallback(TrainerCallback):
    """Appends every log to a JSON-lines file, one object per log, with its `step`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_train_begin(self, args, state: TrainerState, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if state.global_step == 0:  # a resumed run continues the file
                self.path.write_text("")

    def on_log(self, args, state: TrainerState, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
