"""Data between sampling and loss: batches of rollouts, the generation window, readers of prompts, saved runs."""

from dash_trl.rollout.ahead import RunAhead, StaleRollouts
from dash_trl.rollout.batch import (
    CHECKSUM,
    COMPLETION,
    LOG_PROB_FIELDS,
    LOSS,
    PROMPT,
    RolloutBatch,
    concatenated,
    joined,
)
from dash_trl.rollout.prompts import EpochOrder, new_queue
from dash_trl.rollout.queue import PromptQueue, Rows
from dash_trl.rollout.resume import SavedRun, Shapes, loading, one_run, why_a_new_window
from dash_trl.rollout.window import Part, Window
