"""`DASHCallback`: a `TrainerCallback` with three more events, and the callbacks of the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from dash_trl.rollouts import RolloutBatch


class DASHCallback(TrainerCallback):
    """A callback that sees the rollouts on their way from birth to the filter.

    The three events follow each other once per generation batch, on every rank, with this rank's rows in the order of
    their groups. Each may change in place the field that it is about; the keyword arguments are those of every
    `TrainerCallback` event (`model`, `processing_class`, …) and `trainer`. What an event leaves with a wrong shape or
    dtype is a `ValueError` that names the callback. Collectives and model passes are allowed if all ranks do the same
    number of them. Evaluation runs TRL's path and has no such events.
    """

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """The rollouts are in CPU memory; `rollouts.rewards` and `rollouts.advantages` are still `None`."""

    def on_rewards(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """`rollouts.rewards`, [B, F], is set. NaN = not applicable; a row of NaN is unscored."""

    def on_advantages(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """`rollouts.advantages`, [B], is set; replace it by [B, T] for per-token credit."""


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
