"""`DASHCallback`: a `TrainerCallback` with events that can change rollouts, rewards and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dash_trl.config import DASHConfig

if TYPE_CHECKING:
    from dash_trl.rollout import CreditedRollouts, RolloutBatch, ScoredRollouts

ROLLOUT_EVENTS = ("on_rollouts_sampled", "on_rewards", "on_advantages")
TRAINER_EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))

# A method counts as misspelt if its name is at least this similar to the name of an event (difflib's ratio). The ratio
# of `on_advantage` is 0.96; that of `on_train_epoch_end`, an event of other libraries, is 0.80.
MISSPELT = 0.9


class DASHCallback(TrainerCallback):
    """A callback that can read and change rollouts between sampling and filtering.

    For each generation batch, every rank calls `on_rollouts_sampled`, `on_rewards` and `on_advantages` in this order.
    Each event gets the rows of its own rank, with the rows of a group next to each other. It may change them in place:
    tokens and masks in `on_rollouts_sampled`, rewards in `on_rewards`, advantages in `on_advantages`. The keyword
    arguments are `model`, `processing_class`, `trainer`, `rewards_run` (whether reward functions run meanwhile), and
    TRL's `log_extra(column, values)`, which adds a column to the table of completions (one value per row). An event may
    run collectives and model passes if all ranks run the same number of them. Evaluations run TRL's code, which does
    not call these events.

    If an event leaves a field with a wrong shape or dtype, the trainer raises a `ValueError` that names the callback.

    Attributes:
        per_group: True = what the callback does to a group does not depend on other groups. Two options require this,
            because they call `on_rewards` and `on_advantages` for some groups of a window at a time. With
            `reward_pipeline`, these are the groups whose rewards have just come. With `max_num_gen_batches`, these are
            the groups of one round of sampling.
        overlaps_rewards: True = rewards begin before `on_rollouts_sampled`, if each function scores a completion by
            itself. The event has other work meanwhile, and changes no row.
    Raises:
        ValueError: if a subclass is defined and the name of one of its methods resembles the name of an event, or if
            the callback is given to a trainer other than `DASHTrainer`. Without the error, the trainer would never call
            the method, and the user would see no message.
    """

    per_group = False
    overlaps_rewards = False

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
        """Raise an error if the trainer is not a `DASHTrainer`, because other trainers call no rollout events.

        Raises:
            ValueError: if the trainer's `args` is not a `DASHConfig`.
        """
        if not isinstance(args, DASHConfig):
            raise ValueError(
                f"{type(self).__name__} is a DASHCallback, but this trainer sends no {', '.join(ROLLOUT_EVENTS)}, so "
                "it would do nothing. Train with dash_trl.DASHTrainer, or derive the callback from TrainerCallback."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this callback for a checkpoint; `None` = the callback has no state.

        The state must consist of tensors, numbers, texts, lists and dicts, so that `torch.load(weights_only=True)` can
        read it. All ranks must return the same state, because only the state of the first rank is saved. The callback
        must not change the returned object later.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this callback. Every rank calls this method when a run is resumed from a checkpoint.

        Args:
            state: the state that `state_dict` returned when the checkpoint was saved.
        """

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """Called when the rollouts of a generation batch have been sampled. Their tensors are in CPU memory.

        To take tokens out of the loss, set or change `rollouts.tool_mask`, [B, T]: 0 = the loss does not count the
        token. The other masks only distinguish tokens from padding.

        Reward functions get columns that are changed in `rollouts.examples`, unless they have begun before: with
        `reward_pipeline`, with `async_level`, on vLLM servers, or if a callback has `overlaps_rewards`.

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows.
            kwargs: see the class.
        """

    def on_rewards(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: ScoredRollouts, **kwargs
    ) -> None:
        """Called when the F reward functions have scored the rows. It may change `rollouts.rewards`, [B, F].

        NaN = the reward function does not apply to the row. A row in which all F rewards are NaN is unscored.

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows with rewards.
            kwargs: see the class.
        """

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        """Called when the trainer has computed the advantages. It may change `rollouts.advantages`, [B].

        For per-token credit, replace `rollouts.advantages` with a tensor [B, T].

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows with advantages.
            kwargs: see the class.
        """


def dash_callbacks(handler: Any) -> list[DASHCallback]:
    """Return the `DASHCallback`s of Transformers' callback handler, in the order in which they are called."""
    return [callback for callback in handler.callbacks if isinstance(callback, DASHCallback)]


def call_event(
    callback: DASHCallback, event: str, rollouts: RolloutBatch, arguments: tuple, others: Mapping[str, Any]
) -> None:
    """Call one event of a callback, which may change the rows in place, and check the rows.

    Args:
        callback: the callback.
        event: name of the event.
        rollouts: the rows.
        arguments: `args`, `state` and `control`.
        others: the keyword arguments of the event.
    Raises:
        ValueError: if the callback gave a field a wrong shape or dtype, or if in a later event than
            `on_rollouts_sampled` it changed which tokens the loss counts.
    """
    before, loss_mask = rollouts.tensors(), rollouts.loss_mask.clone()
    getattr(callback, event)(*arguments, rollouts, **others)
    rollouts.validate(like=before, culprit=f"{type(callback).__name__}.{event}")
    if event != "on_rollouts_sampled" and not (loss_mask == rollouts.loss_mask).all():
        raise ValueError(
            f"{type(callback).__name__}.{event} changed which tokens the loss counts, but they are counted already "
            "(the loss divides by their number). Change completion_mask and tool_mask in on_rollouts_sampled."
        )


def _named(callbacks: Iterable[DASHCallback]) -> Iterator[tuple[str, DASHCallback]]:
    """Yield (name, callback). The first callback of a class `Name` is called `Name`, the second one `Name-2`, …"""
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}-{count[name]}", callback


def states_of(callbacks: Iterable[DASHCallback]) -> dict[str, Any]:
    """Return the states of the callbacks for a checkpoint. The states are not copied.

    Args:
        callbacks: the callbacks, in the order of the run.
    Returns:
        Name of the callback → its state, without the callbacks that have no state.
    """
    found = {name: callback.state_dict() for name, callback in _named(callbacks)}
    return {name: state for name, state in found.items() if state is not None}


def restore_states(callbacks: Iterable[DASHCallback], states: dict[str, Any]) -> list[str]:
    """Pass the states from a checkpoint to the callbacks.

    Args:
        callbacks: the callbacks, in the same order as when the states were saved.
        states: the result of `states_of`.
    Returns:
        The names of the callbacks that have a state, but are not in `states`.
    """
    missing = []
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])
        elif callback.state_dict() is not None:
            missing.append(name)
    return missing


def misspelt(name: str, events: Iterable[str]) -> str | None:
    """Return the event whose name equals or closely resembles `name`; `None` if there is no such event.

    Args:
        name: name of a method.
        events: names of the events.
    """
    return next(iter(get_close_matches(name, list(events), n=1, cutoff=MISSPELT)), None)
