"""Saves a rank's position and window in a checkpoint, and decides where a resumed run continues.

A run with the `Shapes` of the checkpoint continues within the saved generation window. Any other run needs a new
window. Transformers then skips as many micro-batches as the checkpoint's optimizer steps take in the *new* shapes. If
this does not lead to the first prompt that no optimizer step has used, prompts would be lost or used twice, so the run
ends with an error.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import torch

from dash_trl.rollout.window import Part

# Options on which the rows of a window depend.
OF_ROWS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "max_completion_length",
    "mask_truncated_completions",
    "bf16",
    "fp16",
    "cast_lm_head_to_fp32",
    "reward_weights",
    "scale_rewards",
    "multi_objective_aggregation",
    "advantage_estimator",
    "gradient_filter_threshold",
    "filter_denominator",
)


@dataclass(frozen=True)
class Shapes:
    """Settings that must be the same as in the checkpoint if a resumed run is to continue within the saved window.

    Fields that are not listed here are options of `DASHConfig`.

    Attributes:
        processes: number of ranks.
        prompts: number of rows of the training set; `None` for a stream.
        shuffle_seed: seed of the order of the prompts, if they are shuffled.
        queues_prompts: True = a `PromptQueue` hands out the prompts, and micro-steps do not tell which ones were used.
        rows: settings, as texts, on which the rows of a window depend. Between two windows, they may change.
    """

    processes: int
    prompts: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    shuffle_seed: int | None
    queues_prompts: bool
    rows: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        args: Any,
        *,
        processes: int,
        prompts: int | None,
        rules: dict[str, str],
        samples_ahead: bool,
    ) -> Self:
        """Read the shapes from a `DASHConfig` and a run's other settings.

        Args:
            rules: other settings for `Shapes.rows`.
            samples_ahead: True = windows are sampled ahead.
        """
        own: dict[str, Any] = {
            "processes": processes,
            "prompts": prompts,
            "shuffle_seed": args.seed if args.shuffle_dataset else None,
            "queues_prompts": args.samples_dynamically or (samples_ahead and prompts is None),
            "rows": {name: str(getattr(args, name)) for name in OF_ROWS} | rules,
        }
        return cls(**own, **{one.name: getattr(args, one.name) for one in fields(cls) if one.name not in own})

    def settings(self) -> dict[str, Any]:
        values = asdict(self)
        return values | values.pop("rows")

    @property
    def window_batches(self) -> int:
        """Number of micro-batches of a rank that come from one window."""
        return self.steps_per_generation * self.num_iterations

    @property
    def window_prompts(self) -> int:
        """Number of prompts of a window, over all ranks."""
        return self.processes * self.per_device_train_batch_size * self.steps_per_generation // self.num_generations

    def prompts_used(self, batches: int) -> int:
        """Return the number of prompts that the first `batches` micro-batches of an epoch use, over all ranks.

        A window counts with all its prompts, even if it is used only in part.
        """
        return -(-batches // self.window_batches) * self.window_prompts

    def position(self, epoch: float, max_steps: int) -> tuple[int, int]:
        """Convert Transformers' fractional `epoch` (`TrainerState`) to a position in the dataset.

        Returns:
            The number of whole epochs, and the number of micro-batches that a rank has used in the next epoch.
        """
        if self.prompts is None:  # Transformers assumes that one epoch of a stream is as long as the run
            batches = max_steps * self.gradient_accumulation_steps
        else:
            batches = self.prompts // self.window_prompts * self.window_batches
        return int(epoch), round((epoch - int(epoch)) * batches)


@dataclass(frozen=True)
class SavedRun:
    """State of one rank's run in a checkpoint, in addition to Transformers' files.

    Attributes:
        position: the part of the dataset that optimizer steps have used; see `Shapes.position`.
        step: number of micro-steps of all completed optimizer steps.
        window: the window in use. `None`: there is none, or it begins after `step`.
        prompts: state of the `PromptQueue`, if the run has one.
        states: the states of callbacks, by name; empty except on the first rank.
        tokens: Transformers' `num_input_tokens_seen`.
        figures: `Recorder.logs.figures`.
    """

    shapes: Shapes
    position: tuple[int, int]
    step: int
    skipped_steps: int
    window: Part | None
    prompts: dict[str, Any] | None = None
    states: dict[str, Any] = field(default_factory=dict, compare=False)
    tokens: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict, compare=False)

    def save(self, path: str) -> None:
        window = None if self.window is None else self.window.state_dict()
        torch.save({**vars(self), "shapes": vars(self.shapes), "window": window}, path)

    @classmethod
    def load(cls, path: str) -> Self | None:
        """Read a rank's file of a checkpoint; `None` if there is no such file."""
        if not os.path.isfile(path):
            return None
        with loading(path):
            state = torch.load(path, weights_only=True)
            window = None if state["window"] is None else Part.from_state_dict(state["window"])
            return cls(**{**state, "shapes": Shapes(**state["shapes"]), "window": window})


