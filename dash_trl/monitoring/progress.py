"""What a run shows and keeps of its metrics: the bar, the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback, TrainerState

if TYPE_CHECKING:
    pass


class RewardProgressCallback(ProgressCallback):
    """The progress bar with reward and kept share beside it, instead of a printed dict per log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "reward" in logs:
            shown = {"reward": logs["reward"], "kept": logs.get("filter/kept_rows")}
            self.training_bar.set_postfix({key: f"{value:.2f}" for key, value in shown.items() if value is not None})


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
