"""Callbacks: the progress bar, the file of metrics, and the time that a run may take."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy


class RewardProgressCallback(ProgressCallback):
    """The progress bar with reward and kept share beside it, or else the loss, instead of a printed dict per log."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        names = {"reward": "reward", "kept": "filter/kept_rows"} if "reward" in logs else {"loss": "loss"}
        shown = {key: f"{logs[name]:.2f}" for key, name in names.items() if logs.get(name) is not None}
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)


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


class TimeLimitCallback(TrainerCallback, ExportableState):
    """Counts the seconds of training, logs them as `time/elapsed`, and stops at the first step that ends past a limit.

    The seconds are saved with a checkpoint, so that those before it count in a resumed run, and those that were lost
    after it do not. Loading and preparing do not count; evaluations and checkpoints within the run do. All ranks stop
    at the same step, which the main process's clock decides. As at the end of every run, `save_strategy="steps"` writes
    a checkpoint.

    Args:
        limit: in seconds; None: only counts. clock: seconds, from any beginning.
    """

    def __init__(self, limit: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        if limit is not None and not limit > 0:  # NaN, too
            raise ValueError(
                f"time_limit={limit} leaves no time to train in. Give the seconds of training, or leave it out."
            )
        self.limit, self.seconds = limit, 0.0
        self._clock = clock
        self._counted_at: float | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        self._count()
        return {"args": {"limit": self.limit}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counted_at, self.seconds = self._clock(), 0.0
        # A checkpoint of a run without this callback has no entry, and Transformers would fail at the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            self.seconds = saved["attributes"]["seconds"]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._count()
        if self.limit is not None and broadcast_object_list([self.seconds >= self.limit])[0]:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Adds to the log; callbacks that come later, such as `MetricsFileCallback`, see it."""
        self._count()
        logs["time/elapsed"] = self.seconds

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count()
        self._counted_at = None

    def _count(self) -> None:
        if self._counted_at is not None:
            now = self._clock()
            self.seconds, self._counted_at = self.seconds + now - self._counted_at, now
