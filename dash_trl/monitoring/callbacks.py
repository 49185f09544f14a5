"""Callbacks for the progress bar, a metrics file, and a limit on training time."""

import json
import logging
import math
import time
from contextlib import suppress
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState

from dash_trl.monitoring.plots import plot_run

logger = logging.getLogger(__name__)


def monitor(trainer: Trainer) -> None:
    """Show the reward and the share of survivors in the progress bar, and write `metrics.jsonl` and `run.png`.

    The files are in the trainer's `output_dir`, that of any trainer of Transformers or TRL. In a notebook, the table of
    the run has these figures, and the picture follows, even after an interrupt. A second call does nothing::

        monitor(trainer)
        trainer.train()
    """
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(one, MetricsFileCallback) for one in callbacks):  # a cell that runs again
        return
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgressCallback)
    metrics = MetricsFileCallback(Path(trainer.args.output_dir, "metrics.jsonl"))
    trainer.add_callback(metrics)
    for shown in callbacks.copy():
        if hasattr(shown, "training_tracker"):  # Transformers' callback for notebooks
            from dash_trl.monitoring.notebook import RewardTableCallback

            trainer.remove_callback(shown)
            trainer.add_callback(RewardTableCallback(metrics.draw))


class RewardProgressCallback(ProgressCallback):
    """Shows the mean reward, the share of survivors and the speed in the progress bar, without printing each log.

    The speed is that since the log before: the tokens of prompts and completions that were sampled per second. If a log
    has no reward, as in supervised fine-tuning, the bar shows the loss.
    """

    _last = 0.0, math.inf  # of the last log: its time, and the number of tokens by then

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        names = {"reward": "reward", "kept": "filter/kept_rows"} if "reward" in logs else {"loss": "loss"}
        shown = {key: f"{logs[name]:.2f}" for key, name in names.items() if logs.get(name) is not None}
        if "num_tokens" in logs:
            now = time.monotonic(), logs["num_tokens"]
            if (tokens := now[1] - self._last[1]) > 0:
                shown["tokens/s"] = f"{tokens / (now[0] - self._last[0]):,.0f}"
            self._last = now
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)


class MetricsFileCallback(TrainerCallback):
    """Writes every log to a JSON-lines file with its `step`, and at the end draws `run.png` in the same folder.

    Args:
        path: path of the file. A resumed run first writes the logs of its checkpoint. A new run renames the file of
            an earlier one to `metrics.jsonl.old`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()  # a reward function may change the folder
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state: TrainerState, control, **kwargs) -> None:
        if state.is_world_process_zero:
            if not state.global_step and self.path.exists() and self.path.stat().st_size:
                logger.warning(f"{self.path} of an earlier run is now {self.path.with_suffix('.jsonl.old').name}.")
                self.path.replace(self.path.with_suffix(".jsonl.old"))
            self.path.write_text("".join(json.dumps(log) + "\n" for log in state.log_history))

    def on_log(self, args, state: TrainerState, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({**logs, "step": state.global_step}) + "\n")

    def on_train_end(self, args, state: TrainerState, control, **kwargs) -> None:
        if state.is_world_process_zero:
            with suppress(ValueError):  # no log has a reward
                self.draw()

    def draw(self) -> Path:
        """Call `plot_run`. An interrupt leaves the earlier picture."""
        part = plot_run(self.path, self.path.with_name("run.part.png"), title=self.path.parent.name)
        return part.replace(self.path.with_name("run.png"))


class TimeLimitCallback(TrainerCallback):
    """Counts the seconds of training, logs them as `time/elapsed`, and stops the run at the first step after a limit.

    Evaluations and checkpoints count, too, and so do the seconds before the last log of a checkpoint from which the run
    is resumed. The clock of the main process decides. With `save_strategy="steps"`, a checkpoint is written at the end.

    Args:
        limit: number of seconds. `None`: there is no limit.
    """

    def __init__(self, limit: float | None = None):
        self.limit = limit
        self._started = 0.0

    def on_train_begin(self, args, state: TrainerState, control, **kwargs) -> None:
        before = max((log.get("time/elapsed", 0.0) for log in state.log_history), default=0.0)
        self._started = time.monotonic() - before

    def on_step_end(self, args, state, control: TrainerControl, **kwargs) -> None:
        if self.limit is not None and broadcast_object_list([self._elapsed() >= self.limit])[0]:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == "steps"

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Add the seconds to the log, so that later callbacks and checkpoints get them, too."""
        logs["time/elapsed"] = state.log_history[-1]["time/elapsed"] = self._elapsed()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started
