"""`Checkpoints`: saves and restores the window in use, the position in the prompts and the states of callbacks."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerState

from dash_trl import manifest
from dash_trl.callbacks import dash_callbacks, restore_states, states_of
from dash_trl.collect import DynamicSampling
from dash_trl.host import Host
from dash_trl.log_probs import LogProbRules
from dash_trl.micro_steps import MicroSteps
from dash_trl.rollout import PromptQueue, SavedRun, Shapes, one_run, why_a_new_window
from dash_trl.update import SkippedSteps

logger = logging.getLogger(__name__)
Position = tuple[int, int]  # in the dataset: (completed epochs, micro-batches that a rank has taken of the next one)


def checkpoint_to_resume(value: str | bool | None, output_dir: str) -> str | None:
    """Find the checkpoint for the option `resume_from_checkpoint`; None for a new run.

    Args:
        value: a checkpoint, or a folder with checkpoints, whose last whole one of its latest run is used. True or
            "true" is the folder `output_dir`; None, False, "none" and "false" are a new run.
    Raises:
        ValueError: if there is no such checkpoint, or if the named one is damaged.
    """
    word = str(value).lower()
    if word in ("none", "false"):
        return None
    folder = Path(output_dir if word == "true" else str(value)).expanduser()
    found, reasons = manifest.find(folder)
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint={value!r} names no whole checkpoint of its run: {'; '.join(reasons)}. Name "
            "another checkpoint (of another run, too), or leave it out."
        )
    if reasons:
        logger.warning(f"The run goes on from {found}, not from a later one: {'; '.join(reasons)}.")
    if not (found / manifest.LIST).exists():
        logger.warning(f"{found} has no {manifest.LIST}, as of another trainer, so its files are not checked.")
    return str(found)


# Settings of an adapter on which its weights and what they mean do not depend, or whose change raises an error.
NOT_OF_ADAPTER = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "layer_replication",
    "peft_version",
    "revision",
    "task_type",
)


def check_weights(checkpoint: str, adapters: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if only one of checkpoint and run has an adapter, or if their adapters have other settings.

    Transformers would leave the weights as they are, find no file, or ignore the settings.
    """
    other = "adapter_config.json"
    said = "an adapter, but this run trains all weights"
    for name, own in adapters.items():
        folder = Path(checkpoint, "" if name == "default" else name)
        saved = vars(own.from_pretrained(folder) if Path(folder, other).exists() else own)
        changed = [
            f"{key}={saved.get(key)}, here {value}"
            for key, value in vars(own).items()
            if saved.get(key) != value and key not in NOT_OF_ADAPTER and "dropout" not in key
        ]
        if changed:
            raise ValueError(
                f"{checkpoint} has an adapter with {'; '.join(changed)}. Use its settings, or begin a new run with "
                "its weights, by PeftModel.from_pretrained(..., is_trainable=True)."
            )
    if adapters:
        other = "model*.safetensors"
        said = "a whole model, but this run trains an adapter"
    if any(Path(checkpoint).rglob(other)):
        raise ValueError(
            f"{checkpoint} has the weights of {said}. Resume with the options of PEFT with "
            "which the checkpoint was saved, or begin a new run with its weights (docs/howto/lora.md)."
        )


# Settings of a parameter group whose options have other names.
OPTIONS = {"initial_lr": "learning_rate", "betas": "adam_beta", "eps": "adam_epsilon"}
# Values of a parameter group that change with the steps, the last ones in optimizers without a schedule.
CHANGING = (
    "params",
    "lr",
    "k",
    "d",
    "d_max",
    "d_numerator",
    "lr_max",
    "scheduled_lr",
    "train_mode",
    "weight_sum",
)
STATE = ("optimizer*", "scheduler.pt", "rng_state*")  # files without which a run goes on otherwise


def compared(checkpoint: str, asked: list[dict[str, Any]], groups: list[dict[str, Any]], max_steps: int) -> str | None:
    """Return a warning of how this run's optimizer differs from the checkpoint's, by their parameter groups, or `None`.

    `max_steps` is this run's, on which the schedule of the learning rate depends.

    Raises:
        ValueError: if the checkpoint is of another optimizer, whose settings have other names.
    """
    remedy = f"For other settings, begin a new run with its weights: model={checkpoint} (LoRA: docs/howto/lora.md)."
    said = [f"no {name}, so this begins anew" for name in STATE if not any(Path(checkpoint).glob(name))]
    then = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").max_steps
    if then != max_steps:
        said.append(f"max_steps={then}, so after one step, the learning rate follows the schedule of {max_steps} steps")
    for own, group in zip(asked, groups, strict=True):
        adamw = "decoupled_weight_decay"  # Adam has it, too, as False
        if own.keys() - group.keys() or own.get(adamw) != group.get(adamw):
            raise ValueError(
                f"{checkpoint} is of another optimizer, which differs in {sorted(own.keys() ^ group.keys()) or adamw}. "
                f"Resume with its optim. {remedy}"
            )
        changed = [key for key in own if key not in CHANGING and own[key] != group[key]]
        said += [f"{OPTIONS.get(key, key)}={group[key]}, which is used, not {own[key]}" for key in changed]
    return f"{checkpoint} has {'; '.join(dict.fromkeys(said))}. {remedy}" if said else None


