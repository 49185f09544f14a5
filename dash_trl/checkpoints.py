"""`Checkpoints`: saves and restores the window of a run and the states of its callbacks."""

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
    """What a checkpoint holds of a run beside Transformers' files. Every method is called on every rank.

    Args:
        shapes: of the run, as it is now. callbacks: that may have a state.
        sharded: whether each rank has a shard of the optimizer's state, which only as many ranks can load.
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
        # As they were before the optimizer step that runs: the callbacks' states, and where the prompts stood.
        self._before: tuple[dict[str, Any], dict[str, Any] | None] = {}, None

    def begin_optimizer_step(self, reader: PromptReader | PromptQueue) -> None:
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
        """
        Args:
            step: see `SavedRun`. window: None where a resumed run does not use it.
            samples_again: it samples the window in use anew, before which the states were others.
            reader: of the prompts.
        """
        shapes = self._shapes()
        states, prompts = self._before if samples_again else (states_of(self._callbacks()), reader.state_dict())
        run = SavedRun(shapes, shapes.position(epoch, max_steps), step, skipped_steps, window, prompts)
        run.save(self._file(folder))
        if states and self._ranks.rank == 0:
            torch.save(states, os.path.join(folder, STATES))

    def resume(self, checkpoint: str, start: tuple[int, int], *, ignore_data_skip: bool) -> tuple[SavedRun | None, int]:
        """Gives the callbacks their states.

        Args:
            start: (epochs, micro-batches of a rank since) that Transformers takes for used.
        Returns:
            The run, where this one goes on in its window, else None and a warning why not; the steps skipped so far.
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
            self._warn(f"{checkpoint} holds nothing that {name} has learned; it goes on as it is.")
        if reason is not None:
            self._warn(f"{reason}; training goes on with a new generation window.")
        return None if reason is not None else own, 0 if saved is None else saved.skipped_steps

    def _file(self, folder: str) -> str:
        return os.path.join(folder, f"generation_window_{self._ranks.rank}.pt")

    def _warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(message)
