"""`Checkpoints`: saves and restores the window in use, the place in the prompts and the states of callbacks."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dash_trl.callbacks import DASHCallback, restore_states, states_of
from dash_trl.distributed import Ranks
from dash_trl.rollout import (
    STATES,
    GenerationWindow,
    PromptQueue,
    PromptReader,
    SavedRun,
    Shapes,
    check_shards,
    load_states,
    one_run,
    why_a_new_window,
)

logger = logging.getLogger(__name__)


def checkpoint_to_resume(value: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint that `resume_from_checkpoint` names; None for a new run.

    Args:
        value: a checkpoint; a folder of checkpoints, for its last one; or true, for the last one in `output_dir`.
    Raises:
        ValueError: if there is none.
    """
    word = str(value).lower()
    if word in ("none", "false"):
        return None
    folder = Path(output_dir if word == "true" else str(value)).expanduser()
    # Transformers writes this file last: a folder without it is half a checkpoint.
    found = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")]
    steps = {int(number): str(one) for one in found if (number := one.name.rpartition("-")[2]).isdigit()}
    if steps:
        return steps[max(steps)]
    if (folder / TRAINER_STATE_NAME).is_file():
        return str(folder)
    raise ValueError(
        f"resume_from_checkpoint={value!r} names no checkpoint: {str(folder.absolute())!r} has neither a "
        f"{TRAINER_STATE_NAME} nor a folder {PREFIX_CHECKPOINT_DIR}-N with one. Give a checkpoint, the output_dir of "
        "the run, or true for this output_dir; or leave it out, to begin anew."
    )


class Checkpoints:
    """Saves and restores what a checkpoint holds beside Transformers' files.

    All ranks call every method at the same point.

    Args:
        ranks: the ranks of the run.
        shapes: returns the current shapes of the run.
        callbacks: returns the callbacks that may have a state.
        sharded: each rank saves a shard of the optimizer's state. Only the same number of ranks can load these shards.
    """

    def __init__(
        self,
        ranks: Ranks,
        shapes: Callable[[], Shapes],
        callbacks: Callable[[], list[DASHCallback]],
        *,
        sharded: bool,
    ):
        self._ranks, self._shapes, self._callbacks, self._sharded = ranks, shapes, callbacks, sharded
        # The callbacks' states and the place in the prompts, from before the running optimizer step.
        self._before: tuple[dict[str, Any], dict[str, Any] | None] = {}, None

    def begin_optimizer_step(self, reader: PromptReader | PromptQueue) -> None:
        """Keep the callbacks' states and the place in the prompts, as they are before the optimizer step."""
        self._before = states_of(self._callbacks()), reader.state_dict()

    def save(
        self,
        folder: str,
        *,
        epoch: float,
        max_steps: int,
        step: int,
        skipped_steps: int,
        window: GenerationWindow | None,
        samples_again: bool,
        reader: PromptReader | PromptQueue,
    ) -> None:
        """Save this rank's share of a checkpoint, and on the first rank the states of the callbacks.

        Args:
            folder: folder of the checkpoint.
            epoch: `TrainerState.epoch`.
            max_steps: `TrainerState.max_steps`.
            step: the micro-step at which a resumed run continues; see `SavedRun`.
            skipped_steps: optimizer steps skipped so far.
            window: the window in use; `None` if a resumed run does not use it.
            samples_again: a resumed run samples the window in use again. It then needs the states from before that
                window was sampled.
            reader: hands out the prompts.
        """
        shapes = self._shapes()
        states, prompts = self._before if samples_again else (states_of(self._callbacks()), reader.state_dict())
        run = SavedRun(shapes, shapes.position(epoch, max_steps), step, skipped_steps, window, prompts)
        run.save(self._file(folder))
        if states and self._ranks.rank == 0:
            torch.save(states, os.path.join(folder, STATES))

    def resume(self, checkpoint: str, start: tuple[int, int], *, ignore_data_skip: bool) -> tuple[SavedRun | None, int]:
        """Load a checkpoint, and give the callbacks their states.

        Args:
            checkpoint: folder of the checkpoint.
            start: (epochs, micro-batches of a rank since then) that Transformers counts as used.
            ignore_data_skip: Transformers' option; see `why_a_new_window`.
        Returns:
            The saved run if this run continues in its window, else `None` (with a warning that says why); and the
            number of optimizer steps skipped so far.
        Raises:
            ValueError: the run cannot be resumed in this way, or a file is damaged or missing.
        """
        own = self._ranks.agree(partial(SavedRun.load, self._file(checkpoint)))
        found = self._ranks.gather_object(own and replace(own, window=None, prompts=None))
        saved = one_run(found, self._ranks.count, checkpoint)
        if self._sharded:
            check_shards(saved, self._ranks.count, checkpoint)
        reason = why_a_new_window(
            saved, self._shapes(), start, checkpoint=checkpoint, ignore_data_skip=ignore_data_skip
        )
        states = self._ranks.agree(partial(load_states, checkpoint), main_only=True)
        for name in self._ranks.agree(partial(restore_states, self._callbacks(), states)):
            self._warn(f"{checkpoint} holds nothing that {name} has learned; this callback keeps its current state.")
        if reason is not None:
            self._warn(f"{reason}; training goes on with a new generation window.")
        return None if reason is not None else own, 0 if saved is None else saved.skipped_steps

    def _file(self, folder: str) -> str:
        return os.path.join(folder, f"generation_window_{self._ranks.rank}.pt")

    def _warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(message)
