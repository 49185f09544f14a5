"""Where a resumed run goes on: what a checkpoint holds beside Transformers' files, and what may differ since.

With the batch shapes of the checkpoint a run goes on in the middle of its generation window. With others, Transformers
skips as many micro-batches as the checkpoint's optimizer steps take in the *new* shapes: the run goes on with a new
window if that ends at the first prompt that no optimizer step used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from dash_trl.rollout.window import GenerationWindow


@dataclass(frozen=True)
class Shapes:
    """What gives a count of micro-steps, a position in the dataset and a window's rows their meaning.

    Attributes:
        processes, prompts: ranks; rows of the training set, None for a stream.
        shuffle_seed: decides the order of the prompts, None where they are not shuffled.
        beta_above_0, vllm_importance_sampling: whether a window has reference log-probs, importance-sampling ratios.
        sampler_is_old: whether its old log-probs are the sampler's.
        queues_prompts: whether a `PromptQueue` hands out the prompts. skips_prompts: whether its epochs leave some out.
        The others are `DASHConfig`'s.
    """

    processes: int
    prompts: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    shuffle_seed: int | None
    beta_above_0: bool
    vllm_importance_sampling: bool
    sampler_is_old: bool
    queues_prompts: bool = False  # as in checkpoints from before there was a queue
    skips_prompts: bool = False

    @classmethod
    def of(cls, args: Any, *, processes: int, prompts: int | None, corrected: bool, sampler_is_old: bool) -> Shapes:
        """`corrected`: a window has importance-sampling ratios."""
        own = {
            "processes": processes,
            "prompts": prompts,
            "shuffle_seed": args.seed if args.shuffle_dataset else None,
            "beta_above_0": args.beta != 0.0,
            "vllm_importance_sampling": corrected,
            "sampler_is_old": sampler_is_old,
            "skips_prompts": args.max_skipped_epochs > 0,
        }
        return cls(**own, **{field.name: getattr(args, field.name) for field in fields(cls) if field.name not in own})

    @property
    def window_batches(self) -> int:
        """Micro-batches of a rank that come from one generation window."""
        return self.steps_per_generation * self.num_iterations

    @property
    def window_prompts(self) -> int:
        return self.processes * self.per_device_train_batch_size * self.steps_per_generation // self.num_generations

    def prompts_used(self, batches: int) -> int:
        """The prompts of an epoch's windows that its first `batches` micro-batches touch, if only in part."""
        return -(-batches // self.window_batches) * self.window_prompts

    def position(self, epoch: float, max_steps: int) -> tuple[int, int]:
        """(whole epochs, micro-batches of a rank since) at `TrainerState.epoch`."""
        if self.prompts is None:  # Transformers takes a stream for as long as the run
            batches = max_steps * self.gradient_accumulation_steps
        else:
            batches = self.prompts // self.window_prompts * self.window_batches
        return int(epoch), round((epoch - int(epoch)) * batches)


@dataclass(frozen=True)
class SavedRun:
    """A rank's share of a checkpoint.

    Attributes:
        position: (whole epochs, micro-batches since) that optimizer steps have used.
        step: micro-steps since the run began, the trainer's `_step`.
        skipped_steps: optimizer steps skipped so far.
        window: the window in use; None where only the rest matters.
        prompts: where a `PromptQueue` stands, if there is one, and only for a rank's own share.
    """

    shapes: Shapes
    position: tuple[int, int]
    step: int
    skipped_steps: int
    window: GenerationWindow | None
    prompts: dict[str, Any] | None = None

    def save(self, path: str) -> None:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        window = None if self.window is None else self.window.state_dict()
        torch.save({**state, "shapes": asdict(self.shapes), "window": window}, path)

    @classmethod
    def load(cls, path: str) -> SavedRun | None:
        """The saved run; None if there is no such file."""
        state = _read(path)
        if state is None:
            return None
        window = None if state["window"] is None else GenerationWindow.from_state_dict(state["window"])
        return cls(**{**state, "shapes": Shapes(**state["shapes"]), "window": window})


STATES = "callback_states.pt"  # beside the windows, of all ranks


def load_states(checkpoint: str) -> dict[str, Any]:
    """The states of the callbacks that have one, by the names of their classes; none without the file."""
    return _read(os.path.join(checkpoint, STATES)) or {}


def _read(path: str) -> dict[str, Any] | None:
    if not os.path.isfile(path):
        return None
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # whatever a damaged file makes of torch.load: its message would mislead
        raise ValueError(
            f"{path} is damaged, or of another version ({type(error).__name__}). Resume from another checkpoint, or "
            "delete the file, and those of the other ranks, to go on without what it holds."
        ) from error


def one_run(found: Sequence[SavedRun | None], processes: int, checkpoint: str) -> SavedRun | None:
    """What the ranks found, if that is one run; the same on all of them, so that they go on or stop together.

    Args:
        found: what `SavedRun.load` gave on each rank, without the windows.
    Returns:
        The run, without its window; None if no rank found any (the checkpoint of another trainer).
    Raises:
        ValueError: a file is missing on a rank that must have had one.
    """
    saved = next((one for one in found if one is not None), None)
    if saved is None or saved.shapes.processes != processes:
        return saved
    if missing := [f"generation_window_{rank}.pt" for rank, one in enumerate(found) if one != saved]:
        raise ValueError(
            f"In {checkpoint}, {', '.join(missing)} is missing, or of another step than the others. Resume from "
            "another checkpoint, or delete every generation_window_*.pt of this one to go on with a new window."
        )
    return saved


def check_shards(saved: SavedRun | None, processes: int, checkpoint: str) -> None:
    """Refuse another number of processes than the checkpoint's where each keeps a shard of the optimizer's state."""
    if saved is not None and saved.shapes.processes != processes:
        raise ValueError(
            f"{checkpoint} was saved by {saved.shapes.processes} processes, and now there are {processes}. Under ZeRO "
            "each process saves its shard of the optimizer's state, and DeepSpeed does not split these shards anew. "
            f"Resume with {saved.shapes.processes} processes, or begin a new run with the weights: "
            f"model_name_or_path={checkpoint} (if it has no model.safetensors, run its zero_to_fp32.py first)."
        )


def why_a_new_window(
    saved: SavedRun | None, now: Shapes, start: tuple[int, int], *, checkpoint: str, ignore_data_skip: bool
) -> str | None:
    """None if the run goes on within the saved window, else why it begins a new one.

    Args:
        start: (whole epochs, micro-batches of a rank since) that Transformers takes for used.
        ignore_data_skip: Transformers' option: the prompts of the epoch are begun again, whatever was used.
    Raises:
        ValueError: Transformers would not go on at the first prompt that no optimizer step used.
    """
    epoch, batches = start
    fits = batches % now.window_batches == 0
    if saved is None:
        reason = f"{checkpoint} has no generation window"
        fits &= not now.queues_prompts or start == (0, 0)
    elif saved.shapes == now:
        return None
    else:
        then, old = saved.shapes, asdict(saved.shapes)
        changed = [f"{name}={old[name]} (now {value})" for name, value in asdict(now).items() if value != old[name]]
        used = then.prompts_used(saved.position[1])
        left = -saved.position[1] % then.window_batches
        reason = (
            f"{checkpoint} was saved with {', '.join(changed)}, after prompt {used} of epoch {saved.position[0]}, "
            f"with {left} of {then.window_batches} micro-batches of its window left"
        )
        fits &= not (then.queues_prompts or now.queues_prompts)  # where the prompts stand is known of the old shapes
        same_order = (then.prompts, then.shuffle_seed) == (now.prompts, now.shuffle_seed) or used == 0
        fits &= same_order and (epoch, now.prompts_used(batches)) == (saved.position[0], used)
    if fits or ignore_data_skip:
        return reason
    if now.queues_prompts:
        raise ValueError(
            f"{reason}. With max_num_gen_batches or max_skipped_epochs nothing else tells which prompts were used. "
            "Resume with the values of the checkpoint, or pass ignore_data_skip=True to begin with the first prompt."
        )
    raise ValueError(
        f"{reason}. Transformers would go on after micro-batch {batches} of epoch {epoch}, and {now.window_batches} of "
        f"them take {now.window_prompts} prompts: some prompts would be lost, or used twice. Resume with the values of "
        "the checkpoint, or pass ignore_data_skip=True to begin the prompts of the epoch again. Other values fit where "
        "a window and an optimizer step take as many prompts as before, and the checkpoint is from a window's end."
    )
