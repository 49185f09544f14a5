"""The table and the picture of a run in a notebook. `monitor` imports this module only there."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from IPython import get_ipython
from IPython.display import Image, display
from transformers.utils.notebook import NotebookProgressCallback

# Title of a column → the figure in it. A column without a figure is not shown.
COLUMNS = {
    "Reward": "reward",
    "Kept": "filter/kept_rows",
    "Mean length": "completions/mean_length",
    "Seconds per step": "step_time",
    "Evaluated reward": "eval_reward",
}


class RewardTableCallback(NotebookProgressCallback):
    """Shows figures of each logged step in the notebook's table, and `run.png` below the cell.

    Args:
        draw: function that draws the picture and returns its path; see `MetricsFileCallback.draw`.
    """

    def __init__(self, draw: Callable[[], Path]):
        super().__init__()
        self._draw = draw

    def on_train_begin(self, *args, **kwargs) -> None:
        super().on_train_begin(*args, **kwargs)
        self._lines = dict[int, dict[str, float]]()  # step → title → figure
        self._events = get_ipython().events
        self._events.register("post_run_cell", self._show)  # an interrupted cell has this event, too

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        found = {title: logs[name] for title, name in COLUMNS.items() if logs.get(name) is not None}
        if found and self.training_tracker is not None:
            self._lines.setdefault(state.global_step, {}).update(found)
            shown = [title for title in COLUMNS if any(title in line for line in self._lines.values())]
            rows = [[step, *[line.get(title, "–") for title in shown]] for step, line in self._lines.items()]
            self.training_tracker.inner_table = [["Step", *shown], *rows]
            self.training_tracker.display()  # by itself only with the next step

    def on_evaluate(self, *args, **kwargs) -> None:
        if self.training_tracker is None:
            super().on_evaluate(*args, **kwargs)
            return
        self.training_tracker.remove_child()  # its bar; the figures came with their log
        self.prediction_bar = None

    def _show(self, _: object) -> None:
        self._events.unregister("post_run_cell", self._show)
        with suppress(ValueError, KeyboardInterrupt):  # no log has a reward; stopped once more
            display(Image(self._draw()))
