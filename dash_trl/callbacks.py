"""`DASHCallback`: a `TrainerCallback` with events that can change rollouts, rewards and advantages."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from dash_trl.config import DASHConfig
from dash_trl.rewards import distinct
from dash_trl.rollout import RolloutBatch

ROLLOUT_EVENTS = ("on_rollouts_sampled", "on_rewards", "on_advantages")
TRAINER_EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))

# A method counts as misspelt if its name is at least this similar to the name of an event (difflib's ratio). The ratio
# of `on_advantage` is 0.96; that of `on_train_epoch_end`, an event of other libraries, is 0.80.
MISSPELT = 0.9


class DASHCallback(TrainerCallback):
    """A callback that can read and change rollouts between sampling and filtering.

    For each generation batch, every rank calls `on_rollouts_sampled`, `on_rewards` and `on_advantages` in this order
    with its own rows, groups together. They may change tokens and masks, rewards, and advantages in place. A field of a
    wrong shape or dtype is a `ValueError` that names the callback. Evaluations do not call these events.

    The keyword arguments are `model`, `processing_class`, `trainer`, and TRL's `log_extra(column, values)`, which adds
    a column to the table of completions (one value per row). An event may run collectives and model passes if all ranks
    run the same number.

    Attributes:
        per_group: True = what the callback does to a group does not depend on others. `reward_pipeline` and
            `max_num_gen_batches` require this: they call events for some groups at a time.
    Raises:
        ValueError: if a method's name resembles that of an event, so that no trainer would call it, or if the trainer
            is no `DASHTrainer`.
    """

    per_group = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            meant = misspelt(name, (*ROLLOUT_EVENTS, *TRAINER_EVENTS))
            if name.startswith("on_") and callable(value) and meant not in (None, name):
                raise ValueError(
                    f"{cls.__name__}.{name} is no event, so no trainer calls it. Rename it to {meant}. If you call it "
                    "yourself, give it a name that does not resemble an event's."
                )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise a `ValueError` if the trainer is no `DASHTrainer`."""
        if not isinstance(args, DASHConfig):
            raise ValueError(
                f"{type(self).__name__} is a DASHCallback, but this trainer sends no {', '.join(ROLLOUT_EVENTS)}, so "
                "it would do nothing. Train with dash_trl.DASHTrainer, or derive the callback from TrainerCallback."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this callback for a checkpoint; `None` = it has none.

        It consists of tensors, numbers, texts, lists and dicts, for `torch.load(weights_only=True)`. The first rank's
        is saved; it must be the same on all, and not be changed later.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Every rank calls this when a run is resumed from a checkpoint."""

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """Called when the rollouts of a generation batch have been sampled. Their tensors are on the CPU.

        To take tokens out of the loss, change `rollouts.tool_mask`, [B, T]: 0 = the loss does not count the token.

        Reward functions get changed columns of `rollouts.examples`, unless they have begun before: with
        `reward_pipeline`, `async_level` or vLLM servers.

        Args:
            args: the `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows.
            kwargs: see the class.
        """

    def on_rewards(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """Called when the F reward functions have scored the rows. It may change `rollouts.rewards`, [B, F].

        NaN = the function does not apply. A row of NaN only is unscored. The other arguments are those of
        `on_rollouts_sampled`.
        """

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: RolloutBatch,
        **kwargs,
    ) -> None:
        """Called when the trainer has computed the advantages. It may change `rollouts.advantages`, [B].

        For per-token credit, replace them with a tensor [B, T]. The other arguments are those of `on_rollouts_sampled`.
        """


def dash_callbacks(handler: CallbackHandler) -> dict[str, DASHCallback]:
    """Return the `DASHCallback`s of Transformers' callback handler by name, in order.

    The first callback of a class `Name` is `Name`, the second one `Name#2`, …
    """
    found = [callback for callback in handler.callbacks if isinstance(callback, DASHCallback)]
    return dict(zip(distinct([type(callback).__name__ for callback in found]), found, strict=True))


def call_event(
    callback: DASHCallback, event: str, rollouts: RolloutBatch, arguments: tuple, others: Mapping[str, Any]
) -> None:
    """Call an event with `arguments` (args, state, control), rows and keyword arguments; then check the rows.

    Raises:
        ValueError: if a field is unusable.
    """
    before = deepcopy(rollouts.tensors())
    getattr(callback, event)(*arguments, rollouts, **others)
    rollouts.validate(like=before, caller=f"{type(callback).__name__}.{event}")


def states_of(callbacks: Mapping[str, DASHCallback]) -> dict[str, Any]:
    """Return the states of `dash_callbacks` for a checkpoint, not copied: name → state, if the callback has one."""
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict()) is not None}


def restore_states(callbacks: Mapping[str, DASHCallback], states: dict[str, Any]) -> list[str]:
    """Pass states of `states_of` to the callbacks. Return the names of those that miss theirs."""
    missing = []
    for name, callback in callbacks.items():
        if name in states:
            callback.load_state_dict(states[name])
        elif callback.state_dict() is not None:
            missing.append(name)
    return missing


def misspelt(name: str, events: Iterable[str]) -> str | None:
    """Return the event whose name equals or closely resembles `name`, or `None`."""
    return next(iter(get_close_matches(name, events, n=1, cutoff=MISSPELT)), None)
