"""Helpers for runs that report to a tracker (Trackio, W&B).

Transformers and TRL already send figures and the table of completions to a tracker. This module adds conversations
(`log_traces`), a picture of the run (`RunPictureCallback`), and arguments for such a run (`tracker_defaults`).
"""

import logging
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_trackio_available

from dash_trl.monitoring.plots import plot_run

logger = logging.getLogger(__name__)
TAKE_PICTURES = ("trackio", "wandb")  # trackers that accept a picture in `log({"picture": Image(path)})`


def tracker_defaults(report_to: Any = None) -> dict[str, Any]:
    """Returns defaults of `DASHConfig` for a run that reports to a tracker. The examples use them.

    Args:
        report_to: the value of `TrainingArguments.report_to` that the user gave. None = "trackio" if Trackio is
            installed, otherwise "none".
    Returns:
        Name → value; empty if the run reports to no tracker.
    """
    report_to = report_to or ("trackio" if is_trackio_available() else "none")
    if report_to == "none":
        return {}
    return {
        "report_to": report_to,
        "project": "dash_trl",
        "run_name": time.strftime("%Y-%m-%d %H:%M:%S"),  # with a name, a later evaluation logs to the same Trackio run
        "trackio_static_space_id": False,  # so that push_to_hub uploads the model without the logs
        "log_completions": True,
        "num_completions_to_print": 0,  # so that the console shows only the progress bar
    }


def log_traces(tables: Mapping[str, Any], step: int) -> None:
    """Logs each row of TRL's table of completions to Trackio as a conversation, for Trackio's page "Traces".

    This is needed because Trackio's page of tables shortens long texts and does not show messages.

    Args:
        tables: the columns of the table, which are TRL's `_logs`.
        step: number of the optimizer step.
    """
    import trackio

    columns = {**tables["rewards"], **tables["extra"], "advantage": tables["advantages"]}
    rows = zip(tables["prompt"], tables["completion"], *columns.values(), strict=True)
    traces = [
        trackio.Trace(
            [*_messages("user", prompt), *_messages("assistant", completion)], dict(zip(columns, cells, strict=True))
        )
        for prompt, completion, *cells in rows
    ]
    trackio.log({"traces": traces}, step=step)


def _messages(role: str, said: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


class RunPictureCallback(TrainerCallback):
    """Draws the picture of `plot_run` when training ends, and logs it to Trackio and W&B if the run reports to them.

    Args:
        metrics: path of the file that a `MetricsFileCallback` writes. That callback must come earlier in the list of
            callbacks, so that the file has the last log. The picture is `run.png` beside this file.
    Attributes:
        picture: path of the picture. None until training has ended, if it ended before its first log, and on all
            processes but the main process.
    """

    def __init__(self, metrics: str | Path):
        self.metrics = Path(metrics)
        self.picture: Path | None = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        ends = "train_runtime" in logs  # the last log. on_train_end would be too late: Trackio's run is closed by then
        if not (ends and state.is_world_process_zero):
            return
        title = Path(args.output_dir).name
        try:
            self.picture = plot_run(self.metrics, self.metrics.with_name("run.png"), title=title)
        except ValueError:  # the run ended before its first log
            return
        except OSError as error:
            logger.warning(f"There is no picture of the run: {error}. It needs a MetricsFileCallback before it.")
            return
        for tracker in [import_module(name) for name in TAKE_PICTURES if name in args.report_to]:
            if tracker.__name__ == "wandb" and tracker.run is None:  # W&B is switched off by WANDB_DISABLED
                continue
            tracker.log({"picture": tracker.Image(str(self.picture))})