@contextmanager
def loading(path: str) -> Iterator[None]:
    """`with` block that loads a checkpoint or its file. It turns any error into a `ValueError` with the path."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{path} cannot be loaded: it is damaged, or of another version, or of a run with other settings "
            f"({type(error).__name__}: {error}). Resume from another checkpoint, or begin a new run with the weights: "
            "give the folder of the checkpoint as model_name_or_path."
        ) from error


def one_run(found: Sequence[SavedRun | None], processes: int, checkpoint: str) -> SavedRun | None:
    """Check that all ranks have loaded the same run, so that all ranks continue or all stop.

    If the number of ranks has changed, the files are not compared.

    Args:
        found: the saved run of each rank, without `window` and `prompts`.
    Returns:
        The run; `None` if another trainer saved the checkpoint.
    Raises:
        ValueError: a file is missing or differs on some rank.
    """
    saved = next((one for one in found if one is not None), None)
    if saved is not None and saved.shapes.processes == processes and any(one != saved for one in found):
        raise ValueError(
            f"In {checkpoint}, a generation_window_*.pt is missing, or of another step than the others. Resume from "
            "another checkpoint, or delete all of them to go on with a new window."
        )
    return saved


def why_a_new_window(saved: SavedRun | None, now: Shapes, start: tuple[int, int], *, checkpoint: str) -> str | None:
    """Return why a resumed run begins a new window; `None` if it continues within the saved window.

    Args:
        start: the position up to which Transformers counts the dataset as used.
    Raises:
        ValueError: Transformers would not continue at the first unused prompt.
    """
    epoch, batches = start
    fits = batches % now.window_batches == 0
    if saved is None:
        reason = f"{checkpoint} has no generation window"
        fits &= not now.queues_prompts or start == (0, 0)
    else:
        then = saved.shapes
        old = saved.shapes.settings()
        new = {name: value for name, value in now.settings().items() if value != old.get(name, value)}
        between = saved.step % then.window_batches == 0  # then no row that is left depends on `rows`
        if not new or (between and new.keys() <= now.rows.keys()):
            return None
        changed = [f"{name}={old[name]} (now {value})" for name, value in new.items()]
        used = then.prompts_used(saved.position[1])
        left = -saved.position[1] % then.window_batches
        reason = (
            f"{checkpoint} was saved with {', '.join(changed)}, after prompt {used} of epoch {saved.position[0]}, "
            f"with {left} of {then.window_batches} micro-batches of its window left"
        )
        fits &= not (then.queues_prompts or now.queues_prompts)  # a queue's place is valid for its own shapes only
        same_order = (then.prompts, then.shuffle_seed) == (now.prompts, now.shuffle_seed) or used == 0
        fits &= same_order and (epoch, now.prompts_used(batches)) == (saved.position[0], used)
    if fits:
        return reason
    raise ValueError(
        f"{reason}. Transformers would continue after micro-batch {batches} of epoch {epoch} ({now.window_batches} "
        f"micro-batches take {now.window_prompts} prompts), so some prompts would be lost, or used twice. Resume with "
        "the values of the checkpoint, or pass ignore_data_skip=True to begin the prompts of the epoch again. Other "
        "values are possible if a window and an optimizer step take as many prompts as before, and the checkpoint was "
        "saved at the end of a window."
    )
