"""Trackers: which one the examples report to, and what it gets beside scalars and TRL's table of completions."""

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_trackio_available

from dash_trl.monitoring.plots import plot_run

TAKE_PICTURES = ("trackio", "wandb")  # by the same calls


def tracker_defaults(report_to: Any = None) -> dict[str, Any]:
    """Arguments of a run that reports to a tracker; none for a run that reports to none.

    Args:
        report_to: the user's, as of `TrainingArguments`. Default: Trackio if it is installed.
    """
    report_to = report_to or ("trackio" if is_trackio_available() else "none")
    if report_to == "none":
        return {}
    return {
        "report_to": report_to,
        "project": "dash_trl",
        "run_name": time.strftime("%Y-%m-%d %H:%M:%S"),  # an evaluation after training adds to this run of Trackio
        "trackio_static_space_id": False,  # push_to_hub uploads the model without the logs
        "log_completions": True,
        "num_completions_to_print": 0,  # the console keeps the progress bar
    }


def log_traces(tables: Mapping[str, Any], step: int) -> None:
    """Log each row of TRL's table of completions to Trackio as a conversation, for its page Traces.

    Its page of tables cuts texts short, and does not show messages at all.

    Args:
        tables: TRL's `_logs`.
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
    """Logs the picture of `plot_run` to Trackio and W&B when training ends.

    Args:
        metrics: the file of a `MetricsFileCallback`, which comes earlier in the list of callbacks.
    """

    def __init__(self, metrics: str | Path):
        self.metrics = Path(metrics)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        ends = "train_runtime" in logs  # Trackio's run is closed before this callback's on_train_end
        trackers = [import_module(name) for name in TAKE_PICTURES if name in args.report_to]
        if not (ends and trackers and state.is_world_process_zero):
            return
        try:
            picture = plot_run(self.metrics, self.metrics.with_name("run.png"), title=Path(args.output_dir).name)
        except ValueError:  # the run ended before its first log
            return
        for tracker in trackers:
            if tracker.__name__ == "wandb" and tracker.run is None:  # WANDB_DISABLED
                continue
            tracker.log({"picture": tracker.Image(str(picture))})