@dataclass(eq=False)
class Checkpoints:
    """Saves and loads the files that this package adds to a checkpoint of Transformers.

    All ranks call every method at the same point.

    Attributes:
        prompts: number of rows of the training set; `None` for a stream.
        queue: hands out the prompts. `None`: Transformers reads them.
        dynamic: chooses the groups of windows. `None`: a window has all groups.
        micro_steps: has the window in use.
    """

    host: Host
    rules: LogProbRules
    prompts: int | None
    queue: PromptQueue | None
    dynamic: DynamicSampling | None
    micro_steps: MicroSteps
    skipped: SkippedSteps

    def __post_init__(self) -> None:
        self._ranks = self.host.ranks
        self._shapes = Shapes.of(
            self.host.args,
            processes=self._ranks.count,
            prompts=self.prompts,
            rules={
                "beta above 0": str(self.rules.reference),
                "sampler_is_old": str(self.rules.sampler_is_old),
                "correction": str(self.rules.correction),
            },
            samples_ahead=self.host.args.async_level > 0,
        )
        # From before the running optimizer step: position in the prompts, states of the callbacks, number of tokens.
        self._before: tuple[dict[str, Any] | None, dict[str, Any], int] = None, {}, 0
        self._figures: dict[str, list[float]] = {}  # since the last log, from before the step, too

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """`with` block in which all files of a checkpoint are written. At its end, the checkpoint is whole."""
        runs = {**self._runs, [*self._runs][-1]: self.host.state.global_step}
        self._ranks.agree(manifest.begin, folder, runs, main_only=True)
        yield
        self._ranks.agree(manifest.finish, folder, runs, main_only=True)

    def begin_optimizer_step(self) -> None:
        """Store states and figures from before the optimizer step, for a checkpoint within it."""
        self._before = self._states()
        self._figures = self._pending_figures()

    def _states(self) -> tuple[dict[str, Any] | None, dict[str, Any], int]:
        prompts = None if self.queue is None else self.queue.state_dict()
        if prompts is not None and self.dynamic is not None:
            prompts["share"] = self.dynamic.share
        states = states_of(dash_callbacks(self.host.callback_handler))
        return prompts, states if self._ranks.rank == 0 else {}, self.host.state.num_input_tokens_seen

    def _pending_figures(self) -> dict[str, list[float]]:
        """Return the figures since the last log."""
        return {name: [*map(float, values)] for name, values in self.host.recorder.logs.figures.items()}

    def save(self, folder: str, micro_step: int) -> None:
        """Save this rank's part of a checkpoint: its survivors with their log-probs, and its position.

        Windows that were sampled ahead are not saved: a resumed run samples them again. `micro_step` is the number of
        micro-steps that have run.
        """
        state = self.host.state
        schedule = self.micro_steps.schedule
        completed = schedule.completed(micro_step, state.global_step)  # in whole optimizer steps
        # A window that is sampled again needs the states from before it was sampled.
        states = self._before if schedule.samples_again(completed) else self._states()
        window = self.micro_steps.window_to_save(completed)
        position = self._shapes.position(state.epoch or 0, state.max_steps)
        figures = self._figures if completed < micro_step else self._pending_figures()
        saved = SavedRun(self._shapes, position, completed, self.skipped.total, window, *states, figures)
        saved.save(self._file(folder))

    def begin(self, checkpoint: str | None, start: Position) -> tuple[int, Position]:
        """Begin a run, if possible where a checkpoint was saved, and give it a name. `None` means a new run.

        If the run saves checkpoints, those of other runs in its folder no longer count.

        Returns:
            The micro-step and the position with which the run begins. If its window is new, the position is `start`,
            Transformers' own.
        Raises:
            ValueError: if the run cannot be resumed with these settings, or if a file is damaged or missing.
        """
        args = self.host.args
        self._runs = manifest.new_run(checkpoint)
        if args.save_strategy != "no":
            path = Path(args.output_dir, manifest.RUN)
            self._ranks.agree(manifest.write, path, {"runs": self._runs}, main_only=True)
        saved = None if checkpoint is None else self._resumed(checkpoint, start)
        if saved is not None:
            self.micro_steps.resume(saved.window)  # `None` if the checkpoint was saved between two windows
            # Transformers miscounts in a stream that is read for several epochs.
            start = saved.position
        if self.queue is not None:
            self.queue.begin(*start)
            if saved is not None and saved.prompts is not None:
                self.queue.load_state_dict(saved.prompts)
                if self.dynamic is not None:
                    self.dynamic.share = saved.prompts.get("share", 1.0)
        return 0 if saved is None else saved.step, start

    def _resumed(self, checkpoint: str, start: Position) -> SavedRun | None:
        """Load a checkpoint, and give the callbacks their states; `None` if the run needs a new window."""
        own = self._ranks.agree(SavedRun.load, self._file(checkpoint))
        found = self._ranks.gather_object(own and replace(own, window=None, prompts=None))
        saved = one_run(found, self._ranks.count, checkpoint)
        if self.host.args.async_level:
            self.warn(
                "Windows that were sampled ahead of the checkpoint are sampled again, by its weights, so the run "
                "differs from an uninterrupted one."
            )
        if self.host.args.ignore_data_skip:
            reason: str | None = "ignore_data_skip=True begins the prompts of the epoch again"
        else:
            reason = why_a_new_window(saved, self._shapes, start, checkpoint=checkpoint)
        states = {} if saved is None else saved.states
        for name in self._ranks.agree(restore_states, dash_callbacks(self.host.callback_handler), states):
            self.warn(f"{checkpoint} holds no state of {name}, so this callback keeps its current state.")
        self.skipped.total = 0 if saved is None else saved.skipped_steps
        if own is not None:
            self.host.recorder.logs.figures.update(own.figures)
            self.host.state.num_input_tokens_seen = own.tokens
        if reason is not None:
            self.warn(f"{reason}; training goes on with a new generation window.")
        return own if reason is None else None

    def _file(self, folder: str) -> str:
        return os.path.join(folder, f"generation_window_{self._ranks.rank}.pt")

    def warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(message)
