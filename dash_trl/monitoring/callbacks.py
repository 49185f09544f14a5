"""Callbacks for the progress bar, a metrics file, and a limit on training time."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from dash_trl.monitoring.plots import plot_run


def monitor(trainer: Any) -> None:
    """Show the reward and the share of survivors in the progress bar, and write `metrics.jsonl` and `run.png`.

    The files are in the trainer's `output_dir`. Any trainer of Transformers or TRL can be monitored::

        monitor(trainer)
        trainer.train()
    """
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgressCallback)
    trainer.add_callback(MetricsFileCallback(Path(trainer.args.output_dir, "metrics.jsonl")))


class RewardProgressCallback(ProgressCallback):
    """Shows the mean reward and the share of survivors in the progress bar, instead of printing a dict per log.

    If a log has no reward, as in supervised fine-tuning, the bar shows the loss.
    """

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        names = {"reward": "reward", "kept": "filter/kept_rows"} if "reward" in logs else {"loss": "loss"}
        shown = {key: f"{logs[name]:.2f}" for key, name in names.items() if logs.get(name) is not None}
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)


class MetricsFileCallback(TrainerCallback):
    """Writes every log to a JSON-lines file with its `step`, and at the end draws `run.png` in the same folder.

    Args:
        path: path of the file. A new run empties it. A resumed run first removes the logs after its checkpoint.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_train_begin(self, args, state: TrainerState, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            known = self.path.read_text() if state.global_step and self.path.exists() else ""
            whole = known.splitlines()[: known.count("\n")]  # a kill may have cut the last line
            self.path.write_text("".join(f"{one}\n" for one in whole if json.loads(one)["step"] <= state.global_step))

    def on_log(self, args, state: TrainerState, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")

    def on_train_end(self, args, state: TrainerState, control, **kwargs) -> None:
        if state.is_world_process_zero:
            with suppress(ValueError):  # no log has a reward
                plot_run(self.path, self.path.with_name("run.png"), title=self.path.parent.name)


class TimeLimitCallback(TrainerCallback, ExportableState):
    """Counts the seconds of training, logs them as `time/elapsed`, and stops the run at the first step after a limit.

    Evaluations and checkpoints count, but loading the model does not. A resumed run counts the seconds before its
    checkpoint, too. The clock of the main process decides, so that all ranks stop at the same step. With
    `save_strategy="steps"`, a checkpoint is written at the end.

    Args:
        limit: number of seconds. `None`: there is no limit.
        clock: function that returns the time in seconds, from any starting point.
    Attributes:
        seconds: number of seconds of training so far.
    """

    def __init__(self, limit: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        self.limit, self.seconds = limit, 0.0
        self._clock = clock
        self._counted_at: float | None = None

    def state(self) -> dict[str, Any]:
        self._count()
        return {"args": {"limit": self.limit}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args, state: TrainerState, control, **kwargs) -> None:
        self._counted_at, self.seconds = self._clock(), 0.0
        # If the run that wrote the checkpoint did not have this callback, the checkpoint has no entry for it.
        # Transformers would then fail at the next checkpoint, so the entry is added here.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            self.seconds = saved["attributes"]["seconds"]

    def on_step_end(self, args, state, control: TrainerControl, **kwargs) -> None:
        self._count()
        if self.limit is not None and broadcast_object_list([self.seconds >= self.limit])[0]:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Add the seconds to the log, so that later callbacks get them, too."""
        self._count()
        logs["time/elapsed"] = self.seconds

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._count()
        self._counted_at = None

    def _count(self) -> None:
        if self._counted_at is not None:
            now = self._clock()
            self.seconds, self._counted_at = self.seconds + now - self._counted_at, now
